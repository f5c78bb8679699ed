"""Plot the figures of runs against their averaging periods, and their learning curves."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from speechdp.report.kit import formatting
from speechdp.report.kit.canvas import MOST_DOTS, Canvas, dashes, style_axes
from speechdp.report.kit.learning import (
    HIDDEN,
    curve_points,
    learning_axes,
    lies_on,
    mark_cut_off,
    seen_through,
    thinned,
)
from speechdp.report.kit.metric_names import Terms, terms_of
from speechdp.report.kit.speeds import any_raced
from speechdp.report.runs.derived import RunFigures, learned
from speechdp.report.runs.results import Evaluation


@dataclass(frozen=True)
class PlotMeasure:
    """A figure to plot against the period: its value, interval and axis."""

    title: str
    axis: str
    value: Callable[[RunFigures], float | None]
    text: Callable[[RunFigures], str]
    interval: Callable[[RunFigures], tuple[float, float] | None] = lambda row: None
    from_zero: bool = True
    terms: Terms | None = None


def _wer_interval(row: RunFigures) -> tuple[float, float] | None:
    errors = row.word_errors
    if errors is None or errors.low is None or errors.high is None:
        return None
    return 100 * errors.low, 100 * errors.high


def _race_interval(row: RunFigures) -> tuple[float, float] | None:
    return None if row.raced is None else row.raced.interval


WORD_ERRORS = PlotMeasure(
    "Word error rate, 95 % interval",
    "%",
    lambda row: None if row.word_errors is None else 100 * row.word_errors.wer,
    lambda row: "" if row.word_errors is None else formatting.percent(row.word_errors.wer, 1),
    _wer_interval,
)


def throughput_measure(rows: Sequence[RunFigures]) -> PlotMeasure:
    """Return the speed in the race, for rows that raced; if there was no race, the runs' throughput."""
    if any_raced(rows):
        return PlotMeasure(
            "Raced speed, 95 % interval",
            "times the baseline",
            lambda row: None if row.raced is None else row.raced.ratio,
            lambda row: "" if row.raced is None else formatting.times(row.raced.ratio),
            _race_interval,
        )
    return PlotMeasure(
        "Throughput",
        f"{terms_of(row.run for row in rows).amount}/s",
        lambda row: row.frames_per_s,
        lambda row: formatting.count(row.frames_per_s),
    )


def score_measure(rows: Sequence[RunFigures]) -> PlotMeasure:
    """Return the held-out score in the terms of the runs' task; rows that `_of_task` leaves out have none."""
    terms = terms_of(row.run for row in rows)
    drawn = {row.run.name for row in _of_task(rows, terms)}
    return PlotMeasure(
        formatting.capital(terms.metric.name),
        terms.metric.unit,
        lambda row: row.score if row.run.name in drawn else None,
        lambda row: terms.number(row.score),
        from_zero=False,
        terms=terms,
    )


def _of_task(rows: Sequence[RunFigures], terms: Terms) -> list[RunFigures]:
    """Return the rows of a task, without those no better than guessing: their scores would fill the plot."""
    of_task = [row for row in rows if row.run.metric.key == terms.metric.key]
    names = {run.name for run in learned([row.run for row in of_task])}
    return [row for row in of_task if row.run.name in names]


def draw_by_period(ax: Axes, rows: Sequence[RunFigures], measure: PlotMeasure, canvas: Canvas) -> bool:
    """Plot a figure of each run at its period; runs without a period are at the left.

    Returns:
        False, with nothing drawn, if no run has the figure.
    """
    placed = [(x, tick, row) for x, tick, row in _positions(rows, canvas) if measure.value(row) is not None]
    if not placed:
        return False
    style_axes(ax, measure.title, measure.axis, canvas.theme)
    joined = sorted((x, measure.value(row)) for x, _, row in placed if row.run.model_period is not None)
    if len({row.run.strategy for _, _, row in placed if row.run.model_period is not None}) == 1:
        ax.plot(*zip(*joined, strict=True), color=canvas.theme.grid, linewidth=2, zorder=1)
    xs = [x for x, _, _ in placed]
    crowded = _are_crowded(xs)
    for x, _, row in placed:
        _draw_point(ax, x, row, measure, canvas, written=not crowded)
    _limit_axes(ax, xs, measure)
    ticks = [tick for _, tick, _ in placed]
    if crowded:
        across = [tick.replace("\n", " ") for tick in ticks]
        ax.set_xticks(xs, across, rotation=45, ha="right", rotation_mode="anchor")
    else:
        ax.set_xticks(xs, ticks)
    # Ticks of periods in frames or seconds include the unit.
    label = "averaging period (steps)" if _are_in_steps(rows) else "averaging period"
    ax.set_xlabel(label if joined else "")
    if measure.terms is not None:
        measure.terms.finish_axis(ax)
    return True


