"""Run a launcher as a child: pass on signals so that ranks can save, end it once a rank has failed, and leave
no process behind.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import IO, Any

from speechdp.errors import ConfigError
from speechdp.launching.faults import Fault
from speechdp.launching.processes import (
    adopting_orphans,
    at_our_death,
    descendants,
    kill,
    kill_descendants,
    outermost_with,
    program_name,
)
from speechdp.launching.shown_output import ShownOutput
from speechdp.process.ending import WARNINGS, take_held_warnings
from speechdp.process.file_limit import raise_file_limit_of_launcher

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, *WARNINGS)
#: Signals that mean haste if they come twice.  Not the others: a batch system may send them after its
#: warning, with time left before SIGKILL.
_URGENT_SIGNALS = (signal.SIGTERM, signal.SIGINT)
#: Signals within this time are one request, s: a process's death sends one signal per thread
#: (PR_SET_PDEATHSIG), and a batch system may signal both this process and its group.
_AT_ONCE_S = 1.0
_POLL_S = 0.2
_KILL_AFTER_FAULT_S = 2.0
#: Beginnings of the process names of launchers; the PyPI wheel's mpirun becomes "orterun_wrapper".
_LAUNCHERS = ("mpirun", "orterun", "prterun", "mpiexec", "srun")


@dataclass(frozen=True)
class StopPolicy:
    """How a job is ended on request.

    Attributes:
        first_signal: signal the launcher gets at once.  mpirun forwards SIGUSR1 to all ranks, which save a
            checkpoint and exit; on SIGTERM it would kill them.  horovodrun --gloo knows only SIGTERM, which
            it forwards, and kills remaining ranks 5 s later.
        ranks_have: a variable in the ranks' environment, if all ranks are on this machine and their launcher
            gives them no time to save: then the ranks get SIGUSR1 themselves and the launcher gets nothing;
            "": the launcher gets `first_signal`.
        grace_s: time the ranks have to exit by themselves before SIGTERM, s.
        kill_after_s: time from SIGTERM until every remaining process is killed, s.
        fault_grace_s: time the launcher has to end by itself once a rank or host is known to have failed, s.
            Some never end: a launcher whose daemon is frozen or cut off, and Open MPI 5 when several ranks
            ask it to abort at once.
        gone_grace_s: a second such time, counted from when a rank's process is known to be gone, s; the one
            that is over first applies.
        tolerates_loss: whether the job continues without a lost rank; a rank that reports a failure still
            ends it.
        terminate_after_fault: whether to send SIGTERM after a fault, before everything is killed; not to
            mpirun, which is already ending the job and crashes when asked again.
    """

    first_signal: signal.Signals = signal.SIGUSR1
    ranks_have: str = ""
    grace_s: float = 30.0
    kill_after_s: float = 5.0
    fault_grace_s: float = 5.0
    gone_grace_s: float = fault_grace_s
    tolerates_loss: bool = False
    terminate_after_fault: bool = False


@dataclass(frozen=True)
class JobEnd:
    """How the launcher ended.

    Attributes:
        exit_code: exit code of the launcher; 128 + signal if a signal killed it.
        stop_signal: signal by which the user asked to stop; None: the job ended by itself.
        faults: what the launcher printed about failed ranks and hosts.
        killed_by: signal that killed the launcher itself; None: it ended by itself.
        is_begun: whether ranks were started; False if the user asked to stop before that.
    """

    exit_code: int
    stop_signal: int | None
    faults: tuple[Fault, ...] = ()
    killed_by: int | None = None
    is_begun: bool = True


@dataclass
class SupervisorStop:
    """Records the signals received; the main loop acts on them.

    Attributes:
        signals: signals received, in order.
        since: time of the first signal, by the monotonic clock, s.
        urgent_since: time of the first signal by which a user ends a job, s; None: none yet.
        again: time of the user's second such request, which means haste, s; None: none yet.
        clock: returns the time, s.
    """

    signals: list[int] = field(default_factory=list)
    since: float = 0.0
    urgent_since: float | None = None
    again: float | None = None
    clock: Callable[[], float] = time.monotonic

    def note(self, signum: int, _frame: FrameType | None) -> None:
        """Record a signal; this is the handler for all of them."""
        now = self.clock()
        if not self.signals:
            self.since = now
        if signum in _URGENT_SIGNALS:
            if self.urgent_since is None:
                self.urgent_since = now
            elif self.again is None and now - self.urgent_since >= _AT_ONCE_S:
                self.again = now
        self.signals.append(signum)


def run_job(
    argv: Sequence[str],
    environment: Mapping[str, str],
    policy: StopPolicy,
    output: IO[bytes] | None = None,
    request: SupervisorStop | None = None,
) -> JobEnd:
    """Run `argv` to its end in a process group of its own.

    Call it in the main thread, for signal handlers.  A second SIGINT or SIGTERM skips the grace period.

    Args:
        output: file for its output; None: this process's stdout and stderr, without the launcher's texts
            about failures, which are returned as faults.
        request: signals recorded by a caller that records them between jobs, too; None: recorded here.

    Raises:
        ConfigError: the program cannot be started, or may open too few files.
    """
    raise_file_limit_of_launcher()
    with ExitStack() as stack:
        noted = stack.enter_context(noted_signals()) if request is None else request
        adopt = stack.enter_context(adopting_orphans())
        child, shown = _start(argv, environment, output, policy.tolerates_loss)
        try:
            exit_code = _wait(child, noted, policy, shown)
        finally:
            kill_descendants(os.getpid(), keep=adopt)
            shown.finish(lambda: bool(noted.signals))
    return JobEnd(
        exit_code=128 - exit_code if exit_code < 0 else exit_code,
        stop_signal=noted.signals[0] if noted.signals else None,
        faults=shown.faults,
        killed_by=-exit_code if exit_code < 0 else None,
    )


def _start(
    argv: Sequence[str], environment: Mapping[str, str], output: IO[bytes] | None, tolerates_loss: bool
) -> tuple[subprocess.Popen[bytes], ShownOutput]:
    """Start the launcher so that it ends if this process is killed; return it and what shows its output."""
    if output is not None:
        child = _popen(argv, environment, stdout=output, stderr=subprocess.STDOUT)
        return child, ShownOutput(None, None)
    reading, writing = zip(*(os.pipe() for _ in range(2)), strict=True)
    try:
        # The launcher holds the reading ends, too.  Otherwise, if this process were killed, the launcher
        # could not write its messages about the ranks that it ends.
        child = _popen(argv, environment, stdout=writing[0], stderr=writing[1], pass_fds=reading)
    except ConfigError:
        for pipe in reading:
            os.close(pipe)
        raise
    finally:
        for pipe in writing:
            os.close(pipe)
    return child, ShownOutput(*reading, tolerates_loss=tolerates_loss)


def _popen(argv: Sequence[str], environment: Mapping[str, str], **streams: Any) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            argv,
            env=dict(environment),
            # mpirun, in the background, would read the terminal for rank 0 and be stopped for that.
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=at_our_death(),  # noqa: PLW1509 - a folder's owner may run, whose locks it takes none of
            **streams,
        )
    except OSError as error:
        raise ConfigError(f"{argv[0]} cannot be started ({error.strerror}); run launch/setup") from error


def _wait(
    child: subprocess.Popen[bytes], request: SupervisorStop, policy: StopPolicy, shown: ShownOutput
) -> int:
    """Wait for the child; send first signal, SIGTERM and SIGKILL in turn once a stop is requested or due."""
    stages: list[Callable[[], None]] = [
        lambda: _ask_to_stop(child, policy),
        lambda: _signal_launcher(child, signal.SIGTERM),
        lambda: kill_descendants(child.pid, keep=frozenset()),
    ]
    done = 0
    while True:
        if shown.is_over:  # the child usually ends a moment later
            with suppress(subprocess.TimeoutExpired):
                return child.wait(_POLL_S)
        elif not shown.pump(_POLL_S):
            exit_code = child.poll()
            if exit_code is not None:
                return exit_code
        due = _stages_due(request, policy, _end_after_fault(policy, shown))
        while done < due:
            # After a fault no rank is left to save, and not every launcher may be sent SIGTERM.
            if request.signals or done == len(stages) - 1 or (done == 1 and policy.terminate_after_fault):
                stages[done]()
            done += 1


def _end_after_fault(policy: StopPolicy, shown: ShownOutput) -> float:
    """Return the deadline for the launcher to end by itself after a fault, by the monotonic clock, s."""
    return min(shown.fault_since + policy.fault_grace_s, shown.gone_since + policy.gone_grace_s)


def _stages_due(request: SupervisorStop, policy: StopPolicy, end_after_fault: float) -> int:
    """Return how many of the three stages of ending a job are due."""
    now = time.monotonic()
    due = 0
    if request.signals:
        # A second request skips the grace period.
        terminate_s = policy.grace_s if request.again is None else request.again - request.since
        due = _passed(now - request.since, (0.0, terminate_s, terminate_s + policy.kill_after_s))
    kill_s = _KILL_AFTER_FAULT_S if policy.terminate_after_fault else 0.0
    return max(due, _passed(now - end_after_fault, (0.0, 0.0, kill_s)))


def _passed(time_s: float, deadlines_s: tuple[float, ...]) -> int:
    return sum(time_s >= deadline_s for deadline_s in deadlines_s)


def _ask_to_stop(child: subprocess.Popen[bytes], policy: StopPolicy) -> None:
    """Let the ranks save and exit."""
    ranks = outermost_with(child.pid, policy.ranks_have) if policy.ranks_have else []
    for pid in ranks:
        kill(pid, signal.SIGUSR1)
    if not ranks:  # none has started yet, or the launcher forwards the signal
        _signal_launcher(child, policy.first_signal)


def _signal_launcher(child: subprocess.Popen[bytes], signum: signal.Signals) -> None:
    """Send a signal to the launcher; SIGUSR1 to mpirun itself, even if horovodrun started it.

    horovodrun becomes a shell that may wait for mpirun: SIGUSR1 would end the shell and reach no rank.  If
    there is no launcher that forwards SIGUSR1, the child gets SIGTERM instead.
    """
    if signum == signal.SIGUSR1:
        family = [child.pid, *descendants(child.pid)]
        launchers = [pid for pid in family if program_name(pid).startswith(_LAUNCHERS)]
        for pid in launchers[:1]:
            kill(pid, signum)
        if launchers:
            return
        signum = signal.SIGTERM
    child.send_signal(signum)


@contextmanager
def noted_signals() -> Iterator[SupervisorStop]:
    """Record stop signals and held warnings, instead of dying of them; restore the handlers after the block.

    Ignored signals stay ignored: with `nohup` a job outlives the terminal it was started from.
    """
    request = SupervisorStop()
    heeded = [signum for signum in _STOP_SIGNALS if signal.getsignal(signum) != signal.SIG_IGN]
    former = {signum: signal.signal(signum, request.note) for signum in heeded}
    for signum in take_held_warnings():
        request.note(signum, None)
    try:
        yield request
    finally:
        for signum, handler in former.items():
            signal.signal(signum, handler)
