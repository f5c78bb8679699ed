"""CUDA graphs without a GPU."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


class Repeats:
    """A recorder without a GPU: a replay does the work once more and puts results where they were."""

    def __init__(self) -> None:
        self.num_recorded = self.num_replayed = 0

    def warm_up(self, work: Callable[[], object]) -> None:
        work()

    def record(self, work: Callable[[], list[Tensor]]) -> tuple[Callable[[], None], list[Tensor]]:
        places = [x.clone() for x in work()]
        self.num_recorded += 1

        def replay() -> None:
            self.num_replayed += 1
            for place, result in zip(places, work(), strict=True):
                place.copy_(result)

        return replay, places
