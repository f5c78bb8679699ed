"""Find the steps in which every rank has a whole batch: only such are measured."""

from __future__ import annotations

from collections.abc import Callable

from speechdp.data.loader import Step
from speechdp.data.plan import EpochPlan
from speechdp.errors import ConfigError


class FullBatches:
    """Passes over what is left at the end of a rank's part: fewer segments, or none while others train.

    Every rank passes over the same steps, by the epoch plan alone.

    Args:
        plan: returns the plan of an epoch; pure.
        batch_size: segments of a whole batch; 0: frames count, and a batch with any is whole.
    """

    def __init__(self, plan: Callable[[int], EpochPlan], batch_size: int) -> None:
        self._plan, self._least = plan, max(1, batch_size)
        self._epoch, self._of_epoch = 0, plan(0)

    def check(self) -> None:
        """Refuse data of which no step is whole.  Raises ConfigError."""
        if not any(self.is_whole(index) for index in range(self._of_epoch.num_steps)):
            ranks = len(self._of_epoch.ranks)
            raise ConfigError(
                f"profile: in no step has each of {ranks} rank(s) a whole batch of {self._least} segments; "
                "give a smaller --batch-size, or prepare more data"
            )

    def holds(self, step: Step) -> bool:
        """Say whether every rank has a whole batch in this step."""
        if step.epoch != self._epoch:
            self._epoch, self._of_epoch = step.epoch, self._plan(step.epoch)
        return self.is_whole(step.at.index)

    def is_whole(self, index: int) -> bool:
        """Say the same of a step of the epoch asked for last, the first one to begin with."""
        return all(len(rank.batch(index)) >= self._least for rank in self._of_epoch.ranks)
