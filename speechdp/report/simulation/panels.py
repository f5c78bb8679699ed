"""Draw a simulation: efficiency and cost over ranks, and the periods that are best at each scale."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from matplotlib.axes import Axes

from speechdp.report.kit import formatting
from speechdp.report.kit.canvas import Canvas, dashes, named_canvas, style_axes
from speechdp.report.kit.svg import Panel
from speechdp.report.kit.theme import Theme
from speechdp.report.simulation.ranges import Family, has_periods
from speechdp.report.simulation.table import TargetAmount, hours_text
from speechdp.simulation.predict import Interval, Prediction

SIZE = (5.6, 3.6)


def make_canvas(families: Sequence[Family], theme: Theme) -> Canvas:
    """Return a canvas that gives every strategy its colour on all plots."""
    return named_canvas([family.label for family in families], theme)


def make_panels(families: Sequence[Family], target: TargetAmount) -> list[list[Panel]]:
    """Return the plots line by line."""
    return [
        [
            Panel(
                "efficiency", "efficiency over ranks", SIZE, lambda ax, c: draw_efficiency(ax, families, c)
            ),
            Panel("hours", "GPU-hours over ranks", SIZE, lambda ax, c: draw_hours(ax, families, target, c)),
        ],
        [
            Panel(
                "periods", "the best periods at each scale", SIZE, lambda ax, c: draw_ranges(ax, families, c)
            ),
        ],
    ]


def draw_efficiency(ax: Axes, families: Sequence[Family], canvas: Canvas) -> bool:
    """Plot each strategy's efficiency over ranks, at the shortest of its fast periods."""
    style_axes(ax, "Efficiency over ranks", "%", canvas.theme)
    drawn = _draw_lines(ax, families, canvas, lambda one: one.efficiency, 100.0, "%")
    ax.set_ylim(0, 105)
    return drawn


#: Hours that lie further apart are drawn on a logarithmic axis.
_DECADE = 10.0


def draw_hours(ax: Axes, families: Sequence[Family], target: TargetAmount, canvas: Canvas) -> bool:
    """Plot the hours of all ranks together to so many frames."""
    style_axes(ax, f"To {target}", "GPU-hours", canvas.theme)
    drawn = _draw_lines(ax, families, canvas, lambda one: one.gpu_hours(target.frames), 1.0, "GPU-hours")
    low, high = ax.dataLim.intervaly
    if drawn and 0 < low * _DECADE < high:
        ax.set_yscale("log")
    else:  # a logarithmic axis would have hardly a number on it
        ax.set_ylim(bottom=0)
    ax.yaxis.set_major_formatter(lambda y, _: hours_text(y))
    ax.minorticks_off()
    return drawn


def draw_ranges(ax: Axes, families: Sequence[Family], canvas: Canvas) -> bool:
    """Plot for each number of ranks the range of periods that are about as fast as the fastest."""
    shown = [family for family in families if has_periods(family)]
    if not shown:
        return False
    style_axes(ax, "Periods about as fast as the fastest", "steps", canvas.theme)
    sizes = sorted({ranks for family in shown for ranks in family.ranks})
    width = 0.8 / len(shown)
    for number, family in enumerate(shown):
        for place, ranks in enumerate(sizes):
            near = family.near_best(ranks)
            if not near:
                continue
            low, high = near[0].period, near[-1].period
            x = place + (number - (len(shown) - 1) / 2) * width
            (line,) = ax.plot(
                [x, x], [low, high], color=canvas.colours[family.label], linewidth=2.4, marker="_",
                markersize=5, linestyle=(0, dashes(family.label, canvas) or (1, 0)),
            )  # fmt: skip
            canvas.tip(line, f"{family.label}, {formatting.rank_count(ranks)}: period {low} to {high}")
    ax.set_yscale("log", base=2)
    ax.set_yticks(sorted({p for family in shown for p in family.periods}))
    ax.yaxis.set_major_formatter(lambda y, _: f"{y:,.0f}")
    _rank_axis(ax, sizes)
    return True


def _draw_lines(
    ax: Axes,
    families: Sequence[Family],
    canvas: Canvas,
    value: Callable[[Prediction], Interval],
    scale: float,
    unit: str,
) -> bool:
    sizes = sorted({ranks for family in families for ranks in family.ranks})
    for family in families:
        shown = [(place, near[0]) for place, n in enumerate(sizes) if (near := family.near_best(n))]
        if not shown:
            continue
        places = [place for place, _ in shown]
        intervals = [value(one) for _, one in shown]
        colour, strokes = canvas.colours[family.label], dashes(family.label, canvas)
        ax.fill_between(
            places, [scale * i.low for i in intervals], [scale * i.high for i in intervals], color=colour,
            alpha=0.18, linewidth=0,
        )  # fmt: skip
        (line,) = ax.plot(
            places, [scale * i.mean for i in intervals], color=colour, linewidth=1.8, marker="o",
            markersize=3.4, linestyle=(0, strokes or (1, 0)),
        )  # fmt: skip
        last, ranks = intervals[-1], shown[-1][1].ranks
        canvas.tip(
            line,
            f"{family.label}: {formatting.number(scale * last.mean)} {unit} on "
            f"{formatting.rank_count(ranks)}",
        )
    _rank_axis(ax, sizes)
    return bool(families)


def _rank_axis(ax: Axes, sizes: Sequence[int]) -> None:
    ax.set_xticks(range(len(sizes)), [f"{size:,}" for size in sizes])
    ax.set_xlim(-0.5, len(sizes) - 0.5)
    ax.set_xlabel("ranks")
