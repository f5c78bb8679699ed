"""Colours of the plots: fixed ones for PNG, and placeholders that become CSS variables on a page.

Matplotlib needs real colours, but a page that follows the reader's light or dark setting needs variables.
A placeholder is a colour that nothing else uses; after drawing, it is replaced in the text of the SVG.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Distinguishable also with red or green blindness: any two of them then differ by 16 or more in CIELAB.
#: They are legible as text on the page (contrast 4.5).
RUN_COLOURS = ("#1b6ed8", "#b6523b", "#39816f", "#730e53", "#936f05", "#d40560", "#0574a1", "#2c3605")
RUN_COLOURS_DARK = (
    "#5da5fa",
    "#d47731",
    "#29cfa9",
    "#bc71b8",
    "#d0b420",
    "#e46576",
    "#92e2f8",
    "#cbd794",
)
#: Fill of each span's bar and the text colour that is legible on it; the same on light and dark pages.
SPAN_COLOURS = {
    "forward": ("#a9cbea", "#1b2733"),
    "backward": ("#4585c2", "#ffffff"),
    "update": ("#1f4e85", "#ffffff"),
    "h2d": ("#6dbdb0", "#10302b"),
    "data_wait": ("#e3b04b", "#33260a"),
    "comm": ("#c4513c", "#ffffff"),
    "other": ("#c9cdd2", "#1b2733"),
}


@dataclass(frozen=True)
class Theme:
    """The colours of a plot; those in `runs` are assigned in the order of the runs, and repeat."""

    ink: str
    muted: str
    grid: str
    surface: str
    baseline: str
    runs: tuple[str, ...]


PRINT = Theme("#1b2733", "#5a6773", "#e3e7eb", "#ffffff", "#7b8794", RUN_COLOURS)

_STAND_INS = {
    "#fe0001": "var(--ink)",
    "#fe0002": "var(--muted)",
    "#fe0003": "var(--grid)",
    "#fe0004": "var(--surface)",
    "#fe0005": "var(--baseline)",
    **{f"#fe01{i:02x}": f"var(--run-{i})" for i in range(len(RUN_COLOURS))},
}

_INK, _MUTED, _GRID, _SURFACE, _BASELINE, *_RUNS = _STAND_INS
PAGE = Theme(_INK, _MUTED, _GRID, _SURFACE, _BASELINE, tuple(_RUNS))


def with_variables(svg: str) -> str:
    """Replace the placeholder colours in an SVG with the page's CSS variables."""
    for stand_in, variable in _STAND_INS.items():
        svg = svg.replace(stand_in, variable)
    return svg


def css_variables(*, dark: bool) -> str:
    """Return the CSS declarations of the run colours for the dark or the light page."""
    colours = RUN_COLOURS_DARK if dark else RUN_COLOURS
    return " ".join(f"--run-{i}: {colour};" for i, colour in enumerate(colours))
