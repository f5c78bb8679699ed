"""Options of the optimizer and of its learning rate schedule.

The docstring under a field is its help on the command line.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Annotated

from speechdp.errors import ConfigError
from speechdp.options.recipe import OptimizerName, Recipe
from speechdp.options.schedule import Schedule
from speechdp.options.shown import shown


@dataclass(frozen=True)
class OptimizerOptions:
    """The optimizer and its learning rate schedule: linear warm-up, a plateau, then annealing every epoch."""

    optimizer: Annotated[
        OptimizerName | None, shown("{sgd,adam,adamw}", "adam; sgd with --recipe adpsgd-asr")
    ] = None
    """SGD with momentum, Adam or AdamW."""
    learning_rate: Annotated[
        float | None, shown("RATE", "0.002 for adam and adamw, 0.1 for sgd; scaled if --base-batch is set")
    ] = None
    """Learning rate of the plateau."""
    base_learning_rate: Annotated[float | None, shown("RATE", "none; 0.1 with --recipe adpsgd-asr")] = None
    """Learning rate for a batch of --base-batch, scaled linearly to the batch in use.
    The plateau is --base-learning-rate x global batch / --base-batch.
    The warm-up starts from --base-learning-rate, or from the plateau if that is lower."""
    base_batch: Annotated[int | None, shown("SEGMENTS", "none; 256 with --recipe adpsgd-asr")] = None
    """Batch over all ranks that --base-learning-rate was tuned for; needs --base-learning-rate."""
    momentum: Annotated[float | None, shown("BETA", "0.9")] = None
    """Momentum of sgd, or first beta of adam and adamw; at least 0, below 1."""
    weight_decay: Annotated[float, shown("DECAY")] = 0.0
    """L2 penalty (sgd, adam) or decoupled weight decay (adamw)."""
    max_gradient_norm: Annotated[float, shown("NORM")] = 1.0
    """Clip the gradient (averaged over frames) to this norm; 0: no clipping."""
    warmup_epochs: Annotated[
        float | None, shown("EPOCHS", "0; 10/16 of --epochs with --recipe adpsgd-asr")
    ] = None
    """Length of the linear warm-up in epochs; fractions are allowed."""
    warmup_from: Annotated[
        float | None, shown("RATE", "0; with --base-batch the base learning rate or the plateau, if lower")
    ] = None
    """Learning rate at the start of the warm-up."""
    anneal_from: Annotated[
        int | None, shown("EPOCH", "two thirds of --epochs; with --recipe adpsgd-asr the end of the warm-up")
    ] = None
    """First epoch, counted from 0, with an annealed learning rate; -1: two thirds of --epochs."""
    anneal_factor: Annotated[float, shown("FACTOR", "0.707, which halves the rate every two epochs")] = (
        math.sqrt(0.5)
    )
    """Factor on the learning rate in each epoch from --anneal-from on, above 0 and at most 1."""

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
        """Fill in missing options from `recipe`.

        Args:
            recipe: the recipe.
            epochs: passes over the training split.
            global_batch: segments per step over all ranks; None: unknown.

        Raises:
            ConfigError: a scaled learning rate without its base, or one meant for another optimizer.
        """
        peak = self._peak(recipe, global_batch)
        start = self.warmup_from
        if start is None:  # the rate of the base batch, or the peak if that is lower
            scale = self._scale(recipe, global_batch)
            start = 0.0 if scale is None else peak / max(scale, 1.0)
        warmup = recipe.warmup_share * epochs if self.warmup_epochs is None else self.warmup_epochs
        anneal_from = self.anneal_from
        if anneal_from is None:
            # Without a warm-up, the first epoch has the plateau's rate, as it has without a recipe.
            anneal_from = max(1, math.ceil(warmup)) if recipe.warmup_share else -1
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

    def refuse_rate(self) -> None:
        """Refuse a learning rate and its scaling beside --learning-rates.  Raises ConfigError."""
        for name in ("learning_rate", "base_learning_rate", "base_batch"):
            if getattr(self, name) is not None:
                raise ConfigError(f"--{name.replace('_', '-')}: leave it out: --learning-rates tries others")

    def check_warmup(self, recipe: Recipe) -> None:
        """Refuse --warmup-from without a warm-up.  Call on unresolved options.  Raises ConfigError."""
        warmup = recipe.warmup_share if self.warmup_epochs is None else self.warmup_epochs
        if self.warmup_from is not None and warmup == 0:
            raise ConfigError(
                f"--warmup-from {self.warmup_from:g}: there is no warm-up; give --warmup-epochs, or leave "
                "it out"
            )

    def schedule(self) -> Schedule:
        """Return the learning rate schedule; options must be resolved."""
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
        """Return the global batch in units of base batches; None if the learning rate is not scaled."""
        base = recipe.base_batch if self.base_batch is None else self.base_batch
        if base is None:
            return None
        assert global_batch is not None, "the learning rate is scaled by resolve(size)"
        return global_batch / base
