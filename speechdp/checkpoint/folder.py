"""The folder of a checkpoint while it is written, how rank 0 completes it, and which older ones go."""

from __future__ import annotations

import contextlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speechdp import remedies
from speechdp.checkpoint.state import (
    ASIDE,
    CHECKPOINT_FORMAT,
    CHECKPOINT_VERSION,
    checkpoint_steps,
    last_checkpoint_note,
)
from speechdp.files import cannot_be_written, hand_over, sync, sync_name, write_synced

_KEPT = 2
#: A rank's entry about its file: name, sha256 and bytes, or a problem and its errno.
Entry = dict[str, Any]


@dataclass(frozen=True)
class CheckpointPlace:
    """Where a checkpoint is written, and its folder's final name once it is complete."""

    step: int
    temporary: Path
    final: Path


def entry_name(rank: int) -> str:
    """Return the name of the file with the entry of a rank other than 0."""
    return f"rank-{rank:04d}.json"


def read_entries(folder: Path, ranks: list[int]) -> dict[int, Entry]:
    """Return the entries of `ranks` that have arrived and whose file is visible in full.  Raises OSError."""
    found: dict[int, Entry] = {}
    names = {path.name for path in folder.iterdir()}
    for rank in ranks:
        # A network disk may list a file before its content is visible; an entry that cannot be parsed is
        # read again later.
        with contextlib.suppress(FileNotFoundError, ValueError):
            if entry_name(rank) in names:
                entry = json.loads((folder / entry_name(rank)).read_text(encoding="utf-8"))
                if "problem" in entry or (folder / entry["file"]).stat().st_size == entry["bytes"]:
                    found[rank] = entry
    return found


def bytes_written(folder: Path) -> int:
    """Return the visible size of the ranks' files so far, bytes."""
    with contextlib.suppress(OSError):
        return sum(path.stat().st_size for path in folder.iterdir())
    return 0


def commit(place: CheckpointPlace, entries: dict[int, Entry], size: int) -> None:
    """Complete a checkpoint from the ranks' files; of the `size` ranks, those without an entry are lost.

    Raises:
        OSError: the checkpoint cannot be written.
    """
    lost = [rank for rank in range(size) if rank not in entries]
    head = {
        "format": CHECKPOINT_FORMAT,
        "version": CHECKPOINT_VERSION,
        "step": place.step,
        "ranks": [entries[rank] for rank in sorted(entries)],
        **({"lost": lost} if lost else {}),
    }
    write_synced(place.temporary / "checkpoint.json", json.dumps(head, indent=2) + "\n")
    for rank in range(size):
        with contextlib.suppress(OSError):  # a leftover entry does no harm
            (place.temporary / entry_name(rank)).unlink(missing_ok=True)
    sync(place.temporary)  # the names in the folder, including other ranks' files
    aside = place.temporary.with_suffix(ASIDE)
    if place.final.exists():  # an unreadable checkpoint of a step that was trained again
        place.final.rename(aside)
    try:
        hand_over(place.temporary, place.final)
    except OSError:
        with contextlib.suppress(OSError):
            aside.rename(place.final)
        raise
    sync_name(place.final)
    shutil.rmtree(aside, ignore_errors=True)


def hand_over_entry(place: CheckpointPlace, rank: int, entry: Entry) -> None:
    """Hand over a rank's part to rank 0, which may then delete it together with the folder.

    Raises:
        OSError: the entry cannot be written.
    """
    path = place.temporary / entry_name(rank)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(entry), encoding="utf-8")
    hand_over(temporary, path)


def prune(run_dir: Path, written: list[int], resumed_from: int | None) -> None:
    """Delete all but the last two complete checkpoints; what cannot be deleted now is deleted next time.

    Args:
        written: steps of this start's checkpoints, in order, the newest last.
        resumed_from: step of the checkpoint that was loaded; later ones of earlier starts were unreadable.
    """
    try:
        steps = list(checkpoint_steps(run_dir))
    except OSError:
        return
    latest_read = written[-1] if resumed_from is None else resumed_from
    whole = [step for step in steps if step <= latest_read or step in written]
    kept = [step for step in whole if step <= written[-1]][:_KEPT]
    for step in set(steps) - set(kept):
        shutil.rmtree(run_dir / "checkpoints" / f"step-{step:08d}", ignore_errors=True)


def not_saved(run_dir: Path, error: OSError) -> str:
    """Return the message for a checkpoint that cannot be written, e.g. on a full disk."""
    problem = cannot_be_written(run_dir / "checkpoints", error, remedies.resuming())
    return f"{problem}; {last_checkpoint_note(run_dir)}"
