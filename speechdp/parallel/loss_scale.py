"""Loss scaling for float16: torch's GradScaler, where gradients are summed over ranks or applied elsewhere.

Gradients of half precision underflow, so losses are multiplied by a scale, and gradients divided by it before
they are used.  A gradient that has overflowed skips its update and halves the scale.

What has been summed over ranks is not a number on all of them if it was none on one, and otherwise the same
to the bit: so ranks that average gradients skip the same updates and keep the same scale without a message.
Ranks that train apart have a scale each.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from speechdp.parallel.uncompiled import made_without_compiler

#: Losses here are sums over some hundred or thousand frames: as far from an overflow as 2^16, torch's first
#: scale, is with means.
FIRST_SCALE = 2.0**8
#: A training whose scale falls below it ends, 17 skipped updates from the first scale on: gradients are most
#: likely no numbers at any scale.
LEAST_SCALE = 2.0**-8


def make_scaler(device: torch.device) -> torch.amp.GradScaler:
    """Return a scaler of losses that are sums over frames."""
    return torch.amp.GradScaler(device.type, init_scale=FIRST_SCALE)


def begin(scaler: torch.amp.GradScaler, device: torch.device) -> None:
    """Make a scaler's state, which torch makes at the first loss: a rank may update before it has had one."""
    scaler.scale(torch.zeros((), device=device))


def finite_loss(total: Tensor, frames: int) -> tuple[Tensor, Tensor]:
    """Return a loss summed over frames and their number, both 0 where it is not finite: that does not count.

    The host does not wait for the loss.
    """
    is_finite = total.isfinite()
    return total.where(is_finite, 0), is_finite * frames


def hand_over(scaler: torch.amp.GradScaler | None, gradients: Tensor, take: Callable[[], object]) -> None:
    """Let `take` use this rank's gradients, unless they have overflowed; then the scale is halved.

    Args:
        scaler: of the losses they come from; None: they are not scaled.
        gradients: flat; divided by the scale.
        take: gives them to whoever applies them.
    """
    if scaler is None:
        take()
        return
    taker = made_without_compiler(lambda: _Taker(gradients, take))
    scaler.unscale_(taker)
    scaler.step(taker)
    scaler.update()


class _Taker(torch.optim.Optimizer):
    """To a scaler an optimizer, which does with gradients what it is given to do."""

    def __init__(self, gradients: Tensor, take: Callable[[], object]) -> None:
        holder = nn.Parameter(gradients)  # a scaler looks at gradients alone
        holder.grad = gradients
        super().__init__([holder], {})
        self._take = take

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Take the gradients."""
        self._take()
