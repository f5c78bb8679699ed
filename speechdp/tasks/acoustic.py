"""The acoustic-model task: frame cross-entropy against HMM states."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from speechdp.data.loading.batch import IGNORED_TARGET, Batch
from speechdp.models.lstm_am import LstmAcousticModel
from speechdp.tasks.base import FrameScores, LossSum, Task
from speechdp.tasks.metrics import FRAME_ACCURACY, LOG_PROB, RECORDS

__all__ = ["AcousticTask", "FrameScores", "LossSum"]


class AcousticTask(Task):
    """What an acoustic model is trained for and judged by."""

    name = "acoustic"
    metrics = RECORDS["acoustic"].metrics
    decodes = RECORDS["acoustic"].decodes

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
        sums = {LOG_PROB.key: log_prob.item(), FRAME_ACCURACY.key: float(correct.item())}
        return FrameScores(sums, batch.num_frames)

    def _learnt_frames(self, model: LstmAcousticModel, batch: Batch) -> tuple[Tensor, Tensor]:
        # Padding and context leave before the output layer: with 32,000 classes it is most of the work.
        learnt = batch.targets != IGNORED_TARGET  # (B, T)
        encoded = model.encode(batch.features, batch.lengths)[learnt]  # (frames, H)
        return model.output(encoded), batch.targets[learnt]
