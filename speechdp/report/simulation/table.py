"""The tables of a simulation for the terminal and the page, and its CSV."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from speechdp.report.kit import formatting
from speechdp.report.kit.tables import Column, RowHead, ShownTable, csv_text, with_figures
from speechdp.report.simulation.ranges import NEAR_BEST_TEXT, Family, label_of
from speechdp.simulation.predict import Interval, Prediction

#: Terminal width for a prediction on one line, characters.
_WIDE = 110
#: Hours below which the usual number of decimals has too few significant digits.
_FEW_HOURS = 0.1


def _between(interval: Interval, number: str = "count") -> str:
    write = formatting.count if number == "count" else formatting.percent
    return f"{write(interval.mean)} [{write(interval.low)}, {write(interval.high)}]"


def _share(key: str, title: str, meaning: str) -> Column[Prediction]:
    return Column(
        key, title, "%", meaning, lambda one: getattr(one, key), lambda value: formatting.percent(value, 1)
    )


_RANKS = Column[Prediction]("ranks", "ranks", "", "Number of ranks.", lambda one: one.ranks)
_PERIOD = Column[Prediction]("period", "period", "steps", "Steps between exchanges.", lambda one: one.period)
_STEP = Column[Prediction](
    "step_s", "step", "ms", "Mean time from one step of a rank to the next.", lambda one: one.step_s.mean,
    formatting.milliseconds,
)  # fmt: skip
_SHARES = (
    _share(
        "computing", "com\u00adputing", "Share of a step: forward, backward, update and what lies between."
    ),
    _share("data_wait", "data wait", "Share of a step: no batch is ready."),
    _share("exchange", "ex\u00adchange", "Share of a step: exchanges that do not overlap with computing."),
    _share("waiting", "waiting", "Share of a step: waiting for slower ranks, partners or the server."),
)
_MIXED = Column[Prediction](
    "mixed", "mixings made", "%", "Share of the due exchanges that are made; the others are skipped.",
    lambda one: one.mixed, formatting.percent,
)  # fmt: skip


@dataclass(frozen=True)
class TargetAmount:
    """The training amount for which hours of all ranks together are predicted.

    Attributes:
        frames: number of frames of all ranks together.
        amount: name of the frames; a user's script may call its items otherwise.
        hours: name of the hours: GPU-hours, or rank-hours if ranks have no GPUs.
    """

    frames: float
    amount: str
    hours: str = "rank-hours"

    def __str__(self) -> str:
        return f"{self.frames:,.0f} {self.amount}"


def _speed(amount: str) -> Column[Prediction]:
    return Column(
        "frames_per_s", f"{amount}/s", "", f"{amount.capitalize()} of all ranks in a second [90 % interval].",
        lambda one: one.frames_per_s.mean, cell=lambda one: _between(one.frames_per_s),
    )  # fmt: skip


def _efficiency(amount: str) -> Column[Prediction]:
    return Column(
        "efficiency", "efficiency", "%",
        f"{amount.capitalize()}/s over those of as many ranks that neither exchange nor wait "
        "[90 % interval].",
        lambda one: one.efficiency.mean, cell=lambda one: _between(one.efficiency, "percent"),
    )  # fmt: skip


def hours_text(hours: float) -> str:
    """Write hours; very short ones with two significant digits."""
    if not 0 < hours < _FEW_HOURS:
        return formatting.number(hours)
    return f"{hours:.{1 - math.floor(math.log10(hours))}f}"


def _hours(target: TargetAmount) -> Column[Prediction]:
    return Column(
        "gpu_hours", target.hours, "", f"Hours of all ranks together to {target}.",
        lambda one: one.gpu_hours(target.frames).mean,
        hours_text,
    )  # fmt: skip


def columns_of(predictions: Sequence[Prediction], target: TargetAmount) -> tuple[Column[Prediction], ...]:
    """Return the columns in which any prediction has a figure."""
    speed, efficiency = _speed(target.amount), _efficiency(target.amount)
    return with_figures(
        (_RANKS, _PERIOD, speed, efficiency, _STEP, *_SHARES, _MIXED, _hours(target)), predictions
    )


def full_table(
    predictions: Sequence[Prediction], target: TargetAmount, marks: Mapping[str, Markup]
) -> ShownTable[Prediction]:
    """Return the table with a row for every strategy, period and number of ranks."""
    rows, before = [], ""
    for one in predictions:
        label = label_of(one.strategy)
        rows.append((RowHead(label, mark=marks.get(label), begins=bool(before) and label != before), one))
        before = label
    return ShownTable(
        "predictions", "All predictions", columns_of(predictions, target), rows, first="strategy",
        wide_columns=_WIDE,
    )  # fmt: skip


def overview(families: Sequence[Family], marks: Mapping[str, Markup], amount: str) -> ShownTable[Family]:
    """Return the table with a row for each strategy: efficiency and shortest fast period over ranks."""
    ranks = sorted({n for family in families for n in family.ranks})
    columns = [_efficiency_at(n) for n in ranks]
    rows = [(RowHead(family.label, mark=marks.get(family.label)), family) for family in families]
    note = (
        f"Efficiency at the shortest period that has {NEAR_BEST_TEXT} of the fastest one's {amount}/s; in "
        "brackets the period, in steps."
    )
    return ShownTable("overview", "Efficiency over ranks", columns, rows, first="strategy", note=note)


def _efficiency_at(ranks: int) -> Column[Family]:
    def best(family: Family) -> Prediction | None:
        return next(iter(family.near_best(ranks)), None)

    def value(family: Family) -> float | None:
        one = best(family)
        return None if one is None else one.efficiency.mean

    def cell(family: Family) -> str:
        one = best(family)
        if one is None:
            return formatting.MISSING
        percent = f"{formatting.percent(one.efficiency.mean)} %"
        return f"{percent} ({one.period})" if len(family.periods) > 1 else percent

    return Column(f"efficiency_{ranks}", formatting.rank_count(ranks), "", "", value, cell=cell)


def csv_of(predictions: Sequence[Prediction], frames: float) -> str:
    """Return all predictions as CSV, in plain units: shares 0 to 1, times in s."""
    head = [
        *("strategy", "period", "ranks", "frames_per_s", "frames_per_s_low", "frames_per_s_high"),
        *("efficiency", "efficiency_low", "efficiency_high", "step_s", "step_s_low", "step_s_high"),
        *("computing", "data_wait", "exchange", "waiting", "mixed"),
        *("target_frames", "gpu_hours", "gpu_hours_low", "gpu_hours_high"),
    ]
    return csv_text(head, [_line(one, frames) for one in predictions])


def _line(one: Prediction, frames: float) -> list[str | float | int | None]:
    hours = one.gpu_hours(frames)
    intervals = [
        number
        for interval in (one.frames_per_s, one.efficiency, one.step_s)
        for number in (interval.mean, interval.low, interval.high)
    ]
    shares = [one.computing, one.data_wait, one.exchange, one.waiting, one.mixed]
    return [
        *(one.strategy.text, one.period, one.ranks, *intervals, *shares),
        *(frames, hours.mean, hours.low, hours.high),
    ]
