"""The acoustic-model task: an LSTM, frame cross-entropy against HMM states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from speechdp.data.loading.batch import IGNORED_TARGET, Batch
from speechdp.data.shards.dataset import Dataset
from speechdp.labels.kaldi_pdfs import classes_of
from speechdp.models.lstm_am import LstmAcousticModel, LstmConfig
from speechdp.models.presets import LSTM_TINY, Preset
from speechdp.tasks.base import LOSS, FrameScores, LossSum, Stage, Task, TaskData, Values
from speechdp.tasks.metrics import FRAME_ACCURACY, LOG_PROB, RECORDS
from speechdp.tasks.model_file import ClassCounts, save_model


@dataclass(frozen=True)
class AcousticTask(Task):
    """What an acoustic model is trained for and judged by.

    Attributes:
        sizes: of the model.
    """

    name = "acoustic"
    metrics = RECORDS["acoustic"].metrics
    decodes = RECORDS["acoustic"].decodes
    counts_classes = True
    presets = ("tiny", "kaldi-4x800", "swb2000")
    model_options = tuple(field.name for field in fields(LstmConfig))
    modules = ("encoder", "output")

    sizes: LstmConfig = LSTM_TINY

    @classmethod
    def of_preset(cls, preset: Preset, given: Mapping[str, Any]) -> AcousticTask:
        """Return the task with a preset's sizes, changed by those given."""
        assert isinstance(preset.model, LstmConfig)
        return cls(replace(preset.model, **given))

    @classmethod
    def check_data(cls, dataset: Dataset) -> None:
        """Refuse data without the names of their classes."""
        classes_of(dataset)

    def make_model(self, data: TaskData) -> LstmAcousticModel:
        """Return the LSTM with initial weights."""
        return LstmAcousticModel(data.feature_dim, data.dataset.num_classes, self.sizes)

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

    def stages(self, model: LstmAcousticModel) -> tuple[Stage, ...]:
        """Return the LSTM stack (with the choice of learnt frames), the output layer, cross-entropy."""

        def encode(values: Values, batch: Batch) -> Values:
            learnt = batch.targets != IGNORED_TARGET  # (B, T)
            return {"encoded": model.encode(batch.features, batch.lengths)[learnt]}  # (frames, H)

        def classify(values: Values, batch: Batch) -> Values:
            return {"logits": model.output(values["encoded"])}  # (frames, C)

        def lose(values: Values, batch: Batch) -> Values:
            targets = batch.targets[batch.targets != IGNORED_TARGET]
            return {LOSS: nn.functional.cross_entropy(values["logits"], targets, reduction="sum")}

        return Stage("encoder", encode), Stage("output", classify), Stage("loss", lose)

    def describe_data(self, data: TaskData) -> dict[str, Any]:
        """Return what the model file says of the data, a checksum of the classes' names among it."""
        return {**super().describe_data(data), "classes_sha256": classes_of(data.dataset).sha256}

    def save(self, run_dir: Path, model: Any, facts: dict[str, Any], counts: ClassCounts | None) -> None:
        """Write the model with the counts that decoding needs."""
        assert counts is not None
        save_model(run_dir, model, counts, facts)

    def _learnt_frames(self, model: LstmAcousticModel, batch: Batch) -> tuple[Tensor, Tensor]:
        # Padding and context leave before the output layer: with 32,000 classes it is most of the work.
        learnt = batch.targets != IGNORED_TARGET  # (B, T)
        encoded = model.encode(batch.features, batch.lengths)[learnt]  # (frames, H)
        return model.output(encoded), batch.targets[learnt]
