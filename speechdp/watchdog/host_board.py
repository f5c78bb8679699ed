"""What the ranks of a host tell each other where they have no folder: a file in memory, gone with them.

It has no name once all have opened it, so that nothing is left however the job ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path

from speechdp.comm.base import Communicator
from speechdp.watchdog.status import STATUS_BYTES, RankStatus, status_from, status_to_bytes

_MEMORY = Path("/dev/shm")
#: Those of this process.
_BOARDS: weakref.WeakSet[HostBoard] = weakref.WeakSet()


def _close_in_child() -> None:
    """Keep no rank's lock in a worker that was forked: it may outlive the rank."""
    for board in list(_BOARDS):
        board.close()


os.register_at_fork(after_in_child=_close_in_child)


class HostBoard:
    """The statuses of the ranks of this host.  Collective to make; nothing after that.

    Args:
        comm: the ranks.
        hosts: of each rank.

    Attributes:
        ranks: those whose statuses can be read here, this one included; where ranks of a host share no file
            (containers), none.
    """

    def __init__(self, comm: Communicator, hosts: Sequence[str]) -> None:
        members = [rank for rank, host in enumerate(hosts) if host == hosts[comm.rank]]
        made = _new_file() if comm.rank == members[0] else ""
        path = comm.allgather_object(made)[members[0]]
        self._descriptor: int | None = None
        with contextlib.suppress(OSError):
            self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        _BOARDS.add(self)
        comm.barrier()
        if made:
            Path(made).unlink(missing_ok=True)
        self.ranks = members if self._descriptor is not None else []
        #: Behind the statuses: who marks this byte ends the job.
        self._claim = comm.size * STATUS_BYTES

    def write(self, status: RankStatus) -> None:
        """Write a rank's own status.  Raises OSError."""
        if self._descriptor is not None:
            os.pwrite(self._descriptor, status_to_bytes(status), status.rank * STATUS_BYTES)

    def read(self, rank: int) -> RankStatus | None:
        """Return another rank's status; None where there is none yet, or none to be read.  Raises OSError."""
        if self._descriptor is None or rank not in self.ranks:
            return None
        status = status_from(os.pread(self._descriptor, STATUS_BYTES, rank * STATUS_BYTES))
        return status if status is not None and status.rank == rank else None

    def claim_end(self) -> bool:
        """Return whether this rank is the first of its host to end the job."""
        if self._descriptor is None:
            return True
        try:
            # The kernel lets go of the lock of a rank that has ended: its mark stays.  The lock is one of the
            # file as this rank has opened it, not of the process (lockf), in which ranks may be threads.
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.pread(self._descriptor, 1, self._claim):
                return False
            os.pwrite(self._descriptor, b"!", self._claim)
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Let go of the file; nothing is read or written after it."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def _new_file() -> str:
    """Return the path of a new file, in memory where there is such a folder; "" where none can be made."""
    for folder in (_MEMORY, None):
        with contextlib.suppress(OSError):
            descriptor, path = tempfile.mkstemp(prefix="speechdp-", dir=folder)
            os.close(descriptor)
            return path
    return ""
