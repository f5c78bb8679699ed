"""Batches of a setting that are made ready only while it has its turn."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Iterator

from speechdp.data.loading.loader import Step, StepLoader
from speechdp.data.plan.assignment import Assignment

#: Batches that lie ready when a turn begins, as they do in training.
AHEAD = 4


class Rations:
    """Hands a loader's thread as many assignments as are allowed; the thread waits for more.

    A meeting ends what is allowed: what comes after it belongs to the next turn.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._allowed: float = 0
        self._is_closed = False

    def allow(self, number: float = math.inf) -> None:
        """Allow so many more; infinity: all up to the next meeting."""
        with self._changed:
            self._allowed += number
            self._changed.notify_all()

    def close(self) -> None:
        """Let the thread end."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def pass_on(self, assignments: Iterator[Assignment]) -> Iterator[Assignment]:
        """Yield the assignments as they are allowed; for the loader's thread."""
        while self._take():
            assignment = next(assignments, None)
            if assignment is None:
                return
            if assignment.meeting is not None:
                with self._changed:
                    self._allowed = 0
            yield assignment

    def _take(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._allowed > 0)
            self._allowed -= 1
            return not self._is_closed


class RationedLoader(StepLoader):
    """The steps of a synchronous setting: as many as it takes in a turn, with some that lie ready before.

    As in training, reading goes on beside the steps of a turn, to its end; then it stands still.

    Args:
        loader: reads what `rations` allow.
    """

    def __init__(self, loader: StepLoader, rations: Rations) -> None:
        self._loader, self._rations = loader, rations
        self._ready: deque[Step] = deque()
        self._under_way = 0

    def allow(self, steps: int) -> None:
        """Have so many more steps read."""
        self._under_way += steps
        self._rations.allow(steps)

    def settle(self) -> None:
        """Wait until nothing is being read any more."""
        while self._under_way:
            self._ready.append(self._read())

    def __next__(self) -> Step:
        return self._ready.popleft() if self._ready else self._read()

    def _read(self) -> Step:
        self._under_way -= 1
        return next(self._loader)

    def close(self) -> None:
        self._rations.close()
        self._loader.close()
