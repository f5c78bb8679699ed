"""Options whose value is more options, for another program: --mpi-args, --launch-args, --scheduler-args."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from speechdp.errors import ConfigError


def split_words(option: str, text: str) -> tuple[str, ...]:
    """Split the value of `option` into words as a shell would, without other shell processing.

    Raises:
        ConfigError: a quote is not closed.
    """
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise ConfigError(
            f"{option} {text!r} cannot be split into words ({error}); quote it as in a shell"
        ) from error


def has_option(arguments: Sequence[str], name: str) -> bool:
    """Return whether a command line has an option `--like-this`; ranks accept `--like_this` as well."""
    return any(plain_option(word) == name for word in arguments)


def plain_option(word: str) -> str:
    """Return the name of an option as documented, other words as they are."""
    return word.partition("=")[0].replace("_", "-") if word.startswith("--") else word
