"""Normalise features by statistics of all recordings of a speaker, not of each utterance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from speechdp.comm.base import Communicator
from speechdp.data.signal.features import STD_FLOOR, FeatureConfig
from speechdp.data.transforms.torch_features import audible_frames, beside_silence


@dataclass(frozen=True)
class Moments:
    """Statistics to normalise features with: mean and standard deviation of each dimension, (F,) float32."""

    mean: Tensor
    std: Tensor

    def normalise(self, features: Tensor, config: FeatureConfig) -> Tensor:
        """Normalise (T, F) features: their mean, their variance or both, according to `config`."""
        audible = audible_frames(features, config)
        if config.mean_normalise:
            features = features - self.mean
        if config.variance_normalise:
            features = features / self.std
        is_normalised = config.mean_normalise or config.variance_normalise
        return beside_silence(features[audible], audible) if is_normalised else features


def sums_of(features: Tensor, config: FeatureConfig) -> Tensor:
    """Return number of frames, sums and sums of squares of (T, F) features: (1 + 2 F,) float64.

    Digital silence does not count, as in `features.normalise`.
    """
    rows = features[audible_frames(features, config)].double()
    return torch.cat(
        [torch.tensor([float(len(rows))], dtype=torch.float64), rows.sum(0), rows.square().sum(0)]
    )


def moments_by_speaker(sums: Tensor, speakers: Sequence[str], comm: Communicator) -> list[Moments]:
    """Return each utterance's moments, computed over all utterances of its speaker.  Collective.

    Args:
        sums: (U, 1 + 2 F), for each utterance `sums_of` on one rank and 0 on the others; overwritten.
        speakers: of each of the U utterances; "" is an unknown speaker, whose utterance is normalised alone.
        comm: the ranks.  The result is the same for any number of them.
    """
    comm.allreduce(sums, name="moments")  # exact: all addends but one are 0
    names: list[str | int] = [speaker or number for number, speaker in enumerate(speakers)]
    total = {name: torch.zeros_like(row) for name, row in zip(names, sums, strict=True)}
    for name, row in zip(names, sums, strict=True):
        total[name] += row
    moments = {name: _moments(row) for name, row in total.items()}
    return [moments[name] for name in names]


def _moments(sums: Tensor) -> Moments:
    first, second = (sums[1:] / sums[0].clamp(min=1)).chunk(2)
    variance = (second - first.square()).clamp(min=0)
    return Moments(first.float(), variance.sqrt().clamp(min=STD_FLOOR).float())
