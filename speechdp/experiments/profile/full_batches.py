"""Find the steps in which every rank has a full batch; only these are measured."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from speechdp.counting import counted
from speechdp.data.loading.loader import Step
from speechdp.data.plan.epoch_plan import EpochPlan
from speechdp.errors import ConfigError


class FullBatches:
    """Skips the remainder at the end of a rank's part: small batches, or none while other ranks train.

    Every rank skips the same steps, determined from the epoch plans alone.  The plans are made beforehand,
    because planning an epoch of a large corpus takes seconds and would lengthen the epoch's first step.

    Args:
        plan: returns the plan of an epoch; pure.
        batch_size: segments of a full batch; 0: batches are filled by frames, and any non-empty one counts.
        steps: number of full steps that will be taken.

    Raises:
        ConfigError: the first epoch has no full step.
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
        """Return whether this is one of the steps to take, in which every rank has a full batch."""
        return (step.epoch, step.at.index) in self._whole


def whole_steps(plan: EpochPlan, batch_size: int) -> Iterator[int]:
    """Yield the steps of an epoch in which every rank has a full batch."""
    least = max(1, batch_size)
    for index in range(plan.num_steps):
        if all(len(rank.batch(index)) >= least for rank in plan.ranks):
            yield index


def no_whole_batch(num_ranks: int, batch_size: int) -> ConfigError:
    """Return the error for data without a full step."""
    least = max(1, batch_size)
    return ConfigError(
        f"profile: on {counted(num_ranks, 'rank')} there is no step in which each has a whole batch of "
        f"{counted(least, 'segment')}; give a smaller --batch-size, or prepare more data"
    )
