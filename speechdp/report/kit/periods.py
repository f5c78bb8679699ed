"""Plot the averaging period in force over the steps of training."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from speechdp.counting import counted
from speechdp.parallel.period import PeriodUnit
from speechdp.report.kit.canvas import MOST_DOTS, Canvas, style_axes
from speechdp.report.runs.results import PeriodChange, RunResult

_AXES = {
    PeriodUnit.STEPS: ("steps", 1.0),
    PeriodUnit.FRAMES: ("thousand frames of a rank", 1000.0),
    PeriodUnit.SECONDS: ("s", 1.0),
}


@dataclass(frozen=True)
class PeriodCurve:
    """A run whose periods are plotted, with its name, colour and strokes from the other plots."""

    run: RunResult
    label: str
    colour: str
    dashes: tuple[float, ...] = ()


def period_units(runs: Iterable[RunResult]) -> list[PeriodUnit]:
    """Return the units of the recorded periods; each needs its own plot."""
    found = {run.periods[0].period.unit for run in runs if run.periods}
    return [unit for unit in PeriodUnit if unit in found]


def draw_periods(
    ax: Axes, title: str, curves: Sequence[PeriodCurve], unit: PeriodUnit, canvas: Canvas, *, named: bool
) -> bool:
    """Plot the period in force over steps, for runs whose strategy changes it.

    Args:
        unit: unit of the periods to plot; runs with another unit are left out.
        named: name the curves in a legend if there are several.

    Returns:
        False, with nothing drawn, if no run has recorded periods in this unit.
    """
    shown = [curve for curve in curves if curve.run.periods and curve.run.periods[0].period.unit is unit]
    if not shown:
        return False
    name, scale = _AXES[unit]
    ax.set_yscale("log", base=2)
    style_axes(ax, title, name, canvas.theme)
    lines = {curve.label: _draw_curve(ax, curve, scale, canvas) for curve in shown}
    values = [change.period.value / scale for curve in shown for change in curve.run.periods]
    ax.set_ylim(min(values) / 1.5, max(values) * 1.5)
    ax.yaxis.set_major_locator(LogLocator(base=2, numticks=7))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.set_xlim(0, max(_last_step(curve.run) for curve in shown) * 1.02)
    ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    ax.set_xlabel("steps of training")
    if named and len(lines) > 1:
        ax.legend(
            list(lines.values()), list(lines), frameon=False, fontsize="small", labelcolor=canvas.theme.ink
        )
    return True


def _draw_curve(ax: Axes, curve: PeriodCurve, scale: float, canvas: Canvas) -> Line2D:
    changes = curve.run.periods
    xs = [*(change.step for change in changes), _last_step(curve.run)]
    ys = [change.period.value / scale for change in (*changes, changes[-1])]
    (line,) = ax.plot(
        xs,
        ys,
        drawstyle="steps-post",
        color=curve.colour,
        linewidth=1.8,
        linestyle=(0, curve.dashes or (1, 0)),
        zorder=3,
    )
    canvas.tip(line, f"{curve.label}: {_summary(changes)}")
    for change in changes if len(changes) <= MOST_DOTS else ():
        (dot,) = ax.plot(
            [change.step], [change.period.value / scale], "o", color=curve.colour, markersize=3.6, zorder=4
        )
        canvas.tip(dot, f"{curve.label}: period {change.period} from step {change.step:,} on")
    return line


def _summary(changes: Sequence[PeriodChange]) -> str:
    first, last = changes[0].period, changes[-1].period
    if len(changes) == 1:
        return f"period {first} throughout"
    return f"period {first} first, {last} in the end, {counted(len(changes) - 1, 'change')}"


def _last_step(run: RunResult) -> int:
    """Return the last step for which a run's period is known, at least 1."""
    steps = [run.periods[-1].step, *(evaluation.step for evaluation in run.evaluations)]
    steps += [rank.last_step for rank in (run.timing.ranks if run.timing else ()) if rank.last_step]
    return max(1, *steps)
