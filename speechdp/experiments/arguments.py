"""Write options of training as the words of a command line: what a comparison hands to its jobs."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

from speechdp.options.run import TrainOptions


def train_arguments(options: TrainOptions) -> list[str]:
    """Return the words that give `speechdp train` these options; defaults are left out."""
    return _words(options, TrainOptions())


def _words(options: Any, defaults: Any) -> list[str]:
    words: list[str] = []
    kinds = typing.get_type_hints(type(options))
    for field in dataclasses.fields(options):
        value, default = getattr(options, field.name), getattr(defaults, field.name)
        if dataclasses.is_dataclass(value):
            words += _words(value, default)
        elif value != default:
            words += _option(field.name.replace("_", "-"), value, kinds[field.name])
    return words


def _option(name: str, value: Any, kind: Any) -> list[str]:
    if kind is bool:
        return [f"--{name}" if value else f"--no-{name}"]
    if isinstance(value, (list, tuple)):
        return [f"--{name}", *map(str, value)]
    # One word: a negative number would be read as an option.
    return [f"--{name}={value}"]
