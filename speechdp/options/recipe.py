"""Recipes: named sets of defaults for options that the user has not given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from speechdp.errors import ConfigError

OptimizerName = Literal["sgd", "adam", "adamw"]
RecipeName = Literal["none", "adpsgd-asr"]


@dataclass(frozen=True)
class Recipe:
    """A set of defaults.

    Attributes:
        optimizer: the optimizer.
        momentum: momentum of sgd; first beta of the others.
        epochs: passes over the training split.
        global_batch: segments of a step, all ranks together; None: the preset's batch on every rank.
        base_batch: batch that `base_learning_rate` is for; None: the learning rate is not scaled.
        base_learning_rate: peak learning rate at `base_batch`; scaled linearly with the batch.
        warmup_share: linear warm-up as a fraction of all epochs; annealing begins where it ends.  0: none,
            and annealing begins after two thirds of the epochs.
    """

    optimizer: OptimizerName = "adam"
    momentum: float = 0.9
    epochs: int = 12
    global_batch: int | None = None
    base_batch: int | None = None
    base_learning_rate: float | None = None
    warmup_share: float = 0.0


RECIPES: dict[str, Recipe] = {
    "none": Recipe(),
    # Zhang et al., ICASSP 2019 (arXiv 1904.04956), as recalled, not read in the paper: 16 epochs of SGD with
    # momentum 0.9; batch 256 at 0.1; batch 2,560 from 0.1 to 1.0 within 10 epochs, then annealed.
    "adpsgd-asr": Recipe(
        optimizer="sgd",
        momentum=0.9,
        epochs=16,
        global_batch=2560,
        base_batch=256,
        base_learning_rate=0.1,
        warmup_share=10 / 16,
    ),
}


def find_recipe(name: str) -> Recipe:
    """Return the recipe with this name.

    Raises:
        ConfigError: there is no such recipe.
    """
    if name not in RECIPES:
        raise ConfigError(f"--recipe {name}: choose one of {', '.join(RECIPES)}")
    return RECIPES[name]
