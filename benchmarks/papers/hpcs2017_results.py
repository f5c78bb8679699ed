"""What the runs of benchmarks/papers/hpcs2017.py took and learnt: read, compared, shown as tables."""

from __future__ import annotations

import csv
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from speechdp.cli.support.console import make_console
from speechdp.jsonl import read_lines
from speechdp.report.runs.folders import read_run

#: Start of Kaldi's programs in an iteration, s: C++, no interpreter and no torch to import.
CPP_START_S = 0.3
#: Parts of the total time, in the order of an iteration, and what they are called.
PARTS = {
    "start": "process start",
    "read_model": "reading the model",
    "load": "loading",
    "preprocess": "preprocessing",
    "compute": "computing",
    "write": "writing",
    "average": "averaging",
    "wait": "waiting for the slowest",
    "other": "other",
}
WAYS = {"kaldi": "Kaldi's way", "ours": "ours"}


@dataclass(frozen=True)
class Result:
    """One training.

    Attributes:
        way: "kaldi" or "ours".
        frames: an iteration, all jobs together, as asked for.
        iterations: averages made.
        total_s: from the start to the end of its processes, evaluations taken out.
        seconds: by PARTS, which add up to it; of what jobs do at the same time, the mean over jobs.
        curve: frames of all jobs, time in s, held-out log-probability in nats a frame, one after another.
        wer: word error rate on the test part, 0 to 1.
    """

    way: str
    frames: int
    iterations: int
    total_s: float
    seconds: dict[str, float]
    curve: list[tuple[int, float, float]]
    wer: float | None = None

    @property
    def log_prob(self) -> float:
        """Held-out log-probability at the end, nats a frame."""
        return self.curve[-1][2]

    def share(self, part: str) -> float:
        """Return a part of the total time."""
        return self.seconds.get(part, 0.0) / self.total_s

    def describe(self) -> str:
        """Return a line."""
        wer = "" if self.wer is None else f", WER {100 * self.wer:.2f} %"
        return (
            f"{count(self.frames):>5} frames an iteration, {WAYS[self.way]:<11} {self.total_s:7.1f} s, "
            f"log-prob {self.log_prob:.4f}{wer}"
        )

    def write(self, path: Path) -> None:
        """Write it as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1))

    @classmethod
    def read(cls, path: Path) -> Result | None:
        """Read what `write` wrote; None if it is not there."""
        if not path.is_file():
            return None
        values: dict[str, Any] = json.loads(path.read_text())
        return cls(**{**values, "curve": [tuple(point) for point in values["curve"]]})


def count(frames: int) -> str:
    """Write a number of frames: 600k, 1.2m."""
    return f"{frames / 1e6:g}m" if frames >= 1_000_000 else f"{frames / 1e3:g}k"


def read_our_run(run_dir: Path, frames: int, iterations: int, total_s: float) -> Result:
    """Divide the time of a run of `speechdp launch` into parts.

    Start is what is neither training nor evaluation nor checkpoints: launcher, imports, MPI, opening the
    data, the final model, the end.  Of a step's communication the shortest of all ranks is averaging, what
    the others have beyond it is waiting.
    """
    timelines = [_timeline(path) for path in sorted((run_dir / "timeline").glob("rank-*.jsonl"))]
    sums = [_span_sums(steps) for steps, _ in timelines]
    mean = {name: statistics.mean(each.get(name, 0.0) for each in sums) for name in (*_COMPUTE, *_OTHER)}
    common = [steps for steps, _ in timelines]
    average_s = sum(min(_spent(steps[number], "comm") for steps in common) for number in common[0])
    eval_s, checkpoint_s = (
        statistics.mean(sum(e["wall"] for e in events if e["event"] == name) for _, events in timelines)
        for name in ("eval", "checkpoint")
    )
    total_s -= eval_s
    compute_s = sum(mean[name] for name in _COMPUTE)
    start_s = total_s - mean["wall"] - checkpoint_s
    seconds = {
        "start": start_s,
        "read_model": 0.0,
        "load": mean["data_wait"],  # preprocessing included
        "preprocess": 0.0,
        "compute": compute_s,
        "write": checkpoint_s,
        "average": average_s,
        "wait": mean["comm"] - average_s,
        "other": mean["wall"] - compute_s - mean["data_wait"] - mean["comm"],
    }
    evaluations = read_run(run_dir).evaluations
    curve = []
    for number, each in enumerate(evaluations, start=1):
        assert each.frames is not None and each.time_s is not None and each.score is not None
        # All of start is put at the beginning, and a checkpoint has been written at each evaluation.
        time_s = start_s + each.time_s + checkpoint_s * number / len(evaluations)
        curve.append((int(each.frames), time_s, each.score))
    return Result("ours", frames, iterations, total_s, seconds, curve)


def _timeline(path: Path) -> tuple[dict[int, dict[str, Any]], list[dict[str, Any]]]:
    """Read a rank's steps by number, and its evaluations and checkpoints."""
    records = read_lines(path).records
    return {r["step"]: r for r in records if "step" in r}, [r for r in records if "event" in r]


