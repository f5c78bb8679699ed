"""The synthesis task: from symbols to mel and linear spectrograms, with attention and a stop prediction.

Legend: B batch, T frames, S symbols, N decoder steps of r frames, M mel bins, L linear bins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from speechdp.data.loading.batch import IGNORED_TARGET, Batch
from speechdp.data.shards.dataset import Dataset
from speechdp.errors import ConfigError
from speechdp.labels.symbols import symbols_of
from speechdp.models.precision import at_least_float32
from speechdp.models.presets import Preset
from speechdp.models.tacotron.config import TINY, TacotronConfig
from speechdp.models.tacotron.model import Tacotron, TacotronOutput
from speechdp.tasks.base import LOSS, FrameScores, LossSum, Stage, Task, TaskData, Values
from speechdp.tasks.metrics import ATTENTION_MAXIMUM, L1_ERROR, RECORDS
from speechdp.tasks.model_file import ClassCounts, save_synthesis_model

#: Width of the band that guided attention leaves free, as a share of the text (Tachibana et al. 2018, eq. 3).
GUIDE_WIDTH = 0.2
#: Weight of an utterance's last step in the stop prediction: it is one against tens of others, and speech
#: that does not end is worse than speech that is cut.
STOP_WEIGHT = 10.0


@dataclass(frozen=True)
class SynthesisLosses:
    """The parts of the loss, each summed over the batch's unpadded frames.

    Attributes:
        mel: absolute error of the decoder's mel spectrogram, mean over bins.
        linear: the same of the linear spectrogram.
        stop: cross-entropy of the stop prediction; a decoder step counts as many times as it has frames, the
            last one STOP_WEIGHT times that.
        guide: attention far from the diagonal, 0 to 1 a frame.
    """

    mel: Tensor
    linear: Tensor
    stop: Tensor
    guide: Tensor

    def total(self, guided_attention: float) -> Tensor:
        """Return the loss: all parts of equal weight but the guide's."""
        total = self.mel + self.linear + self.stop
        return total + guided_attention * self.guide if guided_attention else total


def synthesis_losses(output: TacotronOutput, batch: Batch, model: Tacotron) -> SynthesisLosses:
    """Compare what a model has put out with a batch; nothing of it waits for the device.

    Source: Wang et al. 2017, section 3 (equal-weight L1 on mel and linear spectrograms); the stop prediction
    is a later addition of public Tacotron code; guided attention: Tachibana et al. 2018, section 4.1.
    """
    output = TacotronOutput(
        *(at_least_float32(x) for x in (output.mel, output.linear, output.stop_logits, output.attention))
    )
    features, device = batch.features, batch.features.device
    lengths = batch.lengths.to(device, non_blocking=True)
    frame = torch.arange(features.shape[1], device=device)
    spoken = (frame < lengths.unsqueeze(1)).to(features.dtype)  # (B, T)
    mel, linear = features[:, :, : model.mel_dim], features[:, :, model.mel_dim :]
    reduction = model.config.reduction
    num_steps = output.stop_logits.shape[1]
    step = torch.arange(num_steps, device=device)
    steps = (lengths + reduction - 1).div(reduction, rounding_mode="floor").unsqueeze(1)  # (B, 1)
    # Frames of each decoder step: r, but what is left in an utterance's last one, and none past it.
    frames_of_step = (
        (lengths.unsqueeze(1) - step * reduction).clamp(0, reduction).to(features.dtype)
    )  # (B, N)
    is_last = (step == steps - 1).to(features.dtype)
    stop = nn.functional.binary_cross_entropy_with_logits(output.stop_logits, is_last, reduction="none")
    stop = stop * (1 + (STOP_WEIGHT - 1) * is_last)
    return SynthesisLosses(
        mel=_absolute_error(output.mel, mel, spoken),
        linear=_absolute_error(output.linear, linear, spoken),
        stop=(stop * frames_of_step).sum(),
        guide=(_off_diagonal(batch.targets, step, steps) * output.attention).sum(2).mul(frames_of_step).sum(),
    )


def _absolute_error(found: Tensor, wanted: Tensor, spoken: Tensor) -> Tensor:
    """Return |found - wanted|, mean over bins, summed over frames; both (B, T, bins)."""
    return (nn.functional.l1_loss(found, wanted, reduction="none").mean(2) * spoken).sum()


def _off_diagonal(symbols: Tensor, step: Tensor, steps: Tensor) -> Tensor:
    """Return 1 - exp(-(n/N - s/S)^2 / 2 g^2) of each utterance's own N and S: (B, N, S)."""
    num_symbols = (symbols != IGNORED_TARGET).sum(1, keepdim=True)  # (B, 1)
    place = torch.arange(symbols.shape[1], device=symbols.device) / num_symbols  # (B, S)
    time = step / steps  # (B, N)
    distance = time.unsqueeze(2) - place.unsqueeze(1)  # (B, N, S)
    return 1 - torch.exp(-distance.square() / (2 * GUIDE_WIDTH**2))


