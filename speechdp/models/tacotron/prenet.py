"""The pre-net: two layers with dropout, before the encoder's CBHG and before the decoder's attention."""

from __future__ import annotations

import torch
from torch import Tensor, nn

Keep = tuple[Tensor, Tensor]
"""Dropout of the two layers, drawn beforehand: 0 where a value is dropped, else 1 / (1 - dropout)."""


class Prenet(nn.Module):
    """FC-ReLU-dropout twice (Wang et al. 2017, table 1)."""

    def __init__(self, inputs: int, hidden: int, outputs: int, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.layer_1 = nn.Linear(inputs, hidden)
        self.layer_2 = nn.Linear(hidden, outputs)

    def draw(self, *rows: int, like: Tensor) -> Keep:
        """Draw dropout for inputs of shape (*rows, inputs), with the type and device of `like`."""
        first = like.new_empty(*rows, self.layer_1.out_features)
        second = like.new_empty(*rows, self.layer_2.out_features)
        for keep in (first, second):
            # On a CPU bernoulli_ takes four times as long.
            keep.uniform_().ge_(self.dropout).div_(1.0 - self.dropout)
        return first, second

    def forward(self, x: Tensor, keep: Keep | None) -> Tensor:
        """Return (..., outputs) for x (..., inputs); without dropout if keep is None."""
        hidden = torch.relu(self.layer_1(x))
        if keep is None:
            return torch.relu(self.layer_2(hidden))
        return torch.relu(self.layer_2(hidden * keep[0])) * keep[1]