_COMPUTE, _OTHER = ("h2d", "forward", "backward", "update"), ("data_wait", "comm", "wall")


def _spent(step: dict[str, Any], name: str) -> float:
    return float(sum(duration for span, _, duration in step["spans"] if span == name))


def _span_sums(steps: dict[int, dict[str, Any]]) -> dict[str, float]:
    sums = {name: sum(_spent(s, name) for s in steps.values()) for name in (*_COMPUTE, "data_wait", "comm")}
    return {**sums, "wall": sum(s["wall"] for s in steps.values())}


@dataclass(frozen=True)
class Saved:
    """Shares of the total time of Kaldi's way that ours saves: 1 - ours / theirs.

    Attributes:
        measured: as both were.
        their_start: with the start of compiled programs in Kaldi's way, ours as it was.
        both_starts: with that in both, once in ours: its start holds opening the data and the end as well.
        loading_hidden: the same, and Kaldi's loading and preprocessing taken out, as if it hid all of it.
    """

    measured: float
    their_start: float
    both_starts: float
    loading_hidden: float


#: What the shares are called, in the last line and in tables.
SAVED = {
    "measured": ("", "saved"),
    "their_start": ("_kaldi_start_0.3s", "Kaldi's start 0.3 s"),
    "both_starts": ("_both_starts_0.3s", "both starts 0.3 s"),
    "loading_hidden": ("_both_starts_0.3s_loading_hidden", "and its loading hidden"),
}


def _saved(kaldi: Result, ours: Result) -> Saved:
    compiled_s = kaldi.total_s - kaldi.seconds["start"] + CPP_START_S * kaldi.iterations
    hidden_s = compiled_s - kaldi.seconds["load"] - kaldi.seconds["preprocess"]
    ours_compiled_s = ours.total_s - ours.seconds["start"] + CPP_START_S
    return Saved(
        measured=1 - ours.total_s / kaldi.total_s,
        their_start=1 - ours.total_s / compiled_s,
        both_starts=1 - ours_compiled_s / compiled_s,
        loading_hidden=1 - ours_compiled_s / hidden_s,
    )


def saved(results: Sequence[Result], frames: int) -> Saved:
    """Return what is saved with so many frames an iteration: medians over rounds."""
    pairs = zip(of(results, "kaldi", frames), of(results, "ours", frames), strict=True)
    rounds = [_saved(*pair) for pair in pairs]
    return Saved(**{name: statistics.median(getattr(each, name) for each in rounds) for name in SAVED})


def saved_shares(results: Sequence[Result], frames: int) -> dict[str, float]:
    """Return the shares by name, for the last line."""
    found = saved(results, frames)
    return {f"saved_at_{count(frames)}{end}": getattr(found, name) for name, (end, _) in SAVED.items()}


def frame_counts_of(results: Sequence[Result]) -> list[int]:
    """Return the numbers of frames an iteration, in their order."""
    return list(dict.fromkeys(result.frames for result in results))


def of(results: Sequence[Result], way: str, frames: int) -> list[Result]:
    """Return the rounds of one way and number of frames."""
    return [result for result in results if (result.way, result.frames) == (way, frames)]


def show(results: Sequence[Result]) -> None:
    """Print what is saved, and where the time of each goes: medians over rounds."""
    console = make_console()
    table = Table(title="Time saved", title_justify="left", box=box.SIMPLE_HEAD)
    columns = ("frames an iteration", "iterations", "Kaldi's way, s", "ours, s")
    for name in (*columns, *(title for _, title in SAVED.values())):
        table.add_column(name, justify="right")
    for frames in frame_counts_of(results):
        pair = [of(results, way, frames) for way in WAYS]
        times = [f"{statistics.median(r.total_s for r in rounds):.1f}" for rounds in pair]
        shares = [f"{100 * getattr(saved(results, frames), name):.1f} %" for name in SAVED]
        table.add_row(count(frames), str(pair[0][0].iterations), *times, *shares)
    console.print(table)
    table = Table(title="Shares of the total time, %", title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("frames an iteration", "", *PARTS.values(), "log-prob", "WER, %"):
        table.add_column(name, justify="right")
    for frames in frame_counts_of(results):
        for way, name in WAYS.items():
            table.add_row(count(frames), name, *_shares(of(results, way, frames)))
    console.print(table)


def _shares(rounds: Sequence[Result]) -> list[str]:
    shares = [f"{100 * statistics.median(r.share(part) for r in rounds):.1f}" for part in PARTS]
    wers = [100 * r.wer for r in rounds if r.wer is not None]
    log_prob = f"{statistics.median(r.log_prob for r in rounds):.3f}"
    return [*shares, log_prob, f"{statistics.median(wers):.1f}" if wers else "-"]


def write_csv(path: Path, results: Sequence[Result]) -> None:
    """Write a row for each training, times in s."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        names = [f"{part}_s" for part in PARTS]
        writer.writerow(["way", "frames", "iterations", "total_s", *names, "log_prob", "wer"])
        for r in results:
            parts = [r.seconds.get(part, 0.0) for part in PARTS]
            writer.writerow([r.way, r.frames, r.iterations, r.total_s, *parts, r.log_prob, r.wer])
