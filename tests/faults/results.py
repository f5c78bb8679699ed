"""What a command has left, as far as it is the same each time."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.helpers.finished_run import evaluations

Result = Mapping[str, Any]

logging.getLogger("tensorboard").setLevel(logging.ERROR)  # that steps are taken again is what is wanted

#: As a page says it.
_WRITTEN = re.compile(rb"written \d{4}-\d\d-\d\d \d\d:\d\d \S+")


def differences(result: Result, expected: Result, told: str) -> list[str]:
    """Return what differs from the result of a command in which nothing failed.

    Args:
        told: what was printed: curves may lack what a notice says could not be written.
    """
    return [
        f"{name}: {result.get(name)!r:.300} instead of {expected.get(name)!r:.300}"
        for name in sorted({*result, *expected})
        if result.get(name) != expected.get(name)
        and not (
            "tensorboard: cannot be written" in told
            and lacks_only_curves(name, result.get(name), expected.get(name))
        )
    ]


def lacks_only_curves(name: str, value: Any, expected: Any) -> bool:
    """Return whether this is what TensorBoard shows, and some steps are not there, but none twice."""
    return (
        name.endswith("tensorboard")
        and set(value or {}) <= set(expected)
        and all(
            set(steps) <= set(expected[tag]) and len(set(steps)) == len(steps) for tag, steps in value.items()
        )
    )


def run_result(run: Path) -> Result:
    """Return what a run has come to, to the bit.

    Raises:
        OSError, ValueError, LookupError: a file of it is missing or damaged.
    """
    timing = run / "timing.json"
    if timing.exists():  # a run resumed at its very end has none
        json.loads(timing.read_text())
    starts = [json.loads(line) for line in (run / "starts.jsonl").read_text().splitlines()]
    completed = json.loads((run / "completed.json").read_text())
    return {
        "model": model_digest(run / "model.safetensors"),
        "evaluations": evaluations(run) if (run / "metrics.jsonl").exists() else None,
        "completed": {name: completed[name] for name in ("step", "epochs")},
        "tensorboard": tensorboard_steps(run / "tensorboard"),
        "run.json": sorted(json.loads((run / "run.json").read_text())),
        "ranks at the starts": sorted({start["size"] for start in starts}),
    }


def sweep_result(out: Path, record: str) -> Result:
    """Return what the runs of a sweep or comparison have come to.  Raises as `run_result` does."""
    content = json.loads((out / record).read_text())
    runs = {
        f"{path.parent.name}/{name}": value
        for path in sorted(out.glob("*/completed.json"))
        for name, value in run_result(path.parent).items()
    }
    pages = sorted(str(path.relative_to(out)) for path in out.glob("*/*.html"))
    return {"completed": content["completed"], "pages": pages, **runs}


def tune_result(out: Path) -> Result:
    """Return what a search has come to, whose speeds decide for how long and what it trains."""
    content = json.loads((out / "tune.json").read_text())
    pages = sorted(str(path.relative_to(out)) for path in out.glob("tune/*"))
    return {"completed": content["completed"], "has chosen": content["chosen"] != "", "pages": pages}


def model_digest(path: Path) -> str:
    """Return a checksum of a model's tensors."""
    checksum = hashlib.sha256()
    for name, tensor in sorted(safetensors.torch.load_file(path).items()):
        checksum.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        checksum.update(tensor.numpy().tobytes())
    return checksum.hexdigest()


def tensorboard_steps(folder: Path) -> dict[str, list[int]]:
    """Return the steps of every curve as TensorBoard shows them; none where nothing was evaluated."""
    if not folder.is_dir():
        return {}
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [event.step for event in events.Scalars(tag)] for tag in sorted(events.Tags()["scalars"])}


def files(folder: Path) -> Result:
    """Return a checksum of every file of a folder, hidden ones apart; of pages without their time."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(_WRITTEN.sub(b"", path.read_bytes())).hexdigest()
        for path in sorted(folder.rglob("[!.]*"))
        if path.is_file()
    }
