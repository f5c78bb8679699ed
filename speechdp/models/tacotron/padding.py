"""Masks of frames and padding, and batch normalisation over frames only."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

#: As in `nn.BatchNorm1d`.
_MOMENTUM, _EPSILON = 0.1, 1e-5


def frame_mask(lengths: Tensor, num_frames: int, device: torch.device) -> Tensor:
    """Return (B, T) float, 1 for a frame and 0 for padding, on the device; never waits for it."""
    # non_blocking: a plain copy would wait for all work queued on the device
    ends = lengths.to(device, non_blocking=True).unsqueeze(1)  # (B, 1)
    return (torch.arange(num_frames, device=device) < ends).float()


class MaskedBatchNorm(nn.Module):
    """Batch normalisation over the frames of (B, C, T), then optionally ReLU, then zeros at padding.

    Parameters and buffers are named as in `nn.BatchNorm1d`. Statistics are of frames alone, so the amount of
    padding in a batch changes nothing. Source: Ioffe & Szegedy 2015 (arXiv 1502.03167).
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int, *, relu: bool) -> None:
        super().__init__()
        self.relu = relu
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Normalise x (B, C, T) where mask (B, 1, T) is 1; zero elsewhere."""
        if not self.training:
            scale = self.weight * torch.rsqrt(self.running_var + _EPSILON)
            shift = self.bias - self.running_mean * scale
            y = x * scale.unsqueeze(1) + shift.unsqueeze(1)
            return (y.relu() if self.relu else y) * mask
        normalised, mean, variance, count = _Normalise.apply(  # type: ignore[no-untyped-call]
            x.to(self.weight.dtype), mask, self.weight, self.bias, self.relu
        )
        with torch.no_grad():
            unbiased = variance * (count / (count - 1).clamp(min=1))
            self.running_mean.lerp_(mean, _MOMENTUM)
            self.running_var.lerp_(unbiased, _MOMENTUM)
        result: Tensor = normalised
        return result


class _Normalise(torch.autograd.Function):
    """(x, mask, weight, bias) -> y, mean (C,), biased variance (C,), number of frames ().

    Hand-written, to keep only two tensors of x's size for the backward pass, and make fewer passes over them.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, mask: Tensor, weight: Tensor, bias: Tensor, relu: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        count = mask.sum()
        mean = (x * mask).sum((0, 2)) / count
        # Two passes: sum(x^2) / n - mean^2 loses the variance of a channel with a large mean in float32.
        unit = (x - mean.unsqueeze(1)).mul_(mask)
        variance = unit.square().sum((0, 2)) / count
        rstd = torch.rsqrt(variance + _EPSILON)
        unit.mul_(rstd.unsqueeze(1))
        y = torch.addcmul(bias.unsqueeze(1), unit, weight.unsqueeze(1))
        y = (y.relu_() if relu else y).mul_(mask)
        ctx.save_for_backward(unit, y if relu else mask, mask, weight, rstd, count)
        ctx.relu = relu
        ctx.mark_non_differentiable(mean, variance, count)
        return y, mean, variance, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        unit, passed, mask, weight, rstd, count = ctx.saved_tensors
        # With a ReLU, `passed` is y, which is positive only at frames; without one it is the mask.
        grad = grad_y * (passed > 0)
        grad_bias = grad.sum((0, 2))
        grad_weight = (grad * unit).sum((0, 2))
        grad_x = torch.addcmul(grad, unit, (-grad_weight / count).unsqueeze(1))
        grad_x.sub_((grad_bias / count).unsqueeze(1)).mul_((weight * rstd).unsqueeze(1)).mul_(mask)
        return grad_x, None, grad_weight, grad_bias, None
