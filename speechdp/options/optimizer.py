"""Options of the optimizer and of its learning rate over epochs.

The docstring under a field is its help on the command line.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from speechdp.errors import ConfigError
from speechdp.options.recipe import OptimizerName, Recipe
from speechdp.options.schedule import Schedule


@dataclass(frozen=True)
class OptimizerOptions:
    """The optimizer and its learning rate over epochs; what is not given comes from --recipe."""

    optimizer: OptimizerName | None = None
    """SGD with momentum, Adam, or AdamW; default: adam, with --recipe adpsgd-asr sgd."""
    learning_rate: float | None = None
    """Learning rate of the plateau; default 0.002 for adam and adamw, 0.1 for sgd, unless scaled as below."""
    base_learning_rate: float | None = None
    """Learning rate at --base-batch; the plateau's is this times global batch / base batch, and the warm-up
    begins at it.  Default with --recipe adpsgd-asr: 0.1."""
    base_batch: int | None = None
    """Segments a step, all ranks together, that --base-learning-rate suits; with --recipe adpsgd-asr 256."""
    momentum: float | None = None
    """Momentum of sgd; first beta of adam and adamw; default 0.9."""
    weight_decay: float = 0.0
    """L2 penalty (sgd, adam) or decoupled decay (adamw)."""
    max_gradient_norm: float = 1.0
    """Clip the gradient (mean over frames) to this norm; 0: never."""
    warmup_epochs: float | None = None
    """Epochs over which the learning rate rises linearly; default: 0, with --recipe adpsgd-asr 10/16 of
    --epochs."""
    warmup_from: float | None = None
    """Learning rate at the start of the warm-up; default: the base learning rate if there is one, else 0."""
    anneal_from: int | None = None
    """First epoch, counted from 0, with an annealed learning rate; -1, the default: two thirds of --epochs;
    with --recipe adpsgd-asr the first after the warm-up."""
    anneal_factor: float = math.sqrt(0.5)
    """Learning rate of an annealed epoch over that of the epoch before."""

    def __post_init__(self) -> None:
        if self.momentum is not None and not 0 <= self.momentum < 1:
            raise ConfigError(f"--momentum {self.momentum}: must lie in [0, 1)")
        for name in ("weight_decay", "max_gradient_norm"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"--{name.replace('_', '-')} {getattr(self, name)}: must not be negative")
        for name in ("base_learning_rate", "base_batch"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"--{name.replace('_', '-')} {value}: must be positive")
            if value is not None and self.learning_rate is not None:
                raise ConfigError(
                    f"--{name.replace('_', '-')} scales the learning rate, --learning-rate sets it: give one"
                )

    def resolve(self, recipe: Recipe, epochs: int, global_batch: int | None) -> OptimizerOptions:
        """Fill what was not given from `recipe`, for so many epochs and segments a step (None: unknown).

        Raises:
            ConfigError: a learning rate to be scaled that is not known, or that is another optimizer's.
        """
        peak = self._peak(recipe, global_batch)
        start = self.warmup_from
        if start is None:  # the rate that suits the base batch, as long as that is below the peak
            scale = self._scale(recipe, global_batch)
            start = 0.0 if scale is None else peak / max(scale, 1.0)
        warmup = recipe.warmup_share * epochs if self.warmup_epochs is None else self.warmup_epochs
        anneal_from = self.anneal_from
        if anneal_from is None:
            anneal_from = math.ceil(warmup) if recipe.warmup_share else -1
        return dataclasses.replace(
            self,
            optimizer=self.optimizer or recipe.optimizer,
            learning_rate=peak,
            base_learning_rate=None,
            base_batch=None,
            momentum=recipe.momentum if self.momentum is None else self.momentum,
            warmup_epochs=warmup,
            warmup_from=start,
            anneal_from=max(1, epochs * 2 // 3) if anneal_from < 0 else anneal_from,
        )

    def schedule(self) -> Schedule:
        """Return the learning rate over epochs; of resolved options."""
        assert self.learning_rate is not None and self.warmup_epochs is not None
        assert self.warmup_from is not None and self.anneal_from is not None
        return Schedule(
            learning_rate=self.learning_rate,
            warmup_epochs=self.warmup_epochs,
            warmup_from=self.warmup_from,
            anneal_from=self.anneal_from,
            anneal_factor=self.anneal_factor,
        )

    def _peak(self, recipe: Recipe, global_batch: int | None) -> float:
        """Return the learning rate of the plateau."""
        optimizer = self.optimizer or recipe.optimizer
        if self.learning_rate is not None:
            return self.learning_rate
        base = recipe.base_learning_rate if self.base_learning_rate is None else self.base_learning_rate
        scale = self._scale(recipe, global_batch)
        if base is None and scale is None:
            return 0.1 if optimizer == "sgd" else 0.002
        if base is None or scale is None:
            raise ConfigError("--base-learning-rate and --base-batch need each other: give both or neither")
        if self.base_learning_rate is None and optimizer != recipe.optimizer:
            raise ConfigError(
                f"--optimizer {optimizer}: the recipe's learning rate is for {recipe.optimizer}; "
                "give --learning-rate or --base-learning-rate"
            )
        return base * scale

    def _scale(self, recipe: Recipe, global_batch: int | None) -> float | None:
        """Return how many base batches a step has; None where the learning rate is not scaled."""
        base = recipe.base_batch if self.base_batch is None else self.base_batch
        if base is None:
            return None
        assert global_batch is not None, "the learning rate is scaled by resolve(size)"
        return global_batch / base
