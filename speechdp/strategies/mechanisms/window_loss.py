"""Compute a rank's training loss over a window of steps."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from speechdp.parallel.loss_scale import finite_loss


class WindowLoss:
    """Accumulate losses on their device, so that no step synchronises with it.

    Args:
        skips_overflows: losses that are not finite do not count, because they come from float16 and their
            updates are skipped.

    Attributes:
        frames: frames of all losses, including those that do not count.
    """

    def __init__(self, *, skips_overflows: bool = False) -> None:
        self._skips_overflows = skips_overflows
        self._sums = torch.zeros(2, dtype=torch.float64)  # loss and frames of what counts
        self.frames = 0

    def add(self, total: Tensor, frames: int) -> None:
        """Add a loss summed over `frames` frames."""
        self._sums = self._sums.to(total.device)  # a copy only for the first loss and after a resume
        count: Tensor | int = frames
        if self._skips_overflows:
            total, count = finite_loss(total, frames)
        self._sums[0] += total
        self._sums[1] += count
        self.frames += frames

    @property
    def sums(self) -> tuple[float, float]:
        """Sum of the losses that count, and their frames; waits for the device."""
        total, frames = self._sums.tolist()
        return total, frames

    @property
    def mean(self) -> float:
        """Loss per frame; infinite if there is none or it is NaN; waits for the device."""
        total, frames = self.sums
        mean = total / frames if frames > 0 else math.inf
        return math.inf if math.isnan(mean) else mean

    def reset(self) -> None:
        """Start a new window."""
        self._sums = torch.zeros_like(self._sums)
        self.frames = 0

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs."""
        total, counted = self.sums
        return {"total": total, "frames": self.frames, "counted": counted}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""
        self.frames = state["frames"]
        counted = state.get("counted", self.frames)  # earlier checkpoints have none
        self._sums = torch.tensor([state["total"], counted], dtype=torch.float64)
