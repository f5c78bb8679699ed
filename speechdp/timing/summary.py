"""Gather every rank's timing into timing.json, and read runs back from their folders.

Reading never fails on a damaged or missing file of a run: the run is shown with what it has, and the
file is named among its problems.
"""

from __future__ import annotations

import json
import math
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from speechdp.atomic_file import write_text_atomically
from speechdp.comm.base import Communicator, ReduceOp
from speechdp.errors import ConfigError, RunError
from speechdp.timing.jsonl import read_lines
from speechdp.timing.results import Evaluation, RankTiming, RunResult, Sweep, Timing, WordErrors
from speechdp.timing.timeline import Timeline

DEFAULT_WARMUP_STEPS = 4


def gather_timing(
    timeline: Timeline, comm: Communicator, others: dict[str, Any] | None = None
) -> dict[str, Any] | None:
    """Gather every rank's sums, and what else is to stand beside them (`others`).  Collective.

    In a step the rank that comes last to an exchange waits for nobody: the shortest communication of all
    ranks is the exchange itself, what the others need beyond it is waiting.  Summed over steps, this also
    shows ranks that are late in turn (batches of unequal length), which no rank's sum does.

    Returns:
        The content of timing.json on rank 0, None on the others.
    """
    entry = {"host": socket.gethostname(), **timeline.summary(), **(others or {})}
    ranks = comm.allgather_object(entry)
    exchange_s = None
    if len({other["steps"] for other in ranks}) == 1:
        shortest = torch.tensor(timeline.comm_of_steps(), dtype=torch.float64)
        comm.allreduce(shortest, name="shortest_comm", op=ReduceOp.MIN)
        exchange_s = shortest.sum().item()
    if comm.rank != 0:
        return None
    warmup_steps = min(entry["warmup_steps"] for entry in ranks)
    return {"warmup_steps": warmup_steps, "exchange_s": exchange_s, "ranks": ranks}


def write_timing(run_dir: Path, timing: dict[str, Any]) -> Path:
    """Write timing.json so that a reader sees the old file or the new one.

    Raises:
        RunError: the folder cannot be written.
    """
    path = run_dir / "timing.json"
    try:
        write_text_atomically(path, json.dumps(timing, indent=1))
    except OSError as error:
        raise RunError(
            f"{path}: cannot write the timing ({error.strerror}); free space or permit writing there"
        ) from error
    return path


def read_sweep(out: Path) -> Sweep:
    """Read a sweep's folder, a folder of runs, or one run.

    Raises:
        ConfigError: there is no run in `out`.
    """
    if (out / "sweep.json").is_file():
        names = _sweep_names(out)
        return Sweep(out, tuple(_without_accuracy(read_run(out / name)) for name in names))
    if (out / "run.json").is_file():
        return Sweep(out, (read_run(out),))
    if not out.is_dir():
        raise ConfigError(f"{out}: no such folder; give the folder of a run or the OUT of `speechdp sweep`")
    runs = [read_run(folder) for folder in sorted(out.iterdir()) if (folder / "run.json").is_file()]
    if not runs:
        raise ConfigError(
            f"{out}: neither a sweep (sweep.json) nor a run (run.json) nor a folder of runs; "
            "give the folder of a run or the OUT of `speechdp sweep`"
        )
    return Sweep(out, tuple(runs))


def _without_accuracy(run: RunResult) -> RunResult:
    # A sweep's one-rank run ends after some steps: its speed is of interest, its accuracy means nothing.
    return replace(run, evaluations=()) if run.is_baseline else run


def read_run(run_dir: Path) -> RunResult:
    """Read what a run has written so far; `problems` names what is missing or damaged."""
    name = run_dir.resolve().name
    if not run_dir.is_dir():
        return RunResult(name, run_dir, {}, (), None, None, False, False, (f"{run_dir}: missing",))
    problems: list[str] = []
    settings = _read_object(run_dir / "run.json", problems) or {}
    evaluations = _read_evaluations(run_dir / "metrics.jsonl", problems)
    timing = _read_timing(run_dir, problems)
    word_errors = _find_word_errors(run_dir, problems)
    completed = (run_dir / "completed.json").is_file()
    if not completed:
        problems.append("completed.json: missing, so the run did not finish; continue it with --resume")
    return RunResult(
        name, run_dir, settings, evaluations, timing, word_errors, completed, True, tuple(problems)
    )


