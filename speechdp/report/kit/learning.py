"""What plots of learning curves share: points, units and axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar

from matplotlib.axes import Axes

from speechdp.report.kit.canvas import Canvas, style_axes
from speechdp.report.kit.metric_names import Terms
from speechdp.report.runs.results import Evaluation

#: Largest number of points drawn of a curve: a plot is a few hundred pixels wide.
_MOST_POINTS = 400
Point = TypeVar("Point")


def curve_points(evaluations: Sequence[Evaluation], over_time: bool) -> list[tuple[float, float, Evaluation]]:
    """Return (training time in s or frames, score, evaluation) where both are known."""
    points: list[tuple[float, float, Evaluation]] = []
    for evaluation in evaluations:
        x = evaluation.time_s if over_time else evaluation.frames
        if x is not None and evaluation.score is not None:
            points.append((x, evaluation.score, evaluation))
    return points


def thinned(points: Sequence[Point]) -> list[Point]:
    """Return evenly spaced points of a curve, few enough to draw, including the first and the last."""
    if len(points) <= _MOST_POINTS:
        return list(points)
    last = len(points) - 1
    return [points[round(place * last / (_MOST_POINTS - 1))] for place in range(_MOST_POINTS)]


#: Distance below which one curve hides another if it holds at every point, as a share of the axes.
HIDDEN = 0.006


def lies_on(
    curve: Sequence[tuple[Any, ...]], other: Sequence[tuple[Any, ...]], nearest: tuple[float, float]
) -> bool:
    """Return whether a curve hides another; only as many points as the shorter one has are compared.

    Args:
        curve, other: points, each starting with x and y.
        nearest: largest distance in x and in y at which two points look like one.
    """
    return all(
        abs(point[0] - its[0]) <= nearest[0] and abs(point[1] - its[1]) <= nearest[1]
        for point, its in zip(curve, other, strict=False)
    )


def seen_through(hidden: int) -> tuple[float, ...]:
    """Return strokes and gaps, in points, that show `hidden` curves below; () if there are none."""
    return (4.0, 4.0 * hidden) if hidden else ()


def frames_unit(longest: float) -> tuple[float, str]:
    """Return the number of frames in an axis unit, and the unit's name."""
    return (1e6, "million") if longest >= 1e6 else (1e3, "thousand")


def time_unit(longest: float) -> tuple[float, str]:
    """Return the number of seconds in an axis unit, and the unit's name."""
    if longest >= 2 * 3600:
        return 3600.0, "h"
    return (60.0, "min") if longest >= 180 else (1.0, "s")


def learning_axes(
    ax: Axes, title: str, longest: float, terms: Terms, canvas: Canvas, *, over_time: bool
) -> float:
    """Set up the axes of learning curves; return the number of seconds or frames in the x axis's unit.

    Args:
        title: beginning of the plot's title; the name of the x axis follows.
        longest: the largest time, s, or number of frames.
    """
    scale, unit = time_unit(longest) if over_time else frames_unit(longest)
    style_axes(ax, f"{title} {'time' if over_time else terms.amount}", terms.axis, canvas.theme)
    what = "training time" if over_time else f"{terms.amount} trained on, all ranks"
    ax.set_xlabel(f"{what} ({unit})")
    ax.set_xlim(0, longest / scale * 1.02)
    return scale


def mark_cut_off(ax: Axes, heights: Sequence[float], terms: Terms) -> None:
    """Note in the axis label on which side earlier evaluations lie outside of the plot, if any do."""
    if min(heights, default=math.inf) < ax.get_ylim()[0]:
        ax.set_xlabel(f"{ax.get_xlabel()}\nearlier evaluations lie {'above' if terms.falls else 'below'}")
