"""Checkpoints: everything every rank of a run needs to resume; their contents, and how they are read back.

RUN/checkpoints/step-00000120/ holds one safetensors file per rank and checkpoint.json, which names them with
their sha256.  The folder is renamed to this name after all its contents are on disk (checkpoint/writer.py),
so a folder with such a name is complete.  Nothing is pickled: loading a checkpoint never runs code.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import safetensors
from torch import Tensor

from speechdp import remedies
from speechdp.comm.base import Communicator
from speechdp.errors import RunError, one_line
from speechdp.files import (
    cannot_be_read,
    cannot_be_written,
    disk_reason,
    hand_over,
    no_memory_to_read,
    remedy_of,
    sha256_of,
)
from speechdp.json_input import parse_json
from speechdp.parallel.strategy import part_of

CHECKPOINT_FORMAT = "speechdp-checkpoint"
CHECKPOINT_VERSION = 1
_NAME = re.compile(r"step-[0-9]{8,}")
#: Suffix of a checkpoint's name while another checkpoint of the same step replaces it.
ASIDE = ".old"


@dataclass(frozen=True)
class RankState:
    """What one rank saves.

    Attributes:
        values: JSON-like values.
        tensors: tensors on any device, by name.
        size: number of ranks that wrote the checkpoint this was read from; 0: not read from one.
        is_copy: whether another rank saved this, because this rank did not exist then or was lost.
    """

    values: dict[str, Any]
    tensors: dict[str, Tensor]
    size: int = 0
    is_copy: bool = False


def split_state(prefix: str, state: dict[str, Any]) -> RankState:
    """Split a state dict into JSON-like values and tensors, whose names get `prefix`."""
    tensors = {f"{prefix}.{k}": v for k, v in state.items() if isinstance(v, Tensor)}
    return RankState({k: v for k, v in state.items() if not isinstance(v, Tensor)}, tensors)


def join_state(prefix: str, values: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Undo `split_state`."""
    return {**values, **part_of(f"{prefix}.", tensors)}


#: Errors that another try would not mend: a missing file, or data lost by a disk here or on a file server.
#: Any other error may be temporary.  None: safetensors' own errors.
_LOST = (None, errno.ENOENT, errno.EIO, errno.ESTALE)


