"""Turn the plots into SVG for the page and one PNG to pass on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure

from speechdp.report.kit import formatting
from speechdp.report.kit.canvas import Canvas, make_canvas
from speechdp.report.kit.metric_names import terms_of
from speechdp.report.kit.svg import STYLE, Frame, svg_of
from speechdp.report.kit.theme import PAGE, PRINT, SPAN_COLOURS
from speechdp.report.runs.derived import RunFigures
from speechdp.report.sweep import plots
from speechdp.report.sweep.bars import SPAN_TITLES, draw_data_rates, draw_shares, num_bars, rows_with_rates
from speechdp.report.sweep.resources import draw_ranks_memory, draw_runs_utilisation, has_memory, has_samples


@dataclass(frozen=True)
class Plot(Frame):
    """One plot of the page, and how it is drawn."""

    draw: Callable[[Axes, Sequence[RunFigures], Canvas], bool]


def _draw_throughput(ax: Axes, rows: Sequence[RunFigures], canvas: Canvas) -> bool:
    drawn = plots.draw_by_period(ax, rows, plots.throughput_measure(rows), canvas)
    if drawn:
        plots.draw_one_rank(ax, rows, canvas)
    return drawn


def make_plots(rows: Sequence[RunFigures]) -> list[Plot]:
    """Return the report's plots in their order on the page; one run has no use for a period axis."""
    small = (4.4, 3.1)
    figure = _held_out(rows)
    compared = sum(not row.run.is_baseline for row in rows) > 1
    by_period = [
        Plot("throughput", "Frames per second against the averaging period", small, _draw_throughput),
        Plot(
            "log-prob",
            f"{figure} against the averaging period",
            small,
            lambda ax, rows, canvas: plots.draw_by_period(ax, rows, plots.score_measure(rows), canvas),
        ),
        Plot(
            "wer",
            "Word error rate against the averaging period",
            small,
            lambda ax, rows, canvas: plots.draw_by_period(ax, rows, plots.WORD_ERRORS, canvas),
        ),
    ]
    return (by_period if compared else []) + _learning_and_time(rows) + _data_path(rows) + _resources(rows)


def _held_out(rows: Sequence[RunFigures]) -> str:
    return formatting.capital(terms_of(row.run for row in rows).metric.name)


def _learning_and_time(rows: Sequence[RunFigures]) -> list[Plot]:
    medium, figure = (5.6, 3.4), _held_out(rows)
    return [
        Plot(
            "learning-frames",
            f"{figure} over the frames trained on",
            medium,
            lambda ax, rows, canvas: plots.draw_learning(ax, rows, canvas, over_time=False),
        ),
        Plot(
            "learning-time",
            f"{figure} over the training time",
            medium,
            lambda ax, rows, canvas: plots.draw_learning(ax, rows, canvas, over_time=True),
        ),
        Plot(
            "time-shares",
            "Shares of the step time of every rank of every run",
            (11.0, 1.1 + 0.29 * max(num_bars(rows), 2) + 0.12 * len(rows)),
            draw_shares,
        ),
    ]


def _data_path(rows: Sequence[RunFigures]) -> list[Plot]:
    """Return the data path's plot; none, rather than an empty one, where no run recorded it."""
    num_bars = len(rows_with_rates(rows))
    if num_bars == 0:
        return []
    description = "Frames per second that the data path could deliver, and that were trained on"
    return [Plot("data-rates", description, (11.0, 0.8 + 0.34 * max(num_bars, 2)), draw_data_rates)]


def _resources(rows: Sequence[RunFigures]) -> list[Plot]:
    """Return the plots of what runs have used, where that was recorded."""
    size = (5.6, max(3.6, 0.9 + 0.24 * len(rows)))
    over_time = Plot("utilisation", "Utilisation of GPUs or processes over time", size, draw_runs_utilisation)
    memory = Plot("memory", "Most memory that each rank has held", size, draw_ranks_memory)
    drawn = [(has_samples(rows), over_time), (has_memory(rows), memory)]
    return [plot for recorded, plot in drawn if recorded]


def render_svg(plot: Plot, rows: Sequence[RunFigures]) -> str | None:
    """Return a plot as an SVG element for a page, or None where the runs have nothing to draw."""
    canvas = make_canvas(rows, PAGE)
    return svg_of(plot, canvas, lambda ax: plot.draw(ax, rows, canvas))


def render_png(path: Path, rows: Sequence[RunFigures]) -> bool:
    """Write all plots as one picture; return False, with nothing written, where there is nothing to draw."""
    canvas = make_canvas(rows, PRINT)
    lines: dict[tuple[float, float], list[Plot]] = {}
    for plot in make_plots(rows):
        lines.setdefault(plot.size, []).append(plot)
    heights = [size[1] + 0.3 for size in lines]
    with mpl.rc_context({**STYLE, "savefig.facecolor": "white"}):
        figure = Figure(figsize=(13.5, sum(heights)), layout="constrained")
        # A sub-figure a line: its plots need not stand in columns with the next line's.
        parts = figure.subfigures(len(lines), 1, height_ratios=heights, squeeze=False)[:, 0]
        drawn = [
            _draw_line(part, line, rows, canvas) for part, line in zip(parts, lines.values(), strict=True)
        ]
        if any(drawn):
            figure.savefig(path, format="png", dpi=120)
    return any(drawn)


def _draw_line(part: SubFigure, line: Sequence[Plot], rows: Sequence[RunFigures], canvas: Canvas) -> bool:
    """Draw plots side by side; return whether any of them had something to show."""
    part.get_layout_engine().set(w_pad=0.15, h_pad=0.12)  # type: ignore[call-arg]
    drawn = False
    for ax, plot in zip(part.subplots(1, len(line), squeeze=False)[0], line, strict=True):
        if plot.draw(ax, rows, canvas):
            drawn = True
        else:
            ax.set_axis_off()
        if plot.name == "time-shares":
            _add_span_legend(ax, canvas)
    return drawn


def span_legend() -> list[tuple[str, str]]:
    """Return (title, colour) of each kind of time, in the order of the bars."""
    return [(title, SPAN_COLOURS[name][0]) for name, title in SPAN_TITLES.items()]


def _add_span_legend(ax: Axes, canvas: Canvas) -> None:
    if not ax.axison:
        return
    handles = [mpl.patches.Patch(color=colour, label=title) for title, colour in span_legend()]
    ax.legend(
        handles=handles, ncols=len(handles), loc="lower right", bbox_to_anchor=(1, 1), frameon=False,
        fontsize="small", labelcolor=canvas.theme.ink, handlelength=1, handleheight=1,
    )  # fmt: skip
