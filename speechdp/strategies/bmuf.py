"""Blockwise model-update filtering: block momentum filters the mean update of each block of data."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from torch import Tensor

from speechdp.errors import ConfigError
from speechdp.parallel.period import Period
from speechdp.strategies.mechanisms.outer_optimizer import OuterStrategy
from speechdp.strategies.mechanisms.periodic import MomentumRule


@dataclass(eq=False)
class Bmuf(OuterStrategy):
    """Average models, and filter the average by block momentum, classical (CBM) or Nesterov (NBM).

    Update rule: every rank trains locally for a period from y; then, w the mean of the ranks' parameters,
        V <- eta V + zeta (w - y);  CBM: y <- y + V;  NBM: y <- y + eta V + zeta (w - y).
    The global model is y with CBM and y - eta V with NBM, whose y looks ahead.

    Exchange: as model_averaging, one allreduce of the parameters per period; with momentum=average one more
    for each vector of the optimizer.

    Guarantee: replicas are bitwise equal after each exchange, and after finish.  eta=0, zeta=1 is
    model_averaging with the same momentum=.  For y, NBM is diloco with outer_learning_rate=zeta and
    outer_momentum=eta.

    Source: Chen & Huo 2016; the Nesterov form as recalled from it.  From CNTK: defaults eta = 1 - 1/N,
    zeta = 1, and the reset of local momentum; from fairseq: a period of 50 steps and `begin` (its warm-up,
    which sends rank 0's model instead of averaging gradients).  Deviations: the mean is weighted by frames;
    the Nesterov form of CNTK and fairseq also starts from y - eta V, but keeps the look-ahead when it adds
    the next one, so its steps are longer by the factor 1 + eta.
    """

    period: Period = field(default_factory=lambda: Period(50))
    #: Block momentum, 0 <= eta < 1; -1: 1 - 1/N for N ranks.
    eta: float = -1.0
    #: Block learning rate.
    zeta: float = 1.0
    #: Start each block ahead of the global model, where the momentum will take it.
    nesterov: bool = False
    #: The optimizer's state at an exchange: set to zero, each rank's own, or the ranks' mean.
    momentum: MomentumRule = "reset"

    def check_options(self) -> None:
        super().check_options()
        if self.eta != -1 and not 0 <= self.eta < 1:
            raise ConfigError(f"bmuf:eta={self.eta}: must be at least 0 and below 1, or -1 for 1 - 1/N")
        if not 0 < self.zeta < math.inf:
            raise ConfigError(f"bmuf:zeta={self.zeta}: must be positive")
        if self.nesterov and self.eta == 0:
            raise ConfigError("bmuf:nesterov=true,eta=0: nothing to look ahead to; give eta > 0")

    @property
    def block_momentum(self) -> float:
        """Value of `eta`, with its default filled in."""
        return 1.0 - 1.0 / self.comm.size if self.eta == -1 else self.eta

    def outer_step(self, start: Tensor, movement: Tensor, velocity: Tensor) -> None:
        velocity.mul_(self.block_momentum).add_(movement, alpha=self.zeta)
        if self.nesterov:
            start.add_(velocity, alpha=self.block_momentum).add_(movement, alpha=self.zeta)
        else:
            start.add_(velocity)

    def to_global_model(self, values: Tensor) -> None:
        if self.nesterov:
            values.sub_(self._velocity, alpha=self.block_momentum)

    def settle(self) -> None:
        self.settle_momentum(self.momentum)
