"""What the ranks of a profile's job record: the time of every function of every step, and memory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from speechdp.atomic_file import write_text_atomically
from speechdp.errors import RunError
from speechdp.timing.jsonl import read_lines

MEMORY_NAME = "memory.json"
FACTS_NAME = "job.json"

#: What a step consists of, in the order of time; encoder and output are all that an acoustic model has.
FUNCTIONS = (
    "trainloader",
    "h2d",
    "encoder",
    "decoder",
    "postproc",
    "output",
    "loss",
    "exchange",
    "update",
)
FORWARD, BACKWARD, WHOLE = "forward", "backward", ""
PHASES = (FORWARD, BACKWARD, WHOLE)


@dataclass(frozen=True)
class FunctionTime:
    """One function of one step on one rank.

    Attributes:
        name: one of FUNCTIONS.
        phase: "forward", "backward", or "" where there is one of it.
        start_s: since the job's common start, s.
        duration_s: how long it took, s.
    """

    name: str
    phase: str
    start_s: float
    duration_s: float


@dataclass(frozen=True)
class StepRecord:
    """One step of one rank.

    Attributes:
        step: number of the step, from 1.
        start_s: since the job's common start, s.
        wall_s: from the step's start to its end, s.
        frames: frames of this rank's batch, padding left out.
        functions: in the order of time; their sum is wall_s but for what lies between them.
    """

    step: int
    start_s: float
    wall_s: float
    frames: int
    functions: tuple[FunctionTime, ...]

    def seconds(self, name: str, phase: str | None = None) -> float:
        """Return the time of a function in this step, s; of both phases where none is given."""
        return sum(f.duration_s for f in self.functions if f.name == name and phase in (None, f.phase))


@dataclass(frozen=True)
class RankRecord:
    """A rank and its steps.

    Attributes:
        clock_offset_s: by how much its clock was set right, s; 0 on rank 0's host.
    """

    rank: int
    host: str
    pid: int
    clock_offset_s: float
    steps: tuple[StepRecord, ...]


@dataclass(frozen=True)
class RankMemory:
    """Memory of one rank in bytes.

    Attributes:
        peak_bytes: in the profile's unit: of the process (RSS), or of the GPU (allocated by torch).
        rss_bytes: of the process at its peak.
        parameters_bytes: parameters and gradients.
        optimizer_bytes: state of the optimizer.
        gpu_peak_bytes: None on a CPU.
    """

    rank: int
    peak_bytes: int
    rss_bytes: int
    parameters_bytes: int
    optimizer_bytes: int
    gpu_peak_bytes: int | None = None


@dataclass(frozen=True)
class Memory:
    """Memory of all ranks of a job; `unit` is "rss" or "gpu"."""

    unit: str
    ranks: tuple[RankMemory, ...]

    @property
    def balance(self) -> float:
        """The largest peak over the smallest; 1: all ranks the same."""
        peaks = [rank.peak_bytes for rank in self.ranks]
        return max(peaks) / max(1, min(peaks))


def rank_path(folder: Path, rank: int) -> Path:
    """Return where a rank of a job records its steps."""
    return folder / f"rank-{rank:04d}.jsonl"


def read_rank(path: Path) -> RankRecord:
    """Read one rank's steps.  Raises RunError: the file is missing or damaged."""
    try:
        head, *lines = read_lines(path).records
        steps = tuple(
            StepRecord(
                step=line["step"],
                start_s=line["start_s"],
                wall_s=line["wall_s"],
                frames=line["frames"],
                functions=tuple(FunctionTime(*function) for function in line["functions"]),
            )
            for line in lines
        )
        return RankRecord(head["rank"], head["host"], head["pid"], head["clock_offset_s"], steps)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{path}: cannot be read ({error}); run the profile again") from error


def read_memory(path: Path) -> Memory:
    """Read a job's memory.json.  Raises RunError: it is damaged."""
    content = read_json(path)
    try:
        ranks = tuple(RankMemory(**known_fields(RankMemory, rank)) for rank in content["ranks"])
        return Memory(content["unit"], ranks)
    except (KeyError, TypeError) as error:
        raise RunError(f"{path}: cannot be read ({error}); run the profile again") from error


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file at once, with its folder.  Raises RunError (disk)."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomically(path, json.dumps(content, indent=1) + "\n")
    except OSError as error:
        raise RunError(f"{path}: cannot be written ({error.strerror}); free some space") from error


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.  Raises RunError: it is damaged or missing."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise RunError(f"{path}: cannot be read ({error}); run the profile again") from error


def known_fields(kind: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that are fields of `kind`: a later version may write more."""
    names = {field.name for field in fields(kind)}
    return {key: value for key, value in values.items() if key in names}
