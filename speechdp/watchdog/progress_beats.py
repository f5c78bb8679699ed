"""Signs of progress that a rank gives while it trains, read by its watchdog thread."""

from __future__ import annotations


class Pulse:
    """Counts signs of progress.

    Attributes:
        beats: steps, evaluated batches, parts of checkpoints and of the run's end so far.
        part: of the run, for messages where no span is open.
    """

    def __init__(self) -> None:
        self.beats = 0
        self.part = "start"

    def beat(self, part: str | None = None) -> None:
        """Note progress; `part` begins another part of the run."""
        self.beats += 1
        if part is not None:
            self.part = part
