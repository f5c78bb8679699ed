"""A batch of segments, padded to the longest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

#: Target of frames that are input only: padding, and context beside a chunk.
IGNORED_TARGET = -1


@dataclass(frozen=True)
class Batch:
    """What a rank trains on in one step.

    Attributes:
        features: (B, T, F) float32, zero behind each segment's end.
        targets: (B, T) int64 class indices, IGNORED_TARGET where no frame is to be learnt.
        lengths: (B,) int64, on the CPU: frames of each segment, context included.
        num_frames: frames to be learnt; 0 is a step this rank only joins.
    """

    features: Tensor
    targets: Tensor
    lengths: Tensor
    num_frames: int

    def to(self, device: torch.device) -> Batch:
        """Copy features and targets to `device`; asynchronous from pinned memory."""
        if self.features.device == device:
            return self
        return Batch(
            self.features.to(device, non_blocking=True),
            self.targets.to(device, non_blocking=True),
            self.lengths,
            self.num_frames,
        )

    def pin(self) -> Batch:
        """Move features and targets to page-locked memory, so that the copy to a GPU can overlap."""
        return Batch(self.features.pin_memory(), self.targets.pin_memory(), self.lengths, self.num_frames)


@dataclass(frozen=True)
class Example:
    """One segment as read: frames with context, and which of them are to be learnt.

    Attributes:
        features: (T, F).
        targets: (T,) of all frames.
        first, num_frames: the frames to be learnt are first:first+num_frames.
    """

    features: npt.NDArray[Any]
    targets: npt.NDArray[np.int32]
    first: int
    num_frames: int


def collate(examples: Sequence[Example], feature_dim: int) -> Batch:
    """Pad segments to one batch; no segment gives a batch of 0 frames."""
    lengths = [len(e.features) for e in examples]
    longest = max(lengths, default=0)
    features = torch.zeros(len(examples), longest, feature_dim)
    targets = torch.full((len(examples), longest), IGNORED_TARGET)
    feature_rows, target_rows = features.numpy(), targets.numpy()
    for row, example in enumerate(examples):
        learnt = slice(example.first, example.first + example.num_frames)
        feature_rows[row, : lengths[row]] = example.features
        target_rows[row, learnt] = example.targets[learnt]
    num_frames = sum(e.num_frames for e in examples)
    return Batch(features, targets, torch.tensor(lengths, dtype=torch.int64), num_frames)
