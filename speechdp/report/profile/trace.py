"""A job's steps as Chrome trace events: a file that Perfetto (ui.perfetto.dev) and chrome://tracing open.

Source of the format: "Trace Event Format", Google; times are microseconds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from speechdp.experiments.profile.derived import waiting_s
from speechdp.experiments.profile.measured import RankRecord, StepRecord
from speechdp.experiments.profile.record import ProfileJob
from speechdp.files import write_text_atomically
from speechdp.report.kit.utilisation import CPU_AXIS, GPU_AXIS
from speechdp.report.profile.palette import WAITING
from speechdp.report.profile.usage import memory_of, on_gpus, utilisation_of
from speechdp.report.runs.samples import Array

#: Threads of a rank's process in the trace.
FUNCTIONS_TID, STEPS_TID = 0, 1
Event = dict[str, Any]


def trace_events(job: ProfileJob) -> list[Event]:
    """Return a job's trace: one process per rank, functions and steps as threads, counters beside them."""
    waited = waiting_s(job)
    events: list[Event] = []
    for record in job.rank_records:
        events += _names(job, record)
        events += _rank_events(record, waited)
    events += _counters(job)
    return events


def write_trace(path: Path, job: ProfileJob) -> None:
    """Write a job's trace as JSON.  Raises OSError."""
    content = {
        "traceEvents": trace_events(job),
        "displayTimeUnit": "ms",
        "otherData": {"job": job.name, "written_by": "speechdp profile"},
    }
    write_text_atomically(path, json.dumps(content, allow_nan=False))


def _names(job: ProfileJob, record: RankRecord) -> Iterator[Event]:
    process = f"{job.name}, rank {record.rank} on {record.host}"
    yield _metadata(record.rank, FUNCTIONS_TID, "process_name", {"name": process})
    yield _metadata(record.rank, FUNCTIONS_TID, "process_sort_index", {"sort_index": record.rank})
    for tid, name in ((FUNCTIONS_TID, "functions"), (STEPS_TID, "steps")):
        yield _metadata(record.rank, tid, "thread_name", {"name": name})


def _metadata(pid: int, tid: int, name: str, args: dict[str, Any]) -> Event:
    return {"ph": "M", "pid": pid, "tid": tid, "name": name, "args": args}


def _rank_events(record: RankRecord, waited: dict[tuple[int, int, int], float]) -> Iterator[Event]:
    for step in record.steps:
        yield {
            **_span(record.rank, STEPS_TID, f"step {step.step}", step.start_s, step.wall_s),
            "cat": "step", "args": {"step": step.step, "frames": step.frames},
        }  # fmt: skip
        for number, (function, end_s) in enumerate(zip(step.functions, _ends_s(step), strict=True)):
            duration_s = end_s - function.start_s
            wait_s = min(waited.get((record.rank, step.step, number), 0.0), duration_s)
            args = {"step": step.step, "function": function.name, "phase": function.phase}
            if wait_s > 0:
                args["waited_us"] = microseconds(wait_s)
            name = f"{function.name} {function.phase}".strip()
            span = _span(record.rank, FUNCTIONS_TID, name, function.start_s, duration_s)
            yield {**span, "cat": function.phase or "function", "args": args}
            if wait_s > 0:  # nested in the exchange, so viewers draw it below
                span = _span(record.rank, FUNCTIONS_TID, WAITING, function.start_s, wait_s)
                yield {**span, "cat": "waiting", "args": {"step": step.step}}


def _ends_s(step: StepRecord) -> list[float]:
    """Return the end of each function, s, cut so that spans of a thread do not overlap by rounding."""
    ends = [function.start_s + function.duration_s for function in step.functions]
    starts = [function.start_s for function in step.functions[1:]]
    return [max(f.start_s, min(end, following)) for f, end, following in
            zip(step.functions, ends, [*starts, math.inf], strict=True)]  # fmt: skip


def _span(pid: int, tid: int, name: str, start_s: float, duration_s: float) -> Event:
    ts = microseconds(start_s)
    # Subtract rounded ends, so that neighbours never overlap.
    duration = round(microseconds(start_s + duration_s) - ts, 3)
    return {"ph": "X", "pid": pid, "tid": tid, "name": name, "ts": ts, "dur": max(duration, 0.0)}


def microseconds(seconds: float) -> float:
    """Return seconds as microseconds, to the nanosecond."""
    return round(1e6 * seconds, 3)


def _counters(job: ProfileJob) -> Iterator[Event]:
    for samples in job.samples:
        name = (GPU_AXIS if on_gpus(samples) else CPU_AXIS).replace("\n", " ")
        for rank, values in utilisation_of(samples).items():
            yield from _counter(rank, name, "percent", samples.t_s, values)
        for rank, values in memory_of(samples).items():
            yield from _counter(rank, "memory, MB", "MB", samples.t_s, values / 1e6)


def _counter(rank: int, name: str, unit: str, t_s: Array, values: Array) -> Iterator[Event]:
    for time_s, value in zip(t_s, values, strict=True):
        if math.isfinite(value) and math.isfinite(time_s):
            args = {unit: round(float(value), 3)}
            yield {"ph": "C", "pid": rank, "name": name, "ts": microseconds(float(time_s)), "args": args}
