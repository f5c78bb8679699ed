"""Records of the ranks of a profile's job: the time of every function in every step, and memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from speechdp.counting import counted
from speechdp.errors import RunError
from speechdp.experiments.checked import checked_fields
from speechdp.files import record_cannot_be_read
from speechdp.json_input import parse_json
from speechdp.jsonl import read_lines

Read = TypeVar("Read")

MEMORY_NAME = "memory.json"
FACTS_NAME = "job.json"

#: Functions of a step, in order of time; an acoustic model has only encoder and output as modules.
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
#: What the peaks in memory.json are of: the process, or the GPU.
UNITS = ("rss", "gpu")


@dataclass(frozen=True)
class FunctionTime:
    """One function of one step on one rank.

    Attributes:
        name: one of FUNCTIONS.
        phase: "forward", "backward", or "" for a function without phases.
        start_s: start, s since the job's common start.
        duration_s: duration, s.
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
        start_s: start, s since the job's common start.
        wall_s: time from the step's start to its end, s.
        frames: frames of this rank's batch, without padding.
        functions: functions in order of time; their sum is wall_s except for gaps between them.
    """

    step: int
    start_s: float
    wall_s: float
    frames: int
    functions: tuple[FunctionTime, ...]

    def seconds(self, name: str, phase: str | None = None) -> float:
        """Return the time of a function in this step, s; of both phases if none is given."""
        return sum(f.duration_s for f in self.functions if f.name == name and phase in (None, f.phase))


@dataclass(frozen=True)
class RankRecord:
    """A rank and its steps.

    Attributes:
        clock_offset_s: correction of its clock, s; 0 on rank 0's host.
    """

    rank: int
    host: str
    pid: int
    clock_offset_s: float
    steps: tuple[StepRecord, ...]


@dataclass(frozen=True)
class MeasuredMemory:
    """Memory of one rank in bytes.

    Attributes:
        peak_bytes: peak in the profile's unit: of the process (RSS), or of the GPU (allocated by torch).
        rss_bytes: peak RSS of the process.
        parameters_bytes: parameters and gradients.
        optimizer_bytes: state of the optimizer.
        gpu_peak_bytes: peak on the GPU; None on a CPU.
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
    ranks: tuple[MeasuredMemory, ...]

    @property
    def balance(self) -> float:
        """The largest peak divided by the smallest; 1: the same on all ranks."""
        peaks = [rank.peak_bytes for rank in self.ranks]
        return max(peaks) / max(1, min(peaks))


def rank_path(folder: Path, rank: int) -> Path:
    """Return the file in which a rank of a job records its steps."""
    return folder / f"rank-{rank:04d}.jsonl"


def read_rank(path: Path) -> RankRecord:
    """Read one rank's steps.  Raises RunError: the file is missing or damaged."""
    try:
        lines = read_lines(path)
        if lines.num_damaged:
            raise ValueError(f"{counted(lines.num_damaged, 'line')} damaged")
        if not lines.records:
            raise ValueError("it is empty")
        head, *rest = lines.records
        steps = tuple(_in_line(number, _step_of, line) for number, line in enumerate(rest, start=2))
        return RankRecord(**_in_line(1, _head_of, {**head, "steps": steps}))
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error


def _in_line(number: int, read: Callable[[dict[str, Any]], Read], line: dict[str, Any]) -> Read:
    try:
        return read(line)
    except ValueError as error:
        raise ValueError(f"line {number}: {error}") from error


def _head_of(line: dict[str, Any]) -> dict[str, Any]:
    return checked_fields(RankRecord, line)


def _step_of(line: dict[str, Any]) -> StepRecord:
    """Return the step of a line.  Raises ValueError."""
    values = checked_fields(StepRecord, line)
    if not isinstance(values["functions"], list):
        raise ValueError("functions is not a list")
    functions = tuple(map(_function_of, values["functions"]))
    step = StepRecord(**{**values, "functions": functions})
    if step.step < 1 or step.wall_s <= 0 or step.frames < 0:
        raise ValueError(f"step {step.step} of {step.frames} frames in {step.wall_s:g} s cannot be")
    return step


def _function_of(values: Any) -> FunctionTime:
    names = [field.name for field in fields(FunctionTime)]
    if not isinstance(values, list) or len(values) != len(names):
        raise ValueError(f"a function of a step is not [{', '.join(names)}]")
    function = FunctionTime(**checked_fields(FunctionTime, dict(zip(names, values, strict=True))))
    if function.phase not in PHASES or function.duration_s < 0:
        raise ValueError(f"{function.name} {function.phase!r} of {function.duration_s:g} s cannot be")
    return function


def _unreadable(path: Path, error: Exception) -> RunError:
    return RunError(record_cannot_be_read(path, error, "run the profile again"))


def read_memory(path: Path) -> Memory:
    """Read a job's memory.json.  Raises RunError: it is damaged."""
    content = read_json(path)
    try:
        memory = Memory(**checked_fields(Memory, content))
        if memory.unit not in UNITS or not isinstance(memory.ranks, list) or not memory.ranks:
            raise ValueError(f"unit {memory.unit!r} and ranks: no memory of ranks")
        return Memory(
            memory.unit, tuple(MeasuredMemory(**checked_fields(MeasuredMemory, r)) for r in memory.ranks)
        )
    except ValueError as error:
        raise _unreadable(path, error) from error


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.  Raises RunError: it is damaged or missing."""
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("it holds no object")
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    return content
