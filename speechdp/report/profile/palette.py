"""Names and colours of a step's functions: one hue each, light for forward, strong for backward."""

from __future__ import annotations

from speechdp.experiments.profile.measured import BACKWARD, FORWARD, FUNCTIONS
from speechdp.report.kit.canvas import Canvas
from speechdp.report.kit.theme import Theme

#: What each function does, for the legend.
MEANINGS = {
    "trainloader": "trainloader (waiting for the batch)",
    "h2d": "h2d (copy to the device)",
    "exchange": "exchange",
    "update": "update",
}
#: Waiting for the last rank, a part of `exchange`.
WAITING = "waiting for the last rank"
_DARK_INK, _LIGHT_INK = "#1b2733", "#ffffff"
#: Fill of forward, and of backward or a function without phases; the same on light and dark pages.
_FILLS = {
    "trainloader": ("#e3b04b", "#e3b04b"),
    "h2d": ("#6dbdb0", "#6dbdb0"),
    "encoder": ("#a9cbea", "#2f6fb3"),
    "decoder": ("#f5c6a0", "#bf5510"),
    "postproc": ("#a6dabb", "#257a4d"),
    "output": ("#f5c6a0", "#bf5510"),
    "loss": ("#d5dcae", "#6d7a38"),
    "exchange": ("#b83a4b", "#b83a4b"),
    "update": ("#8a3f82", "#8a3f82"),
}
WAITING_FILL = "#e8a9b1"
_DARK_FILLS = frozenset({"exchange", "update"})
_OTHER_FILLS = ("#c9cdd2", "#6b7783")
#: Index of the theme's run colour for a function's line, of the same hue as its bars.
_LINES = {
    "trainloader": 4,
    "h2d": 6,
    "encoder": 0,
    "decoder": 1,
    "postproc": 2,
    "output": 1,
    "loss": 7,
    "exchange": 5,
    "update": 3,
}


def fill_of(function: str, phase: str) -> tuple[str, str]:
    """Return a bar's fill, and the text colour that is legible on it."""
    light, strong = _FILLS.get(function, _OTHER_FILLS)
    if phase == FORWARD:
        return light, _DARK_INK
    return strong, _LIGHT_INK if phase == BACKWARD or function in _DARK_FILLS else _DARK_INK


def make_canvas(theme: Theme) -> Canvas:
    """Return a canvas with the line colours of all functions."""
    colours = {name: theme.runs[_LINES[name]] for name in FUNCTIONS}
    return Canvas(theme, {name: name for name in FUNCTIONS}, colours)
