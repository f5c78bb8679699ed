"""Signs of progress that a rank gives while it trains, read by its watchdog thread."""

from __future__ import annotations


class Pulse:
    """Counts signs of progress.

    Attributes:
        beats: number of steps, evaluated batches, and parts of checkpoints and of the run's end so far.
        part: current part of the run, for messages when no span is open.
    """

    def __init__(self) -> None:
        self.beats = 0
        self.part = "start"

    def beat(self, part: str | None = None) -> None:
        """Record progress; `part`, if given, names the part of the run that begins."""
        self.beats += 1
        if part is not None:
            self.part = part
