"""Draw frames/s over the period, one panel a link rate, in the look of the report."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from speechdp.parallel.registry import parse_strategy
from speechdp.report.kit.canvas import style_axes
from speechdp.report.kit.theme import PRINT

#: Marker and dashes by back-end.
_STYLES: dict[str, tuple[str, tuple[int, ...]]] = {
    "mpi": ("o", (4, 3)),
    "torch": ("s", (1, 2)),
    "horovod": ("^", (6, 2, 1, 2)),
}


@dataclass(frozen=True)
class Result:
    """A measurement.

    Attributes:
        rate: of the links, as tc writes it, or "free".
        name: of the contender.
        strategy: as on the command line.
        backend: communicator.
        period: in steps; None where the strategy has none.
        frames_per_s: of all ranks together.
    """

    rate: str
    name: str
    strategy: str
    backend: str
    period: int | None
    frames_per_s: float


def draw(results: Sequence[Result], path: Path) -> None:
    """Write a PNG: lines over the period where there are several periods, level lines where there is none."""
    rates = list(dict.fromkeys(r.rate for r in results))
    figure = Figure(figsize=(4.6 * len(rates), 4.4), layout="constrained")
    figure.set_facecolor(PRINT.surface)
    axes = figure.subplots(1, len(rates), sharey=True, squeeze=False)[0]
    colours = _colours(results)
    for ax, rate in zip(axes, rates, strict=True):
        style_axes(ax, "unlimited link" if rate == "free" else f"link of {rate}", "frames/s", PRINT)
        _draw_panel(ax, [r for r in results if r.rate == rate], colours)
    figure.legend(
        *axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False,
        labelcolor=PRINT.ink, fontsize="small",
    )  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def family(result: Result) -> str:
    """Return what measurements of a colour have in common: strategy, compression, the back-end but mpi."""
    if result.name == "no exchange":
        return result.name
    name = result.strategy.partition(":")[0]
    compression = getattr(parse_strategy(result.strategy), "compression", "none")
    if compression != "none":
        name = f"{name} {compression}"
    if "between_nodes=" in result.strategy:
        name = f"{name} between nodes"
    return name if result.backend == "mpi" else f"{name} on {result.backend}"


def _is_level(result: Result) -> bool:
    """Whether a result stands for every period: there is none, or it is never due."""
    return result.period is None or family(result) == "no exchange"


def _colours(results: Sequence[Result]) -> dict[str, str]:
    """Give each strategy a colour, whatever the back-end."""
    strategies = [f.partition(" on ")[0] for f in map(family, results) if f != "no exchange"]
    colours = {s: PRINT.runs[i % len(PRINT.runs)] for i, s in enumerate(dict.fromkeys(strategies))}
    return {"no exchange": PRINT.baseline, **colours}


def _draw_panel(ax: Axes, results: Sequence[Result], colours: dict[str, str]) -> None:
    for name in dict.fromkeys(map(family, results)):
        mine = [r for r in results if family(r) == name]
        marker, dashes = _STYLES[mine[0].backend]
        colour = colours[name.partition(" on ")[0]]
        for value in (r.frames_per_s for r in mine if _is_level(r)):
            ax.axhline(value, color=colour, linewidth=1.5, linestyle=(0, dashes), label=name)
        points = sorted((math.log2(r.period), r.frames_per_s) for r in mine if r.period and not _is_level(r))
        if points:
            ax.plot(
                *zip(*points, strict=True), color=colour, marker=marker, markersize=7,
                markerfacecolor=colour if marker == "o" else "none", label=name,
            )  # fmt: skip
    periods = sorted({r.period for r in results if r.period and not _is_level(r)})
    ax.set_xticks([math.log2(p) for p in periods], [str(p) for p in periods])
    ax.set_xlabel("averaging period (steps)", color=PRINT.muted)
    ax.set_ylim(0, None)
