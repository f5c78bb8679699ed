"""Record which collective call of a run a rank is in, for the rank's watchdog thread to read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

#: What messages call the place a script has reached once `main` has returned.
END_OF_MAIN = "the end of main"
#: The remedy for ranks that are in different calls.
CALL_ALIKE = (
    "make the same collective calls on every rank, in the same order; rank 0 alone writes what is written "
    "once"
)


class Calls:
    """The collective calls that a script makes on one rank.

    Attributes:
        at: the call that the rank is in now, e.g. `run.save_checkpoint()`; "": the script's own code.
        last: the call that it was in last.
        beats: calls entered and left so far.
        has_ended: whether the script is finished and waits, for however long, for the others to end.
    """

    def __init__(self) -> None:
        self.at = ""
        self.last = "the start"
        self.beats = 0
        self.has_ended = False
        #: Active runs in which a rank may spend a long time in steps of its own.
        self._apart: list[object] = []

    @property
    def together(self) -> bool:
        """Whether all ranks of the job wait for each other in every step of every run."""
        return not self._apart

    def begin(self, run: object, *, together: bool) -> None:
        """Note that a run begins.

        Args:
            together: whether the run has all ranks of the job, and they wait for each other in every step.
        """
        if not together:
            self._apart.append(run)

    def end(self, run: object) -> None:
        """Note that a run has ended."""
        self._apart = [other for other in self._apart if other is not run]

    @contextmanager
    def of(self, call: str) -> Iterator[None]:
        """Record that the rank is in `call` during the block; "": in the script's own code."""
        before = self.at
        self._go_to(call)
        try:
            yield
        finally:
            self._go_to(before)

    def _go_to(self, call: str) -> None:
        # Beats first: a watchdog that sees the new call must not think the rank has been in it since the
        # previous beat.
        self.beats += 1
        self.last, self.at = self.at or self.last, call
