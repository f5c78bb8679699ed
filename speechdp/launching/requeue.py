"""Requeue a batch job, so that it continues from its checkpoint later."""

from __future__ import annotations

import signal

from speechdp import exit_codes
from speechdp.errors import ConfigError
from speechdp.launching.allocation import Allocation
from speechdp.launching.programs import ask
from speechdp.launching.supervise import JobEnd

#: Grid Engine runs a job again that ends with this exit code; no program is needed.
_GRID_ENGINE_AGAIN = 99
#: What batch systems send before they end a job; the others are a user's own scancel, qdel or Ctrl-C.
_WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)


def is_to_go_on(end: JobEnd, exit_code: int) -> bool:
    """Tell whether the batch system, not the user, stopped the job: it saved, or had nothing to save yet.

    Args:
        exit_code: of the launch, as outcome.verdict has it.
    """
    if end.stop_signal is None:
        return exit_code == exit_codes.STOPPED
    return end.stop_signal in _WARNINGS and exit_code in (exit_codes.STOPPED, 128 + end.stop_signal)


def requeue(allocation: Allocation) -> int:
    """Ask for another run of this job; return the exit code to leave with.

    LSF is told by the exit code alone: launch/lsf.bsub has `-Q "75"`.

    Raises:
        ConfigError: the scheduler refused.
    """
    if allocation.scheduler == "sge":
        return _GRID_ENGINE_AGAIN
    if allocation.scheduler == "slurm":
        _order(["scontrol", "requeue", allocation.job_id])
    elif allocation.scheduler == "pbs":
        _order(["qrerun", allocation.job_id])
    return exit_codes.STOPPED


def _order(argv: list[str]) -> None:
    remedy = "submit the job again; with --resume it goes on from its checkpoint"
    answer = ask(argv, remedy)
    if answer.returncode != 0:
        said = " ".join((answer.stderr or answer.stdout).split())
        raise ConfigError(f"{' '.join(argv)} failed ({said}); {remedy}")
