"""The MPI library.  Importing this module initialises MPI.

So only back-ends import it, which `comm/startup/create.py` imports, and code that finds MPI initialised.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from torch import Tensor

from speechdp.comm.environment import (
    end_process,
    flush_output,
    has_parent_that_reports,
    prepare_open_mpi,
    wait_until_read,
)
from speechdp.comm.waiting import sleep_until
from speechdp.errors import CommunicationError

prepare_open_mpi()

from mpi4py import MPI as MPI  # noqa: E402, PLC0414  initialises MPI, which reads the settings above

T = TypeVar("T")

#: Elements per MPI call: counts have 32 bits in MPI 3.
_MAX_COUNT = 1 << 30


def world_rank() -> int:
    """Return this process's rank in MPI.COMM_WORLD."""
    return int(MPI.COMM_WORLD.Get_rank())


def abort_world(exit_code: int) -> NoReturn:
    """End every rank of the MPI job at once."""
    flush_output()
    # Hydra also ends the others when a rank exits, with an exit code of its own; launch knows the rank's.
    if not has_parent_that_reports():
        wait_until_read()
        MPI.COMM_WORLD.Abort(exit_code)
    end_process(exit_code or 1)  # MPICH's Abort returns once it has notified the launcher


def finalise() -> None:
    """Finalise MPI in this process; else mpirun considers a process that exits to have failed."""
    if not MPI.Is_finalized():
        MPI.Finalize()


def parts(x: Tensor) -> list[Tensor]:
    """Cut a flat tensor into pieces that one MPI call can count; one piece even if it is empty."""
    return [x[start : start + _MAX_COUNT] for start in range(0, max(1, x.numel()), _MAX_COUNT)]


def meet(comm: Any) -> None:
    """Return once every rank has called this; MPI's own waits would all spin."""
    sleep_until(comm.Ibarrier().Test)


def close_channel(comm: Any) -> None:
    """Free the communicator of a channel.  Collective."""

    def run() -> None:
        meet(comm)
        comm.Free()

    checked("closing a channel", run)


def checked(what: str, call: Callable[[], T]) -> T:
    """Run `call`, turning an MPI error into a CommunicationError that names the operation `what`."""
    try:
        return call()
    except MPI.Exception as error:
        hint = (
            "; do all ranks take the same number of steps?"
            if error.Get_error_class() == MPI.ERR_TRUNCATE
            else ""
        )
        raise CommunicationError(f"{what} failed in MPI: {error.Get_error_string()}{hint}") from error
