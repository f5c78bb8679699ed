"""Options of a run from names alone, for tests about single options."""

from __future__ import annotations

import dataclasses
from typing import Any

from speechdp.data.transforms.preprocess import AugmentOptions, InputOptions
from speechdp.options.batch import BatchOptions, LoadingOptions
from speechdp.options.model import ModelOptions
from speechdp.options.optimizer import OptimizerOptions
from speechdp.options.run import TrainOptions
from speechdp.parallel.registry import StrategyChoice


def options_with(**given: Any) -> TrainOptions:
    """Return options with these values, whatever component they belong to."""
    kinds = {
        "model": ModelOptions,
        "batch": BatchOptions,
        "optimizer": OptimizerOptions,
        "inputs": InputOptions,
        "augment": AugmentOptions,
        "loading": LoadingOptions,
    }
    parts: dict[str, Any] = {}
    for part, kind in kinds.items():
        names = {f.name for f in dataclasses.fields(kind)}
        parts[part] = kind(**{n: given.pop(n) for n in list(given) if n in names})
    if "strategy" in given:
        parts["strategy"] = StrategyChoice(given.pop("strategy"))
    return TrainOptions(**parts, **given)
