"""Add context to the features that the model sees: their slopes over time, and the frames around each.

Legend: B segments of a batch, T frames of the longest, F feature dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from speechdp.errors import ConfigError

if TYPE_CHECKING:  # --help and the launcher read the options and do not import torch
    from torch import Tensor

#: Frames on each side over which a slope is computed, as in Kaldi's add-deltas.
_DELTA_WINDOW = 2
_MAX_DELTAS = 4
_MAX_SPLICE = 100


@dataclass(frozen=True)
class InputOptions:
    """How the model's input is made from features.  Decoding and alignment use the same input as training."""

    deltas: int = 0
    """Order of the deltas appended to the features, as in Kaldi's add-deltas.
    0: none; 1: deltas; 2: deltas and delta-deltas; at most 4."""
    splice: int = 0
    """Number of frames on each side that are appended to each frame (Kaldi's splicing), at most 100."""

    def __post_init__(self) -> None:
        if not 0 <= self.deltas <= _MAX_DELTAS:
            raise ConfigError(f"--deltas {self.deltas}: must lie in 0..{_MAX_DELTAS}")
        if not 0 <= self.splice <= _MAX_SPLICE:
            raise ConfigError(f"--splice {self.splice}: must lie in 0..{_MAX_SPLICE}")

    @property
    def copies(self) -> int:
        """Number of input values for each feature."""
        return (self.deltas + 1) * (2 * self.splice + 1)

    def apply(self, features: Tensor, lengths: Tensor) -> Tensor:
        """Add deltas, then splice.

        Args:
            features: (B, T, F).
            lengths: (B,) int64, on the CPU, each above 0; frames past a segment's end are not used, its first
                and last frame are repeated instead.

        Returns:
            (B, T, F * copies), arbitrary past each segment's end; `features` itself if nothing is added.
        """
        if self.deltas:
            features = _add_deltas(features, lengths, self.deltas)
        if self.splice:
            import torch  # noqa: PLC0415

            around = range(-self.splice, self.splice + 1)
            features = torch.cat(list(_shifted(features, lengths, self.splice, around)), dim=2)
        return features


#: The model sees only each frame's features.
FEATURES_ALONE = InputOptions()


def _add_deltas(features: Tensor, lengths: Tensor, order: int) -> Tensor:
    """Return features and their slopes of order 1 to `order`, side by side: (B, T, F * (order + 1)).

    Source: Kaldi, DeltaFeatures: each order's weights are those of the order below convolved with
    j / sum j^2, j = -2..2; beyond the ends the outermost frames are repeated.
    """
    import torch  # noqa: PLC0415

    slope = np.arange(-_DELTA_WINDOW, _DELTA_WINDOW + 1)
    slope = slope / (slope**2).sum()
    weights, parts = np.ones(1), [features]
    for number in range(1, order + 1):
        weights = np.convolve(weights, slope)
        reach = number * _DELTA_WINDOW
        shifted = _shifted(features, lengths, reach, range(-reach, reach + 1))
        total = torch.zeros_like(features)
        for weight, frames in zip(weights.tolist(), shifted, strict=True):
            total.add_(frames, alpha=weight)
        parts.append(total)
    return torch.cat(parts, dim=2)


def _shifted(features: Tensor, lengths: Tensor, reach: int, offsets: range) -> list[Tensor]:
    """Return views (B, T, F) of the frames shifted by each offset, which is up to `reach` either way."""
    import torch  # noqa: PLC0415

    num_segments, longest = features.shape[:2]
    frames = torch.arange(-reach, longest + reach)
    frames = torch.minimum(frames.clamp_(min=0), (lengths - 1).unsqueeze(1))  # (B, T + 2 reach)
    rows = frames + longest * torch.arange(num_segments).unsqueeze(1)
    flat = features.reshape(num_segments * longest, -1)
    wide = flat[rows.to(features.device)]  # (B, T + 2 reach, F)
    return [wide[:, reach + offset : reach + offset + longest] for offset in offsets]
