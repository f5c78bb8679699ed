"""Which of several settings is the fastest: by their race those that took part in one, else by their runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from speechdp.report.kit import formatting
from speechdp.report.kit.tables import Column
from speechdp.report.runs.raced import RacedSpeed

#: By which share speeds of runs differ although nothing else does.
_BY_CHANCE = 0.05


class Raced(Protocol):
    """What is compared."""

    @property
    def raced(self) -> RacedSpeed | None:
        """Its speed by the race; None: it took no part in one."""

    @property
    def score(self) -> float | None:
        """What is higher the better a model is on held-out data."""


Row = TypeVar("Row", bound=Raced)


def any_raced(rows: Sequence[Raced]) -> bool:
    """Return whether a race compares some of the rows: speeds are attached only where it compares several."""
    return any(row.raced is not None for row in rows)


def ranked(rows: Sequence[Row]) -> list[Row]:
    """Return the rows that are compared by their speed: those that raced, else all, by their runs.

    A row's ratio in a race and the throughput of another's run are never compared.
    """
    return [row for row in rows if row.raced is not None] or list(rows)


def choose_fastest(rows: Sequence[Row], of_runs: Callable[[Row], float]) -> tuple[Row, list[Row]]:
    """Return the row to choose of those that are ranked, and those whose speed cannot be told from its.

    The most accurate is chosen of those than which no row is known to be faster.  The row that is the fastest
    in truth is among these in 95 % of races at least, with enough rounds (docs/timing.md).

    Args:
        of_runs: the throughput of a row's own runs.
    """
    candidates = ranked(rows)
    fastest = _first(candidates, of_runs)
    if not _has_interval(fastest):
        return fastest, []
    # Each of a circle of rows might be known to be faster than the next, if hardly ever.
    among = len(candidates)
    alike = [
        row for row in candidates if not any(_is_faster(other, row, of_runs, among) for other in candidates)
    ]
    chosen = max(alike or [fastest], key=lambda row: row.score or 0.0)
    return chosen, [row for row in alike if row is not chosen]


def faster_than(chosen: Row, rows: Sequence[Row], of_runs: Callable[[Row], float]) -> Row | None:
    """Return the fastest of the rows that are compared with the chosen one; None: not known to be faster.

    Args:
        of_runs: as in choose_fastest.
    """
    compared = [row for row in rows if (row.raced is None) == (chosen.raced is None)]
    fastest = _first(compared, of_runs)
    return fastest if _is_faster(fastest, chosen, of_runs, len(compared)) else None


def _first(rows: Sequence[Row], of_runs: Callable[[Row], float]) -> Row:
    """Return the row with the largest ratio of the race, or of rows that did not race the fastest run's."""
    return max(rows, key=lambda row: of_runs(row) if row.raced is None else row.raced.ratio)


def _is_faster(one: Row, other: Row, of_runs: Callable[[Row], float], among: int) -> bool:
    """Return whether a row is faster than another that is compared with it: known to be, by a race.

    Args:
        among: number of rows that are compared.
    """
    if one.raced is None or other.raced is None:
        return of_runs(one) > of_runs(other)
    if not _has_interval(one):
        return one.raced.over(other.raced).ratio > 1
    return one.raced.is_faster_than(other.raced, among)


def _has_interval(row: Raced) -> bool:
    return row.raced is not None and row.raced.interval is not None


def ratio_text(speed: RacedSpeed | None) -> str:
    """Write a ratio and its interval: `1.41 [1.38, 1.44]`."""
    return formatting.MISSING if speed is None else times_text(speed.ratio, speed.interval)


def times_text(ratio: float | None, interval: tuple[float, float] | None) -> str:
    """Write a ratio with its interval, if it has one: `1.41 [1.38, 1.44]`."""
    if ratio is None or interval is None:
        return formatting.times(ratio)
    low, high = map(formatting.times, interval)
    return f"{formatting.times(ratio)} [{low}, {high}]"


def is_surely_slower(times: float | None, interval: tuple[float, float] | None) -> bool:
    """Return whether a speed is below another: by the interval of its ratio, else by more than by chance."""
    if times is None:
        return False
    return times < 1 - _BY_CHANCE if interval is None else interval[1] < 1


def speed_phrase(speed: RacedSpeed, name: str, baseline: str) -> str:
    """Write how fast a setting is beside the baseline, without a line break inside the figures.

    Args:
        speed: of the setting, in the race.
        name: the setting.
        baseline: the setting whose speed is 1.
    """
    if name == baseline:
        return "the speed that others are compared with"
    figures = ratio_text(speed).replace(" ", "\u00a0")
    return f"{figures} times the speed of {baseline}"


RACED_SPEED: Column[Any] = Column(
    "raced_speed", "raced speed", "times",
    "Speed over the baseline's in the same round of the race, and the 95 % interval; empty for settings that "
    "did not race.",
    lambda row: None if row.raced is None else row.raced.ratio, formatting.times,
    cell=lambda row: ratio_text(row.raced).replace(" ", "\u00a0"),
)  # fmt: skip


def _end_of_interval(end: int) -> Callable[[Raced], float | None]:
    def value(row: Raced) -> float | None:
        interval = None if row.raced is None else row.raced.interval
        return None if interval is None else interval[end]

    return value


RACED_LOW, RACED_HIGH = (
    replace(RACED_SPEED, key=f"raced_speed_{name}", value=_end_of_interval(end), cell=None)
    for end, name in enumerate(("low", "high"))
)
