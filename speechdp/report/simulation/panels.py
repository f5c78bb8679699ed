"""Plot a simulation: efficiency and cost over ranks, and the best periods for each number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from speechdp.report.kit import formatting
from speechdp.report.kit.canvas import Canvas, dashes, even_numbers, named_canvas, style_axes
from speechdp.report.kit.svg import Panel
from speechdp.report.kit.theme import Theme
from speechdp.report.simulation.ranges import Family, has_periods
from speechdp.report.simulation.table import TargetAmount, hours_text
from speechdp.simulation.predict import Interval, Prediction

SIZE = (5.6, 3.6)


def make_canvas(families: Sequence[Family], theme: Theme) -> Canvas:
    """Return a canvas with a colour for every strategy, the same on all plots."""
    return named_canvas([family.label for family in families], theme)


def make_panels(families: Sequence[Family], target: TargetAmount) -> list[list[Panel]]:
    """Return lines of plots over ranks; for a single number of ranks, a plot with a bar per setting."""
    sizes = {ranks for family in families for ranks in family.ranks}
    if len(sizes) == 1:
        bars = speed_bars(families)
        size = (11.0, 1.0 + 0.25 * max(len(bars), 2))
        (ranks,) = sizes
        what = f"{target.amount}/s on {formatting.rank_count(ranks)}"
        return [[Panel("speeds", what, size, lambda ax, c: draw_speeds(ax, bars, what, c))]]
    with_ranges = any(map(has_periods, families))
    lines = [
        [
            Panel(
                "efficiency", "efficiency over ranks", SIZE, lambda ax, c: draw_efficiency(ax, families, c)
            ),
            Panel(
                "hours", f"{target.hours} over ranks", SIZE, lambda ax, c: draw_hours(ax, families, target, c)
            ),
        ],
        [
            Panel(
                "periods", "the best periods at each scale", SIZE, lambda ax, c: draw_ranges(ax, families, c)
            ),
        ],
    ]
    return lines if with_ranges else lines[:1]


#: Largest number of bars in a picture; if there are more settings, each strategy has one bar.
_MOST_BARS = 48


def speed_bars(families: Sequence[Family]) -> list[tuple[str, Family, Prediction]]:
    """Return (name, family, prediction) of each bar: every setting; of too many, each strategy's best."""
    shown = [(family, one) for family in families for one in family.predictions]
    if len(shown) > _MOST_BARS:
        shown = [
            (family, family.near_best(one.ranks)[0]) for family in families for one in family.predictions[:1]
        ]
    return [
        (f"{family.label}, period {one.period}" if has_periods(family) else family.label, family, one)
        for family, one in shown
    ]


def draw_speeds(ax: Axes, bars: Sequence[tuple[str, Family, Prediction]], title: str, canvas: Canvas) -> bool:
    """Draw a bar with the speed and interval of each setting, all on the same number of ranks."""
    if not bars:
        return False
    style_axes(ax, formatting.capital(title), "", canvas.theme)
    for y, (name, family, one) in enumerate(bars):
        speed, colour = one.frames_per_s, canvas.colours[family.label]
        (bar,) = ax.barh(y, speed.mean, height=0.66, color=colour, linewidth=0)
        ax.plot([speed.low, speed.high], [y, y], color=canvas.theme.ink, linewidth=1.2)
        figures = f"{formatting.estimate(speed.mean)} ({formatting.percent(one.efficiency.mean)} %)"
        canvas.tip(bar, f"{name}: {figures}")
        ax.annotate(
            figures, (max(speed.mean, speed.high), y), xytext=(5, 0), textcoords="offset points",
            va="center", color=canvas.theme.muted, fontsize="small",
        )  # fmt: skip
    ax.set_yticks(range(len(bars)), [name for name, _, _ in bars])
    ax.set_ylim(len(bars) - 0.4, -0.6)
    ax.set_xlim(0, 1.15 * max(max(one.frames_per_s.mean, one.frames_per_s.high) for _, _, one in bars))
    even_numbers(ax.xaxis)
    ax.grid(visible=False, axis="y")
    ax.grid(axis="x", color=canvas.theme.grid, linewidth=0.8)
    return True


def draw_efficiency(ax: Axes, families: Sequence[Family], canvas: Canvas) -> bool:
    """Plot each strategy's efficiency over ranks, at its shortest period among the fast ones."""
    style_axes(ax, "Efficiency over ranks", "%", canvas.theme)
    drawn = _draw_lines(ax, families, canvas, lambda one: one.efficiency, 100.0, "%")
    ax.set_ylim(0, 105)
    return drawn


#: Ratio of largest to smallest hours above which the axis is logarithmic.
_DECADE = 10.0


def draw_hours(ax: Axes, families: Sequence[Family], target: TargetAmount, canvas: Canvas) -> bool:
    """Plot the hours of all ranks together to train on the target amount."""
    style_axes(ax, f"To {target}", target.hours, canvas.theme)
    drawn = _draw_lines(ax, families, canvas, lambda one: one.gpu_hours(target.frames), 1.0, target.hours)
    low, high = ax.dataLim.intervaly
    if drawn and 0 < low * _DECADE < high:
        ax.set_yscale("log")
    else:  # a logarithmic axis would have hardly any labelled tick
        ax.set_ylim(bottom=0)
        ticks = MaxNLocator(6, steps=[1, 2, 5, 10])  # avoids e.g. 0.00125, whose label would be rounded
        ax.yaxis.set_major_locator(ticks)
    ax.yaxis.set_major_formatter(lambda y, _: hours_text(y))
    ax.minorticks_off()
    return drawn


def draw_ranges(ax: Axes, families: Sequence[Family], canvas: Canvas) -> bool:
    """Plot, for each number of ranks, the range of periods that are about as fast as the fastest."""
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


#: Share of the distance between two numbers of ranks over which strategies' points are spread, so that their
#: intervals do not overlap.
_ASIDE = 0.5


def _draw_lines(
    ax: Axes,
    families: Sequence[Family],
    canvas: Canvas,
    value: Callable[[Prediction], Interval],
    scale: float,
    unit: str,
) -> bool:
    sizes = sorted({ranks for family in families for ranks in family.ranks})
    for number, family in enumerate(families):
        aside = (number - (len(families) - 1) / 2) * _ASIDE / len(families)
        shown = [(place + aside, near[0]) for place, n in enumerate(sizes) if (near := family.near_best(n))]
        if not shown:
            continue
        places = [place for place, _ in shown]
        intervals = [value(one) for _, one in shown]
        colour, strokes = canvas.colours[family.label], dashes(family.label, canvas)
        ax.vlines(
            places, [scale * i.low for i in intervals], [scale * i.high for i in intervals], color=colour,
            alpha=0.6, linewidth=1.4,
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
