"""Restart a job after a fault: whether that may help, on which hosts, and with which command line."""

from __future__ import annotations

import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from speechdp import exit_codes
from speechdp.errors import ConfigError
from speechdp.files import see_folder_anew
from speechdp.launching.faults import Fault, first_cause, short_name
from speechdp.launching.forwarded_options import has_option, plain_option
from speechdp.launching.hostfile import Host, Hostfile, is_this_machine
from speechdp.launching.outcome import Target, has_tried_all, whole_checkpoints
from speechdp.launching.processes import descendants, kill
from speechdp.launching.supervise import JobEnd

#: Faults that another start, on other hosts, may avoid.
_FAULTS_OF_HOSTS = ("killed", "host lost", "not reached", "no program", "no folder", "no room")
#: Exit codes after which another start is not wanted, and needs no message.
_NEVER_AGAIN = (
    exit_codes.USAGE,
    exit_codes.IN_USE,
    exit_codes.STOPPED,
    exit_codes.STOPPED_UNSAVED,
)
#: Number of rank deaths after which a host is left out, if the others have room for enough ranks.
_FAILURES_OF_A_BAD_HOST = 2
_PROBE_S = 15.0
#: Time that a launcher gets to end when asked to, s.
_PROBE_END_S = 2.0
_PROBES_AT_ONCE = 32
_POLL_S = 0.1


@dataclass(frozen=True)
class RestartPolicy:
    """How often, and with how few ranks, a job may be restarted.

    Attributes:
        max_restarts: largest number of starts after the first; 0: none.
        min_ranks: fewest ranks to continue with if hosts are lost; None: as many as at the start.
    """

    max_restarts: int = 0
    min_ranks: int | None = None

    def check(self, num_ranks: int, target: Target | None, *, is_script: bool = False) -> None:
        """Refuse, before the first start, a policy that can never be met.  Raises ConfigError."""
        if self.max_restarts < 0:
            raise ConfigError(f"--max-restarts {self.max_restarts}: must be at least 0")
        if self.max_restarts and target is None and not is_script:
            raise ConfigError("--max-restarts: only train, sweep and Python scripts can be restarted")
        if self.min_ranks is None:
            return
        if not 1 <= self.min_ranks <= num_ranks:
            raise ConfigError(
                f"--min-ranks {self.min_ranks}: must be from 1 to the number of ranks, {num_ranks}"
            )
        if not self.max_restarts:
            raise ConfigError(
                "--min-ranks is the smallest number of ranks for a restart; give --max-restarts as well"
            )
        if target is not None and target.subcommand == "sweep" and self.min_ranks < num_ranks:
            raise ConfigError(
                f"--min-ranks {self.min_ranks}: a sweep compares runs on the same number of ranks, and "
                "cannot continue with fewer; leave it out"
            )

    def fewer_ranks(self, hosts: Sequence[Host], num_ranks: int) -> list[int]:
        """Return the numbers of ranks below `num_ranks` with which a job may continue after losing hosts."""
        slots = {0}
        for host in hosts:
            slots |= {left + host.slots for left in slots}
        least = num_ranks if self.min_ranks is None else self.min_ranks
        return sorted(left for left in slots if least <= left < num_ranks)


#: Identifies a state of a file or folder: (path, modification time in ns, inode).
_State = tuple[Path, int, int]


