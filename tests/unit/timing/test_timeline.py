"""Timeline: what is timed, what is left out, and that it costs next to nothing."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from speechdp.errors import RunError
from speechdp.report.runs.timing_file import read_timeline
from speechdp.timing.device_events import CudaEvents
from speechdp.timing.spans import innermost
from speechdp.timing.steps import STEP_SPAN_NAMES, exclusive_pieces
from speechdp.timing.timeline import STEP_SPANS, Span, Timeline

CPU = torch.device("cpu")


class FakeClock:
    """The host's clock, which moves only when the test lets it."""

    def __init__(self) -> None:
        self.now_ns = 1_000

    def __call__(self) -> int:
        return self.now_ns

    def sleep(self, seconds: float) -> None:
        self.now_ns += round(seconds * 1e9)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    fake = FakeClock()
    monkeypatch.setattr("speechdp.timing.timeline.perf_counter_ns", fake)
    monkeypatch.setattr("speechdp.timing.spans.perf_counter_ns", fake)
    return fake


class FakeEvent:
    """A point on the fake device's clock."""

    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.at_ms = 0.0
        self.passed = False

    def query(self) -> bool:
        return self.passed

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self.passed
        assert end.passed
        return end.at_ms - self.at_ms


class FakeDevice:
    """A device whose clock the test turns; it lags behind the host until told to catch up."""

    def __init__(self) -> None:
        self.now_ms = 100.0
        self.num_created = 0
        self.num_synchronised = 0
        self.queued: list[FakeEvent] = []
        self.free: list[FakeEvent] = []

    def record(self) -> FakeEvent:
        if self.free:
            event = self.free.pop()
        else:
            event = FakeEvent(self)
            self.num_created += 1
        event.at_ms, event.passed = self.now_ms, False
        self.queued.append(event)
        return event

    def recycle(self, events: Any) -> None:
        for event in events:
            assert event not in self.free
            self.free.append(event)

    def catch_up(self) -> None:
        for event in self.queued:
            event.passed = True
        self.queued.clear()

    def synchronize(self) -> None:
        self.num_synchronised += 1
        self.catch_up()


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_step_is_one_line_with_its_spans(tmp_path: Path, clock: FakeClock) -> None:
    path = tmp_path / "timeline" / "rank-0003.jsonl"
    timeline = Timeline(path, rank=3, device=CPU, warmup_steps=0)
    clock.sleep(2.0)  # setting up belongs to no step
    with timeline.span(Span.DATA_WAIT):
        clock.sleep(0.004)
    clock.sleep(0.001)
    with timeline.span(Span.FORWARD):
        clock.sleep(0.008)
    clock.sleep(0.002)
    timeline.end_step(7, 2, 321)
    timeline.close()
    assert _lines(path) == [
        {
            "step": 7,
            "epoch": 2,
            "t": 2.0,
            "wall": 0.015,
            "frames": 321,
            "spans": [["data_wait", 0.0, 0.004], ["forward", 0.005, 0.008]],
        }
    ]
    summary = timeline.summary()
    assert summary["rank"] == 3
    assert summary["wall_s"] == pytest.approx(0.015)
    assert summary["spans_s"]["forward"] == pytest.approx(0.008)


def test_warmup_steps_are_left_out_and_a_short_run_says_so() -> None:
    timeline = Timeline(None, rank=0, device=CPU)
    for step in range(1, 4):
        timeline.end_step(step, 0, 10)
    short = timeline.summary()
    assert (short["warmup_steps"], short["steps"], short["frames"]) == (0, 3, 30)
    for step in range(4, 10):
        timeline.end_step(step, 0, 10)
    full = timeline.summary()
    assert (full["warmup_steps"], full["steps"], full["frames"]) == (4, 5, 50)
    assert (full["first_step"], full["last_step"]) == (5, 9)


def test_a_nested_span_is_taken_out_of_the_outer_one(clock: FakeClock) -> None:
    timeline = Timeline(None, rank=0, device=CPU, warmup_steps=0)
    with timeline.span(Span.BACKWARD):
        clock.sleep(0.003)
        with timeline.span(Span.COMM):
            clock.sleep(0.02)
        clock.sleep(0.004)
    timeline.end_step(1, 0, 1)
    summary = timeline.summary()
    assert summary["spans_s"]["comm"] == pytest.approx(0.02)
    assert summary["spans_s"]["backward"] == pytest.approx(0.007)
    assert summary["wall_s"] == pytest.approx(0.027)


