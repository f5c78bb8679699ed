"""Turn the marks of a step into the time of each span: exclusive pieces, device time, sums after warm-up."""

from __future__ import annotations

import json
from array import array
from dataclasses import dataclass, field
from typing import Any

#: Order of the step spans in every list; the enum in timeline.py numbers them in this order.
STEP_SPAN_NAMES = ("data_wait", "h2d", "forward", "backward", "comm", "update")
MEETING = "meeting"
#: Events that do not count as training time.
_PAUSES = ("eval", "checkpoint", "capture")
EVENT_NAMES = (*_PAUSES, MEETING)
#: Spans whose host time is kept beside the device's, because the host blocks in them.
HOST_TIMED = (STEP_SPAN_NAMES.index("data_wait"), STEP_SPAN_NAMES.index("comm"))

#: File beside the timelines: the averaging periods, and from when on each was in use.
PERIODS_FILE = "periods.jsonl"

_COMM = STEP_SPAN_NAMES.index("comm")

#: One piece of time: index of the span, start in s after the start of the step, duration in s.
Piece = tuple[int, float, float]


@dataclass(frozen=True)
class ResolvedStep:
    """The times of one step, all in s."""

    step: int
    epoch: int
    frames: int
    t: float
    wall_s: float
    spans: list[Piece]
    host: list[Piece]
    overlapped: list[Piece]

    def to_line(self) -> str:
        """Return the step as a line of JSON; times rounded to the microsecond."""
        record: dict[str, Any] = {
            "step": self.step,
            "epoch": self.epoch,
            "t": round(self.t, 6),
            "wall": round(self.wall_s, 6),
            "frames": self.frames,
            "spans": _rounded(self.spans),
        }
        if self.host:
            record["host"] = _rounded(self.host)
        if self.overlapped:
            record["overlapped"] = _rounded(self.overlapped)
        return json.dumps(record, separators=(",", ":"))


@dataclass(frozen=True)
class PendingStep:
    """A step that the host has finished, but perhaps not the device.

    Attributes:
        marks: [span index or -1, host ns, ...], two entries for each start or end of a span.
        events: one device event for each mark; empty if only the host clock is used.
        boundaries: device events at the start and end of the step; (None, None) on the host.
    """

    step: int
    epoch: int
    frames: int
    t: float
    start_ns: int
    wall_ns: int
    excluded_ns: int
    marks: list[int]
    overlapped: list[tuple[int, int, int]]
    events: list[Any]
    boundaries: tuple[Any, Any]

    def is_done(self) -> bool:
        """Return whether the device has passed the end of the step; never waits."""
        end = self.boundaries[1]
        return end is None or bool(end.query())

    def resolve(self) -> ResolvedStep:
        """Return the step's times."""
        on_host = [(time_ns - self.start_ns) / 1e9 for time_ns in self.marks[1::2]]
        pieces = exclusive_pieces(self.marks[::2])
        start, end = self.boundaries
        if end is None:
            spans, host, wall_s = _timed(pieces, on_host), [], self.wall_ns / 1e9
        else:
            # The device lags behind the host, so only differences between its events have meaning.  The first
            # event of the step is placed where the host recorded it.
            on_device = [on_host[0] + self.events[0].elapsed_time(e) / 1e3 for e in self.events]
            spans = _timed(pieces, on_device)
            host = [p for p in _timed(pieces, on_host) if p[0] in HOST_TIMED]
            wall_s = max(start.elapsed_time(end) / 1e3 - self.excluded_ns / 1e9, 0.0)
        overlapped = [(i, (a - self.start_ns) / 1e9, (b - a) / 1e9) for i, a, b in self.overlapped]
        return ResolvedStep(self.step, self.epoch, self.frames, self.t, wall_s, spans, host, overlapped)


def exclusive_pieces(codes: list[int]) -> list[tuple[int, int, int]]:
    """Split nested spans into pieces that do not overlap.

    Args:
        codes: span index where a span starts, -1 where the innermost open one ends.

    Returns:
        (span index, position of the mark where the piece starts, of the one where it ends), in order of time.
    """
    pieces: list[tuple[int, int, int]] = []
    open_spans: list[int] = []
    for position, code in enumerate(codes):
        if open_spans:
            pieces.append((open_spans[-1], position - 1, position))
        if code >= 0:
            open_spans.append(code)
        else:
            open_spans.pop()
    assert not open_spans, "a step ended inside a span"
    return pieces