def read_timeline(path: Path) -> tuple[dict[int, dict[str, Any]], list[dict[str, Any]], int]:
    """Read one rank's timeline.

    Returns:
        Steps by number (of a step that a resumed run repeated, the last record), the evaluations and
        checkpoints, and the number of damaged lines.

    Raises:
        OSError: the file cannot be read.
    """
    lines = read_lines(path)
    steps = {r["step"]: r for r in lines.records if isinstance(r.get("step"), int)}
    events = [r for r in lines.records if "event" in r]
    return dict(sorted(steps.items())), events, lines.num_damaged


def _sweep_names(out: Path) -> list[str]:
    """Return the names of the sweep's runs; they are folders below `out`, never elsewhere."""
    problems: list[str] = []
    sweep = _read_object(out / "sweep.json", problems)
    names = (sweep or {}).get("runs")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        reason = problems[0] if problems else "sweep.json: no list of runs"
        raise ConfigError(f"{out}: {reason}; run `speechdp sweep` again with this OUT to rewrite it")
    for name in names:
        if name in ("", ".", "..") or "/" in name or "\\" in name:
            raise ConfigError(
                f"{out}/sweep.json: {name!r} is not the name of a folder beside it; mend the file"
            )
    return names


def _read_object(path: Path, problems: list[str]) -> dict[str, Any] | None:
    """Return a JSON object, or None after noting what is wrong with the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        problems.append(f"{path.name}: missing")
    except OSError as error:
        problems.append(f"{path.name}: cannot be read ({error.strerror})")
    except ValueError:
        problems.append(f"{path.name}: not valid JSON")
    else:
        if isinstance(value, dict):
            return value
        problems.append(f"{path.name}: not a JSON object")
    return None


def _read_evaluations(path: Path, problems: list[str]) -> tuple[Evaluation, ...]:
    try:
        lines = read_lines(path)
    except FileNotFoundError:
        problems.append(f"{path.name}: missing")
        return ()
    except OSError as error:
        problems.append(f"{path.name}: cannot be read ({error.strerror})")
        return ()
    if lines.num_damaged:
        problems.append(f"{path.name}: {lines.num_damaged} damaged line(s) passed over")
    # A resumed run repeats the evaluations after its checkpoint: the last of a step counts.
    by_step = {r["step"]: _evaluation(r) for r in lines.records if isinstance(r.get("step"), int)}
    return tuple(by_step[step] for step in sorted(by_step))


def _evaluation(record: dict[str, Any]) -> Evaluation:
    return Evaluation(
        step=record["step"],
        epoch=_number(record, "epoch"),
        frames=_number(record, "frames"),
        time_s=_number(record, "time_s"),
        log_prob=_number(record, "heldout_log_prob"),
        accuracy=_number(record, "heldout_frame_accuracy"),
        train_loss=_number(record, "train_loss"),
        replica_distance=_number(record, "replica_distance"),
    )


def _read_timing(run_dir: Path, problems: list[str]) -> Timing | None:
    """Read timing.json; for a run that never wrote it, sum its timelines."""
    path = run_dir / "timing.json"
    if path.is_file():
        record = _read_object(path, problems)
        entries = record.get("ranks") if record else None
        if isinstance(entries, list) and entries:
            ranks = [_rank_timing(entry) for entry in entries]
            if None not in ranks:
                warmup = record.get("warmup_steps") if record else None
                kept = tuple(rank for rank in ranks if rank is not None)
                exchange_s = _number(record, "exchange_s") if record else None
                return Timing(warmup if isinstance(warmup, int) else 0, kept, exchange_s)
        if record is not None:
            problems.append("timing.json: ranks missing or incomplete")
    timing = _timing_from_timelines(run_dir, problems)
    source = f"summed timeline/ of {len(timing.ranks)} rank(s) instead" if timing else "no timeline/ either"
    problems.append(
        f"timing.json: not usable; {source}" if path.is_file() else f"timing.json: missing; {source}"
    )
    return timing


def _rank_timing(entry: Any) -> RankTiming | None:
    """Return a rank's sums, or None where the entry lacks one."""
    if not isinstance(entry, dict) or not isinstance(entry.get("spans_s"), dict):
        return None
    numbers = {key: _number(entry, key) for key in ("rank", "steps", "frames", "wall_s")}
    spans = {str(name): _number(entry["spans_s"], name) for name in entry["spans_s"]}
    if None in numbers.values() or None in spans.values():
        return None
    return RankTiming(
        rank=int(numbers["rank"] or 0),
        host=str(entry.get("host", "")),
        steps=int(numbers["steps"] or 0),
        frames=int(numbers["frames"] or 0),
        wall_s=numbers["wall_s"] or 0.0,
        spans_s={name: seconds or 0.0 for name, seconds in spans.items()},
        eval_s=_number(entry, "eval_s") or 0.0,
        checkpoint_s=_number(entry, "checkpoint_s") or 0.0,
        sent_bytes=_number(entry, "sent_bytes"),
        trained_s=_number(entry, "trained_s"),
        statistics=entry["statistics"] if isinstance(entry.get("statistics"), dict) else {},
    )