def _newest_first(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder, which may not exist.  Raises OSError: it cannot be listed."""
    found = (path for path in _paths_in(folder) if _NAME.fullmatch(path.name))
    return sorted(found, key=_step_of, reverse=True)


def _paths_in(folder: Path) -> list[Path]:
    """Return the contents of a folder, which may not exist.  Raises OSError: it cannot be listed."""
    # Not by glob, which treats an unreadable folder as empty.
    try:
        return list(folder.iterdir())
    except FileNotFoundError:
        return list(folder.iterdir()) if folder.is_dir() else []  # it may have been made meanwhile


def _step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def last_checkpoint_note(run_dir: Path) -> str:
    """Return `last checkpoint: PATH`, or that there is none."""
    try:
        found = _newest_first(run_dir / "checkpoints")
    except OSError as error:
        return f"cannot tell whether there is an earlier checkpoint ({disk_reason(error)})"
    return f"last checkpoint: {found[0]}" if found else "there is no earlier checkpoint"


def load_checkpoint(
    run_dir: Path, comm: Communicator, notices: list[str], *, any_size: bool = False, num_feeders: int = 0
) -> RankState | None:
    """Return this rank's state from the newest checkpoint that is complete on all ranks.  Collective.

    Args:
        notices: gets a line for every broken checkpoint that is skipped.
        any_size: whether to accept a checkpoint of a different number R of ranks; rank r then gets the state
            of rank r modulo R.
        num_feeders: ranks of the job besides those of `comm`, for the message on how to start.

    Returns:
        The state, or None if there is no checkpoint at all.

    Raises:
        RunError: checkpoints exist but none is complete, or they are of another number of ranks and
            `any_size` is False, or their folder cannot be read.
    """
    folders = comm.broadcast_object([str(f) for f in _listed(run_dir)] if comm.rank == 0 else None)
    problems: list[_Problem] = []
    for folder in map(Path, folders):
        state, problem = _try_load(folder, comm, None if any_size else num_feeders)
        found = [p for p in comm.allgather_object(problem and asdict(problem)) if p]
        if not found:
            assert state is not None
            return state
        problems.append(_Problem(**found[0]))
        notices.append(f"skipping checkpoint {problems[-1].text}")
    if problems:
        # A disk that does not answer may answer later: a run need not be given up for that.
        anew = remedies.starting_over(run_dir)
        remedy = next((f"{p.remedy}, or {anew}" for p in problems if p.remedy), anew)
        problems_text = "; ".join(problem.text for problem in problems)
        raise RunError(f"{run_dir / 'checkpoints'}: no checkpoint can be used: {problems_text}; {remedy}")
    return None


@dataclass(frozen=True)
class _Problem:
    """Why a checkpoint cannot be used, and the remedy if the disk may be at fault."""

    text: str
    remedy: str = ""


def _listed(run_dir: Path) -> list[Path]:
    try:
        _name_again(run_dir / "checkpoints")
        return _newest_first(run_dir / "checkpoints")
    except OSError as error:
        raise RunError(cannot_be_read(run_dir / "checkpoints", error, remedies.resuming())) from error


def _name_again(folder: Path) -> None:
    """Finish renaming a checkpoint if a kill came after the old one was put aside and before the new rename.

    Raises:
        OSError: the folder cannot be read.
        RunError: the rename fails.
    """
    for aside in _paths_in(folder):
        final = folder / aside.name[1:].partition(".")[0]
        if aside.suffix == ASIDE and _NAME.fullmatch(final.name) and not final.exists():
            new = aside.with_suffix(".tmp")  # complete: nothing is put aside before the last file is written
            try:
                hand_over(new if new.is_dir() else aside, final)
            except OSError as error:
                raise RunError(cannot_be_written(final, error, remedies.resuming())) from error


def _try_load(
    folder: Path, comm: Communicator, num_feeders: int | None
) -> tuple[RankState | None, _Problem | None]:
    """Load this rank's state from a checkpoint of as many ranks; `num_feeders` None: of any number."""
    try:
        head = parse_json((folder / "checkpoint.json").read_text(encoding="utf-8"))
        if other := _of_another_format(folder, head):
            return None, other
        entries, lost = head["ranks"], head.get("lost", [])
        size = len(entries) + len(lost)
        if size != comm.size and num_feeders is not None:
            feeders = f", of which {num_feeders} feed" if num_feeders else ""
            raise RunError(
                f"{folder}: written by {size} ranks, cannot be resumed by {comm.size}; "
                f"start with -np {size + num_feeders}{feeders}"
            )
        # Ranks lost before the checkpoint was written start as copies of rank 0, which cannot be lost.
        rank = 0 if comm.rank % size in lost else comm.rank % size
        path = folder / f"rank-{rank:04d}.safetensors"
        entry = _entry_of(path.name, entries)
        # The size first: a file that has been inflated by a fault may take hours to read.
        num_bytes = path.stat().st_size
        if num_bytes != entry["bytes"]:
            return None, _Problem(f"{path}: damaged ({num_bytes} bytes, {entry['bytes']} were written)")
        if sha256_of(path) != entry["sha256"]:
            return None, _Problem(f"{path}: damaged (checksum)")
        with safetensors.safe_open(str(path), framework="pt") as file:
            values = parse_json(file.metadata()["state"])
            # Copies: safetensors returns views of the mapped file, which is deleted once newer checkpoints
            # exist.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except OSError as error:
        _refuse_short_of_memory(folder, error)
        if error.errno not in _LOST:
            raise RunError(cannot_be_read(folder, error, remedies.resuming())) from error
        remedy = f"{remedy_of(error, reading=True)}, then {remedies.resuming()}"
        return None, _Problem(f"{folder}: cannot be read ({disk_reason(error)})", remedy)
    except (
        ValueError,
        MemoryError,
        RuntimeError,  # torch's, if memory is short
        ArithmeticError,  # no ranks at all
        LookupError,
        TypeError,
        AttributeError,
        safetensors.SafetensorError,
    ) as error:
        _refuse_short_of_memory(folder, error)
        # A damaged JSON file gives values of unexpected types, or none at all.
        return None, _Problem(f"{folder}: cannot be read ({one_line(error)})")
    return RankState(values, tensors, size, is_copy=rank != comm.rank), None


def _of_another_format(folder: Path, head: dict[str, Any]) -> _Problem | None:
    """Return why this version cannot read a checkpoint, though it may be complete; None if it can."""
    if head.get("format") != CHECKPOINT_FORMAT:
        return _Problem(f"{folder}: not a checkpoint of speechdp")
    if (version := head.get("version")) == CHECKPOINT_VERSION:
        return None
    what = f"is of version {version!r}, and this speechdp reads version {CHECKPOINT_VERSION}"
    return _Problem(f"{folder}: {what}", "continue with the speechdp that wrote it")


def _refuse_short_of_memory(folder: Path, error: Exception) -> None:
    """Raise RunError if a checkpoint may be complete and could be read with more memory.

    If it were skipped, it would be lost: training would resume from an older one, or have to start over.
    """
    line = no_memory_to_read(folder, error, remedies.resuming())
    if line is not None:
        raise RunError(line) from error


def _entry_of(file: str, entries: list[dict[str, Any]]) -> dict[str, Any]:
    return next((entry for entry in entries if entry["file"] == file), {})


def checkpoint_steps(run_dir: Path) -> Iterator[int]:
    """Yield the steps of the existing checkpoints, newest first."""
    for folder in _newest_first(run_dir / "checkpoints"):
        yield _step_of(folder)
