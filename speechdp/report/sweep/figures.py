"""The plots of the report, section by section of the page."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes

from speechdp.parallel.period import PeriodUnit
from speechdp.report.kit import formatting
from speechdp.report.kit.canvas import Canvas
from speechdp.report.kit.metric_names import terms_of
from speechdp.report.kit.periods import PeriodCurve, draw_periods, period_units
from speechdp.report.kit.svg import Panel
from speechdp.report.runs.derived import RunFigures
from speechdp.report.sweep import plots
from speechdp.report.sweep.bars import SPAN_KEYS, draw_data_rates, draw_shares, num_bars, rows_with_rates
from speechdp.report.sweep.resources import (
    draw_ranks_memory,
    draw_runs_clocks,
    draw_runs_utilisation,
    has_clocks,
    has_memory,
    has_samples,
)

_SMALL, _MEDIUM = (4.4, 3.1), (5.6, 3.4)


def make_panels(rows: Sequence[RunFigures]) -> dict[str, list[Panel]]:
    """Return the plots by the name of their section in the page's template, in the order of the page."""
    return {
        "plots_by_period": _by_period(rows),
        "plots_of_learning": _learning(rows),
        "plots_of_periods": _periods(rows),
        "plot_of_shares": [_shares(rows)],
        "plot_of_data": _data_path(rows),
        "plots_of_resources": _resources(rows),
    }


def _by_period(rows: Sequence[RunFigures]) -> list[Panel]:
    """Return the plots over the period; none for a single run."""
    if sum(not row.run.is_baseline for row in rows) < 2:
        return []

    def panel(name: str, what: str, measure: plots.PlotMeasure, *, with_one_rank: bool = False) -> Panel:
        def draw(ax: Axes, canvas: Canvas) -> bool:
            drawn = plots.draw_by_period(ax, rows, measure, canvas)
            if drawn and with_one_rank:
                plots.draw_one_rank(ax, rows, measure, canvas)
            return drawn

        return Panel(name, f"{what} against the averaging period", _SMALL, draw)

    terms = terms_of(row.run for row in rows)
    speed = f"{terms.amount.capitalize()} per second"
    return [
        panel("throughput", speed, plots.throughput_measure(rows), with_one_rank=True),
        panel("log-prob", formatting.capital(terms.metric.name), plots.score_measure(rows)),
        panel("wer", "Word error rate", plots.WORD_ERRORS),
    ]


def _learning(rows: Sequence[RunFigures]) -> list[Panel]:
    terms = terms_of(row.run for row in rows)

    def panel(name: str, over: str, *, over_time: bool) -> Panel:
        return Panel(
            name,
            f"{formatting.capital(terms.metric.name)} over {over}",
            _MEDIUM,
            lambda ax, canvas: plots.draw_learning(ax, rows, canvas, over_time=over_time),
        )

    return [
        panel("learning-frames", f"the {terms.amount} trained on", over_time=False),
        panel("learning-time", "the training time", over_time=True),
    ]


def _periods(rows: Sequence[RunFigures]) -> list[Panel]:
    """Return the plots of the period in force, one per unit; none if no strategy changes its period."""

    def panel(unit: PeriodUnit) -> Panel:
        def draw(ax: Axes, canvas: Canvas) -> bool:
            curves = [
                PeriodCurve(row.run, canvas.labels[row.run.name], canvas.colours[row.run.name])
                for row in rows
            ]
            return draw_periods(ax, "Averaging period in force", curves, unit, canvas, named=True)

        return Panel(f"periods-{unit.value}", "Averaging period in force over the steps", _MEDIUM, draw)

    return [panel(unit) for unit in period_units(row.run for row in rows)]


def _shares(rows: Sequence[RunFigures]) -> Panel:
    return Panel(
        "time-shares",
        "Shares of the step time of every rank of every run",
        (11.0, 1.1 + 0.29 * max(num_bars(rows), 2) + 0.12 * len(rows)),
        lambda ax, canvas: draw_shares(ax, rows, canvas),
        SPAN_KEYS,
    )


def _data_path(rows: Sequence[RunFigures]) -> list[Panel]:
    """Return the plot of the data path; none, rather than an empty one, if no run recorded it."""
    num_bars = len(rows_with_rates(rows))
    if num_bars == 0:
        return []
    description = "Frames per second that the data path could deliver, and that were trained on"
    size = (11.0, 0.8 + 0.34 * max(num_bars, 2))
    return [Panel("data-rates", description, size, lambda ax, canvas: draw_data_rates(ax, rows, canvas))]


def _resources(rows: Sequence[RunFigures]) -> list[Panel]:
    """Return the plots of the resources that runs used, as far as recorded."""
    size = (5.6, max(3.6, 0.9 + 0.24 * len(rows)))
    drawn = []
    if has_samples(rows):
        what = "Utilisation of GPUs or processes over time"
        drawn += [
            Panel("utilisation", what, size, lambda ax, canvas: draw_runs_utilisation(ax, rows, canvas))
        ]
    if has_clocks(rows):
        what = "SM clock of GPUs over time"
        drawn += [Panel("clocks", what, size, lambda ax, canvas: draw_runs_clocks(ax, rows, canvas))]
    if has_memory(rows):
        what = "Most memory that each rank has held"
        drawn += [Panel("memory", what, size, lambda ax, canvas: draw_ranks_memory(ax, rows, canvas))]
    return drawn
