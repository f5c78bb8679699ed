"""Check values read from a file against a dataclass: their types, and that numbers are finite."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any


def checked_fields(kind: Any, values: Any) -> dict[str, Any]:
    """Return the values that are fields of dataclass `kind`; ignore others, which a later version may write.

    The caller checks fields whose types are not in the table below.

    Raises:
        ValueError: a value is missing, has another type, or is not finite.
    """
    if not isinstance(values, Mapping):
        raise ValueError(f"{_shown(values)} where there should be fields")
    found = {}
    for name, fits, wanted, is_needed in _tests_of(kind):
        if name in values:
            if not fits(values[name]):
                raise ValueError(f"{name} is {_shown(values[name])}, not {wanted}")
            found[name] = values[name]
        elif is_needed:
            raise ValueError(f"there is no {name}")
    return found


def _is_whole(value: Any) -> bool:
    # At most a 64-bit integer: a larger one counts nothing real, and may not fit a float.
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= sys.maxsize


def _is_finite(value: Any) -> bool:
    return _is_whole(value) or (isinstance(value, float) and math.isfinite(value))


def _is_word(value: Any) -> bool:
    return isinstance(value, str)


def _is_words(value: Any) -> bool:
    return isinstance(value, tuple | list) and all(isinstance(word, str) for word in value)


#: By the text of a field's type: its test, and its name in messages.
_TESTS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "str": (_is_word, "a word"),
    "int": (_is_whole, "a whole number"),
    "float": (_is_finite, "a number"),
    "int | None": (lambda value: value is None or _is_whole(value), "a whole number"),
    "float | None": (lambda value: value is None or _is_finite(value), "a number"),
    "tuple[str, ...]": (_is_words, "a list of words"),
    "Mapping[str, Any] | None": (lambda value: value is None or isinstance(value, Mapping), "an object"),
}
_ANYTHING: tuple[Callable[[Any], bool], str] = (lambda value: True, "")


@cache
def _tests_of(kind: Any) -> tuple[tuple[str, Callable[[Any], bool], str, bool], ...]:
    """Return of every field its name, test, expected type in words, and whether it is required."""
    missing = dataclasses.MISSING
    return tuple(
        (field.name, *_TESTS.get(str(field.type), _ANYTHING), field.default is missing)
        for field in dataclasses.fields(kind)
    )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
