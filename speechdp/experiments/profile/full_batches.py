"""Find the steps in which every rank has a whole batch: only such are measured."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from speechdp.counting import counted
from speechdp.data.loading.loader import Step
from speechdp.data.plan.epoch_plan import EpochPlan
from speechdp.errors import ConfigError


class FullBatches:
    """Passes over what is left at the end of a rank's part: fewer segments, or none while others train.

    Every rank passes over the same steps, by the epoch plans alone.  They are looked into beforehand: to plan
    an epoch takes seconds of a large corpus, and would lengthen the step in which it begins.

    Args:
        plan: returns the plan of an epoch; pure.
        batch_size: segments of a whole batch; 0: frames count, and a batch with any is whole.
        steps: how many whole ones will be taken.

    Raises:
        ConfigError: no step of the first epoch is whole.
    """

    def __init__(self, plan: Callable[[int], EpochPlan], batch_size: int, steps: int) -> None:
        self._whole: set[tuple[int, int]] = set()
        for epoch in itertools.count():
            of_epoch = plan(epoch)
            indices = itertools.islice(whole_steps(of_epoch, batch_size), steps - len(self._whole))
            self._whole.update((epoch, index) for index in indices)
            if not self._whole:
                raise no_whole_batch(len(of_epoch.ranks), batch_size)
            if len(self._whole) >= steps:
                return

    def holds(self, step: Step) -> bool:
        """Say whether every rank has a whole batch in this step, one of those that will be taken."""
        return (step.epoch, step.at.index) in self._whole


def whole_steps(plan: EpochPlan, batch_size: int) -> Iterator[int]:
    """Yield the steps of an epoch in which every rank has a whole batch."""
    least = max(1, batch_size)
    for index in range(plan.num_steps):
        if all(len(rank.batch(index)) >= least for rank in plan.ranks):
            yield index


def no_whole_batch(num_ranks: int, batch_size: int) -> ConfigError:
    """Return the refusal of data of which no step is whole."""
    least = max(1, batch_size)
    return ConfigError(
        f"profile: on {counted(num_ranks, 'rank')} there is no step in which each has a whole batch of "
        f"{counted(least, 'segment')}; give a smaller --batch-size, or prepare more data"
    )
