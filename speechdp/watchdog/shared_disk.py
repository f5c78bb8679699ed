"""Check that all hosts see what one writes: on a network disk after a while, on local disks never."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from speechdp.comm.base import Communicator
from speechdp.comm.environment import host_name
from speechdp.files import listed_anew
from speechdp.watchdog.watchdog import Stillness

#: Seconds until all hosts must see what rank 0 writes; NFS refreshes its caches only after a while.
_VISIBLE_S = 65.0
#: File systems that only this host writes to, or serves: a file not seen there at once is never seen.
_OF_ONE_HOST = frozenset(
    ("bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "jfs", "overlay", "ramfs", "tmpfs", "xfs", "zfs")
)
#: Seconds for which listing a folder may fail, since a network disk may recover.
_UNREADABLE_S = 3.0
#: At most this much of one look at the disk counts as waiting, s: a disk that hangs proves nothing.
LOOK_S = 1.0


class Patience:
    """Tolerates errors in reading a folder that others write to, for a limited time."""

    def __init__(self) -> None:
        self._failing, self._num_read = Stillness(time.monotonic(), LOOK_S), 0

    def bear(self, error: OSError | None) -> None:
        """Record the outcome of one more look.  Raises the error if all looks have failed for too long."""
        self._num_read += error is None
        failing_s = self._failing.look(time.monotonic(), self._num_read)
        if error is not None and failing_s > _UNREADABLE_S:
            raise error


def why_unseen(path: Path) -> str | None:
    """Return None if a file is there, or appears soon; else say in a few words how its absence is known.

    On a local disk there is no wait.  A network disk may hide a new file, and new folders above it, for a
    minute.

    Raises:
        OSError: the file's folder is unreadable.
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
    """Return the type of the file system that holds, or would hold, a path, e.g. `nfs4`; "": unknown."""
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
    """Return a line naming a rank that does not see a file rank 0 wrote; None: all see it.  Collective.

    A rank that cannot read the folder is assumed to see the file: whatever reads it next reports the error.

    Args:
        folder: folder of the run, for the line; like `file` the same on all ranks.
        what: name of the folder in the remedy.
    """
    if comm.size == 1:
        return None
    try:
        unseen = why_unseen(file)
    except OSError:
        unseen = None
    answers = comm.allgather_object([host_name(), unseen])
    hosts = [host for host, _ in answers]
    return next(
        (not_shared(folder, rank, hosts, why, what) for rank, (_, why) in enumerate(answers) if why), None
    )


def not_shared(folder: Path, rank: int, hosts: Sequence[str], why: str, what: str = "RUN") -> str:
    """Return the message about a rank that does not see what rank 0 writes.

    Args:
        hosts: host of every rank.
        why: how this is known; result of `why_unseen`.
        what: name of the folder in the remedy.
    """
    return (
        f"{folder}: rank {rank} on {hosts[rank]} does not see what rank 0 on {hosts[0]} writes there "
        f"({why}); put {what} on a disk all hosts share"
    )
