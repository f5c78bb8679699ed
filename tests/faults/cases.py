"""The commands whose files are made to fail: what they are given, and what they leave."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.faults.verdict import Result
from tests.helpers.tiny_data import TINY_MODEL

#: Steps of an epoch with two ranks: 24 utterances, 4 a rank.
TRAIN = (*TINY_MODEL, "--batch-size", "4", "--epochs", "2", "--checkpoint-steps", "2", "--backend", "torch")
#: Fields of metrics.jsonl that hold times.
_TIMES = ("time_s",)


@dataclass(frozen=True)
class Case:
    """A command to try.

    Attributes:
        name: what records call it.
        size: ranks.
        arguments: of the command, given the folder it works in, which is what is watched.
        again: arguments when it is repeated, as it advises.
        result: reads what it has left in that folder.
        set_up: fills the folder, given one in which the data is.
    """

    name: str
    size: int
    arguments: Callable[[Path], Sequence[str]]
    again: Callable[[Path], Sequence[str]]
    result: Callable[[Path], Result]
    set_up: Callable[[Path], None] = lambda folder: None


def training(data: Path, size: int = 2, options: Sequence[str] = TRAIN) -> Case:
    """Return the training of a tiny model."""

    def arguments(folder: Path) -> list[str]:
        return ["train", str(data), str(folder / "RUN"), *options]

    return Case(
        f"train-{size}",
        size,
        arguments,
        lambda folder: [*arguments(folder), "--resume"],
        lambda folder: run_result(folder / "RUN"),
    )


def run_result(run: Path) -> Result:
    """Return what a run has come to: the same each time, to the bit."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        for name in _TIMES:
            del line[name]
    json.loads((run / "timing.json").read_text()) if (run / "timing.json").is_file() else None
    completed = json.loads((run / "completed.json").read_text())
    return {
        "model": model_digest(run / "model.safetensors"),
        "metrics": lines,
        "completed": {name: completed[name] for name in ("step", "epochs")},
        "tensorboard": tensorboard_steps(run / "tensorboard"),
        "run.json": sorted(json.loads((run / "run.json").read_text())),
        "broken starts": [line for line in (run / "starts.jsonl").read_text().splitlines() if not _is_json(line)],
    }


def model_digest(path: Path) -> str:
    """Return a checksum of a model's tensors."""
    checksum = hashlib.sha256()
    for name, tensor in sorted(safetensors.torch.load_file(path).items()):
        checksum.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        checksum.update(tensor.numpy().tobytes())
    return checksum.hexdigest()


def tensorboard_steps(folder: Path) -> dict[str, list[int]]:
    """Return the steps of every curve as TensorBoard shows them."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [event.step for event in events.Scalars(tag)] for tag in sorted(events.Tags()["scalars"])}


def _is_json(line: str) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def files(folder: Path) -> Result:
    """Return a checksum of every file of a folder."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
