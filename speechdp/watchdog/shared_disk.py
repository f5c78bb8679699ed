"""Whether all hosts see what one of them writes: on a network disk after a while, on their own never."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from speechdp.comm.base import Communicator
from speechdp.comm.environment import host_name
from speechdp.watchdog.watchdog import Stillness

#: Seconds until what rank 0 writes must be seen on all hosts; NFS looks again after a while only.
_VISIBLE_S = 65.0
#: Seconds that a folder may give errors instead of its names: a network disk recovers.
_UNREADABLE_S = 3.0
#: Of a look at the disk only so many seconds count as waiting, s: a disk that stands still proves nothing.
LOOK_S = 1.0


class Patience:
    """Errors of reading a folder that others write to are borne for a while."""

    def __init__(self) -> None:
        self._failing, self._num_read = Stillness(time.monotonic(), LOOK_S), 0

    def bear(self, error: OSError | None) -> None:
        """Take the outcome of one more look.  Raises the error if there have been only such for long."""
        self._num_read += error is None
        failing_s = self._failing.look(time.monotonic(), self._num_read)
        if error is not None and failing_s > _UNREADABLE_S:
            raise error


def is_seen(path: Path) -> bool:
    """Return whether a file is there, or comes to be seen soon.  Raises OSError: its folder is unreadable."""
    looking, patience = Stillness(time.monotonic(), LOOK_S), Patience()
    while True:
        # Listing a folder makes NFS look again; asking for the file alone may answer from memory.
        try:
            if path in path.parent.iterdir():
                return True
            patience.bear(None)
        except FileNotFoundError:
            patience.bear(None)
        except OSError as error:
            patience.bear(error)
        if looking.look(time.monotonic(), 0) > _VISIBLE_S or not path.parent.parent.is_dir():
            return False
        time.sleep(0.05)


def why_not_shared(folder: Path, file: Path, comm: Communicator, *, what: str = "RUN") -> str | None:
    """Return in a line which rank does not see a file that rank 0 has written; None: all do.  Collective.

    One whose folder cannot be read is taken to see it: what reads it next says why.

    Args:
        folder: of the run, for the line; like `file` the same on all ranks.
        what: the folder is called in the remedy.
    """
    if comm.size == 1:
        return None
    try:
        found = is_seen(file)
    except OSError:
        found = True
    hosts, seen = zip(*comm.allgather_object([host_name(), found]), strict=True)
    return None if all(seen) else not_shared(folder, seen.index(False), hosts, what)


def not_shared(folder: Path, rank: int, hosts: Sequence[str], what: str = "RUN") -> str:
    """Return the line on a rank that does not see what rank 0 writes.

    Args:
        hosts: of all ranks.
        what: the folder is called in the remedy.
    """
    return (
        f"{folder}: rank {rank} on {hosts[rank]} does not see what rank 0 on {hosts[0]} writes there; put "
        f"{what} on a disk all hosts share"
    )
