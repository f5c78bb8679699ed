"""The trace of a profile: Chrome trace events that Perfetto opens."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from speechdp.experiments.profile.record import ProfileJob, read_profile
from speechdp.report.profile.palette import WAITING
from speechdp.report.profile.trace import microseconds, trace_events, write_trace
from speechdp.report.profile.usage import mean_utilisation
from tests.helpers.profiles import MadeUpProfile, write_profile

#: What the format asks of each kind of event.
REQUIRED = {
    "X": {"name", "cat", "ts", "dur", "pid", "tid", "args"},
    "M": {"name", "pid", "tid", "args"},
    "C": {"name", "ts", "pid", "args"},
}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> ProfileJob:
    out = write_profile(tmp_path_factory.mktemp("trace") / "out", MadeUpProfile(ranks=(1, 2), steps=5))
    return next(job for job in read_profile(out).jobs if job.name == "weak-2")


@pytest.fixture(scope="module")
def events(job: ProfileJob, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    path = tmp_path_factory.mktemp("file") / "trace.json"
    write_trace(path, job)
    content = json.loads(path.read_text(), parse_constant=lambda text: pytest.fail(f"{text} is no JSON"))
    assert set(content) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert content["displayTimeUnit"] in ("ms", "ns")
    found: list[dict[str, Any]] = content["traceEvents"]
    return found


def test_every_event_has_what_its_kind_needs(events: list[dict[str, Any]]) -> None:
    assert {event["ph"] for event in events} == set(REQUIRED)
    for event in events:
        assert set(event) == REQUIRED[event["ph"]] | {"ph"}, event
        assert isinstance(event["pid"], int) and isinstance(event["args"], dict)
        assert all(isinstance(event.get(key, 0), (int, float)) for key in ("ts", "dur", "tid"))
        assert event.get("dur", 0) >= 0
        if event["ph"] == "C":
            assert all(isinstance(value, (int, float)) for value in event["args"].values())


def test_processes_are_ranks_and_threads_are_named(events: list[dict[str, Any]]) -> None:
    named = {(e["pid"], e["tid"], e["name"]): e["args"] for e in events if e["ph"] == "M"}
    assert named[1, 0, "process_name"]["name"] == "weak-2, rank 1 on node-a"
    assert {named[rank, 0, "thread_name"]["name"] for rank in (0, 1)} == {"functions"}
    assert named[0, 1, "thread_name"]["name"] == "steps"
    used = {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"}
    assert used == {(pid, tid) for pid, tid, name in named if name == "thread_name"}


def test_times_are_microseconds_of_the_record(job: ProfileJob, events: list[dict[str, Any]]) -> None:
    spans = [e for e in events if e["ph"] == "X" and e["tid"] == 0 and e["name"] != WAITING]
    recorded = [
        (record.rank, step.step, f"{f.name} {f.phase}".strip(), f.start_s, f.duration_s)
        for record in job.rank_records
        for step in record.steps
        for f in step.functions
    ]
    assert len(spans) == len(recorded)
    for span, (rank, step, name, start_s, duration_s) in zip(spans, recorded, strict=True):
        assert (span["pid"], span["args"]["step"], span["name"]) == (rank, step, name)
        assert span["ts"] == pytest.approx(1e6 * start_s, abs=0.001)
        # Made-up times are rounded to microseconds, so that one may reach into the next.
        assert span["dur"] == pytest.approx(1e6 * duration_s, abs=1.01)
    decoder = next(s for s in spans if s["name"] == "decoder backward" and s["args"]["step"] == 4)
    assert decoder["cat"] == "backward" and decoder["dur"] == pytest.approx(173_400, rel=0.03)


def test_functions_of_a_rank_do_not_overlap(events: list[dict[str, Any]]) -> None:
    for rank in (0, 1):
        spans = [e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == (rank, 0)]
        spans = [e for e in spans if e["name"] != WAITING]
        for one, following in itertools.pairwise(spans):
            assert one["ts"] + one["dur"] <= following["ts"] + 0.0011


def test_waiting_lies_inside_its_exchange(events: list[dict[str, Any]]) -> None:
    exchanges = {(e["pid"], e["args"]["step"]): e for e in events if e["name"] == "exchange"}
    waits = [e for e in events if e["name"] == WAITING]
    assert waits
    for wait in waits:
        exchange = exchanges[wait["pid"], wait["args"]["step"]]
        assert wait["ts"] == exchange["ts"] and wait["dur"] <= exchange["dur"] + 0.001
        assert wait["dur"] == pytest.approx(exchange["args"]["waited_us"], abs=0.002)
    # Of two ranks one waits, never both.
    assert max(Counter(wait["args"]["step"] for wait in waits).values()) == 1


def test_counters_are_what_was_sampled(job: ProfileJob, events: list[dict[str, Any]]) -> None:
    counters = [e for e in events if e["ph"] == "C"]
    names = {e["name"] for e in counters}
    assert len(names) == 2 and "memory, MB" in names
    assert any("no GPU" in name and "\n" not in name for name in names)
    (samples,) = job.samples
    of_rank = [e for e in counters if e["pid"] == 1 and "percent" in e["args"]]
    assert len(of_rank) == len(samples.t_s)
    assert of_rank[7]["ts"] == pytest.approx(700_000) and of_rank[7]["args"]["percent"] == 99.0


def test_a_job_without_samples_has_no_counters(tmp_path: Path) -> None:
    out = write_profile(tmp_path / "out", MadeUpProfile(ranks=(1,), steps=2, samples=False))
    events = trace_events(read_profile(out).jobs[0])
    assert {event["ph"] for event in events} == {"X", "M"}


def test_names_are_json_strings_whatever_they_hold(tmp_path: Path) -> None:
    out = write_profile(tmp_path / "out", MadeUpProfile(ranks=(1,), steps=2, samples=False))
    path = out / "weak-1" / "rank-0000.jsonl"
    path.write_text(path.read_text().replace("node-a", '\\"</script>\\u2028').replace("postproc", "a\\\\b"))
    trace = tmp_path / "trace.json"
    write_trace(trace, read_profile(out).jobs[0])
    names = {event["args"].get("name") for event in json.loads(trace.read_text())["traceEvents"]}
    assert 'weak-1, rank 0 on "</script>\u2028' in names


def test_microseconds_keep_nanoseconds() -> None:
    assert microseconds(1.234_567_891) == 1_234_567.891


def test_gpus_are_counted_for_the_ranks_that_use_them(tmp_path: Path) -> None:
    out = write_profile(tmp_path / "out", MadeUpProfile(ranks=(2,), steps=2))
    head = {
        "kind": "gpu", "hz": 10.0, "host": "node-a", "ranks": {"0": 1, "1": 2},
        "gpus": ["H200", "H200"], "gpu_of_rank": {"0": 1, "1": 0},
    }  # fmt: skip
    sample = {
        "t_s": 0.5,
        "ranks": [[0, 99.0, 1], [1, 98.0, 1]],
        "gpus": [[0, 40, 8e6, 300, 1], [1, 70, 9e6, 1, 1]],
    }
    (out / "weak-2" / "samples-node-a.jsonl").write_text(
        "".join(json.dumps(x) + "\n" for x in (head, sample))
    )
    job = read_profile(out).jobs[0]
    counted = {(e["pid"], e["name"]): e["args"] for e in trace_events(job) if e["ph"] == "C"}
    assert counted == {
        (0, "GPU utilisation (NVML), %"): {"percent": 70.0},
        (1, "GPU utilisation (NVML), %"): {"percent": 40.0},
        (0, "memory, MB"): {"MB": 9.0},
        (1, "memory, MB"): {"MB": 8.0},
    }
    assert mean_utilisation(job) == 55.0
