"""Draw what each strategy keeps of its throughput when one rank is slow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from speechdp.report.kit.canvas import style_axes
from speechdp.report.kit.svg import STYLE
from speechdp.report.kit.theme import PRINT, RUN_COLOURS


@dataclass(frozen=True)
class Bar:
    """A strategy's throughput with a rank slowed by `factor`, over its unslowed throughput."""

    strategy: str
    factor: int
    share: float


def draw(path: Path, bars: Sequence[Bar], sums: Mapping[int, float], ranks: int) -> None:
    """Write the picture: one panel a factor, one bar a strategy.

    Args:
        sums: for each factor the sum of the ranks' own speeds, over the unslowed one.
        ranks: number of ranks.
    """
    strategies = list(dict.fromkeys(bar.strategy for bar in bars))
    with mpl.rc_context({**STYLE, "savefig.facecolor": "white"}):
        figure = Figure(figsize=(4.2 * len(sums) + 1.8, 0.42 * len(strategies) + 1.7), layout="constrained")
        axes = figure.subplots(1, len(sums), sharey=True, squeeze=False)[0]
        for ax, (factor, of_sum) in zip(axes, sums.items(), strict=True):
            style_axes(ax, f"One of {ranks} ranks {factor} times slower", "", PRINT)
            for bar in bars:
                if bar.factor == factor:
                    y = strategies.index(bar.strategy)
                    ax.barh(y, bar.share, height=0.68, color=RUN_COLOURS[0])
                    ax.text(bar.share + 0.015, y, f"{bar.share:.2f}", va="center", color=PRINT.ink)
            for value, label in ((of_sum, "sum of\nspeeds"), (1 / factor, "slowest\nrank")):
                ax.axvline(value, color=PRINT.baseline, linewidth=1, linestyle=(0, (4, 3)), zorder=0)
                ax.text(
                    value, len(strategies) - 0.42, label, ha="center", va="top", fontsize=8,
                    color=PRINT.muted,
                    bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
                )  # fmt: skip
            ax.set_xlim(0, max(1.0, *(bar.share for bar in bars)) + 0.16)
            ax.set_ylim(len(strategies) + 0.35, -0.6)
            ax.set_yticks(range(len(strategies)), strategies)
            ax.grid(visible=False)
            ax.set_xlabel("throughput, of the unslowed run's", color=PRINT.muted)
        figure.savefig(path, format="png", dpi=120)
