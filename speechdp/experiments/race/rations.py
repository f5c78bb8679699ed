"""Let a setting's loader prepare batches only during the setting's turn."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Iterator

from speechdp.data.loading.loader import Step, StepLoader
from speechdp.data.plan.assignment import Assignment

#: Batches that are ready when a turn begins, as in training.
AHEAD = 4


class Rations:
    """Limits the number of assignments that a loader's thread gets; the thread waits for more.

    A meeting uses up the rest of the allowance, because what follows it belongs to the next turn.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._allowed: float = 0
        self._is_closed = False

    def allow(self, number: float = math.inf) -> None:
        """Allow `number` more assignments; infinity: all up to the next meeting."""
        with self._changed:
            self._allowed += number
            self._changed.notify_all()

    def close(self) -> None:
        """Let the thread end."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def pass_on(self, assignments: Iterator[Assignment]) -> Iterator[Assignment]:
        """Yield assignments as they are allowed; called in the loader's thread."""
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
    """The steps of a synchronous setting: as many as a turn has, some of them ready before it begins.

    As in training, reading runs in parallel with the steps until the end of the turn; then it pauses.

    Args:
        loader: reads as much as `rations` allow.
    """

    def __init__(self, loader: StepLoader, rations: Rations) -> None:
        self._loader, self._rations = loader, rations
        self._ready: deque[Step] = deque()
        self._under_way = 0

    def allow(self, steps: int) -> None:
        """Let `steps` more steps be read."""
        self._under_way += steps
        self._rations.allow(steps)

    def settle(self) -> None:
        """Wait until reading has paused."""
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
