"""The folder of a run, or of a sweep, belongs to the ranks that write it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from speechdp import exit_codes
from speechdp.comm import environment
from speechdp.ownership.claimant import Claimant
from speechdp.ownership.owner import FolderOwner, StopAsked, Surroundings
from speechdp.process.bounded import bounded
from speechdp.process.ending import StoppedBefore
from speechdp.train.session import Session


@contextmanager
def owned(session: Session, folder: Path, command: str) -> Iterator[FolderOwner | None]:
    """Own a folder while the block runs; yields the owner on rank 0, which owns it for all.  Collective.

    Args:
        command: what the ranks do, for whoever else wants the folder.

    Raises:
        ConfigError: on rank 0, another owns the folder.
        RunError: on rank 0, the folder cannot be written.
        StoppedBefore: a signal came while it was not known whether another owner still lives.
    """
    owner = None
    if session.comm.rank == 0:
        owner = FolderOwner(folder, Claimant.here(command, os.environ), _surroundings(session))
    if not session.comm.broadcast_object(_acquired(owner)):
        raise StoppedBefore(folder)
    try:
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


def _surroundings(session: Session) -> Surroundings:
    def end(message: str) -> None:
        bounded(session.reporter.end, default=None)  # training may hold its lock, in a print nobody reads
        name = "speechdp"
        if session.comm.size > 1:
            name = f"speechdp: rank {session.comm.rank} on {environment.host_name()}"
        environment.end_process_with(f"{name}: {message}\n", exit_codes.IN_USE)

    def stopped() -> bool:
        return session.stop is not None and session.stop.received is not None

    return Surroundings(session.reporter.notice, end, stopped)
