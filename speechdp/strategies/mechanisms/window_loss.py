"""Training loss of a rank over a window of steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class WindowLoss:
    """Accumulates losses on their device, so that no step synchronises with it.

    Attributes:
        frames: frames the losses stand for.
    """

    def __init__(self) -> None:
        self._total = torch.zeros((), dtype=torch.float64)
        self.frames = 0

    def add(self, total: Tensor, frames: int) -> None:
        """Add a loss summed over `frames` frames."""
        if self.frames == 0:
            self._total = self._total.to(total.device)
        self._total += total
        self.frames += frames

    @property
    def total(self) -> float:
        """The sum; waits for the device."""
        return float(self._total.item())

    def reset(self) -> None:
        """Begin a new stretch."""
        self._total = torch.zeros_like(self._total)
        self.frames = 0

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs."""
        return {"total": self.total, "frames": self.frames}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""
        self._total = torch.tensor(state["total"], dtype=torch.float64)
        self.frames = state["frames"]
