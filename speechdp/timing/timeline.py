"""Time every part of every training step on one rank and write it as one JSON line per step.

A span costs two reads of the clock and four appends; everything else happens once per step, in `end_step`.
The line format and the meaning of each span are in docs/timing.md.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from contextlib import AbstractContextManager
from enum import Enum
from pathlib import Path
from time import perf_counter_ns
from types import TracebackType
from typing import Any

import torch

from speechdp.jsonl import LineFile
from speechdp.timing.device_events import CudaEvents, DeviceEvents
from speechdp.timing.load import LoadMeter
from speechdp.timing.spans import EXIT, DeviceSpan, HostSpan, OverlappedSpan, innermost
from speechdp.timing.steps import PERIODS_FILE, PendingStep, StepTotals


class Span(str, Enum):
    """Activities of a rank.  The first six are parts of a step, the others are outside of steps."""

    code: int

    DATA_WAIT = "data_wait"
    H2D = "h2d"
    FORWARD = "forward"
    BACKWARD = "backward"
    COMM = "comm"
    UPDATE = "update"
    EVAL = "eval"
    CHECKPOINT = "checkpoint"
    CAPTURE = "capture"
    MEETING = "meeting"

    def __init__(self, _value: str) -> None:
        # An index into a list: hashing an Enum member runs Python code, too slow for the hot path.
        self.code = len(self.__class__.__members__)


STEP_SPANS = (Span.DATA_WAIT, Span.H2D, Span.FORWARD, Span.BACKWARD, Span.COMM, Span.UPDATE)
EVENT_SPANS = (Span.EVAL, Span.CHECKPOINT, Span.CAPTURE, Span.MEETING)
SPAN_NAMES = tuple(span.value for span in Span)


class Timeline:
    """Record of how one rank spends its time.

    Spans belong to the thread that created the timeline.  The time of a nested span is subtracted from the
    outer one, so the spans of a step never add up to more than the step.  A span opened by another thread (a
    gradient hook on CUDA's autograd thread, a background exchange) is recorded separately, as *overlapped*,
    with the host clock, and is not included in the shares of the step.

    On a CUDA device spans are measured between events on the current stream: the time in which the device
    worked or was idle between them.  Events are read once the device has passed them; nothing waits for the
    device within a step.  DATA_WAIT and COMM are also measured with the host clock (how long the host was
    blocked).
    """

    def __init__(
        self,
        path: Path | None,
        *,
        rank: int,
        device: torch.device,
        warmup_steps: int = 4,
        device_events: DeviceEvents | None = None,
    ) -> None:
        """Open the record.

        Args:
            path: JSONL file to append to; None: only sums are kept.
            rank: this rank.
            device: device of the model; selects the host clock or CUDA events.
            warmup_steps: number of first steps of this process to exclude from `summary`.
            device_events: source of device time stamps; None: CUDA events, if `device` is a CUDA device.

        Raises:
            RunError: the file cannot be opened.
        """
        if device_events is None and device.type == "cuda":
            device_events = CudaEvents(device)
        self.rank = rank
        self._device_events = device_events
        self._owner = threading.get_ident()
        self._origin_ns = perf_counter_ns()
        self._resumed_time_s = 0.0
        # Code and time of every start and end of a span: [code, ns, code, ns, ...].
        self._marks: list[int] = []
        self._events: list[Any] = []
        self._overlapped: deque[tuple[int, int, int]] = deque()
        self._step_start_ns: int | None = None
        self._boundary: Any = None
        self._lead_ns = 0  # event time before the first span of the step
        self._excluded_ns = 0  # event time since the start of the step
        self._event_start_ns: int | None = None
        self._event_span: Span | None = None
        self._trained_ns = 0
        self._pending: deque[PendingStep] = deque()
        self._totals = StepTotals(warmup_steps)
        self._load: LoadMeter | None = None  # from the first step on
        self._timers = self._make_timers()
        self._file = None if path is None else LineFile(path)
        #: File of the averaging periods, which are the same on every rank; opened when there is one.
        self._periods_path = None if path is None or rank > 0 else path.with_name(PERIODS_FILE)
        self._periods_file: LineFile | None = None

    def span(self, span: Span) -> AbstractContextManager[None]:
        """Return the context manager that times `span`; there is one object per span, created once."""
        if threading.get_ident() != self._owner:
            return OverlappedSpan(span.code, self._overlapped)
        return self._timers[span.code]

    def event(self, span: Span) -> AbstractContextManager[None]:
        """Return the context manager that times an event, such as an evaluation, which is not step time.

        Only a meeting counts as training time: as long as others still train, training continues.
        """
        assert span in EVENT_SPANS, span
        return self._timers[span.code]

    def end_step(self, step: int, epoch: int, frames: int) -> None:
        """Close the step's record; the next step starts here.

        Args:
            step: number of the step in the run.
            epoch: epoch it belongs to.
            frames: frames of this rank's batch; 0 if it only took part in the exchange.
        """
        now = perf_counter_ns()
        marks = self._marks
        start = self._step_start_ns
        if start is None:
            start = marks[1] if marks else now
            self._boundary = self._events[0] if self._events else self._record_event()
            self._load = LoadMeter()
        events, boundary, end = self._events, self._boundary, self._record_event()
        overlapped = [self._overlapped.popleft() for _ in range(len(self._overlapped))]
        step_start = start + self._lead_ns
        self._pending.append(
            PendingStep(
                step=step,
                epoch=epoch,
                frames=frames,
                t=self._resumed_time_s + (step_start - self._origin_ns) / 1e9,
                start_ns=step_start,
                wall_ns=now - start - self._excluded_ns,
                excluded_ns=self._excluded_ns,
                marks=marks.copy(),
                overlapped=overlapped,
                events=events.copy(),
                boundaries=(boundary, end),
            )
        )
        self._trained_ns += now - start - self._excluded_ns
        # The timers hold references to these two lists: empty them, never replace them.
        marks.clear()
        events.clear()
        self._step_start_ns, self._boundary = now, end
        self._lead_ns = self._excluded_ns = 0
        self._resolve()

    def note_period(self, step: int, period: str) -> None:
        """Record on rank 0 that an averaging period is used from now on.

        Args:
            step: number of steps done.
            period: as its option is written: `16`, `600kf`, `5s`.

        Raises:
            RunError: the file cannot be written.
        """
        if self._periods_path is None:
            return
        if self._periods_file is None:
            self._periods_file = LineFile(self._periods_path, flush_interval_ns=0)
        record = {"step": step, "t": round(self.training_time_s, 6), "period": period}
        self._periods_file.write(json.dumps(record))

    def resume_at(self, time_s: float) -> None:
        """Continue from the run's training time, s; call before this process's first step."""
        assert self._trained_ns == 0 and self._step_start_ns is None
        self._resumed_time_s = time_s

    @property
    def origin_s(self) -> float:
        """Value of `time.perf_counter` that corresponds to time 0 in the records of steps."""
        return self._origin_ns / 1e9 - self._resumed_time_s

    @property
    def training_time_s(self) -> float:
        """Training time of the run so far, s: includes meetings, excludes evaluation and checkpoints."""
        running = 0
        if self._step_start_ns is not None:
            until = perf_counter_ns() if self._event_start_ns is None else self._event_start_ns
            running = until - self._step_start_ns - self._excluded_ns
        return self._resumed_time_s + (self._trained_ns + running) / 1e9

    def open_span(self) -> tuple[str, float] | None:
        """Return the open span and its duration so far, s; None between spans.  For any thread."""
        begun = innermost(self._marks.copy())
        event_ns, event = self._event_start_ns, self._event_span
        if event is not None and event_ns is not None and (begun is None or begun[1] < event_ns):
            begun = event.code, event_ns
        return None if begun is None else (SPAN_NAMES[begun[0]], (perf_counter_ns() - begun[1]) / 1e9)

    def summary(self) -> dict[str, Any]:
        """Return this rank's entry of timing.json.  Waits for the device."""
        self._finish_pending()
        load = {} if self._load is None else {"load": self._load.so_far()}
        return {"rank": self.rank, **self._totals.as_dict(), **load}

    def comm_of_steps(self) -> list[float]:
        """Return the seconds of communication in each step that `summary` includes.  Waits for the device."""
        self._finish_pending()
        return self._totals.comm_of_steps

    def close(self) -> None:
        """Wait for the device, write the remaining steps and close the file.  Safe to call twice."""
        self._finish_pending()
        for file in (self._file, self._periods_file):
            if file is not None:
                file.close()
        self._file = self._periods_file = self._periods_path = None

    def _make_timers(self) -> list[AbstractContextManager[None]]:
        timers: list[AbstractContextManager[None]] = []
        for span in STEP_SPANS:
            if self._device_events is None:
                timers.append(HostSpan(span.code, self._marks))
            else:
                timers.append(DeviceSpan(span.code, self._marks, self._events, self._device_events))
        return timers + [_Event(self, span) for span in EVENT_SPANS]

    def _record_event(self) -> Any:
        return None if self._device_events is None else self._device_events.record()

    def _finish_pending(self) -> None:
        if self._device_events is not None:
            self._device_events.synchronize()
        self._resolve()

    def _resolve(self) -> None:
        """Turn steps whose device work is done into lines and sums, oldest first."""
        while self._pending and self._pending[0].is_done():
            pending = self._pending.popleft()
            resolved = pending.resolve()
            self._totals.add(resolved)
            if self._file is not None:
                self._file.write(resolved.to_line())
            if self._device_events is not None:
                # Keep the end boundary: the next step starts at it.  The start boundary of the first step is
                # the event of its first span, which must not enter the pool twice.
                first = pending.boundaries[0]
                own_first = pending.events and pending.events[0] is first
                self._device_events.recycle(pending.events if own_first else [first, *pending.events])

    def _begin_event(self, span: Span) -> tuple[int, int]:
        """Return start time and position in the marks, after waiting for the device to finish the steps."""
        assert self._event_start_ns is None, "an event inside another"
        if self._device_events is not None:
            self._device_events.synchronize()
        self._event_span, self._event_start_ns = span, perf_counter_ns()
        return self._event_start_ns, len(self._marks)

    def _finish_event(self, span: Span, start_ns: int, num_marks: int) -> None:
        if self._device_events is not None:
            self._device_events.synchronize()
        now = perf_counter_ns()
        self._resolve()  # count the steps before the event before it
        # Evaluation also reads data and runs the model: its spans are not part of the step.
        del self._marks[num_marks:]
        if self._device_events is not None:
            self._device_events.recycle(self._events[num_marks // 2 :])
            del self._events[num_marks // 2 :]
        self._event_start_ns = None
        is_training = self._step_start_ns is not None or num_marks > 0
        if is_training:
            self._excluded_ns += now - start_ns
            if span is Span.MEETING:
                self._trained_ns += now - start_ns
        if num_marks:  # inside a step: leave a gap in the open span
            self._marks += (span.code, start_ns, EXIT, now)
            if self._device_events is not None:
                self._events += (self._device_events.record(), self._device_events.record())
        else:
            self._lead_ns = self._excluded_ns
        wall_s = (now - start_ns) / 1e9
        if is_training or span is not Span.MEETING:
            self._totals.add_event(span.value, wall_s)
        if self._file is not None:
            t = self._resumed_time_s + (start_ns - self._origin_ns) / 1e9
            self._file.write(json.dumps({"event": span.value, "t": round(t, 6), "wall": round(wall_s, 6)}))


class _Event:
    """Time an event and exclude it from the step around it."""

    def __init__(self, timeline: Timeline, span: Span) -> None:
        self._timeline = timeline
        self._span = span
        self._begun = (0, 0)

    def __enter__(self) -> None:
        self._begun = self._timeline._begin_event(self._span)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timeline._finish_event(self._span, *self._begun)
