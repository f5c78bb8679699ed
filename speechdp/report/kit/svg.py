"""Plots as SVG elements of a page: ids of their own, the page's font and colours, texts to point at."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from speechdp.report.kit.canvas import Canvas
from speechdp.report.kit.theme import with_variables

#: Text stays text (searchable, in the page's font); names of runs are never read as formulas; element
#: ids do not change from one report to the next.
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


@dataclass(frozen=True)
class Frame:
    """What a plot is called (file-safe), what it shows, and its size in inches."""

    name: str
    description: str
    size: tuple[float, float]


def svg_of(frame: Frame, canvas: Canvas, draw: Callable[[Axes], bool]) -> str | None:
    """Return what `draw` draws as an SVG element for a page, or None where it draws nothing."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=frame.size, layout="constrained")
        if not draw(figure.add_subplot()):
            return None
        buffer = io.StringIO()
        # No metadata: it would be a block of links to the vocabularies that describe it.
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(buffer, format="svg", metadata=nothing)
    return _for_page(buffer.getvalue(), frame, canvas)


def _for_page(svg: str, plot: Frame, canvas: Canvas) -> str:
    """Fit matplotlib's file into a page: ids of its own, the page's font and colours, texts to point at."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    for gid, text in canvas.tips.items():
        svg = svg.replace(f'<g id="{gid}">', f'<g id="{gid}"><title>{html.escape(text)}</title>', 1)
    svg = re.sub(r'\bid="', f'id="{plot.name}-', svg)
    svg = svg.replace("url(#", f"url(#{plot.name}-").replace('href="#', f'href="#{plot.name}-')
    svg = re.sub(r"font: (\w+ )?([\d.]+)px [^;\"]*", _page_font, svg)
    description = html.escape(plot.description)
    opening = re.compile(r'<svg [^>]*?viewBox="([^"]*)"[^>]*>')
    svg = opening.sub(rf'<svg class="plot" role="img" aria-label="{description}" viewBox="\1">', svg, count=1)
    return with_variables(svg)


def _page_font(match: re.Match[str]) -> str:
    weight = f"font-weight: {match[1].strip()}; " if match[1] else ""
    return f"{weight}font-size: {match[2]}px"
