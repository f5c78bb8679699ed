"""What a model is trained for: a loss, and scores on held-out data, both as sums over frames."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from speechdp.data.loading.batch import Batch
from speechdp.tasks.metrics import Metric, TaskRecord


@dataclass(frozen=True)
class LossSum:
    """A loss as a sum and a count, never a mean: right also when ranks hold different numbers of frames.

    Attributes:
        total: scalar, in the unit of the task's loss, summed over frames; differentiable.
        num_frames: frames summed over.
    """

    total: Tensor
    num_frames: int


@dataclass(frozen=True)
class FrameScores:
    """Sums over held-out frames.

    Attributes:
        sums: of each of the task's metrics, by its key; divided by all ranks' frames they are its values.
        num_frames: frames scored.
    """

    sums: dict[str, float]
    num_frames: int


class Task(ABC):
    """What a model is trained for and judged by; `model` is of the task's own kind.

    Attributes:
        name: as on the command line.
        metrics: what models are judged by on held-out data; the first is what they are chosen by.
        decodes: whether `decode` reads its models, so that its runs may have a word error rate.
    """

    name: ClassVar[str]
    metrics: ClassVar[tuple[Metric, ...]]
    decodes: ClassVar[bool] = False

    @classmethod
    def record(cls) -> TaskRecord:
        """Return what run.json says of it, from which reports take their columns."""
        return TaskRecord(cls.metrics, cls.decodes)

    @abstractmethod
    def loss(self, model: Any, batch: Batch) -> LossSum:
        """Return the summed loss of a batch with at least one frame."""

    @abstractmethod
    def score(self, model: Any, batch: Batch) -> FrameScores:
        """Score a model in evaluation mode on a batch, without gradients."""