def test_exclusive_pieces_of_nested_spans() -> None:
    # span 3 around span 4, then span 5
    assert exclusive_pieces([3, 4, -1, -1, 5, -1]) == [(3, 0, 1), (4, 1, 2), (3, 2, 3), (5, 4, 5)]
    with pytest.raises(AssertionError, match="inside a span"):
        exclusive_pieces([3])


def test_spans_of_another_thread_are_recorded_apart(tmp_path: Path, clock: FakeClock) -> None:
    path = tmp_path / "rank-0000.jsonl"
    timeline = Timeline(path, rank=0, device=CPU, warmup_steps=0)

    def hook() -> None:
        with timeline.span(Span.COMM):
            clock.sleep(0.005)

    with timeline.span(Span.BACKWARD):
        thread = threading.Thread(target=hook)
        thread.start()
        thread.join()
    timeline.end_step(1, 0, 1)
    timeline.close()
    (line,) = _lines(path)
    assert [name for name, _, _ in line["spans"]] == ["backward"]
    assert line["overlapped"] == [["comm", 0.0, 0.005]]
    assert timeline.summary()["spans_s"]["comm"] == 0
    assert timeline.summary()["overlapped_s"] == {"comm": 0.005}


def test_evaluation_counts_neither_as_step_nor_as_training_time(tmp_path: Path, clock: FakeClock) -> None:
    path = tmp_path / "rank-0000.jsonl"
    timeline = Timeline(path, rank=0, device=CPU, warmup_steps=0)
    timeline.resume_at(100.0)
    with timeline.event(Span.EVAL):  # before the first step
        clock.sleep(0.002)
    assert timeline.training_time_s == 100.0
    timeline.end_step(1, 0, 1)
    clock.sleep(0.001)  # logging, say: part of the next step
    with timeline.event(Span.EVAL):
        with timeline.span(Span.FORWARD):  # evaluation runs the model, too
            clock.sleep(0.05)
        assert timeline.training_time_s == pytest.approx(100.001)
    with timeline.event(Span.CHECKPOINT):
        clock.sleep(0.02)
    with timeline.span(Span.FORWARD):
        clock.sleep(0.004)
    timeline.end_step(2, 0, 1)
    timeline.close()
    assert timeline.training_time_s == pytest.approx(100.005)
    summary = timeline.summary()
    assert summary["wall_s"] == pytest.approx(0.005)
    assert summary["eval_s"] == pytest.approx(0.052)
    assert summary["checkpoint_s"] == pytest.approx(0.02)
    assert summary["spans_s"]["forward"] == pytest.approx(0.004)
    lines = _lines(path)
    assert [line.get("event", "step") for line in lines] == ["eval", "step", "eval", "checkpoint", "step"]
    assert (lines[-2]["t"], lines[-2]["wall"]) == (100.053, 0.02)
    # The moment before the evaluation is the step's, which therefore starts that much early.
    assert lines[-1]["t"] == 100.072
    assert lines[-1]["spans"] == [["forward", 0.001, 0.004]]


def test_a_meeting_is_training_time_but_no_step(tmp_path: Path, clock: FakeClock) -> None:
    path = tmp_path / "rank-0000.jsonl"
    timeline = Timeline(path, rank=0, device=CPU, warmup_steps=0)
    with timeline.event(Span.MEETING):  # of a run that has not begun to train
        clock.sleep(1.0)
    assert timeline.training_time_s == 0
    for step in (1, 2):
        with timeline.span(Span.FORWARD):
            clock.sleep(0.002)
        timeline.end_step(step, 0, 1)
        with timeline.event(Span.MEETING):
            clock.sleep(0.5)
        with timeline.event(Span.EVAL):
            clock.sleep(0.03)
    timeline.close()
    assert timeline.training_time_s == pytest.approx(1.004)
    summary = timeline.summary()
    assert (summary["wall_s"], summary["meeting_s"]) == (pytest.approx(0.004), pytest.approx(1.0))
    assert (summary["eval_s"], summary["spans_s"]["comm"]) == (pytest.approx(0.06), 0)
    assert [line["wall"] for line in _lines(path) if line.get("event") == "meeting"] == [1.0, 0.5, 0.5]


