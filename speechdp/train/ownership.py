"""Ownership of the folder of a run or sweep by the ranks that write it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from speechdp.comm.startup.folder_owner import OwningProcess, owner_of
from speechdp.errors import RunError
from speechdp.ownership.owner import OWNER_FILE, FolderOwner, StopAsked
from speechdp.process.ending import StoppedBefore
from speechdp.train.session import Session
from speechdp.watchdog.shared_disk import why_not_shared


@contextmanager
def owned(session: Session, folder: Path, command: str) -> Iterator[FolderOwner | None]:
    """Own a folder during the block; yield the owner on rank 0, which owns it for all ranks.  Collective.

    Args:
        command: what the ranks do, for the message to others that want the folder.

    Raises:
        ConfigError: on rank 0, another job owns the folder.
        RunError: on rank 0, the folder cannot be written; on all ranks, a rank does not see it.
        StoppedBefore: a signal came before it was known whether another owner is still alive.
    """
    owner = None
    if session.comm.rank == 0:
        process = OwningProcess(session.comm, session.reporter.end, session.is_asked_to_stop)
        owner = owner_of(folder, command, session.reporter.notice, process)
    if not session.comm.broadcast_object(_acquired(owner)):
        raise StoppedBefore(folder)
    try:
        if problem := why_not_shared(folder, folder / OWNER_FILE, session.comm):
            raise RunError(problem)
        yield owner
    finally:
        if owner is not None:
            owner.release()


def _acquired(owner: FolderOwner | None) -> bool:
    try:
        if owner is not None:
            owner.acquire()
    except StopAsked:
        return False
    return True