def _timing_from_timelines(run_dir: Path, problems: list[str]) -> Timing | None:
    ranks: list[RankTiming] = []
    warmup_used = DEFAULT_WARMUP_STEPS
    for path in sorted((run_dir / "timeline").glob("rank-*.jsonl")):
        try:
            steps, events, num_damaged = read_timeline(path)
        except OSError as error:
            problems.append(f"timeline/{path.name}: cannot be read ({error.strerror})")
            continue
        if num_damaged:
            problems.append(f"timeline/{path.name}: {num_damaged} damaged line(s) passed over")
        if len(steps) <= DEFAULT_WARMUP_STEPS:
            warmup_used = 0
        rank = int(path.stem.removeprefix("rank-")) if path.stem[5:].isdigit() else len(ranks)
        ranks.append(_sum_steps(rank, list(steps.values()), events))
    ranks = [rank for rank in ranks if rank.steps > 0]
    return Timing(warmup_used, tuple(ranks)) if ranks else None


def _sum_steps(rank: int, steps: list[dict[str, Any]], events: list[dict[str, Any]]) -> RankTiming:
    """Sum the records of a rank's steps, the first ones left out where there are enough."""
    kept = steps[DEFAULT_WARMUP_STEPS:] or steps
    spans: dict[str, float] = {}
    for step in kept:
        for name, seconds in _span_pieces(step):
            spans[name] = spans.get(name, 0.0) + seconds
    event_s = {
        kind: math.fsum(_number(e, "wall") or 0.0 for e in events if e["event"] == kind)
        for kind in ("eval", "checkpoint")
    }
    return RankTiming(
        rank=rank,
        host="",
        steps=len(kept),
        frames=sum(int(_number(step, "frames") or 0) for step in kept),
        wall_s=math.fsum(_number(step, "wall") or 0.0 for step in kept),
        spans_s=spans,
        eval_s=event_s["eval"],
        checkpoint_s=event_s["checkpoint"],
    )


def _span_pieces(step: dict[str, Any]) -> list[tuple[str, float]]:
    """Return (span, seconds) of a step's well-formed pieces."""
    pieces = step.get("spans")
    if not isinstance(pieces, list):
        return []
    return [(str(p[0]), _finite(p[2]) or 0.0) for p in pieces if isinstance(p, list) and len(p) == 3]


def _find_word_errors(run_dir: Path, problems: list[str]) -> WordErrors | None:
    """Read the errors on the test split, else on the only split decoded; None where there is no such file."""
    test = run_dir / "wer-test.json"
    found = [test] if test.is_file() else sorted(run_dir.glob("wer-*.json"))
    if len(found) > 1:
        problems.append("wer-test.json: missing, and several other splits are decoded; decode the test split")
        return None
    return _read_word_errors(found[0], problems) if found else None


def _read_word_errors(path: Path, problems: list[str]) -> WordErrors | None:
    record = _read_object(path, problems)
    if record is None:
        return None
    wer = _number(record, "wer")
    if wer is None:
        problems.append(f"{path.name}: no word error rate in it; decode the run again")
        return None
    counts = {key: _number(record, key) for key in ("words", "insertions", "deletions", "substitutions")}
    whole = {key: None if value is None else int(value) for key, value in counts.items()}
    return WordErrors(
        wer=wer,
        low=_number(record, "wer_low"),
        high=_number(record, "wer_high"),
        split=str(record.get("split", "")),
        grammar=str(record.get("grammar", "")),
        **whole,
    )


def _number(record: dict[str, Any], key: str) -> float | None:
    """Return a finite number, or None where there is none."""
    return _finite(record.get(key))


def _finite(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)
