"""Measure where the data path's time goes: reading, preprocessing, collating, copying to the GPU."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

#: The stages that a batch passes, in order.
STAGES = ("read", "preprocess", "collate", "send", "h2d")


class StageTimes:
    """Seconds spent in each stage, summed over the threads that worked in it; thread-safe.

    Attributes:
        facts: further values for the summary, JSON-like.
    """

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._seconds = dict.fromkeys(STAGES, 0.0)
        self._bytes = 0
        self._batches = 0
        self._frames = 0
        self._computed_frames = 0

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a stage of one batch."""
        begun = perf_counter()
        try:
            yield
        finally:
            self.add(name, perf_counter() - begun)

    def add(self, name: str, seconds: float, num_bytes: int = 0) -> None:
        """Add one batch's seconds to a stage, and the bytes that it read."""
        with self._lock:
            self._seconds[name] += seconds
            self._bytes += num_bytes

    def count(self, frames: int, computed_frames: int) -> None:
        """Count a finished batch: its frames to be learnt, and those computed on, padding included."""
        with self._lock:
            self._batches += 1
            self._frames += frames
            self._computed_frames += computed_frames

    def summary(self) -> dict[str, Any]:
        """Return the sums as timing.json holds them; stages that took no time are left out."""
        with self._lock:
            stages = {name: round(s, 6) for name, s in self._seconds.items() if s > 0}
            return {
                "stages_s": stages,
                "read_bytes": self._bytes,
                "batches": self._batches,
                "frames": self._frames,
                "computed_frames": self._computed_frames,
                **self.facts,
            }
