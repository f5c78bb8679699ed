"""Learning rate schedule: linear warm-up, then annealing once per epoch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from speechdp.errors import ConfigError


@dataclass(frozen=True)
class Schedule:
    """Warm-up, plateau, annealing: the shape of the AD-PSGD papers' recipe (arXiv 1904.04956, recalled).

    Attributes:
        learning_rate: learning rate of the plateau.
        warmup_epochs: epochs of linear warm-up; 0 for none.
        warmup_from: learning rate at the start of the warm-up.
        anneal_from: first epoch (counted from 0) with a smaller rate; negative: never.
        anneal_factor: factor on the rate from one epoch to the next, from `anneal_from` on.
    """

    learning_rate: float
    warmup_epochs: float = 0.0
    warmup_from: float = 0.0
    anneal_from: int = -1
    anneal_factor: float = math.sqrt(0.5)

    def __post_init__(self) -> None:
        if not 0 < self.learning_rate < math.inf:
            raise ConfigError(f"--learning-rate {self.learning_rate}: must be positive")
        for name in ("warmup_epochs", "warmup_from"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"--{name.replace('_', '-')} {getattr(self, name)}: must not be negative")
        if not 0 < self.anneal_factor <= 1:
            raise ConfigError(f"--anneal-factor {self.anneal_factor}: must be in (0, 1]")

    def at(self, epoch: float) -> float:
        """Return the learning rate after `epoch` epochs (2.5: half-way through the third)."""
        if epoch < self.warmup_epochs:
            share = epoch / self.warmup_epochs
            return self.warmup_from + share * (self.learning_rate - self.warmup_from)
        annealings = 0 if self.anneal_from < 0 else max(0, math.floor(epoch) - self.anneal_from + 1)
        return float(self.learning_rate * self.anneal_factor**annealings)
