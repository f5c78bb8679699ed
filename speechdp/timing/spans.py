"""The context managers of `Timeline.span`: each is created once and used for every step.

They write to two lists that the timeline reads and empties at the end of a step: marks
[span code, host ns, EXIT, host ns, ...] and, on a device, one event for each pair.
"""

from __future__ import annotations

from collections import deque
from time import perf_counter_ns

from speechdp.timing.device_events import DeviceEvent, DeviceEvents

#: Code of the mark that ends a span.
EXIT = -1


def innermost(marks: list[int]) -> tuple[int, int] | None:
    """Return code and start (ns) of the innermost open span; the last mark may be incomplete."""
    begun: list[tuple[int, int]] = []
    for code, ns in zip(marks[0::2], marks[1::2], strict=False):
        if code != EXIT:
            begun.append((code, ns))
        elif begun:
            begun.pop()
    return begun[-1] if begun else None


class HostSpan:
    """Time one span with the host clock."""

    __slots__ = ("_code", "_push")

    def __init__(self, code: int, marks: list[int]) -> None:
        """Args: code: code of the span; marks: list for starts and ends."""
        self._push = marks.append
        self._code = code

    def __enter__(self) -> None:
        push = self._push
        push(self._code)
        push(perf_counter_ns())

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        push = self._push
        push(EXIT)
        push(perf_counter_ns())


class DeviceSpan:
    """Time one span with device events and with the host clock."""

    __slots__ = ("_code", "_push", "_push_event", "_record")

    def __init__(self, code: int, marks: list[int], events: list[DeviceEvent], source: DeviceEvents) -> None:
        """Args: code: of the span; marks, events: lists for starts and ends; source: of the events."""
        self._push = marks.append
        self._push_event = events.append
        self._record = source.record
        self._code = code

    def __enter__(self) -> None:
        self._push_event(self._record())
        self._push(self._code)
        self._push(perf_counter_ns())

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._push_event(self._record())
        self._push(EXIT)
        self._push(perf_counter_ns())


class OverlappedSpan:
    """Time a span on another thread than the timeline's; created for each use, as several may run at once."""

    __slots__ = ("_code", "_sink", "_start_ns")

    def __init__(self, code: int, sink: deque[tuple[int, int, int]]) -> None:
        """Args: code: code of the span; sink: gets (code, start ns, end ns) when the span ends."""
        self._sink = sink
        self._code = code
        self._start_ns = 0

    def __enter__(self) -> None:
        self._start_ns = perf_counter_ns()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._sink.append((self._code, self._start_ns, perf_counter_ns()))
