"""SpecAugment: what is masked, how much, and that it repeats."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from speechdp.data.transforms.augment import SpecAugment

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
LENGTHS = torch.tensor([50, 20, 3])


def make_features(dims: int = 40) -> torch.Tensor:
    features = torch.ones(3, 50, dims)
    for row, length in enumerate(LENGTHS.tolist()):
        features[row, length:] = 7.0  # stands for padding: must not be touched
    return features


def test_masks_are_bands_and_stretches_within_their_limits_and_leave_padding_alone() -> None:
    masked = 0
    for seed in range(50):
        features = make_features()
        SpecAugment(num_bands=1, num_stretches=1).apply(features, LENGTHS, np.random.default_rng(seed))
        for segment, length in zip(features, LENGTHS.tolist(), strict=True):
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
    first, same, other = make_features(), make_features(), make_features()
    SpecAugment().apply(first, LENGTHS, np.random.default_rng(3))
    SpecAugment().apply(same, LENGTHS, np.random.default_rng(3))
    SpecAugment().apply(other, LENGTHS, np.random.default_rng(4))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def test_masks_are_drawn_segment_by_segment_bands_before_stretches_width_before_start() -> None:
    features = make_features()
    SpecAugment().apply(features, LENGTHS, np.random.default_rng(5))
    expected, rng = make_features(), np.random.default_rng(5)
    for row, length in enumerate(LENGTHS.tolist()):
        for extent, widest, axis in (
            (40, 8, 1),
            (40, 8, 1),
            (length, length // 10, 0),
            (length, length // 10, 0),
        ):
            width = rng.integers(0, widest + 1)
            start = rng.integers(0, extent - width + 1)
            expected[row, :length].narrow(axis, int(start), int(width)).zero_()
    assert torch.equal(features, expected)


def test_a_band_is_hidden_in_every_copy_of_the_features() -> None:
    alone, copied = make_features(), make_features(120)
    SpecAugment().apply(alone, LENGTHS, np.random.default_rng(6))
    SpecAugment().apply(copied, LENGTHS, np.random.default_rng(6), copies=3)
    assert torch.equal(copied, alone.repeat(1, 1, 3))


@pytest.mark.parametrize("copies", [1, 3])
def test_hiding_all_at_once_hides_what_hiding_one_by_one_does(copies: int) -> None:
    masks, expected, features = SpecAugment(), make_features(120), make_features(120)
    masks.apply(expected, LENGTHS, np.random.default_rng(7), copies)
    pieces = masks.draw(LENGTHS.tolist(), 120 // copies, np.random.default_rng(7))
    masks.hide_at_once(features, LENGTHS, torch.from_numpy(pieces), copies)
    assert torch.equal(features, expected)


@pytest.mark.gpu
@needs_gpu
def test_masks_on_a_gpu_are_those_of_the_cpu() -> None:
    expected, features = make_features(), make_features().cuda()
    SpecAugment().apply(expected, LENGTHS, np.random.default_rng(7))
    SpecAugment().apply(features, LENGTHS, np.random.default_rng(7))
    assert torch.equal(features.cpu(), expected)


def test_a_batch_without_segments_is_left_alone() -> None:
    SpecAugment().apply(torch.zeros(0, 0, 40), torch.zeros(0, dtype=torch.int64), np.random.default_rng(0))
