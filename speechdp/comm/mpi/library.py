"""The MPI library.  Importing this module initialises MPI: only `create_communicator` leads to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from torch import Tensor

from speechdp.comm.environment import (
    end_process,
    flush_output,
    has_parent_that_tells,
    prepare_open_mpi,
    wait_until_heard,
)
from speechdp.comm.waiting import sleep_until
from speechdp.errors import CommunicationError

prepare_open_mpi()

from mpi4py import MPI as MPI  # noqa: E402, PLC0414  initialises MPI, which reads the settings above

T = TypeVar("T")

#: elements per MPI call: counts are 32 bits wide in MPI 3.
_MAX_COUNT = 1 << 30


def world_rank() -> int:
    """Return this process' rank among all that MPI knows of."""
    return int(MPI.COMM_WORLD.Get_rank())


def abort_world(exit_code: int) -> NoReturn:
    """End every rank of the MPI job at once."""
    flush_output()
    # Where a rank leaves, Hydra ends the others as well, with an exit code of its own: launch has the rank's.
    if not has_parent_that_tells():
        wait_until_heard()
        MPI.COMM_WORLD.Abort(exit_code)
    end_process(exit_code or 1)  # MPICH returns once its launcher has been told


def finalise() -> None:
    """End MPI in this process: without it mpirun takes a process that leaves for one that has failed."""
    if not MPI.Is_finalized():
        MPI.Finalize()


def parts(x: Tensor) -> list[Tensor]:
    """Cut a flat tensor into pieces that one MPI call can count; one piece even if it is empty."""
    return [x[start : start + _MAX_COUNT] for start in range(0, max(1, x.numel()), _MAX_COUNT)]


def meet(comm: Any) -> None:
    """Return once every rank is here; every wait of MPI's own would spin."""
    sleep_until(comm.Ibarrier().Test)


def checked(what: str, call: Callable[[], T]) -> T:
    """Call, and turn MPI's error into a CommunicationError that says what was called."""
    try:
        return call()
    except MPI.Exception as error:
        hint = (
            "; do all ranks take the same number of steps?"
            if error.Get_error_class() == MPI.ERR_TRUNCATE
            else ""
        )
        raise CommunicationError(f"{what} failed in MPI: {error.Get_error_string()}{hint}") from error
