"""Numbers and names of things, as messages have them."""

from __future__ import annotations

from collections.abc import Iterable


def counted(number: int, noun: str) -> str:
    """Return a number and what is counted: `1 rank`, `4 ranks`; thousands are separated."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Ask whether one of the names was meant, `; did you mean train?`; "": none is like it."""
    import difflib  # noqa: PLC0415 - only for a message; every command imports this module

    like = difflib.get_close_matches(name, list(names), n=1)
    return f"; did you mean {like[0]}?" if like else ""
