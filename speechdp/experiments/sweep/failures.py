"""Let a sweep continue after a run that diverged on all ranks alike."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from speechdp.comm.background import exchanging
from speechdp.comm.base import Communicator
from speechdp.errors import DivergedError, RunError
from speechdp.experiments.record import delete_file, write_json
from speechdp.report.runs.records import number, read_object

#: How long a failed rank waits for the others to fail, and between two looks, in s. The others may be some
#: steps behind, and files written by other hosts appear late.
_PATIENCE_S, _LOOK_S = 10.0, 0.1


def failure_of(
    comm: Communicator, run_dir: Path, train: Callable[[], None], *, synchronous: bool
) -> str | None:
    """Train a run; return None, or the first rank's message if all ranks diverged alike.  Collective.

    Args:
        run_dir: folder of the run, on a disk that all ranks share.
        train: trains the run; collective.
        synchronous: whether the run's strategy is synchronous.

    Raises:
        As `train`; DivergedError if only some ranks diverged, or if a thread of the strategy may still be
        exchanging, which would disturb later runs.
    """
    nonce, sent_bytes = comm.broadcast_object(secrets.token_hex(4)), comm.sent_bytes
    if comm.rank == 0:
        _forget(run_dir)
    comm.barrier()
    threads = exchanging()
    try:
        train()
    except DivergedError as error:  # other errors, such as a full disk, are not the run's fault
        facts = {"sent_bytes": comm.sent_bytes - sent_bytes, "is_exchanging": bool(exchanging() - threads)}
        has_spoken = _note(run_dir, nonce, comm.rank, facts)
        if not (has_spoken and synchronous and _have_all_failed(comm, run_dir, nonce)):
            raise
        message = str(comm.broadcast_object(str(error)))
    else:
        return None
    if comm.rank == 0:
        _forget(run_dir)
    comm.barrier()
    return message


def has_failed(run_dir: Path) -> bool:
    """Return whether a run has ended an earlier job because it failed on some ranks only."""
    return any(_notes(run_dir, "*"))


def _have_all_failed(comm: Communicator, run_dir: Path, nonce: str) -> bool:
    """Return whether all ranks fail within some seconds, between the same exchanges.

    The ranks communicate by files.  A rank that has not failed waits in an exchange of its training, which
    would take a message for its own.
    """
    end_s = time.monotonic() + _PATIENCE_S
    while True:
        found = [read_object(path, []) or {} for path in _notes(run_dir, nonce)]
        sent = [number(note, "sent_bytes") for note in found]
        if len(sent) >= len(comm.alive) and None not in sent:
            return len(set(sent)) == 1 and not any(note.get("is_exchanging") for note in found)
        if time.monotonic() > end_s:
            return False
        time.sleep(_LOOK_S)


def _note(run_dir: Path, nonce: str, rank: int, facts: dict[str, float | bool]) -> bool:
    """Record on disk that this rank has failed, and at which exchange; return whether that succeeded."""
    with suppress(RunError):  # the first error is the one to report
        write_json(_folder(run_dir) / f"failed-{nonce}-{rank:04d}.json", facts)
        return True
    return False


def _notes(run_dir: Path, nonce: str) -> list[Path]:
    return sorted(_folder(run_dir).glob(f"failed-{nonce}-*.json"))


def _folder(run_dir: Path) -> Path:
    return run_dir / "status"


def _forget(run_dir: Path) -> None:
    """Delete the notes of earlier jobs.  Raises RunError (disk)."""
    for path in _notes(run_dir, "*"):
        delete_file(path)