@dataclass(frozen=True)
class SynthesisTask(Task):
    """What a synthesis model is trained for and judged by.

    Attributes:
        guided_attention: weight of the guide in the loss; 0: attention is left to itself, as in the paper.
        sizes: of the model.
    """

    name = "synthesis"
    metrics = RECORDS["synthesis"].metrics
    trains_on = ("spectrograms",)
    whole_utterances = True
    presets = ("tacotron-tiny", "tacotron-small", "tacotron")
    model_options = ("dropout", "reduction", "decoder", "guided_attention")
    modules = ("encoder", "decoder", "postproc")

    guided_attention: float = 0.0
    sizes: TacotronConfig = TINY

    def __post_init__(self) -> None:
        if not 0 <= self.guided_attention < float("inf"):
            raise ConfigError(f"--guided-attention {self.guided_attention}: must not be negative")

    @classmethod
    def of_preset(cls, preset: Preset, given: Mapping[str, Any]) -> SynthesisTask:
        """Return the task with a preset's sizes and guide, changed by those given."""
        assert isinstance(preset.model, TacotronConfig)
        sizes = dict(given)
        return cls(sizes.pop("guided_attention", preset.guided_attention), replace(preset.model, **sizes))

    @classmethod
    def check_data(cls, dataset: Dataset) -> None:
        """Refuse data without the symbols that texts are written in."""
        symbols_of(dataset)

    def make_model(self, data: TaskData) -> Tacotron:
        """Return the Tacotron with initial weights."""
        dataset = data.dataset
        mel_dim, linear_dim = dataset.features.num_mel_bins, dataset.features.linear_dim
        return Tacotron(dataset.num_classes, mel_dim, linear_dim, self.sizes)

    def loss(self, model: Tacotron, batch: Batch) -> LossSum:
        """Return the summed loss of a batch, teacher forced."""
        losses = synthesis_losses(self._output(model, batch), batch, model)
        return LossSum(losses.total(self.guided_attention), batch.num_frames)

    @torch.no_grad()
    def score(self, model: Tacotron, batch: Batch) -> FrameScores:
        """Score a batch, teacher forced: the absolute errors, and how sharp the attention is.

        Sharpness is the attention's maximum over symbols, each step weighted by its frames: the focus rate of
        Ren et al. 2019 (FastSpeech), section 3.3.
        """
        output = self._output(model, batch)
        losses = synthesis_losses(output, batch, model)
        reduction, num_steps = model.config.reduction, output.stop_logits.shape[1]
        first = torch.arange(num_steps) * reduction
        frames = (batch.lengths.unsqueeze(1) - first).clamp(0, reduction)  # (B, N), on the CPU
        sharpness = (output.attention.amax(2).cpu() * frames).sum()
        errors = (losses.mel + losses.linear).item()
        return FrameScores({L1_ERROR.key: errors, ATTENTION_MAXIMUM.key: sharpness.item()}, batch.num_frames)

    def stages(self, model: Tacotron) -> tuple[Stage, ...]:
        """Return encoder, decoder, post-processing net, and all parts of the loss."""

        def encode(values: Values, batch: Batch) -> Values:
            return {"memory": model.encode(batch.targets)}

        def decode(values: Values, batch: Batch) -> Values:
            taught = batch.features[:, :, : model.mel_dim]
            decoded = model.decode(values["memory"], batch.targets, taught, batch.lengths)
            return {"mel": decoded.mel, "stop": decoded.stop_logits, "attention": decoded.attention}

        def postprocess(values: Values, batch: Batch) -> Values:
            return {"linear": model.postproc(values["mel"], batch.lengths)}

        def lose(values: Values, batch: Batch) -> Values:
            output = TacotronOutput(values["mel"], values["linear"], values["stop"], values["attention"])
            return {LOSS: synthesis_losses(output, batch, model).total(self.guided_attention)}

        named = {"encoder": encode, "decoder": decode, "postproc": postprocess, "loss": lose}
        return tuple(Stage(name, run) for name, run in named.items())

    def model_facts(self) -> dict[str, Any]:
        """Return how the decoder is computed, and how many frames a step makes."""
        return {"decoder": self.sizes.decoder, "reduction": self.sizes.reduction}

    def describe_data(self, data: TaskData) -> dict[str, Any]:
        """Return what the model file says of the data, the symbols among it."""
        return {**data.facts(), "symbols": symbols_of(data.dataset).to_dict()}

    def save(self, run_dir: Path, model: Any, facts: dict[str, Any], counts: ClassCounts | None) -> None:
        """Write the model with its symbols."""
        save_synthesis_model(run_dir, model, facts)

    def _output(self, model: Tacotron, batch: Batch) -> TacotronOutput:
        output: TacotronOutput = model(batch.targets, batch.features[:, :, : model.mel_dim], batch.lengths)
        return output
