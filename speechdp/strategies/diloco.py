"""DiLoCo: long periods of AdamW on every rank, one Nesterov step of a global model between them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from torch import Tensor

from speechdp.errors import ConfigError
from speechdp.parallel.period import Period
from speechdp.strategies.mechanisms.outer_optimizer import OuterStrategy


@dataclass(eq=False)
class DiLoCo(OuterStrategy):
    """Use the ranks' mean movement as the gradient of an outer SGD with Nesterov momentum.

    Update rule: every rank trains locally for a period from x with the run's optimizer, whose state remains
    the rank's own; then, w the mean of the ranks' parameters, D = x - w,
        b <- outer_momentum b + D;  x <- x - outer_learning_rate (D + outer_momentum b).

    Exchange: as model_averaging, one allreduce of the parameters per period.

    Guarantee: replicas are bitwise equal after each exchange, and after finish.  outer_learning_rate=1,
    outer_momentum=0 is model_averaging with momentum=keep.

    Source: Douillard et al. 2023, with the settings of OpenDiLoCo and torchft: inner AdamW (learning rate
    4e-4, weight decay 0.1, betas 0.9 and 0.95), outer learning rate 0.7 and momentum 0.9, 500 steps.  The
    inner optimizer is the run's: choose AdamW for DiLoCo as published; SGD is not refused.
    Deviation: the mean is weighted by frames instead of equally.
    """

    period: Period = field(default_factory=lambda: Period(500))
    #: Learning rate of the outer step; 1 with outer_momentum=0 is plain averaging.
    outer_learning_rate: float = 0.7
    #: Nesterov momentum of the outer step.
    outer_momentum: float = 0.9

    def check_options(self) -> None:
        super().check_options()
        if not 0 < self.outer_learning_rate < math.inf:
            raise ConfigError(f"diloco:outer_learning_rate={self.outer_learning_rate}: must be positive")
        if not 0 <= self.outer_momentum < 1:
            raise ConfigError(f"diloco:outer_momentum={self.outer_momentum}: must be at least 0 and below 1")

    def outer_step(self, start: Tensor, movement: Tensor, velocity: Tensor) -> None:
        velocity.mul_(self.outer_momentum).sub_(movement)
        start.add_(movement, alpha=self.outer_learning_rate)
        start.sub_(velocity, alpha=self.outer_learning_rate * self.outer_momentum)
