"""What a model is trained for: a loss, and scores on held-out data, both as sums over frames."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from speechdp.data.loading.batch import Batch
from speechdp.data.shards.dataset import TaskName


@dataclass(frozen=True)
class LossSum:
    """A loss as a sum and a count, never a mean: right also when ranks hold different numbers of frames.

    Attributes:
        total: scalar, nats (of synthesis: absolute errors) summed over frames; differentiable.
        num_frames: frames summed over.
    """

    total: Tensor
    num_frames: int


@dataclass(frozen=True)
class FrameScores:
    """Sums over held-out frames.

    Attributes:
        log_prob: log-probability of what was to be learnt, nats; of spectrograms up to a constant, for an
            absolute error is minus the log-probability under a Laplace distribution.
        correct: frames whose most probable class is the aligned one; of synthesis, the attention's maximum
            summed over frames.
        num_frames: frames scored.
    """

    log_prob: float
    correct: float
    num_frames: int


class Task(ABC):
    """What a model is trained for and judged by; `model` is of the task's own kind.

    Attributes:
        name: as on the command line.
    """

    name: ClassVar[TaskName]

    @abstractmethod
    def loss(self, model: Any, batch: Batch) -> LossSum:
        """Return the summed loss of a batch with at least one frame."""

    @abstractmethod
    def score(self, model: Any, batch: Batch) -> FrameScores:
        """Score a model in evaluation mode on a batch, without gradients."""
