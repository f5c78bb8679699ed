"""SpecAugment: mask random bands and stretches of the features, so that a small corpus goes further.

Legend: B segments of a batch, T frames of the longest, F input dimensions, M masks of a segment.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


@dataclass(frozen=True)
class SpecAugment:
    """Masks drawn anew for every segment and epoch.

    Masked values become 0, the mean of normalised features.

    Source: Park et al. 2019 (arXiv 1904.08779), without time warping; widths relative to the features, so
    that they suit short utterances and few mel bins.

    Attributes:
        num_bands, num_stretches: masks along frequency and along time, each.
        band_share: widest band, as a share of the feature dimensions.
        stretch_share: longest stretch, as a share of the segment's frames.
    """

    num_bands: int = 2
    num_stretches: int = 2
    band_share: float = 0.2
    stretch_share: float = 0.1

    def apply(self, features: Tensor, lengths: Tensor, rng: np.random.Generator, copies: int = 1) -> None:
        """Mask segments in place; the same generator state gives the same masks on every device.

        Args:
            features: (B, T, F).
            lengths: (B,) int64, on the CPU; frames past a segment's end stay as they are.
            rng: source of all random draws.
            copies: number of equal parts along F, for deltas and spliced frames; a band is masked in each
                part.
        """
        num_dims = features.shape[2] // copies
        pieces = self.draw(lengths.tolist(), num_dims, rng)  # (B, M, 2)
        if features.device.type == "cpu":
            self._hide(features.numpy(), lengths.tolist(), pieces, copies)
        else:
            self.hide_at_once(features, lengths, torch.from_numpy(pieces), copies)

    def hide_at_once(self, features: Tensor, lengths: Tensor, pieces: Tensor, copies: int) -> None:
        """Mask pieces (B, M, 2) with a few operations on the whole batch, on the device of `features`."""
        device, num_frames = features.device, features.shape[1]
        bands, stretches = torch.split(pieces.to(device), [self.num_bands, self.num_stretches], dim=1)
        frames = _covered(stretches, num_frames).unsqueeze(2)  # (B, T, 1)
        hidden = frames | _covered(bands, features.shape[2] // copies).unsqueeze(1)
        inside = torch.arange(num_frames, device=device) < lengths.to(device).unsqueeze(1)
        hidden &= inside.unsqueeze(2)  # (B, T, F / copies)
        features.masked_fill_(hidden.repeat(1, 1, copies), 0.0)

    def draw(self, lengths: list[int], num_dims: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
        """Draw each segment's bands, then its stretches, as (start, end): (B, M, 2)."""
        extents = [(num_dims, self.band_share)] * self.num_bands
        pieces = [
            [_piece(*e, rng) for e in [*extents, *[(n, self.stretch_share)] * self.num_stretches]]
            for n in lengths
        ]
        return np.array(pieces, dtype=np.int64).reshape(len(lengths), self.num_bands + self.num_stretches, 2)

    def _hide(
        self,
        features: npt.NDArray[np.float32],
        lengths: list[int],
        pieces: npt.NDArray[np.int64],
        copies: int,
    ) -> None:
        for segment, length, masks in zip(features, lengths, pieces.tolist(), strict=True):
            parts = segment[:length].reshape(length, copies, -1)  # a view: one row of a contiguous batch
            for start, end in masks[: self.num_bands]:
                parts[:, :, start:end] = 0.0
            for start, end in masks[self.num_bands :]:
                segment[start:end] = 0.0


def _covered(pieces: Tensor, extent: int) -> Tensor:
    """Return which of 0..extent-1 lie in any of the pieces (B, M, 2): (B, extent) bool."""
    places = torch.arange(extent, device=pieces.device)
    return ((places >= pieces[:, :, :1]) & (places < pieces[:, :, 1:])).any(dim=1)


def _piece(extent: int, largest_share: float, rng: np.random.Generator) -> tuple[int, int]:
    width = int(rng.integers(0, int(extent * largest_share) + 1))
    start = int(rng.integers(0, extent - width + 1))
    return start, start + width
