"""Padding segments to a batch, and what of it is learnt."""

from __future__ import annotations

import numpy as np
import torch

from speechdp.data.batch import IGNORED_TARGET, Example, collate


def example(num_frames: int, first: int, learnt: int, value: float) -> Example:
    features = np.full((num_frames, 3), value, dtype=np.float16)
    targets = np.arange(num_frames, dtype=np.int32)
    return Example(features, targets, first, learnt)


def test_segments_are_padded_and_only_their_own_frames_learnt() -> None:
    batch = collate([example(4, 1, 2, 0.5), example(2, 0, 2, 2.0)], 3)
    assert batch.features.dtype == torch.float32 and batch.targets.dtype == torch.int64
    assert batch.features[:, :, 0].tolist() == [[0.5] * 4, [2.0, 2.0, 0.0, 0.0]]
    assert batch.targets.tolist() == [[-1, 1, 2, -1], [0, 1, -1, -1]]
    assert batch.lengths.tolist() == [4, 2] and batch.lengths.dtype == torch.int64
    assert batch.num_frames == 4 == int((batch.targets != IGNORED_TARGET).sum())


def test_no_segment_gives_a_batch_of_no_frames() -> None:
    batch = collate([], 3)
    assert batch.features.shape == (0, 0, 3)
    assert batch.targets.shape == (0, 0)
    assert batch.lengths.tolist() == [] and batch.num_frames == 0


def test_a_batch_that_is_there_already_is_not_copied() -> None:
    batch = collate([example(2, 0, 2, 1.0)], 3)
    assert batch.to(torch.device("cpu")) is batch
