"""Loss scaling for float16: torch's GradScaler, where gradients are summed over ranks or applied elsewhere.

Half-precision gradients underflow, so losses are multiplied by a scale, and gradients are divided by it
before use.  If gradients have overflowed, the update is skipped and the scale halved.

A sum over ranks is not finite on any rank if it was not finite on one, and otherwise bitwise equal on all.
So ranks that average gradients skip the same updates and keep the same scale without a message.  Ranks that
train apart each have their own scale.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from speechdp.parallel.uncompiled import made_without_compiler

#: Losses here are sums over some hundreds or thousands of frames: with this scale they are as far from an
#: overflow as means are with 2^16, torch's first scale.
FIRST_SCALE = 2.0**8
#: Training ends when the scale falls below this, after 17 skipped updates from the first scale on: gradients
#: are then most likely not finite at any scale.
LEAST_SCALE = 2.0**-8


def make_scaler(device: torch.device) -> torch.amp.GradScaler:
    """Return a scaler for losses that are sums over frames."""
    return torch.amp.GradScaler(device.type, init_scale=FIRST_SCALE)


def begin(scaler: torch.amp.GradScaler, device: torch.device) -> None:
    """Create a scaler's state, which torch creates at the first loss: a rank may update before its first."""
    scaler.scale(torch.zeros((), device=device))


def finite_loss(total: Tensor, frames: int) -> tuple[Tensor, Tensor]:
    """Return a loss summed over frames and their number; both are 0 if the loss is not finite.

    The host does not wait for the loss.
    """
    is_finite = total.isfinite()
    return total.where(is_finite, 0), is_finite * frames


def hand_over(scaler: torch.amp.GradScaler | None, gradients: Tensor, take: Callable[[], object]) -> None:
    """Let `take` use this rank's gradients, or halve the scale if they have overflowed.

    Args:
        scaler: scaler of the losses they come from; None: those are not scaled.
        gradients: flat; divided by the scale in place.
        take: passes them to whatever applies them.
    """
    if scaler is None:
        take()
        return
    taker = made_without_compiler(lambda: _Taker(gradients, take))
    scaler.unscale_(taker)
    scaler.step(taker)
    scaler.update()


class _Taker(torch.optim.Optimizer):
    """An optimizer for a scaler to step: the step only calls `take`."""

    def __init__(self, gradients: Tensor, take: Callable[[], object]) -> None:
        holder = nn.Parameter(gradients)  # a scaler reads only gradients
        holder.grad = gradients
        super().__init__([holder], {})
        self._take = take

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Take the gradients."""
        self._take()
