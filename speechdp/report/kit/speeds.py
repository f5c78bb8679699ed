"""Choose the fastest of several settings: by their race if they took part in one, else by their runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from speechdp.report.kit import formatting
from speechdp.report.kit.tables import Column
from speechdp.report.runs.raced import RacedSpeed

#: Relative difference of speed between runs that have the same settings.
_BY_CHANCE = 0.05


class Raced(Protocol):
    """A row whose speed is compared."""

    @property
    def raced(self) -> RacedSpeed | None:
        """Its speed in the race; None: it took part in none."""

    @property
    def score(self) -> float | None:
        """Score of its model on held-out data; higher is better."""


Row = TypeVar("Row", bound=Raced)


def any_raced(rows: Sequence[Raced]) -> bool:
    """Return whether a race compares some of the rows: only races of several rows attach speeds to them."""
    return any(row.raced is not None for row in rows)


def ranked(rows: Sequence[Row]) -> list[Row]:
    """Return the rows to compare by speed: those that raced; if none did, all, by their runs.

    The ratio of one row in a race is never compared with the throughput of another row's run.
    """
    return [row for row in rows if row.raced is not None] or list(rows)


def choose_fastest(rows: Sequence[Row], of_runs: Callable[[Row], float]) -> tuple[Row, list[Row]]:
    """Return the row to choose, and the other rows that may be the fastest.

    Candidates are the rows that no other row is known to outpace; the most accurate of them is chosen.  With
    enough rounds, the row that is truly the fastest is among the candidates in at least 95 % of races
    (docs/timing.md).

    Args:
        of_runs: returns the throughput of a row's own runs.
    """
    candidates = ranked(rows)
    fastest = _first(candidates, of_runs)
    if not _has_interval(fastest):
        return fastest, []
    # In rare cases, each row in a cycle is known to be faster than the next: then no candidate is left.
    among = len(candidates)
    alike = [
        row for row in candidates if not any(_is_faster(other, row, of_runs, among) for other in candidates)
    ]
    chosen = max(alike or [fastest], key=lambda row: row.score or 0.0)
    return chosen, [row for row in alike if row is not chosen]


def faster_than(chosen: Row, rows: Sequence[Row], of_runs: Callable[[Row], float]) -> Row | None:
    """Return the fastest row that can be compared with the chosen one; None: not known to be faster.

    Args:
        of_runs: as in `choose_fastest`.
    """
    compared = [row for row in rows if (row.raced is None) == (chosen.raced is None)]
    fastest = _first(compared, of_runs)
    return fastest if _is_faster(fastest, chosen, of_runs, len(compared)) else None


def _first(rows: Sequence[Row], of_runs: Callable[[Row], float]) -> Row:
    """Return the row with the largest ratio in the race; if none raced, the row with the fastest run."""
    return max(rows, key=lambda row: of_runs(row) if row.raced is None else row.raced.ratio)


def _is_faster(one: Row, other: Row, of_runs: Callable[[Row], float], among: int) -> bool:
    """Return whether a row is faster than another; if both raced, whether the race shows it.

    Args:
        among: number of rows compared.
    """
    if one.raced is None or other.raced is None:
        return of_runs(one) > of_runs(other)
    if not _has_interval(one):
        # Without an interval, a ratio that is written as 1.00 shows nothing.
        return round(one.raced.over(other.raced).ratio, 2) > 1
    return one.raced.is_faster_than(other.raced, among)


def _has_interval(row: Raced) -> bool:
    return row.raced is not None and row.raced.interval is not None


def ratio_text(speed: RacedSpeed | None) -> str:
    """Write a ratio and its interval: `1.41 [1.38, 1.44]`."""
    return formatting.MISSING if speed is None else times_text(speed.ratio, speed.interval)


def times_text(ratio: float | None, interval: tuple[float, float] | None) -> str:
    """Write a ratio, with its interval if known: `1.41 [1.38, 1.44]`.

    A ratio without uncertainty has no interval: `1.00` for a setting divided by itself.
    """
    if ratio is None or interval is None or interval[0] == interval[1]:
        return formatting.times(ratio)
    low, high = map(formatting.times, interval)
    return f"{formatting.times(ratio)} [{low}, {high}]"


def is_surely_slower(times: float | None, interval: tuple[float, float] | None) -> bool:
    """Return whether a speed is below another's: by the ratio's interval; without one, by more than 5 %."""
    if times is None:
        return False
    return times < 1 - _BY_CHANCE if interval is None else interval[1] < 1


def speed_phrase(speed: RacedSpeed, name: str, baseline: str) -> str:
    """State a setting's speed relative to the baseline, without a line break inside the figures.

    Args:
        speed: speed of the setting in the race.
        name: name of the setting.
        baseline: name of the setting whose speed is 1.
    """
    if name == baseline:
        return "the reference speed"
    figures = ratio_text(speed).replace(" ", "\u00a0")
    return f"{figures} times the speed of {baseline}"


RACED_SPEED: Column[Any] = Column(
    "raced_speed", "raced speed", "times",
    "Speed divided by the baseline's in the same round of the race, and the 95 % interval; empty for "
    "settings that did not race.",
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
