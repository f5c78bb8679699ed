"""How sure a choice is: what it rests on, in the words of every report."""

from __future__ import annotations

from collections.abc import Sequence

from speechdp.counting import counted


def judging(lacks: Sequence[str]) -> str:
    """Write what a choice rests on that is too little to know; "": it lacks nothing.

    Example:
        >>> judging(["by one seed", "without a race"])
        'judging by one seed and without a race'
        >>> judging(["without a race"])
        'without a race'
    """
    lack = " and ".join(lacks)
    return f"judging {lack}" if lack.startswith("by ") else lack


def seeds_text(seeds: int) -> str:
    """Write a number of seeds: `one seed`, `2 seeds`."""
    return "one seed" if seeds == 1 else f"{seeds} seeds"


def short_race(rounds: int) -> str:
    """Write of a race that is too short for intervals how long it was: `a race of 2 rounds`."""
    return f"a race of {counted(rounds, 'round')}"
