"""Draw what benchmarks/papers/hpcs2017.py found: where the time goes, what is saved, how both ways learn."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from benchmarks.papers.hpcs2017_results import PARTS, SAVED, WAYS, Result, count, frame_counts_of, of, saved
from speechdp.report.kit.canvas import style_axes
from speechdp.report.kit.svg import STYLE
from speechdp.report.kit.theme import PRINT, RUN_COLOURS

_PART_COLOURS = {
    "start": "#8c3b2e", "read_model": "#c4513c", "load": "#e3b04b", "preprocess": "#f0d38f",
    "compute": "#4585c2", "write": "#6dbdb0", "average": "#2c8556", "wait": "#96408c", "other": "#c9cdd2",
}  # fmt: skip
#: Rosciszewski & Kaliski 2017: 4 x 800 LSTM, 100 h, 2 workstations with 4 GPUs each.
_PAPER = (600_000, 0.549)


def draw(path: Path, results: Sequence[Result]) -> None:
    """Write the picture: times by part, share saved, learning curves over frames and over time."""
    with mpl.rc_context({**STYLE, "savefig.facecolor": "white"}):
        figure = Figure(figsize=(12.5, 9.0), layout="constrained")
        (times, shares), (over_frames, over_time) = figure.subplots(2, 2)
        _draw_times(times, results)
        _draw_saved(shares, results)
        _draw_curves(over_frames, results, 0, "frames, millions", 1e-6)
        _draw_curves(over_time, results, 1, "time, start included, s", 1.0)
        figure.savefig(path, format="png", dpi=120)


def _draw_times(ax: Axes, results: Sequence[Result]) -> None:
    style_axes(ax, "Total time: left Kaldi's way, right ours", "s", PRINT)
    frames = frame_counts_of(results)
    for place, number in enumerate(frames):
        for side, way in ((-0.2, "kaldi"), (0.2, "ours")):
            rounds, bottom = of(results, way, number), 0.0
            for part in PARTS:
                height = statistics.median(r.seconds.get(part, 0.0) for r in rounds)
                ax.bar(place + side, height, 0.36, bottom, color=_PART_COLOURS[part])
                bottom += height
            ax.text(place + side, bottom, f"{bottom:.0f}", ha="center", va="bottom", color=PRINT.ink)
    ax.set_xticks(range(len(frames)), [count(number) for number in frames])
    ax.set_xlabel("frames an iteration, all jobs together", color=PRINT.muted)
    handles = [Line2D([], [], color=_PART_COLOURS[p], linewidth=7, label=PARTS[p]) for p in reversed(PARTS)]
    ax.legend(handles=handles, frameon=False, fontsize=8, labelcolor=PRINT.muted)


def _draw_saved(ax: Axes, results: Sequence[Result]) -> None:
    style_axes(ax, "Time saved, of Kaldi's way", "%", PRINT)
    frames = frame_counts_of(results)
    found = [saved(results, number) for number in frames]
    for (name, (_, label)), colour in zip(SAVED.items(), RUN_COLOURS, strict=False):
        shares = [100 * getattr(each, name) for each in found]
        ax.plot(frames, shares, color=colour, marker="o", label="measured" if name == "measured" else label)
    ax.plot(
        _PAPER[0], 100 * _PAPER[1], "*", color=PRINT.ink, markersize=13, linestyle="",
        label="HPCS 2017, on 8 GPUs: 54.9 %",
    )  # fmt: skip
    ax.set_xscale("log")
    ax.set_xticks(frames, [count(number) for number in frames])
    ax.minorticks_off()
    ax.axhline(0, color=PRINT.baseline, linewidth=1)
    ax.set_xlabel("frames an iteration, all jobs together", color=PRINT.muted)
    ax.legend(frameon=False, fontsize=8, labelcolor=PRINT.muted)


def _draw_curves(ax: Axes, results: Sequence[Result], column: int, unit: str, scale: float) -> None:
    style_axes(ax, "Held-out log-probability", "nats a frame", PRINT)
    frames = frame_counts_of(results)
    styles: dict[str, tuple[int, tuple[int, ...]]] = {"kaldi": (0, (4, 2)), "ours": (0, ())}
    handles = []
    for number, colour in zip(frames, RUN_COLOURS, strict=False):
        handles.append(Line2D([], [], color=colour, label=count(number)))
        for way, style in styles.items():
            curve = of(results, way, number)[0].curve
            x, y = [scale * point[column] for point in curve], [point[2] for point in curve]
            ax.plot(x, y, color=colour, linestyle=style, marker="." if len(curve) < 6 else "")
    handles += [Line2D([], [], color=PRINT.ink, linestyle=styles[way], label=WAYS[way]) for way in styles]
    ax.set_xlabel(unit, color=PRINT.muted)
    # The first points lie so low that the rest could not be told apart.
    last = [point[2] for result in results for point in result.curve[len(result.curve) // 3 :]]
    ax.set_ylim(min(last) - 0.05, max(last) + 0.05)
    ax.legend(handles=handles, frameon=False, fontsize=8, labelcolor=PRINT.muted, loc="lower right")
