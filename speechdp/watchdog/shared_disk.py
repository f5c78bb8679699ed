"""Whether all hosts see what one of them writes: on a network disk after a while, on their own never."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from speechdp.comm.base import Communicator
from speechdp.comm.environment import host_name
from speechdp.files import listed_anew
from speechdp.watchdog.watchdog import Stillness

#: Seconds until what rank 0 writes must be seen on all hosts; NFS looks again after a while only.
_VISIBLE_S = 65.0
#: File systems that this host alone writes to, or serves: what is not seen there at once is never seen.
_OF_ONE_HOST = frozenset(
    ("bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "jfs", "overlay", "ramfs", "tmpfs", "xfs", "zfs")
)
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


def why_unseen(path: Path) -> str | None:
    """Return None if a file is there, or comes to be seen soon, else how that is known, a few words.

    A disk of this host's own is not waited for.  A network disk may hide a new file, and new folders above
    it, for a minute.

    Raises:
        OSError: its folder is unreadable.
    """
    looking, patience = Stillness(time.monotonic(), LOOK_S), Patience()
    while True:
        error = None
        try:
            if path.name in listed_anew(path.parent):
                return None
        except FileNotFoundError:
            pass
        except OSError as failure:
            error = failure
        patience.bear(error)
        if error is None and (system := file_system(path)) in _OF_ONE_HOST:
            return f"{system} is local to that host"
        if looking.look(time.monotonic(), 0) > _VISIBLE_S:
            return f"it did not appear within {_VISIBLE_S:g} s"
        time.sleep(0.05)


def file_system(path: Path) -> str:
    """Return the kind of file system that a path is, or would be, on, e.g. `nfs4`; "": that is not known."""
    place = Path(os.path.realpath(path))
    try:
        there = os.open(next(part for part in (place, *place.parents) if part.exists()), os.O_PATH)
        try:
            about = Path(f"/proc/self/fdinfo/{there}").read_text(encoding="utf-8")
        finally:
            os.close(there)
        number = about.partition("mnt_id:")[2].split()[0]
        # Folders may have names that are not UTF-8.
        table = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
        mounts = [line.split() for line in table.splitlines()]
        return next(mount[mount.index("-") + 1] for mount in mounts if mount[0] == number)
    except (OSError, ValueError, LookupError, StopIteration):
        return ""


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
        unseen = why_unseen(file)
    except OSError:
        unseen = None
    told = comm.allgather_object([host_name(), unseen])
    hosts = [host for host, _ in told]
    return next(
        (not_shared(folder, rank, hosts, why, what) for rank, (_, why) in enumerate(told) if why), None
    )


def not_shared(folder: Path, rank: int, hosts: Sequence[str], why: str, what: str = "RUN") -> str:
    """Return the line on a rank that does not see what rank 0 writes.

    Args:
        hosts: of all ranks.
        why: this is known, as of `why_unseen`.
        what: the folder is called in the remedy.
    """
    return (
        f"{folder}: rank {rank} on {hosts[rank]} does not see what rank 0 on {hosts[0]} writes there "
        f"({why}); put {what} on a disk all hosts share"
    )
