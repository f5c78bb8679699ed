"""Checkpoints: everything a run needs to go on, on every rank, written atomically; and the final model.

RUN/checkpoints/step-00000120/ holds one safetensors file a rank and checkpoint.json, which names them with
their sha256.  The folder gets its name by a rename after all of it is on disk, so a folder with that
name is whole.  Nothing here is pickled: loading a checkpoint never runs code.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from speechdp.atomic_file import write_text_atomically
from speechdp.comm.base import Communicator
from speechdp.errors import RunError

CHECKPOINT_FORMAT = "speechdp-checkpoint"
CHECKPOINT_VERSION = 1
_KEPT = 2
_NOT_SHARED = "the run folder must be on a disk all hosts share"


@dataclass(frozen=True)
class RankState:
    """What one rank saves.

    Attributes:
        values: JSON-like.
        tensors: by name; on any device.
    """

    values: dict[str, Any]
    tensors: dict[str, Tensor]


def split_state(prefix: str, state: dict[str, Any]) -> RankState:
    """Part a state dict into JSON-like values and tensors, names prefixed."""
    tensors = {f"{prefix}.{k}": v for k, v in state.items() if isinstance(v, Tensor)}
    return RankState({k: v for k, v in state.items() if not isinstance(v, Tensor)}, tensors)


def join_state(prefix: str, values: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Undo `split_state`."""
    own = {k.removeprefix(f"{prefix}."): v for k, v in tensors.items() if k.startswith(f"{prefix}.")}
    return {**values, **own}


def save_checkpoint(run_dir: Path, step: int, state: RankState, comm: Communicator) -> Path:
    """Write a checkpoint of all ranks and keep the last two.  Collective.

    Raises:
        RunError: it cannot be written (disk full); earlier checkpoints are untouched.
    """
    folder = run_dir / "checkpoints"
    final, temporary = folder / f"step-{step:08d}", folder / f".step-{step:08d}.tmp"
    if comm.rank == 0:
        with _disk_errors(temporary, run_dir):
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
    comm.barrier()
    path = temporary / f"rank-{comm.rank:04d}.safetensors"
    sha256, problem = "", None
    try:
        sha256 = _write_rank(path, state)
    except OSError as error:
        problem = f"{error.strerror or error} on rank {comm.rank}" if temporary.is_dir() else _NOT_SHARED
    # Ranks fail together: one that cleared the folder by itself would take it away from those still writing.
    entries = comm.allgather_object({"file": path.name, "sha256": sha256, "problem": problem})
    problems = [entry.pop("problem") for entry in entries]
    if comm.rank == 0:
        with _disk_errors(temporary, run_dir):
            _raise_first(problems)
            _commit(temporary, final, step, entries)
        _prune(folder)
    elif any(problems):
        raise RunError(_cannot_be_written(run_dir, next(filter(None, problems))))
    comm.barrier()
    return final


def _raise_first(problems: list[str | None]) -> None:
    for problem in filter(None, problems):
        raise OSError(problem)


