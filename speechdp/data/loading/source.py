"""Define the interface for sources of a rank's batches: its own reading, or another rank that feeds it."""

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
    """A batch that is being made."""

    def result(self) -> Batch:
        """Wait for the batch.  Raises the error that occurred in making it (ShardError for damaged data)."""
        ...


@dataclass(frozen=True)
class Ready:
    """A batch that is ready."""

    batch: Batch

    def result(self) -> Batch:
        """Return the batch."""
        return self.batch


class SplitSource(ABC):
    """Makes batches of one split.

    Attributes:
        index: the utterances of the split.
        feature_dim: values per frame of its batches: the model's input size.
        times: seconds spent in each stage.
        left_out: utterances that are not learnt.
        read_ahead: batches that should be in work at a time, so that nobody who makes them is idle.
        beat: called whenever `count_classes` has made progress; counting may take minutes.
    """

    index: CorpusIndex
    feature_dim: int
    times: StageTimes
    left_out: LeftOut
    read_ahead: int = 1
    beat: Callable[[], None] = staticmethod(lambda: None)

    @abstractmethod
    def start(self, segments: Segments, place: PlanPosition | None = None) -> Pending:
        """Start making a batch.  Must not be called by two threads at a time.

        Args:
            segments: contents of the batch; none gives a batch of 0 frames.
            place: place of the batch in training; seeds what is drawn at random.  None: nothing is drawn.
        """

    def batch(self, segments: Segments, place: PlanPosition | None = None) -> Batch:
        """Make a batch and wait for it."""
        return self.start(segments, place).result()

    @abstractmethod
    def count_classes(self, num_classes: int, share: int, num_shares: int) -> npt.NDArray[np.int64]:
        """Count frames and runs of each target class over one of `num_shares` shares of the split.

        Returns:
            (2, num_classes); the sum over all shares covers the split.
        """

    @abstractmethod
    def close(self) -> None:
        """Release files, threads and channels; safe to call twice."""
