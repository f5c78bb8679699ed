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

#: What Grid Engine sends with -notify before qdel kills; before it suspends or the time limit, SIGUSR1 comes.
_QDEL = signal.SIGUSR2


def is_to_go_on(
    end: JobEnd, exit_code: int, scheduler: Scheduler | None = None, *, begins_anew: bool = False
) -> bool:
    """Tell whether the batch system, not the user, stopped the job: it saved, or had nothing to save yet.

    Args:
        exit_code: of the launch, as outcome.verdict has it.
        scheduler: whose job it is; None: no batch job.
        begins_anew: what has not saved would begin anew at each time limit, for ever: a user's script, of
            which only exit code 75 tells that it has, and a command that saves nothing on the way.  What was
            stopped before its ranks were started leaves with 75 as well.
    """
    if exit_code == exit_codes.STOPPED:
        return end.stop_signal is None or _is_warning(end.stop_signal, scheduler)
    return not begins_anew and is_ended_unsaved(end, exit_code, scheduler)


def _is_warning(signum: int, scheduler: Scheduler | None) -> bool:
    """Tell a batch system's warning from the user's own scancel, qdel or Ctrl-C."""
    return signum in WARNINGS and not (scheduler == "sge" and signum == _QDEL)


def is_ended_unsaved(end: JobEnd, exit_code: int, scheduler: Scheduler | None = None) -> bool:
    """Tell whether the batch system asked the job to save and end, and it was ended without an answer, or
    a script has ended without having saved.

    Args:
        exit_code: of the launch, as outcome.verdict has it.
        scheduler: as of is_to_go_on.
    """
    signum = end.stop_signal
    without_answer = signum is not None and _is_warning(signum, scheduler) and exit_code == 128 + signum
    return without_answer or exit_code == exit_codes.STOPPED_UNSAVED


def why_not_requeued(command: Sequence[str], end: JobEnd, *, is_script: bool) -> str:
    """Return why a job that was ended unsaved would begin anew, and the remedy."""
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
    """Ask for another run of this job; return the exit code to leave with.

    LSF and Grid Engine are told by it alone.  SIGTERM is ignored once another program was asked.

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
    """The batch system ends this job, as it was told to: `qrerun` would wait for that end."""


def _accept(_signum: int, _frame: FrameType | None) -> None:
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
        said = " ".join((answer.stderr or answer.stdout).split())
        raise ConfigError(f"{' '.join(argv)} failed ({said}); {remedy}")
