"""The parts of a synthesis model's loss.

Legend: B batch, T frames, S symbols, N decoder steps of r frames, M mel bins, L linear bins.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from speechdp.data.loading.batch import IGNORED_TARGET, Batch
from speechdp.models.precision import at_least_float32
from speechdp.models.tacotron.model import Tacotron, TacotronOutput

#: Width of the band that guided attention leaves free, as a share of the text (Tachibana et al. 2018, eq. 3).
GUIDE_WIDTH = 0.2
#: Weight of an utterance's last step in the stop prediction: it is one step among tens, and speech that does
#: not end is worse than speech that is cut off.
STOP_WEIGHT = 10.0


@dataclass(frozen=True)
class SynthesisLosses:
    """The parts of the loss, each summed over the batch's unpadded frames.

    Attributes:
        mel: absolute error of the decoder's mel spectrogram, mean over bins.
        linear: the same for the linear spectrogram.
        stop: cross-entropy of the stop prediction; a decoder step has its number of frames as weight, and the
            last one STOP_WEIGHT times that.
        guide: attention far from the diagonal, 0 to 1 per frame.
    """

    mel: Tensor
    linear: Tensor
    stop: Tensor
    guide: Tensor

    def total(self, guided_attention: float) -> Tensor:
        """Return the loss: all parts with equal weight except the guide."""
        total = self.mel + self.linear + self.stop
        return total + guided_attention * self.guide if guided_attention else total


def synthesis_losses(output: TacotronOutput, batch: Batch, model: Tacotron) -> SynthesisLosses:
    """Compare a model's output with a batch, without waiting for the device.

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
    # Frames of each decoder step: r, in an utterance's last step the remaining ones, and none after it.
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
    """Return 1 - exp(-(n/N - s/S)^2 / 2 g^2), with each utterance's own N and S: (B, N, S)."""
    num_symbols = (symbols != IGNORED_TARGET).sum(1, keepdim=True)  # (B, 1)
    place = torch.arange(symbols.shape[1], device=symbols.device) / num_symbols  # (B, S)
    time = step / steps  # (B, N)
    distance = time.unsqueeze(2) - place.unsqueeze(1)  # (B, N, S)
    return 1 - torch.exp(-distance.square() / (2 * GUIDE_WIDTH**2))