def _timed(pieces: list[tuple[int, int, int]], times_s: list[float]) -> list[Piece]:
    """Assign times to pieces; evaluation and checkpoints inside a step are not spans of it."""
    return [
        (index, times_s[a], times_s[b] - times_s[a]) for index, a, b in pieces if index < len(STEP_SPAN_NAMES)
    ]


def _rounded(pieces: list[Piece]) -> list[tuple[str, float, float]]:
    names = STEP_SPAN_NAMES + EVENT_NAMES
    return [(names[i], round(start, 6), round(duration, 6)) for i, start, duration in pieces]


@dataclass
class _Sums:
    steps: int = 0
    frames: int = 0
    wall_s: float = 0.0
    first_step: int = 0
    last_step: int = 0
    spans_s: list[float] = field(default_factory=lambda: [0.0] * len(STEP_SPAN_NAMES))
    host_s: dict[int, float] = field(default_factory=dict)
    overlapped_s: dict[int, float] = field(default_factory=dict)
    #: Seconds of the meetings that followed these steps.
    meeting_s: float = 0.0
    #: Seconds of communication in each step, 4 bytes per step.
    comm_of_steps: array[float] = field(default_factory=lambda: array("f"))

    def add(self, step: ResolvedStep) -> None:
        if self.steps == 0:
            self.first_step = step.step
        self.last_step = step.step
        self.steps += 1
        self.frames += step.frames
        self.wall_s += step.wall_s
        for index, _, duration in step.spans:
            self.spans_s[index] += duration
        self.comm_of_steps.append(sum(duration for index, _, duration in step.spans if index == _COMM))
        for sums, pieces in ((self.host_s, step.host), (self.overlapped_s, step.overlapped)):
            for index, _, duration in pieces:
                sums[index] = sums.get(index, 0.0) + duration


class StepTotals:
    """Sums over the steps after the warm-up, or over all steps if the run is shorter."""

    def __init__(self, warmup_steps: int) -> None:
        """Args: warmup_steps: number of first steps to exclude."""
        self._warmup_steps = warmup_steps
        self._warmup = _Sums()
        self._measured = _Sums()
        self._events_s = dict.fromkeys(_PAUSES, 0.0)

    def add(self, step: ResolvedStep) -> None:
        """Count a step."""
        in_warmup = self._warmup.steps < self._warmup_steps
        (self._warmup if in_warmup else self._measured).add(step)

    def add_event(self, name: str, wall_s: float) -> None:
        """Count an event, after all steps before it."""
        if name == MEETING:
            # A meeting waits for what other ranks have left of the steps before it.
            (self._measured if self._measured.steps > 0 else self._warmup).meeting_s += wall_s
        else:
            self._events_s[name] += wall_s

    @property
    def comm_of_steps(self) -> list[float]:
        """Seconds of communication in each step included in the sums."""
        return list((self._measured if self._measured.steps > 0 else self._warmup).comm_of_steps)

    def as_dict(self) -> dict[str, Any]:
        """Return the sums under their names in timing.json."""
        measured = self._measured.steps > 0
        sums = self._measured if measured else self._warmup
        result: dict[str, Any] = {
            "warmup_steps": self._warmup_steps if measured else 0,
            "steps": sums.steps,
            "first_step": sums.first_step,
            "last_step": sums.last_step,
            "frames": sums.frames,
            "wall_s": sums.wall_s,
            "spans_s": dict(zip(STEP_SPAN_NAMES, sums.spans_s, strict=True)),
        }
        if sums.host_s:
            result["host_s"] = {STEP_SPAN_NAMES[i]: s for i, s in sorted(sums.host_s.items())}
        if sums.overlapped_s:
            names = STEP_SPAN_NAMES + EVENT_NAMES
            result["overlapped_s"] = {names[i]: s for i, s in sorted(sums.overlapped_s.items())}
        result |= {f"{name}_s": seconds for name, seconds in self._events_s.items()}
        return result | {f"{MEETING}_s": sums.meeting_s}