def _write_rank(path: Path, state: RankState) -> str:
    """Write a rank's file; return its sha256."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.tensors.items()}
    content = safetensors.torch.save(tensors, {"state": json.dumps(state.values)})
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return hashlib.sha256(content).hexdigest()


def _commit(temporary: Path, final: Path, step: int, entries: list[dict[str, str]]) -> None:
    for entry in entries:
        if not (temporary / entry["file"]).is_file():
            raise RunError(f"{temporary / entry['file']}: not visible on rank 0; {_NOT_SHARED}")
    head = {"format": CHECKPOINT_FORMAT, "version": CHECKPOINT_VERSION, "step": step, "ranks": entries}
    write_text_atomically(temporary / "checkpoint.json", json.dumps(head, indent=2) + "\n")
    if final.exists():  # saved twice at one step, e.g. at an epoch's end and by request
        shutil.rmtree(final)
    temporary.rename(final)
    directory = os.open(final.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _prune(folder: Path) -> None:
    # What a killed run left half-written goes too; nobody writes now.
    for old in [*_newest_first(folder)[_KEPT:], *folder.glob(".step-*.tmp")]:
        shutil.rmtree(old, ignore_errors=True)


def _newest_first(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-????????"), reverse=True)


class _disk_errors:  # noqa: N801 (reads as a function)
    """Turn an OSError into a RunError that names the last checkpoint, and clear half-written files."""

    def __init__(self, temporary: Path, run_dir: Path) -> None:
        self._temporary, self._run_dir = temporary, run_dir

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, OSError):
            return
        shutil.rmtree(self._temporary, ignore_errors=True)
        raise RunError(_cannot_be_written(self._run_dir, str(error.strerror or error))) from error


def _cannot_be_written(run_dir: Path, reason: str) -> str:
    remedy = (
        "put RUN on such a disk" if reason == _NOT_SHARED else "free some space, then go on with --resume"
    )
    folder = run_dir / "checkpoints"
    return f"{folder}: checkpoint cannot be written ({reason}); {remedy}; {last_checkpoint_note(run_dir)}"


def last_checkpoint_note(run_dir: Path) -> str:
    """Return `last checkpoint: PATH`, or that there is none."""
    found = _newest_first(run_dir / "checkpoints")
    return f"last checkpoint: {found[0]}" if found else "there is no earlier checkpoint"


def load_checkpoint(run_dir: Path, comm: Communicator, notices: list[str]) -> RankState | None:
    """Return this rank's state of the newest checkpoint that is whole on all ranks.  Collective.

    Args:
        notices: gets a line for every broken checkpoint that is passed over.

    Returns:
        The state, or None where there is no checkpoint at all.

    Raises:
        RunError: checkpoints exist, but none is whole, or they are of another number of ranks.
    """
    folders = comm.broadcast_object([str(f) for f in _newest_first(run_dir / "checkpoints")])
    for folder in map(Path, folders):
        state, problem = _try_load(folder, comm)
        problems = [p for p in comm.allgather_object(problem) if p]
        if not problems:
            assert state is not None
            return state
        notices.append(f"passing over a broken checkpoint: {problems[0]}")
    if folders:
        raise RunError(f"{run_dir / 'checkpoints'}: no checkpoint is whole; {'; '.join(notices)}")
    return None


def _try_load(folder: Path, comm: Communicator) -> tuple[RankState | None, str | None]:
    try:
        head = json.loads((folder / "checkpoint.json").read_text())
        if head.get("format") != CHECKPOINT_FORMAT or head.get("version") != CHECKPOINT_VERSION:
            return None, f"{folder}: not a checkpoint of this version of speechdp"
        entries = head["ranks"]
        if len(entries) != comm.size:
            raise RunError(
                f"{folder}: written by {len(entries)} ranks, cannot be resumed by {comm.size}; "
                f"start with -np {len(entries)}"
            )
        path = folder / f"rank-{comm.rank:04d}.safetensors"
        content = path.read_bytes()
        if hashlib.sha256(content).hexdigest() != entries[comm.rank]["sha256"]:
            return None, f"{path}: damaged (checksum)"
        tensors = safetensors.torch.load(content)
        with safetensors.safe_open(str(path), framework="pt") as file:
            values = json.loads(file.metadata()["state"])
    except (
        OSError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        safetensors.SafetensorError,
    ) as error:
        # What a damaged JSON file gives: another type than expected, or none at all.
        return None, f"{folder}: cannot be read ({' '.join(str(error).split())})"
    return RankState(values, tensors), None


def checkpoint_steps(run_dir: Path) -> Iterator[int]:
    """Yield the steps of the checkpoints there are, newest first."""
    for folder in _newest_first(run_dir / "checkpoints"):
        yield int(folder.name.removeprefix("step-"))
