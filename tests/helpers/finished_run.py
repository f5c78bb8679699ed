"""Read what a run wrote to its folder, and compare two runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor


def model_tensors(run: Path) -> dict[str, Tensor]:
    """Return the tensors of model.safetensors."""
    tensors: dict[str, Tensor] = safetensors.torch.load_file(run / "model.safetensors")
    return tensors


def evaluations(run: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl without the times, which no two runs share."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        del line["time_s"]
    return lines


def assert_equal_runs(one: Path, other: Path) -> None:
    """Compare two finished runs bit by bit."""
    assert evaluations(one) == evaluations(other), f"evaluations of {one} and {other} differ"
    mine, theirs = model_tensors(one), model_tensors(other)
    assert mine.keys() == theirs.keys()
    different = [name for name, tensor in mine.items() if not torch.equal(tensor, theirs[name])]
    assert not different, f"{different} of {one} and {other} differ"
    steps = [json.loads((run / "completed.json").read_text())["step"] for run in (one, other)]
    assert steps[0] == steps[1], steps
