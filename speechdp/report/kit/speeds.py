"""Which of several settings is the fastest: by their race where all took part, else by their runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from speechdp.report.kit import formatting
from speechdp.report.kit.tables import Column
from speechdp.report.runs.raced import RacedSpeed


class Raced(Protocol):
    """What is compared."""

    @property
    def raced(self) -> RacedSpeed | None:
        """Its speed by the race; None: it took no part in one."""

    @property
    def score(self) -> float | None:
        """What is higher the better a model is on held-out data."""


Row = TypeVar("Row", bound=Raced)


def all_raced(rows: Sequence[Raced]) -> bool:
    """Return whether speeds are compared by a race: all settings took part in one."""
    return bool(rows) and all(row.raced is not None for row in rows)


def by_speed(rows: Sequence[Row], of_runs: Callable[[Row], float]) -> Callable[[Row], float]:
    """Return what is larger the faster one of the rows is.

    Args:
        of_runs: the throughput of a row's own runs.
    """
    if not all_raced(rows):
        return of_runs
    return lambda row: 0.0 if row.raced is None else row.raced.ratio


def not_apart(rows: Sequence[Row], fastest: Row) -> list[Row]:
    """Return the other rows whose speed the race cannot tell from the fastest's; none without intervals."""
    own = fastest.raced
    if own is None or own.low is None:
        return []
    others = [row for row in rows if row is not fastest]
    return [row for row in others if row.raced is not None and not own.is_apart_from(row.raced)]


def choose_fastest(rows: Sequence[Row], speed: Callable[[Row], float]) -> tuple[Row, list[Row]]:
    """Return the row to choose, and those whose speed cannot be told from its.

    The most accurate is chosen of the fastest and those than which no row is known to be faster: one whose
    interval overlaps that of the fastest, but lies below that of another row, is not among them.
    """
    fastest = max(rows, key=speed)
    alike = [fastest, *not_apart(rows, fastest)]
    alike = [row for row in alike if not any(_is_faster(other, row) for other in rows)]
    chosen = max(alike, key=lambda row: row.score or 0.0)
    return chosen, [row for row in alike if row is not chosen]


def _is_faster(one: Raced, other: Raced) -> bool:
    """Return whether the race tells that one row is faster than the other."""
    if one.raced is None or other.raced is None:
        return False
    return one.raced.ratio > other.raced.ratio and one.raced.is_apart_from(other.raced)


def ratio_text(speed: RacedSpeed | None) -> str:
    """Write a ratio and its interval: `1.41 [1.38, 1.44]`."""
    if speed is None:
        return formatting.MISSING
    if speed.low is None or speed.high is None:
        return formatting.times(speed.ratio)
    low, high = formatting.times(speed.low), formatting.times(speed.high)
    return f"{formatting.times(speed.ratio)} [{low}, {high}]"


def speed_phrase(speed: RacedSpeed, name: str, baseline: str) -> str:
    """Write how fast a setting is beside the baseline, without a line break inside the figures."""
    if name == baseline:
        return "the speed that others are compared with"
    figures = ratio_text(speed).replace(" ", "\u00a0")
    return f"{figures} times the speed of {baseline}"


RACED_SPEED: Column[Any] = Column(
    "raced_speed", "raced speed", "times",
    "Frames/s over the baseline's in the same round of the race, median and 95 % interval.",
    lambda row: None if row.raced is None else row.raced.ratio, formatting.times,
    cell=lambda row: ratio_text(row.raced).replace(" ", "\u00a0"),
)  # fmt: skip
RACED_LOW, RACED_HIGH = (
    replace(RACED_SPEED, key=f"raced_speed_{end}", value=value, cell=None)
    for end, value in (
        ("low", lambda row: None if row.raced is None else row.raced.low),
        ("high", lambda row: None if row.raced is None else row.raced.high),
    )
)
