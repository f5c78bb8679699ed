"""What all plots of a report share: colours and names of runs, tooltips, style."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.lines import Line2D
from matplotlib.ticker import Formatter

from speechdp.report.kit import formatting
from speechdp.report.kit.theme import Theme
from speechdp.report.runs.derived import RunFigures

#: Largest number of points that a curve marks with dots for tooltips; more would merge into a band.
MOST_DOTS = 60
#: Strokes and gaps of the first, second, ... line of a colour, in points.
_STROKES: tuple[tuple[float, ...], ...] = (
    (),
    (3, 1.5),
    (1, 1.2),
    (5, 1.5, 1, 1.5),
    (8, 2),
    (4, 1.2, 1, 1.2, 1, 1.2),
)


@dataclass
class Canvas:
    """What every plot needs: theme, names and colours of runs, and the tooltips of drawn objects.

    `tips` maps the SVG id of a drawn object to its text.
    """

    theme: Theme
    labels: dict[str, str]
    colours: dict[str, str]
    tips: dict[str, str] = field(default_factory=dict)

    def tip(self, artist: Any, text: str) -> None:
        """Give a drawn object a tooltip."""
        gid = f"tip-{len(self.tips)}"
        artist.set_gid(gid)
        self.tips[gid] = text


def make_canvas(rows: Sequence[RunFigures], theme: Theme) -> Canvas:
    """Return a canvas with a colour for every run; the one-rank run is grey."""
    colours: dict[str, str] = {}
    for row in rows:
        index = sum(colour != theme.baseline for colour in colours.values())
        colours[row.run.name] = theme.baseline if row.run.is_baseline else theme.runs[index % len(theme.runs)]
    return Canvas(theme, formatting.run_labels([row.run for row in rows]), colours)


def named_canvas(names: Sequence[str], theme: Theme, families: Mapping[str, str] | None = None) -> Canvas:
    """Return a canvas with a colour for every name; the name of one-rank training is grey.

    Args:
        families: family of each name; names of one family share a colour and differ in their strokes.  None:
            every name is a family of its own.
    """
    of = {name: name for name in names} if families is None else families
    order = list(dict.fromkeys(of[name] for name in names))
    colours = {name: theme.runs[order.index(of[name]) % len(theme.runs)] for name in names}
    if formatting.ONE_RANK_LABEL in colours:
        colours[formatting.ONE_RANK_LABEL] = theme.baseline
    return Canvas(theme, {name: name for name in names}, colours)


def dashes(label: str, canvas: Canvas) -> tuple[float, ...]:
    """Return the strokes and gaps of a name's line, in points; names of the same colour differ in them."""
    if label == formatting.ONE_RANK_LABEL:
        return (5, 2.5)
    colour = canvas.colours[label]
    repeats = [name for name, of in canvas.colours.items() if of == colour].index(label)
    return _STROKES[min(repeats, len(_STROKES) - 1)]


def legend_lines(canvas: Canvas) -> list[Line2D]:
    """Return the lines of a picture's legend, one for each name, in its colour and strokes."""
    return [
        Line2D([], [], color=colour, linewidth=2, linestyle=(0, dashes(name, canvas) or (1, 0)), label=name)
        for name, colour in canvas.colours.items()
    ]


def style_axes(ax: Axes, title: str, axis: str, theme: Theme) -> None:
    """Reduce the frame to what helps reading: light grid lines, a base line, the unit in the title."""
    ax.set_title(
        f"{title} ({axis})" if axis else title, loc="left", color=theme.ink, fontweight="bold", pad=10
    )
    ax.set_facecolor("none")
    for side, spine in ax.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(theme.muted)
    ax.grid(axis="y", color=theme.grid, linewidth=0.8)
    ax.set_axisbelow(True)
    ax.tick_params(length=0, colors=theme.muted, labelcolor=theme.muted)
    for across in (ax.xaxis, ax.yaxis):
        across.label.set_color(theme.muted)
    even_numbers(ax.yaxis)


#: Largest number of digits after the decimal point of a tick.
_MOST_DIGITS = 6


def even_numbers(axis: Axis, fewest: int = 0) -> None:
    """Write all ticks of an axis alike: thousands separated, with as many digits as distinguish them.

    Args:
        fewest: smallest number of digits after the decimal point.
    """
    axis.set_major_formatter(_EvenNumbers(fewest))


class _EvenNumbers(Formatter):
    """Formats ticks with the number of digits that distinguishes all ticks of the axis."""

    def __init__(self, fewest: int) -> None:
        self._fewest = fewest
        self._digits = _MOST_DIGITS

    def set_locs(self, locs: Any) -> None:
        """Choose the number of digits for all ticks; matplotlib calls this before it formats each of them."""
        super().set_locs(locs)
        ticks = [float(tick) for tick in locs]
        gaps = [abs(one - other) for one, other in pairwise(ticks) if one != other]
        exact = 1e-3 * min(gaps, default=0.0)
        every = (n for n in range(self._fewest, _MOST_DIGITS) if gaps and _are_exact(ticks, n, exact))
        self._digits = next(every, _MOST_DIGITS)

    def __call__(self, value: float, pos: int | None = None) -> str:
        if self._digits == _MOST_DIGITS:
            return f"{value:,g}".replace("-", formatting.MINUS)
        return f"{value:,.{self._digits}f}".replace("-", formatting.MINUS)


def _are_exact(ticks: Sequence[float], digits: int, within: float) -> bool:
    return all(abs(round(tick, digits) - tick) <= within for tick in ticks)
