"""Where a rank's batches come from: its own reading, or another rank that feeds it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from speechdp.data.loading.batch import Batch
from speechdp.data.loading.left_out import LeftOut
from speechdp.data.loading.stage_times import StageTimes
from speechdp.data.plan.assignment import PlanPosition
from speechdp.data.plan.epoch_plan import CorpusIndex, Segments


class Pending(Protocol):
    """A batch under way."""

    def result(self) -> Batch:
        """Wait for the batch.  Raises what went wrong in making it (ShardError for damaged data)."""
        ...


@dataclass(frozen=True)
class Ready:
    """A batch that is there already."""

    batch: Batch

    def result(self) -> Batch:
        """Return the batch."""
        return self.batch


class SplitSource(ABC):
    """Makes batches of one split.

    Attributes:
        index: the utterances of the split.
        feature_dim: values a frame of its batches has: the model's input.
        times: where its time goes.
        left_out: utterances of its batches that are not learnt.
        read_ahead: batches that should be under way, lest some of those who make them stand idle.
        beat: called as `count_classes` goes on, which may take minutes.
    """

    index: CorpusIndex
    feature_dim: int
    times: StageTimes
    left_out: LeftOut
    read_ahead: int = 1
    beat: Callable[[], None] = staticmethod(lambda: None)

    @abstractmethod
    def start(self, segments: Segments, place: PlanPosition | None = None) -> Pending:
        """Begin to make a batch; called by one thread at a time.

        Args:
            segments: what is in the batch; none gives a batch of 0 frames.
            place: of the batch in training: what is drawn at random depends on it.  None draws nothing.
        """

    def batch(self, segments: Segments, place: PlanPosition | None = None) -> Batch:
        """Make a batch and wait for it."""
        return self.start(segments, place).result()

    @abstractmethod
    def count_classes(self, num_classes: int, share: int, num_shares: int) -> npt.NDArray[np.int64]:
        """Count targets over one of `num_shares` shares of the split: frames and runs of each class.

        Returns:
            (2, num_classes); the sum over all shares covers the split.
        """

    @abstractmethod
    def close(self) -> None:
        """Release files, threads and channels; safe to call twice."""
