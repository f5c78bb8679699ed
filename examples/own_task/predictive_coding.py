"""Autoregressive predictive coding: a model that learns from speech alone to say how it goes on.

Source: Chung, Hsu, Tang, Glass 2019, "An unsupervised autoregressive model for speech representation
learning".
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from speechdp.data.loading.batch import Batch
from speechdp.errors import ConfigError
from speechdp.tasks.base import FrameScores, LossSum, Task, TaskData
from speechdp.tasks.metrics import Metric


class Predictor(nn.Module):
    """(B, T, F) features to (B, T, F) features of later frames."""

    def __init__(self, feature_dim: int, width: int) -> None:
        super().__init__()
        self.gru = nn.GRU(feature_dim, width, batch_first=True)
        self.output = nn.Linear(width, feature_dim)

    def forward(self, features: Tensor) -> Tensor:
        predicted: Tensor = self.output(self.gru(features)[0])
        return predicted


@dataclass(frozen=True)
class PredictiveCoding(Task):
    """Predict the features `ahead` frames later.

    Attributes:
        ahead: frames.
        width: cells of the GRU.
    """

    metrics = (
        Metric(
            "prediction_error",
            "prediction error",
            "prediction error",
            "per frame",
            "Absolute error of the predicted features, mean over dimensions and held-out frames.",
            higher_is_better=False,
            tolerance=0.01,
            tolerance_is_relative=True,
        ),
        Metric(
            "close_share",
            "close",
            "share of close predictions",
            "%",
            "Held-out features that are predicted to within 0.5.",
            decimals=1,
        ),
    )

    ahead: int = 3
    width: int = 64

    def __post_init__(self) -> None:
        if self.ahead < 1 or self.width < 1:
            raise ConfigError(f"{self.name}: ahead and width are at least 1")

    def make_model(self, data: TaskData) -> Predictor:
        return Predictor(data.feature_dim, self.width)

    def loss(self, model: Predictor, batch: Batch) -> LossSum:
        return LossSum(self._errors(model, batch).mean(1).sum(), batch.num_frames)

    @torch.no_grad()
    def score(self, model: Predictor, batch: Batch) -> FrameScores:
        errors = self._errors(model, batch)
        close = (errors < 0.5).to(errors.dtype)
        sums = {"prediction_error": errors.mean(1).sum().item(), "close_share": close.mean(1).sum().item()}
        return FrameScores(sums, len(errors))

    def _errors(self, model: Predictor, batch: Batch) -> Tensor:
        """Return the absolute errors of all frames that have one `ahead` of them: (frames, F)."""
        later = batch.features[:, self.ahead :]  # (B, T - ahead, F)
        frame = torch.arange(later.shape[1], device=later.device)
        is_there = frame < (batch.lengths.to(later.device) - self.ahead).unsqueeze(1)  # not padding
        predicted = model(batch.features)[:, : later.shape[1]]
        return (predicted - later).abs()[is_there]
