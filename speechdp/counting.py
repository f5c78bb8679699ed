"""Numbers of things, as messages have them."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """Return a number and what is counted: `1 rank`, `4 ranks`; thousands are separated."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