def test_meetings_of_the_warm_up_do_not_count(clock: FakeClock) -> None:
    timeline = Timeline(None, rank=0, device=CPU, warmup_steps=1)
    with timeline.event(Span.MEETING):
        clock.sleep(1.0)
    for step, meeting_s in ((1, 0.5), (2, 0.25), (3, 0.125)):
        clock.sleep(0.002)
        timeline.end_step(step, 0, 1)
        with timeline.event(Span.MEETING):
            clock.sleep(meeting_s)
        assert timeline.summary()["meeting_s"] == pytest.approx({1: 0.5, 2: 0.25, 3: 0.375}[step])


def test_a_checkpoint_inside_a_step_leaves_a_gap_in_its_span(clock: FakeClock) -> None:
    timeline = Timeline(None, rank=0, device=CPU, warmup_steps=0)
    with timeline.span(Span.UPDATE):
        clock.sleep(0.001)
        with timeline.event(Span.CHECKPOINT):
            clock.sleep(0.03)
        clock.sleep(0.002)
    timeline.end_step(1, 0, 1)
    summary = timeline.summary()
    assert summary["checkpoint_s"] == pytest.approx(0.03)
    assert summary["spans_s"]["update"] == pytest.approx(0.003)
    assert summary["wall_s"] == pytest.approx(0.003)


def test_which_span_is_open_and_for_how_long(clock: FakeClock) -> None:
    timeline = Timeline(None, rank=0, device=CPU)
    assert timeline.open_span() is None
    with timeline.span(Span.BACKWARD):
        clock.sleep(1)
        assert timeline.open_span() == ("backward", 1.0)
        with timeline.span(Span.COMM):
            clock.sleep(2)
            assert timeline.open_span() == ("comm", 2.0)
        assert timeline.open_span() == ("backward", 3.0)
        with timeline.event(Span.CHECKPOINT):
            clock.sleep(4)
            assert timeline.open_span() == ("checkpoint", 4.0)
        assert timeline.open_span() == ("backward", 7.0)
    assert timeline.open_span() is None
    timeline.end_step(1, 0, 5)
    with timeline.event(Span.EVAL):
        clock.sleep(1)
        with timeline.span(Span.COMM):
            clock.sleep(1)
            assert timeline.open_span() == ("comm", 1.0)
        assert timeline.open_span() == ("eval", 2.0)
    assert timeline.open_span() is None


def test_a_span_that_is_being_opened_is_not_yet_open() -> None:
    assert innermost([Span.FORWARD.code]) is None
    assert innermost([Span.FORWARD.code, 5, Span.COMM.code]) == (Span.FORWARD.code, 5)


def test_a_resumed_run_appends_behind_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "rank-0000.jsonl"
    first = Timeline(path, rank=0, device=CPU)
    for step in (1, 2, 3):
        first.end_step(step, 0, 10)
    first.close()
    first.close()
    path.write_bytes(path.read_bytes()[:-20])  # killed while writing step 3
    second = Timeline(path, rank=0, device=CPU)
    second.resume_at(50.0)
    for step in (2, 3):
        second.end_step(step, 0, 20)
    second.close()
    steps, _, num_damaged = read_timeline(path)
    assert list(steps) == [1, 2, 3]
    assert [steps[step]["frames"] for step in steps] == [10, 20, 20]
    assert num_damaged == 1
    assert steps[2]["t"] >= 50.0


def test_an_unwritable_file_is_one_line_naming_it(tmp_path: Path) -> None:
    (tmp_path / "timeline").write_text("in the way")
    with pytest.raises(RunError, match=r"timeline/rank-0000\.jsonl.*then run again"):
        Timeline(tmp_path / "timeline" / "rank-0000.jsonl", rank=0, device=CPU)


