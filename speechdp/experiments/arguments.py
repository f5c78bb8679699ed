"""Arguments that an experiment passes to its jobs: options as command-line words, the split to tune on."""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path
from typing import Any

from speechdp.data.shards.dataset import ARPA_NAME, GRAMMAR_NAME
from speechdp.errors import ConfigError
from speechdp.options.run import TrainOptions


def train_arguments(options: TrainOptions) -> list[str]:
    """Return command-line words that give `speechdp train` these options; defaults are left out."""
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
    # As one word, because a separate negative number would be read as an option.
    return [f"--{name}={value}"]


def refuse_throughout(options: TrainOptions) -> None:
    """Refuse --realign-from throughout for the runs of an experiment.  Raises ConfigError."""
    if options.realign_from == "throughout":
        raise ConfigError(
            "--realign-from throughout: runs that are compared start from initial weights; give another"
        )


def split_to_tune_on(data: Path, held_out: str, split: str) -> str | None:
    """Return the split on which experiments tune the scales before they decode `split`; None: no tuning.

    With a language model, word errors depend more on the scales than on the settings under comparison, and
    the best scales differ between models.  Without one, the default scales suffice.  If the held-out split
    itself is decoded, each run is judged with its best scales there.
    """
    has_model = any((data / name).exists() for name in (ARPA_NAME, GRAMMAR_NAME))
    return held_out if has_model and split else None
