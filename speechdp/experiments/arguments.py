"""What an experiment hands to its jobs: options as words of a command line, the split to tune decoding on."""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path
from typing import Any

from speechdp.data.shards.dataset import ARPA_NAME, GRAMMAR_NAME
from speechdp.errors import ConfigError
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


def refuse_throughout(options: TrainOptions) -> None:
    """Refuse to start the runs of an experiment from the model of an alignment.  Raises ConfigError."""
    if options.realign_from == "throughout":
        raise ConfigError(
            "--realign-from throughout: runs that are compared start from initial weights; give another"
        )


def split_to_tune_on(data: Path, held_out: str, split: str) -> str | None:
    """Return the split on which experiments choose scales before they decode `split`; None: they need none.

    With a language model word errors depend on the scales more than on what is compared, and the best ones
    differ between models.  Without one the defaults do.  Where the held-out split itself is decoded, each run
    is judged at its best there.
    """
    has_model = any((data / name).exists() for name in (ARPA_NAME, GRAMMAR_NAME))
    return held_out if has_model and split else None
