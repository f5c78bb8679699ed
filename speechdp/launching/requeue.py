"""Give a batch job back to its scheduler, so that it goes on from its checkpoint later."""

from __future__ import annotations

import subprocess

from speechdp import exit_codes
from speechdp.errors import ConfigError
from speechdp.launching.allocation import Allocation

#: Grid Engine runs a job again that ends with this exit code; no program is needed.
_GRID_ENGINE_AGAIN = 99


def requeue(allocation: Allocation) -> int:
    """Ask for another run of this job; return the exit code to leave with.

    LSF is told by the exit code alone: launch/lsf.bsub has `-Q "75"`.

    Raises:
        ConfigError: the scheduler refused.
    """
    if allocation.scheduler == "sge":
        return _GRID_ENGINE_AGAIN
    if allocation.scheduler == "slurm":
        _ask(["scontrol", "requeue", allocation.job_id])
    elif allocation.scheduler == "pbs":
        _ask(["qrerun", allocation.job_id])
    return exit_codes.STOPPED


def _ask(argv: list[str]) -> None:
    remedy = "submit the job again; with --resume it goes on from its checkpoint"
    try:
        answer = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{' '.join(argv)} cannot be run ({error}); {remedy}") from error
    if answer.returncode != 0:
        said = " ".join((answer.stderr or answer.stdout).split())
        raise ConfigError(f"{' '.join(argv)} failed ({said}); {remedy}")
