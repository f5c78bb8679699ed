"""A file in memory through which the ranks of a host share their statuses if they have no folder.

It is unlinked once all have opened it, so that nothing is left behind, however the job ends.
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
#: The boards of this process.
_BOARDS: weakref.WeakSet[HostBoard] = weakref.WeakSet()


def _close_in_child() -> None:
    """Close the boards in a forked worker, which may outlive the rank and would hold its lock."""
    for board in list(_BOARDS):
        board.close()


os.register_at_fork(after_in_child=_close_in_child)


class HostBoard:
    """The statuses of the ranks of this host.  Only the constructor is collective.

    Args:
        comm: the ranks.
        hosts: host of every rank.

    Attributes:
        ranks: ranks whose statuses can be read here, including this one; empty if the ranks of a host cannot
            share a file (containers).
    """

    def __init__(self, comm: Communicator, hosts: Sequence[str]) -> None:
        members = [rank for rank, host in enumerate(hosts) if host == hosts[comm.rank]]
        made = _new_file() if comm.rank == members[0] else ""
        self._descriptor: int | None = None
        try:
            path = comm.allgather_object(made)[members[0]]
            with contextlib.suppress(OSError):
                self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            _BOARDS.add(self)
            comm.barrier()
        finally:  # another rank may fail meanwhile
            if made:
                Path(made).unlink(missing_ok=True)
        self.ranks = members if self._descriptor is not None else []
        #: Offset of a byte behind the statuses; the rank that marks it ends the job.
        self._claim = comm.size * STATUS_BYTES

    def write(self, status: RankStatus) -> None:
        """Write a rank's own status.  Raises OSError."""
        if self._descriptor is not None:
            os.pwrite(self._descriptor, status_to_bytes(status), status.rank * STATUS_BYTES)

    def read(self, rank: int) -> RankStatus | None:
        """Return another rank's status; None: none yet, or not readable here.  Raises OSError."""
        if self._descriptor is None or rank not in self.ranks:
            return None
        status = status_from(os.pread(self._descriptor, STATUS_BYTES, rank * STATUS_BYTES))
        return status if status is not None and status.rank == rank else None

    def claim_end(self) -> bool:
        """Return whether this rank is the first of its host to end the job."""
        if self._descriptor is None:
            return True
        try:
            # The kernel releases the lock when a rank ends, but its mark stays.  flock locks this rank's open
            # file, not the process as lockf does: ranks may be threads of one process.
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.pread(self._descriptor, 1, self._claim):
                return False
            os.pwrite(self._descriptor, b"!", self._claim)
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Close the file; nothing is read or written afterwards."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def _new_file() -> str:
    """Return the path of a new file, in memory if there is such a folder; "" if none can be made."""
    for folder in (_MEMORY, None):
        with contextlib.suppress(OSError):
            descriptor, path = tempfile.mkstemp(prefix="speechdp-", dir=folder)
            os.close(descriptor)
            return path
    return ""
