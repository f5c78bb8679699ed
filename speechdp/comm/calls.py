"""Which collective call of a run a rank is at: told by the rank, read by its watchdog's thread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

#: Where a script has come to once `main` has returned, as messages have it.
END_OF_MAIN = "the end of main"
#: What to do about ranks that are at different calls.
CALL_ALIKE = (
    "make the same collective calls on every rank, in the same order; rank 0 alone writes what is written "
    "once"
)


class Calls:
    """The collective calls that a script makes on one rank.

    Attributes:
        at: the call that the rank is in now, e.g. `run.save_checkpoint()`; "": in code of its own.
        last: the call that it was in last.
        beats: calls entered and left so far.
        has_ended: the script has no more to do; it waits for the others to end, for however long.
    """

    def __init__(self) -> None:
        self.at = ""
        self.last = "the start"
        self.beats = 0
        self.has_ended = False
        #: Runs under way in which a rank may be long with steps of its own.
        self._apart: list[object] = []

    @property
    def together(self) -> bool:
        """Whether all ranks of the job wait for each other in every step of every run."""
        return not self._apart

    def begin(self, run: object, *, together: bool) -> None:
        """Note that a run begins.

        Args:
            together: its ranks are all of the job, and wait for each other in every step.
        """
        if not together:
            self._apart.append(run)

    def end(self, run: object) -> None:
        """Note that a run has ended."""
        self._apart = [other for other in self._apart if other is not run]

    @contextmanager
    def of(self, call: str) -> Iterator[None]:
        """Be at a call for the block; "": in code of the script's own, for the length of it."""
        before = self.at
        self._go_to(call)
        try:
            yield
        finally:
            self._go_to(before)

    def _go_to(self, call: str) -> None:
        # Beats first: a watchdog that sees the new place must not take it for one held since the last beat.
        self.beats += 1
        self.last, self.at = self.at or self.last, call
