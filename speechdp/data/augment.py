"""SpecAugment: hide random bands and stretches of the features, so that a small corpus goes further."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from speechdp.data.batch import Batch


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

    def apply(self, batch: Batch, rng: np.random.Generator) -> None:
        """Mask a batch on the CPU in place; the same generator state gives the same masks."""
        features = batch.features.numpy()  # (B, T, F)
        for segment, length in zip(features, batch.lengths.tolist(), strict=True):
            for _ in range(self.num_bands):
                start, end = _piece(segment.shape[1], self.band_share, rng)
                segment[:length, start:end] = 0.0
            for _ in range(self.num_stretches):
                start, end = _piece(length, self.stretch_share, rng)
                segment[start:end] = 0.0


def _piece(extent: int, largest_share: float, rng: np.random.Generator) -> tuple[int, int]:
    width = int(rng.integers(0, int(extent * largest_share) + 1))
    start = int(rng.integers(0, extent - width + 1))
    return start, start + width
