"""Requeue a batch job, so that it continues from its checkpoint later."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from types import FrameType

from speechdp import exit_codes
from speechdp.errors import ConfigError
from speechdp.launching.allocation import Allocation, Scheduler
from speechdp.launching.batch_script import SYSTEMS
from speechdp.launching.programs import ask
from speechdp.launching.supervise import JobEnd
from speechdp.process.ending import WARNINGS, give_up_handler

#: Signal that Grid Engine sends with -notify before qdel kills; before a suspension or time limit it is
#: SIGUSR1.
_QDEL = signal.SIGUSR2


def is_to_be_resumed(
    end: JobEnd, exit_code: int, scheduler: Scheduler | None = None, *, begins_anew: bool = False
) -> bool:
    """Return whether the batch system, not the user, stopped the job: it saved, or had nothing to save yet.

    Args:
        exit_code: exit code of the launch, from `outcome.verdict`.
        scheduler: batch system of the job; None: no batch job.
        begins_anew: whether an unsaved job would start over at each time limit, for ever: a user's script,
            for which only exit code 75 proves that it saved, or a command that saves nothing on the way.  A
            job stopped before its ranks were started exits with 75 as well.
    """
    if exit_code == exit_codes.STOPPED:
        return end.stop_signal is None or _is_warning(end.stop_signal, scheduler)
    return not begins_anew and is_ended_unsaved(end, exit_code, scheduler)


def _is_warning(signum: int, scheduler: Scheduler | None) -> bool:
    """Return whether a signal is a batch system's warning, not the user's own scancel, qdel or Ctrl-C."""
    return signum in WARNINGS and not (scheduler == "sge" and signum == _QDEL)


def is_ended_unsaved(end: JobEnd, exit_code: int, scheduler: Scheduler | None = None) -> bool:
    """Return whether the job ended unsaved when it should have saved.

    Either it was killed without having answered the batch system's warning, or a script ended without having
    saved.

    Args:
        exit_code: exit code of the launch, from `outcome.verdict`.
        scheduler: as for `is_to_be_resumed`.
    """
    signum = end.stop_signal
    without_answer = signum is not None and _is_warning(signum, scheduler) and exit_code == 128 + signum
    return without_answer or exit_code == exit_codes.STOPPED_UNSAVED


def why_not_requeued(command: Sequence[str], end: JobEnd, *, is_script: bool) -> str:
    """Return why a job that ended unsaved would start over, and the remedy."""
    if not is_script:
        return (
            f"{command[0]} saves no checkpoints, so it would start over and be stopped again; submit it "
            "with a longer --time"
        )
    if any(fault.kind == "killed" and fault.signal in WARNINGS for fault in end.faults):
        return (
            "the script was ended by the batch system's warning signal, as it had not yet checked "
            "run.should_stop; let it check that after each step and save when it is true (docs/api.md), or, "
            "if it does and was still starting, submit the job again"
        )
    return (
        "the script did not save in time when it was asked to stop; let it check run.should_stop after each "
        "step and save when it is true (docs/api.md), or raise --signal-s"
    )


def requeue(allocation: Allocation, *, is_script: bool = False) -> int:
    """Request another run of this job; return the exit code to exit with.

    For LSF and Grid Engine the exit code alone is the request.  For others a program is called, after which
    SIGTERM is ignored.

    Raises:
        ConfigError: the scheduler refused.
    """
    how = "the same command continues from the script's last checkpoint"
    remedy = f"submit the job again; {how if is_script else 'with --resume it continues from its checkpoint'}"
    system = SYSTEMS[allocation.scheduler]
    if system.requeue:
        _order([*system.requeue, allocation.job_id], remedy)
    return system.requeued_code


class _Accepted(BaseException):
    """The batch system ends this job as requested; `qrerun` would wait for that end."""


def _accept(_signum: int, _frame: FrameType | None) -> None:
    give_up_handler(signal.SIGTERM, signal.SIG_IGN)  # a second one must not raise later
    raise _Accepted


def _order(argv: list[str], remedy: str) -> None:
    try:
        signal.signal(signal.SIGTERM, _accept)
        try:
            answer = ask(argv, remedy)
        finally:
            give_up_handler(signal.SIGTERM, signal.SIG_IGN)
    except _Accepted:
        return
    if answer.returncode not in (0, -signal.SIGTERM):  # the program may be ended first, by the same signal
        output = " ".join((answer.stderr or answer.stdout).split())
        raise ConfigError(f"{' '.join(argv)} failed ({output}); {remedy}")
