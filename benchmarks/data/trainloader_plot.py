"""Draw which share of its time a rank computes, over time, for each order of batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure

from speechdp.report.kit.canvas import style_axes
from speechdp.report.kit.svg import STYLE
from speechdp.report.kit.theme import PRINT, RUN_COLOURS


@dataclass(frozen=True)
class Panel:
    """An order's share of time in computing: in each bin, and in the mean."""

    order: str
    over_time: npt.NDArray[np.float64]
    mean: float


def draw(path: Path, panels: Sequence[Panel], bin_s: float) -> None:
    """Write the picture: a panel an order, over the seconds that all of them trained."""
    end_s = min(len(panel.over_time) for panel in panels) * bin_s
    with mpl.rc_context({**STYLE, "savefig.facecolor": "white"}):
        figure = Figure(figsize=(8.6, 1.45 * len(panels) + 0.5), layout="constrained")
        axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
        for ax, panel in zip(axes, panels, strict=True):
            style_axes(ax, f"{panel.order}: computing {100 * panel.mean:.0f} % of the time", "", PRINT)
            edges = np.arange(len(panel.over_time) + 1) * bin_s
            colour = RUN_COLOURS[1] if panel.order == "blocking-sort" else RUN_COLOURS[0]
            ax.stairs(100 * panel.over_time, edges, fill=True, color=colour)
            ax.set_xlim(0, end_s)
            ax.set_ylim(0, 100)
            ax.set_yticks([0, 50, 100], ["0", "50", "100 %"])
        axes[-1].set_xlabel("seconds of training", color=PRINT.muted)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="png", dpi=120)
