"""Write plots as SVG elements of a page, with tooltips, and as PNG pictures."""

from __future__ import annotations

import html
import io
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure, SubFigure
from matplotlib.patches import Patch

from speechdp.files import atomic_path
from speechdp.report.kit.canvas import Canvas, legend_lines
from speechdp.report.kit.theme import with_variables

#: Text remains text (searchable, in the page's font), names of runs are never parsed as formulas, and element
#: ids are the same in every report.
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "speechdp",
    "text.parse_math": False,
    "font.family": ["DejaVu Sans"],
    "font.size": 9.5,
    "axes.titlesize": 10.5,
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
}
#: Fixed for SVG; matplotlib lays out text with it.
_SVG_DPI = 72
_PNG_DPI = 120


@dataclass(frozen=True)
class Panel:
    """One plot.

    Attributes:
        name: name, safe as a file name.
        description: what it shows.
        size: width and height, inches.
        draw: function that draws it; returns False, with nothing drawn, if there is nothing to show.
        keys: (title, colour) pairs, for pictures without the page's legend.
    """

    name: str
    description: str
    size: tuple[float, float]
    draw: Callable[[Axes, Canvas], bool]
    keys: tuple[tuple[str, str], ...] = ()


def panel_svgs(panels: Iterable[Panel], make_canvas: Callable[[], Canvas]) -> list[tuple[str, Markup]]:
    """Return (name, SVG element for a page) for each plot that has something to show.

    Args:
        make_canvas: returns a new canvas, so that the ids of tooltips start again in each plot.
    """
    found = ((panel.name, _panel_svg(panel, make_canvas())) for panel in panels)
    return [(name, svg) for name, svg in found if svg is not None]


def _panel_svg(panel: Panel, canvas: Canvas) -> Markup | None:
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=panel.size, dpi=_SVG_DPI, layout="constrained")
        if not panel.draw(figure.add_subplot(), canvas):
            return None
        buffer = io.StringIO()
        # Leave out the metadata: it is mostly links to the vocabularies that describe it.
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        # Not `savefig`, which first draws everything once more only for the layout.
        FigureCanvasSVG(figure).print_svg(buffer, metadata=nothing)  # type: ignore[no-untyped-call]
    # Safe markup: the drawing is ours, and matplotlib or html.escape has escaped all of its text.
    return Markup(_for_page(buffer.getvalue(), panel, canvas))


def write_png(
    path: Path,
    lines: Sequence[Sequence[Panel]],
    canvas: Canvas,
    *,
    with_names: bool = False,
    caption: str = "",
) -> bool:
    """Write lines of plots as one picture; return False, with nothing written, if there is nothing to draw.

    Args:
        with_names: draw a legend at the top.
        caption: text below the plots.
    """
    width = max(7.0, *(sum(panel.size[0] for panel in line) for line in lines)) + 0.4
    heights = [max(panel.size[1] for panel in line) + 0.4 for line in lines]
    with mpl.rc_context({**STYLE, "figure.facecolor": "white"}):
        size = width, sum(heights) + 0.4 * with_names
        figure = Figure(figsize=size, dpi=_PNG_DPI, layout="constrained")
        # One sub-figure per line: plots of different lines need not align in columns.
        parts = figure.subfigures(len(lines), 1, height_ratios=heights, squeeze=False)[:, 0]
        drawn = [_draw_line(*each, width, canvas) for each in zip(parts, lines, strict=True)]
        if with_names:
            figure.legend(
                handles=legend_lines(canvas), loc="outside upper left", ncols=int(width // 2.6), frameon=False
            )
        if caption:
            figure.supxlabel(
                caption, x=0.01, ha="left", fontsize="small", color=canvas.theme.muted, wrap=True
            )
        if any(drawn):
            with atomic_path(path) as temporary:
                # See `_panel_svg` for why this is not `savefig`.
                FigureCanvasAgg(figure).print_png(temporary)  # type: ignore[no-untyped-call]
    return any(drawn)


def _draw_line(part: SubFigure, line: Sequence[Panel], width: float, canvas: Canvas) -> bool:
    """Draw plots side by side, each at most 1.5 times as wide as on a page."""
    part.get_layout_engine().set(w_pad=0.15, h_pad=0.12)  # type: ignore[call-arg]
    widths = [panel.size[0] for panel in line]
    room = width - 1.5 * sum(widths)
    axes = part.subplots(
        1, len(line) + (room > 0), width_ratios=[*widths, *[room][: room > 0]], squeeze=False
    )
    drawn = []
    for ax, panel in itertools.zip_longest(axes[0], line):
        drawn.append(panel is not None and panel.draw(ax, canvas))
        if not drawn[-1]:
            ax.set_axis_off()
        elif panel.keys:
            ax.legend(
                handles=[Patch(color=colour, label=title) for title, colour in panel.keys],
                ncols=len(panel.keys), loc="lower right", bbox_to_anchor=(1, 1), frameon=False,
                fontsize="small", labelcolor=canvas.theme.ink, handlelength=1, handleheight=1,
            )  # fmt: skip
    return any(drawn)


def _for_page(svg: str, plot: Panel, canvas: Canvas) -> str:
    """Adapt matplotlib's SVG to a page: unique ids, the page's font and colours, tooltips."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="(tip-\d+)">', lambda match: _with_tip(match, canvas.tips), svg)
    svg = re.sub(r'\bid="', f'id="{plot.name}-', svg)
    svg = svg.replace("url(#", f"url(#{plot.name}-").replace('href="#', f'href="#{plot.name}-')
    svg = re.sub(r"font: (\w+ )?([\d.]+)px [^;\"]*", _page_font, svg)
    description = html.escape(plot.description)
    opening = re.compile(r'<svg [^>]*?viewBox="([^"]*)"[^>]*>')
    svg = opening.sub(
        # A function, not a template: `re` would interpret a backslash in the description.
        lambda match: f'<svg class="plot" role="img" aria-label="{description}" viewBox="{match[1]}">',
        svg,
        count=1,
    )
    return with_variables(svg)


def _with_tip(match: re.Match[str], tips: Mapping[str, str]) -> str:
    text = tips.get(match[1])
    return match[0] if text is None else f"{match[0]}<title>{html.escape(text)}</title>"


def _page_font(match: re.Match[str]) -> str:
    weight = f"font-weight: {match[1].strip()}; " if match[1] else ""
    return f"{weight}font-size: {match[2]}px"