@dataclass
class Restarts:
    """Decides whether and how a job is restarted.

    Args:
        policy: how often to restart.
        hostfile: all hosts that may be used.
        num_ranks: wanted number of ranks.
        target: the run; None: nothing that could be resumed.
        reachable: returns those of the given hosts on which a process can be started.
        is_script: whether a user's script runs, which itself knows from what to resume.

    Attributes:
        number: number of starts after the first so far.
        left_out: hosts not used in the last of them, because they failed or did not answer.
    """

    policy: RestartPolicy
    hostfile: Hostfile
    num_ranks: int
    target: Target | None
    reachable: Callable[[Sequence[Host]], list[Host]]
    is_script: bool = False
    number: int = 0
    left_out: tuple[str, ...] = ()
    _checkpoints: frozenset[_State] = frozenset()
    _record: _State | None = None
    _failures: Counter[str] = field(default_factory=Counter)

    def begin(self) -> tuple[Host, ...]:
        """Return the hosts of the first start.  Raises ConfigError: too few slots."""
        self._record = self._present_record()
        self._checkpoints = self._present_checkpoints()
        return self.hostfile.allocate(self.num_ranks)

    def why_not(self, end: JobEnd, exit_code: int) -> str | None:
        """Return why the job must not be started again; None: it may be; "": the reason needs no message."""
        if exit_code == 0 or self.policy.max_restarts == 0 or end.stop_signal is not None:
            return ""
        if (self.target is None and not self.is_script) or exit_code in _NEVER_AGAIN:
            return ""
        if self._is_refusal(end, exit_code) and self.target is not None and has_tried_all(self.target):
            return ""  # a sweep whose failed runs would fail again
        # What a script has saved, and what its exit code means, is unknown.
        if not self.is_script and self._is_refusal(end, exit_code) and not self._has_gone_on():
            return "not restarted: it would fail in the same way, as this start has written no checkpoint"
        if self.number >= self.policy.max_restarts:
            return f"not restarted: --max-restarts {self.policy.max_restarts} is reached"
        return None

    def next_hosts(self, faults: Sequence[Fault]) -> tuple[Host, ...]:
        """Return the hosts for the next start, leaving out those that failed.

        Raises:
            ConfigError: too few slots are left.
        """
        self.number += 1
        self._failures.update(_hosts_at_fault(faults))
        usable = self.reachable(self.hostfile.hosts)
        good = [host for host in usable if self._failures[short_name(host.name)] < _FAILURES_OF_A_BAD_HOST]
        least = self.num_ranks if self.policy.min_ranks is None else self.policy.min_ranks
        if sum(host.slots for host in good) >= least:
            usable = good
        self.left_out = tuple(host.name for host in self.hostfile.hosts if host not in usable)
        slots = sum(host.slots for host in usable)
        if slots < least:
            raise ConfigError(
                f"not restarted: {least} ranks need as many slots, but the hosts that respond have {slots} "
                f"(no response: {', '.join(self.left_out)}); "
                "repair these hosts, add others to the hostfile, or lower --min-ranks"
            )
        self._checkpoints = self._present_checkpoints()
        left = replace(self.hostfile, hosts=tuple(usable))
        return left.allocate(min(self.num_ranks, slots))

    def resume_arguments(self, arguments: Sequence[str]) -> tuple[str, ...]:
        """Return the command line of a further start, which resumes the run if it has begun."""
        if self.is_script:
            return tuple(arguments)
        if has_option(arguments, "--overwrite") and self._present_record() == self._record:
            return tuple(arguments)  # the run to overwrite is still there
        kept = [word for word in arguments if plain_option(word) not in ("--overwrite", "--resume")]
        # A sweep keeps its finished runs by itself.
        return (*kept, "--resume") if kept[0] == "train" else tuple(kept)

    def _is_refusal(self, end: JobEnd, exit_code: int) -> bool:
        """Return whether the ranks refused to continue, as they would again."""
        cause = first_cause(end.faults)
        if end.exit_code == 0 or cause is None or cause.kind in _FAULTS_OF_HOSTS:
            # Open MPI 5 returns 0 when a host is lost; mpirun returns 1 when it reaches no host, is ended by
            # SIGTERM, or fails itself.
            return False
        return exit_code == exit_codes.FAILED

    def _has_gone_on(self) -> bool:
        return bool(self._present_checkpoints() - self._checkpoints)

    def _present_checkpoints(self) -> frozenset[_State]:
        paths = [] if self.target is None else whole_checkpoints(self.target.directory)
        return frozenset(state for state in map(_state, paths) if state is not None)

    def _present_record(self) -> _State | None:
        """Return the state of the file that every run or sweep writes at its beginning."""
        if self.target is None:
            return None
        see_folder_anew(self.target.directory)
        return _state(
            self.target.directory / ("run.json" if self.target.subcommand == "train" else "sweep.json")
        )


def _state(path: Path) -> _State | None:
    try:
        return (path, path.stat().st_mtime_ns, path.stat().st_ino)
    except OSError:
        return None


def find_reachable(
    hosts: Sequence[Host],
    probe: Callable[[Host], list[str]],
    environment: Mapping[str, str],
    stopped: Callable[[], bool] = lambda: False,
) -> list[Host]:
    """Return the hosts on which the launcher can start a process, trying several at a time.

    This machine is not tried; it counts as reachable.

    Args:
        probe: returns the command line that runs `true` on a host.
        environment: environment of the probes.
        stopped: returns whether to give up; hosts that have not answered by then count as unreachable.
    """
    untried = [host for host in hosts if not is_this_machine(host.name)]
    reachable = {host.name for host in hosts if host not in untried}
    running: dict[str, subprocess.Popen[bytes]] = {}
    deadlines: dict[str, float] = {}
    with ExitStack() as stack:
        stack.callback(lambda: _end_probes(list(running.values())))
        while (untried or running) and not stopped():
            while untried and len(running) < _PROBES_AT_ONCE:
                host = untried.pop(0)
                running[host.name] = _start_probe(probe(host), environment)
                deadlines[host.name] = time.monotonic() + _PROBE_S
            ended = {name for name, child in running.items() if child.poll() is not None}
            reachable |= {name for name in ended if running[name].returncode == 0}
            late = {name for name in {*running} - ended if time.monotonic() > deadlines[name]}
            _end_probes([running[name] for name in late])
            for name in ended | late:
                del running[name]
            if running:
                time.sleep(_POLL_S)
    return [host for host in hosts if host.name in reachable]


def _start_probe(argv: list[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        argv,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _end_probes(probes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End probes that still run and all their descendants: mpirun's ssh has a process group of its own."""
    waiting = [child for child in probes if child.poll() is None]
    below = [pid for child in waiting for pid in descendants(child.pid)]  # not found after mpirun has ended
    for child in waiting:
        child.terminate()  # mpirun then deletes the folder of its session
    deadline = time.monotonic() + _PROBE_END_S
    for child in waiting:
        with suppress(subprocess.TimeoutExpired):
            child.wait(max(0.0, deadline - time.monotonic()))
    for pid in below:
        kill(pid, signal.SIGKILL)
    for child in waiting:
        child.kill()
        child.wait()


def _hosts_at_fault(faults: Sequence[Fault]) -> set[str]:
    """Return the short names of the hosts that caused the end, not of those that were ended as a result."""
    cause = first_cause(faults)
    hosts = {cause.host} if cause is not None and cause.host and cause.kind in _FAULTS_OF_HOSTS else set()
    return {short_name(host) for host in [*hosts, *(host for fault in faults for host in fault.silent_hosts)]}