def draw_one_rank(ax: Axes, rows: Sequence[RunFigures], measure: PlotMeasure, canvas: Canvas) -> None:
    """Add the speed of one rank and the ideal multiple of it as reference lines."""
    baseline = next((row for row in rows if row.run.is_baseline and measure.value(row)), None)
    speed = None if baseline is None else measure.value(baseline)
    if baseline is None or speed is None:
        return
    sizes = {row.run.size for row in rows if not row.run.is_baseline and row.run.size}
    lines = [(speed, "one rank")]
    if len(sizes) == 1 and (size := sizes.pop()) > 1:
        lines.append((size * speed, f"{size} × one rank"))  # noqa: RUF001
    for value, label in lines:
        line = ax.axhline(value, color=canvas.theme.baseline, linewidth=1, linestyle=(0, (4, 3)), zorder=0)
        canvas.tip(line, f"{label}: {formatting.count(value)} {measure.axis}")
        ax.annotate(
            label.replace("one ", "one\n"), (1, value), xycoords=("axes fraction", "data"), xytext=(4, 0),
            textcoords="offset points", ha="left", va="center", color=canvas.theme.muted, fontsize="small",
        )  # fmt: skip
    ax.set_ylim(0, max(lines[-1][0] * 1.12, ax.get_ylim()[1]))


def draw_learning(ax: Axes, rows: Sequence[RunFigures], canvas: Canvas, *, over_time: bool) -> bool:
    """Plot held-out scores over frames or over training time, with each curve's name at its end.

    Returns:
        False, with nothing drawn, if no run has an evaluation.
    """
    terms = terms_of(row.run for row in rows)
    curves = [(row, curve_points(row.run.evaluations, over_time)) for row in _of_task(rows, terms)]
    curves = [(row, thinned(points)) for row, points in curves if points]
    if not curves:
        return False
    longest = max(points[-1][0] for _, points in curves)
    scale = learning_axes(ax, "Learning over", longest, terms, canvas, over_time=over_time)
    focus_on_end(ax, [[y for _, y, _ in points] for _, points in curves])
    low, high = ax.get_ylim()
    nearest, drawn = (HIDDEN * longest, HIDDEN * (high - low)), list[list[tuple[float, float, Evaluation]]]()
    for row, points in curves:
        xs, ys = [x / scale for x, _, _ in points], [y for _, y, _ in points]
        colour = canvas.colours[row.run.name]
        hidden = sum(lies_on(points, other, nearest) for other in drawn)
        drawn.append(points)
        strokes = dashes(row.run.name, canvas) or seen_through(hidden)
        style = (0, strokes) if strokes else "-"
        (line,) = ax.plot(xs, ys, color=colour, linewidth=1.8, zorder=3, linestyle=style)
        canvas.tip(line, canvas.labels[row.run.name])
        dotted = zip(xs, ys, (e for _, _, e in points), strict=True) if len(points) <= MOST_DOTS else ()
        for x, y, evaluation in dotted:
            (dot,) = ax.plot([x], [y], "o", color=colour, markersize=3.6, zorder=4)
            canvas.tip(dot, _evaluation_tip(canvas.labels[row.run.name], evaluation, terms))
    mark_cut_off(ax, [y for _, points in curves for _, y, _ in points], terms)
    _label_ends(ax, curves, scale, canvas)
    terms.finish_axis(ax)
    return True


def _positions(rows: Sequence[RunFigures], canvas: Canvas) -> list[tuple[float, str, RunFigures]]:
    """Place the runs on the period axis: at log2 of steps, or side by side if any period has a unit."""
    rows = [row for row in rows if not row.run.is_baseline]
    periods = [row.run.model_period for row in rows if row.run.model_period is not None]
    in_steps = _are_in_steps(rows)
    without = [row for row in rows if row.run.model_period is None]
    placed: list[tuple[float, str, RunFigures]] = []
    first = math.log2(min((int(p) for p in periods), default=1)) if in_steps else 0.0
    # Keep runs without a period apart from the numbers of the axis.
    for i, row in enumerate(without):
        label = canvas.labels[row.run.name].replace(" ", "\n", 1)
        placed.append((first - 1.4 * (len(without) - i) - 0.4, label, row))
    for i, row in enumerate(row for row in rows if row.run.model_period is not None):
        period = row.run.model_period or ""
        placed.append((math.log2(int(period)) if in_steps else float(i), period, row))
    return placed


def _are_in_steps(rows: Sequence[RunFigures]) -> bool:
    """Return whether the averaging periods of all runs are numbers of steps."""
    periods = [row.run.model_period for row in rows if not row.run.is_baseline]
    return all(period.isdigit() and int(period) > 0 for period in periods if period is not None)