def test_device_spans_are_the_devices_time_and_nothing_waits_in_a_step(
    tmp_path: Path, clock: FakeClock
) -> None:
    path, device = tmp_path / "rank-0000.jsonl", FakeDevice()
    timeline = Timeline(path, rank=0, device=CPU, warmup_steps=0, device_events=device)
    for step in (1, 2):
        with timeline.span(Span.FORWARD):
            device.now_ms += 30
        with timeline.span(Span.BACKWARD):
            device.now_ms += 50
            with timeline.span(Span.COMM):
                device.now_ms += 15
                clock.sleep(0.002)  # for so long the host blocked
        device.now_ms += 5  # the device stood idle between spans
        timeline.end_step(step, 0, 100)
    assert device.num_synchronised == 0
    assert timeline.training_time_s == pytest.approx(0.004)  # the host has not waited for the device's 0.2 s
    timeline.close()
    assert device.num_synchronised == 1
    summary = timeline.summary()
    assert summary["spans_s"] == pytest.approx(
        {"data_wait": 0, "h2d": 0, "forward": 0.06, "backward": 0.1, "comm": 0.03, "update": 0}
    )
    assert summary["wall_s"] == pytest.approx(0.2)
    assert summary["host_s"] == pytest.approx({"comm": 0.004})
    line = _lines(path)[0]
    assert [name for name, _, _ in line["host"]] == ["comm"]
    assert [name for name, _, _ in line["spans"]] == ["forward", "backward", "comm", "backward"]


def test_device_events_are_used_again_once_the_device_has_passed_them() -> None:
    device = FakeDevice()
    timeline = Timeline(None, rank=0, device=CPU, device_events=device)
    for step in range(1, 51):
        for span in STEP_SPANS:
            with timeline.span(span):
                device.now_ms += 1
        timeline.end_step(step, 0, 1)
        device.catch_up()
    # Two steps under way, each of two events a span and one at its end, and the first step's start.
    assert device.num_created <= 2 * (2 * len(STEP_SPANS) + 1) + 1
    assert timeline.summary()["spans_s"]["comm"] == pytest.approx(0.046)


def test_evaluation_waits_for_the_device_and_its_spans_are_dropped(clock: FakeClock) -> None:
    device = FakeDevice()
    timeline = Timeline(None, rank=0, device=CPU, warmup_steps=0, device_events=device)
    with timeline.span(Span.FORWARD):
        device.now_ms += 10
    timeline.end_step(1, 0, 1)
    with timeline.event(Span.EVAL), timeline.span(Span.FORWARD):
        assert device.num_synchronised == 1
        device.now_ms += 5000
        clock.sleep(5.0)
    assert device.num_synchronised == 2
    with timeline.span(Span.FORWARD):
        device.now_ms += 20
    timeline.end_step(2, 0, 1)
    summary = timeline.summary()
    assert summary["spans_s"]["forward"] == pytest.approx(0.03)
    assert summary["wall_s"] == pytest.approx(0.03)


def test_a_span_costs_a_few_calls() -> None:
    """Counted, not timed: however busy the machine is."""
    timeline = Timeline(None, rank=0, device=CPU)
    calls = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        for _ in range(100):
            with timeline.span(Span.FORWARD):
                pass
    finally:
        sys.setprofile(None)
    assert calls / 100 < 12  # 0.5 µs on a free core


def test_span_codes_are_the_positions_in_the_summary() -> None:
    assert tuple(span.value for span in STEP_SPANS) == STEP_SPAN_NAMES
    assert [span.code for span in Span] == list(range(len(Span)))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_events_measure_the_devices_work() -> None:
    device = torch.device("cuda", 0)
    matrix = torch.randn(4096, 4096, device=device)
    timeline = Timeline(None, rank=0, device=device, warmup_steps=1)
    for step in range(1, 5):
        with timeline.span(Span.FORWARD):
            for _ in range(20):
                matrix @ matrix
        timeline.end_step(step, 0, 1)
    events = timeline._device_events
    assert isinstance(events, CudaEvents)
    summary = timeline.summary()
    assert summary["steps"] == 3
    # Queuing 20 products takes the host far less than the device takes to compute them.
    assert 0.8 * summary["wall_s"] < summary["spans_s"]["forward"] <= summary["wall_s"] * 1.01
