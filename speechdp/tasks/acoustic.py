"""The acoustic-model task: frame cross-entropy against HMM states."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from speechdp.data.batch import IGNORED_TARGET, Batch
from speechdp.models.lstm_am import LstmAcousticModel


@dataclass(frozen=True)
class LossSum:
    """A loss as a sum and a count, never a mean: right also when ranks hold different numbers of frames.

    Attributes:
        total: scalar, nats summed over frames; differentiable.
        num_frames: frames summed over.
    """

    total: Tensor
    num_frames: int


@dataclass(frozen=True)
class FrameScores:
    """Sums over held-out frames.

    Attributes:
        log_prob: log-probability of the aligned class, nats.
        correct: frames whose most probable class is the aligned one.
        num_frames: frames scored.
    """

    log_prob: float
    correct: int
    num_frames: int


class AcousticTask:
    """What an acoustic model is trained for and judged by."""

    def loss(self, model: LstmAcousticModel, batch: Batch) -> LossSum:
        """Return the summed cross-entropy of a batch with at least one frame."""
        logits, targets = self._learnt_frames(model, batch)
        return LossSum(nn.functional.cross_entropy(logits, targets, reduction="sum"), batch.num_frames)

    @torch.no_grad()
    def score(self, model: LstmAcousticModel, batch: Batch) -> FrameScores:
        """Score a batch (Kaldi's log-probability per frame and frame accuracy, as sums)."""
        logits, targets = self._learnt_frames(model, batch)
        log_prob = -nn.functional.cross_entropy(logits, targets, reduction="sum")
        correct = (logits.argmax(dim=1) == targets).sum()
        return FrameScores(log_prob.item(), int(correct.item()), batch.num_frames)

    def _learnt_frames(self, model: LstmAcousticModel, batch: Batch) -> tuple[Tensor, Tensor]:
        # Padding and context leave before the output layer: with 32,000 classes it is most of the work.
        learnt = batch.targets != IGNORED_TARGET  # (B, T)
        encoded = model.encode(batch.features, batch.lengths)[learnt]  # (frames, H)
        return model.output(encoded), batch.targets[learnt]