#: Largest width of the period axis, in distances of its two nearest points, with room for a text at each.
_WRITTEN_WIDTH = 9.0


def _are_crowded(xs: Sequence[float]) -> bool:
    """Return whether points are so near each other that their values and ticks would overlap."""
    nearest = min((after - before for before, after in pairwise(sorted(xs))), default=math.inf)
    return max(xs) - min(xs) + sum(_MARGINS) > _WRITTEN_WIDTH * nearest


def _draw_point(
    ax: Axes, x: float, row: RunFigures, measure: PlotMeasure, canvas: Canvas, *, written: bool
) -> None:
    """Draw a point with its interval.

    Args:
        written: write the value beside the point; the tooltip has it, too.
    """
    y = measure.value(row)
    assert y is not None
    colour = canvas.colours[row.run.name]
    interval = measure.interval(row)
    if interval is not None:
        ax.plot([x, x], interval, color=colour, linewidth=2, alpha=0.45, solid_capstyle="round", zorder=2)
    finished = row.run.completed
    face = colour if finished else canvas.theme.surface
    (dot,) = ax.plot([x], [y], "o", color=colour, markerfacecolor=face, markersize=7, zorder=3)
    text = measure.text(row)
    note = "" if finished else f" ({row.run.status})"
    figure = f"{text} {measure.axis}" if measure.terms is None else measure.terms.with_unit(y)
    canvas.tip(dot, f"{canvas.labels[row.run.name]}{note}: {figure}")
    if not written:
        return
    # Write beside an interval but below a lone point, clear of lines between points and references above.
    shift, ha, va = ((6, 7), "left", "center") if interval else ((0, -7), "center", "top")
    ax.annotate(
        text, (x, y), xytext=shift, textcoords="offset points", ha=ha, va=va, color=canvas.theme.ink,
        fontsize="small", zorder=5,
    )  # fmt: skip


#: Room at the left and right of the points on the period axis.
_MARGINS = (0.8, 1.1)


def _limit_axes(ax: Axes, xs: Sequence[float], measure: PlotMeasure) -> None:
    ax.set_xlim(min(xs) - _MARGINS[0], max(xs) + _MARGINS[1])
    low, high = ax.get_ylim()
    if measure.from_zero:
        ax.set_ylim(0, max(high * 1.08, 1e-9))
    else:
        ax.set_ylim(low - 0.2 * (high - low), high + 0.08 * (high - low))
    ax.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))


def _evaluation_tip(label: str, evaluation: Evaluation, terms: Terms) -> str:
    parts = (
        f"{label}, step {evaluation.step}: {terms.with_unit(evaluation.score)}",
        terms.others(evaluation),
        f"{formatting.count(evaluation.frames)} {terms.amount}, {formatting.seconds(evaluation.time_s)}",
    )
    return ", ".join(filter(None, parts))


#: Share of a curve's evaluations that the plot must show.
_KEPT = 2 / 3


def focus_on_end(ax: Axes, curves: Sequence[Sequence[float]]) -> None:
    """Cut off the curves' steep beginning if there are enough evaluations: it would compress their ends."""
    values = [y for curve in curves for y in curve]
    best, worst = max(values), min(values)
    worst_end = min(curve[-1] for curve in curves)
    shown = max(4 * (best - worst_end), 0.25 * (best - worst), 1e-3)
    latest = min(min(curve[-max(3, math.ceil(_KEPT * len(curve))) :]) for curve in curves)
    bottom = max(min(best - shown * 1.15, latest - 0.05 * shown), worst - 0.05 * shown)
    ax.set_ylim(bottom, best + 0.08 * shown)
    ax.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))


def _label_ends(ax: Axes, curves: Sequence[tuple[RunFigures, Any]], scale: float, canvas: Canvas) -> None:
    """Write each run's name at the end of its curve; names that would overlap are moved apart."""
    low, high = ax.get_ylim()
    gap = (high - low) * 0.068
    ends = sorted(((points[-1][1], points[-1][0] / scale, row) for row, points in curves), key=lambda e: e[0])
    heights: list[float] = []
    for y, _, _ in ends:
        heights.append(y if not heights else max(y, heights[-1] + gap))
    surplus = max(heights[-1] - high, 0.0)
    right = ax.get_xlim()[1]
    for (y, x, row), height in zip(ends, heights, strict=True):
        placed = max(height - surplus, low)
        ax.annotate(
            canvas.labels[row.run.name], (x, y), xytext=(right * 1.03, placed), textcoords="data",
            color=canvas.colours[row.run.name], fontsize=9, va="center", annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": canvas.theme.grid, "linewidth": 0.8, "shrinkB": 3},
        )  # fmt: skip
