"""Slow momentum: model averaging with an outer momentum that is updated once per period."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from torch import Tensor

from speechdp.errors import ConfigError
from speechdp.parallel.period import Period
from speechdp.strategies.mechanisms.outer_optimizer import OuterStrategy
from speechdp.strategies.mechanisms.periodic import MomentumRule

#: Slow momentum by number of workers (nodes there): fairscale's tuning guide.
_BETA_FROM = {16: 0.6, 8: 0.5, 4: 0.2}


@dataclass(eq=False)
class SlowMo(OuterStrategy):
    """Average parameters once per period and apply slow momentum in units of the learning rate.

    Update rule: every rank trains locally for a period from x; then, w the mean of the ranks' parameters
    and lr the learning rate at the exchange,
        u <- beta u + (x - w) / lr;  x <- x - alpha lr u.
    lr is that of the first parameter group.  If it is 0, x <- x - alpha (x - w) and u is unchanged: this is
    the limit of the rule for ever smaller rates, and other groups, or earlier steps, may have moved w.

    Exchange: as model_averaging, one allreduce of the parameters per period; with momentum=average one more
    for each vector of the optimizer.

    Guarantee: replicas are bitwise equal after each exchange, and after finish.  alpha=1, beta=0 is
    model_averaging.  With a constant learning rate it is bmuf with eta=beta, zeta=alpha (classical).

    Source: Wang et al. 2019 (arXiv 1910.00643).  beta by number of ranks, alpha = 1 and a period of 48 steps
    from fairscale's guide (its base is local SGD with H = 3 inside; here the base is SGD on one rank).
    Keeping, averaging or resetting the optimizer's state is recalled from the paper.  Deviation: the mean is
    weighted by frames.
    """

    period: Period = field(default_factory=lambda: Period(48))
    #: Slow momentum, 0 <= beta < 1; -1: by number of ranks: 0 below 4, 0.2 below 8, 0.5 below 16, then 0.6.
    beta: float = -1.0
    #: Slow learning rate.
    alpha: float = 1.0
    #: The optimizer's state at an exchange: each rank's own, the ranks' mean, or zero.
    momentum: MomentumRule = "keep"

    def check_options(self) -> None:
        super().check_options()
        if self.beta != -1 and not 0 <= self.beta < 1:
            raise ConfigError(
                f"slowmo:beta={self.beta}: must be at least 0 and below 1, or -1 for its default"
            )
        if not 0 < self.alpha < math.inf:
            raise ConfigError(f"slowmo:alpha={self.alpha}: must be positive")

    @property
    def slow_momentum(self) -> float:
        """Value of `beta`, with its default filled in."""
        if self.beta != -1:
            return self.beta
        return next((beta for ranks, beta in _BETA_FROM.items() if self.comm.size >= ranks), 0.0)

    def outer_step(self, start: Tensor, movement: Tensor, velocity: Tensor) -> None:
        rate = self.replica.learning_rate
        if rate == 0:  # no unit for the movement: use it directly
            start.add_(movement, alpha=self.alpha)
            return
        velocity.mul_(self.slow_momentum).sub_(movement, alpha=1.0 / rate)
        start.sub_(velocity, alpha=self.alpha * rate)

    def settle(self) -> None:
        self.settle_momentum(self.momentum)
