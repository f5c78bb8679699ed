"""CBHG: a bank of convolutions, highway layers and a bidirectional GRU (Wang et al. 2017, section 3.1).

Legend: B batch, T frames or symbols, I input channels, W width, K convolutions in the bank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from speechdp.models.tacotron.padding import MaskedBatchNorm
from speechdp.models.tacotron.recurrent import BiGru


@dataclass(frozen=True)
class CbhgSizes:
    """Sizes of a CBHG.

    Attributes:
        inputs: input channels, and output channels of the last projection, which is added to the input.
        bank: number of convolutions in the bank, of kernel widths 1 to `bank`.
        width: channels of each of them and of the highway layers, and cells per direction of the GRU.
        projection: channels between the two projections.
        highways: number of highway layers.
    """

    inputs: int
    bank: int
    width: int
    projection: int
    highways: int


class Cbhg(nn.Module):
    """Map (B, T, I) to (B, T, 2W); padding affects no frame, and values past an end are zero or unused.

    The order is convolution, batch normalisation, ReLU, because the paper normalises "all convolutional
    layers"; some public code normalises after the ReLU.
    """

    def __init__(self, sizes: CbhgSizes) -> None:
        super().__init__()
        inputs, width = sizes.inputs, sizes.width
        self.bank = nn.ModuleList(_convolution(inputs, width, 1 + k) for k in range(sizes.bank))
        self.bank_norm = MaskedBatchNorm(sizes.bank * width, relu=True)
        self.project_1 = _convolution(sizes.bank * width, sizes.projection, 3)
        self.norm_1 = MaskedBatchNorm(sizes.projection, relu=True)
        self.project_2 = _convolution(sizes.projection, inputs, 3)
        self.norm_2 = MaskedBatchNorm(inputs, relu=False)
        self.widen = nn.Identity() if inputs == width else nn.Linear(inputs, width, bias=False)
        self.highways = nn.ModuleList(Highway(width) for _ in range(sizes.highways))
        self.gru = BiGru(width, width)

    def forward(self, x: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
        """Return (B, T, 2W) for x (B, T, I), zero past each end, mask (B, T) and lengths (B,)."""
        num_frames = x.shape[1]
        mask = mask.unsqueeze(1)  # (B, 1, T)
        turned = x.transpose(1, 2)  # (B, I, T)
        features = torch.cat([bank(turned)[:, :, :num_frames] for bank in self.bank], dim=1)  # (B, KW, T)
        features = self.bank_norm(features, mask)
        features = self.norm_1(self.project_1(_pool(features)), mask)  # (B, projection, T)
        features = self.norm_2(self.project_2(features), mask)  # (B, I, T)
        hidden = self.widen(features.transpose(1, 2) + x)  # (B, T, W)
        for highway in self.highways:
            hidden = highway(hidden)
        output: Tensor = self.gru(hidden, lengths)
        return output


class Highway(nn.Module):
    """y = t relu(W_h x + b_h) + (1 - t) x, t = sigmoid(W_t x + b_t) (Srivastava et al. 2015)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 2 * width)  # W_h above W_t
        self.reset_gate()

    def reset_gate(self) -> None:
        """Make the layer pass on most of its input at first: b_t = -1, as in public code."""
        with torch.no_grad():
            self.linear.bias[self.linear.in_features :] = -1.0

    def forward(self, x: Tensor) -> Tensor:
        """Return y (..., W) for x (..., W)."""
        candidate, gate = self.linear(x).chunk(2, dim=-1)
        return torch.lerp(x, candidate.relu().to(x.dtype), gate.sigmoid().to(x.dtype))


def _pool(x: Tensor) -> Tensor:
    """Return the maximum of each frame and the next, (B, C, T) for x (B, C, T) that is zero at padding.

    This is max-pooling of width 2 and stride 1, as x_t + relu(x_{t+1} - x_t), in a third of the time of
    `max_pool1d` on a CPU. As x >= 0, the ends need no special treatment: the zeros past them are neutral.
    """
    return x + nn.functional.pad((x[:, :, 1:] - x[:, :, :-1]).relu(), (0, 1))


def _convolution(inputs: int, outputs: int, kernel: int) -> nn.Conv1d:
    """Make a convolution that gives at least T frames for T; no bias, as normalisation would remove it."""
    return nn.Conv1d(inputs, outputs, kernel, padding=kernel // 2, bias=False)
