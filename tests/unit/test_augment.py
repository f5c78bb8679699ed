"""SpecAugment: what is masked, how much, and that it repeats."""

from __future__ import annotations

import numpy as np
import torch

from speechdp.data.augment import SpecAugment
from speechdp.data.batch import Batch


def make_batch() -> Batch:
    lengths = torch.tensor([50, 20, 3])
    features = torch.ones(3, 50, 40)
    for row, length in enumerate(lengths.tolist()):
        features[row, length:] = 7.0  # stands for padding: must not be touched
    return Batch(features, torch.zeros(3, 50, dtype=torch.int64), lengths, 73)


def test_masks_are_bands_and_stretches_within_their_limits_and_leave_padding_alone() -> None:
    masked = 0
    for seed in range(50):
        batch = make_batch()
        SpecAugment(num_bands=1, num_stretches=1).apply(batch, np.random.default_rng(seed))
        for segment, length in zip(batch.features, batch.lengths.tolist(), strict=True):
            assert (segment[length:] == 7.0).all()
            hidden = segment[:length] == 0
            frames = hidden.all(dim=1)
            bands = hidden[~frames].all(dim=0)
            assert frames.sum() <= 0.1 * length
            assert bands.sum() <= 8
            # Nothing is hidden outside of whole bands and whole stretches.
            assert torch.equal(hidden, frames.unsqueeze(1) | bands.unsqueeze(0))
            masked += int(hidden.sum())
    assert masked > 0


def test_same_generator_same_masks_other_generator_other_masks() -> None:
    first, same, other = make_batch(), make_batch(), make_batch()
    SpecAugment().apply(first, np.random.default_rng(3))
    SpecAugment().apply(same, np.random.default_rng(3))
    SpecAugment().apply(other, np.random.default_rng(4))
    assert torch.equal(first.features, same.features)
    assert not torch.equal(first.features, other.features)
