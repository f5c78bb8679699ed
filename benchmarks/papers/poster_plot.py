"""Draw the answers of poster.py: threads against processes, a decoder step, memory of each rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from speechdp.report.kit.canvas import style_axes
from speechdp.report.kit.svg import STYLE
from speechdp.report.kit.theme import PRINT, RUN_COLOURS

Result = dict[str, Any]
_OURS, _POSTER = RUN_COLOURS[0], RUN_COLOURS[1]


def draw(path: Path, found: dict[str, Result]) -> None:
    """Write the picture: a panel for each of "threads", "decoder" and "memory" that was measured."""
    panels = {"threads": draw_threads, "decoder": draw_decoder, "memory": draw_memory}
    measured = [name for name in panels if name in found]
    if not measured:
        raise SystemExit("--plot: nothing of threads, decoder and memory was measured; see --only")
    with mpl.rc_context({**STYLE, "savefig.facecolor": "white"}):
        figure = Figure(figsize=(8.6, 3.2 * len(measured)), layout=ConstrainedLayoutEngine(h_pad=0.15))
        axes = figure.subplots(len(measured), 1, squeeze=False)[:, 0]
        for ax, name in zip(axes, measured, strict=True):
            panels[name](ax, found[name])
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="png", dpi=120)


def draw_threads(ax: Axes, result: Result) -> None:
    """Draw the efficiency of each function at the most replicas: threads beside processes."""
    names = list(result["threads"])
    most = max(result["threads"][names[0]], key=int)
    style_axes(ax, f"{most} replicas: time of one / time of {most}", "", PRINT)
    for offset, way, colour in ((-0.2, "threads", _POSTER), (0.2, "processes", _OURS)):
        values = [result[way][name][most]["efficiency"] for name in names]
        bars = ax.bar([i + offset for i in range(len(names))], values, 0.38, color=colour, label=_LABELS[way])
        ax.bar_label(bars, fmt="%.2f", color=PRINT.ink, padding=2)
    ax.axhline(1, color=PRINT.muted, linewidth=0.8)
    ax.axhline(1 / int(most), color=PRINT.muted, linewidth=0.8, linestyle=":")
    ax.set_xticks(range(len(names)), [name.replace(", ", ",\n") for name in names])
    ax.set_ylim(0, 1.35)
    ax.legend(frameon=False, ncols=2, loc="upper right", labelcolor=PRINT.ink)


_LABELS = {"threads": "threads of a process (the poster's way)", "processes": "a process each (ours)"}


def draw_decoder(ax: Axes, result: Result) -> None:
    """Draw what a step of the plain loop consists of: calls, and the arithmetic beside them."""
    parts = result["parts"]
    style_axes(ax, "A decoder step of the plain loop, forward and backward", "µs", PRINT)
    calls = [min(part["launches_us"], part["us"]) for part in parts.values()]
    rest = [part["us"] - alone for part, alone in zip(parts.values(), calls, strict=True)]
    places = range(len(parts))
    ax.bar(places, calls, 0.6, color=_POSTER, label="calls alone (Python, dispatcher, autograd)")
    ax.bar(places, rest, 0.6, bottom=calls, color=_OURS, label="arithmetic and memory")
    ax.set_xticks(places, [name.replace("decoder loop", "whole step") for name in parts])
    ax.legend(frameon=False, loc="upper right", labelcolor=PRINT.ink)


def draw_memory(ax: Axes, result: Result) -> None:
    """Draw each rank's working memory in both schemes."""
    style_axes(ax, "Working memory of each rank", "MB", PRINT)
    begin, places, names = 0, [], []
    for scheme, colour in (("master", _POSTER), ("equal", _OURS)):
        values = result[scheme]["working_mb"]
        where = [begin + i for i in range(len(values))]
        balance = result[scheme]["working_balance"]
        label = f"{_SCHEMES[scheme]}: most / least {balance:.2f}"
        ax.bar_label(ax.bar(where, values, 0.6, color=colour, label=label), fmt="%.0f", color=PRINT.ink)
        places += where
        names += [f"rank {i}" for i in range(len(values))]
        begin += len(values) + 1
    ax.set_xticks(places, names)
    ax.margins(y=0.25)
    ax.legend(frameon=False, loc="upper right", ncols=2, labelcolor=PRINT.ink)


_SCHEMES = {"master": "one master (the poster's way)", "equal": "equal ranks (ours)"}
