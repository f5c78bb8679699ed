"""What the held-out figures of a task are called: recognition has probabilities, synthesis errors.

Runs record one figure for both, the higher the better; of synthesis it is minus the L1 error.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from matplotlib.axes import Axes

from speechdp.report.kit import formatting
from speechdp.report.runs.results import RunResult


@dataclass(frozen=True)
class Terms:
    """Names of the held-out figures.

    Attributes:
        is_error: whether the figure is shown as a positive error, the smaller the better.
        figure: what it is called in a sentence.
        best: the word for the best one.
        unit: of a column.
        axis: of a plot.
        accuracy: what the second figure is called.
    """

    is_error: bool
    figure: str
    best: str
    unit: str
    axis: str
    accuracy: str

    def number(self, log_prob: float | None) -> str:
        """Write the figure alone: `−0.407`, or `0.1233` of an error."""
        if self.is_error and log_prob is not None:
            return f"{abs(log_prob):.4f}"
        return formatting.nats(log_prob)

    def with_unit(self, log_prob: float | None) -> str:
        """Write the figure so that it can stand in a sentence: `−0.407 nats/frame`, `L1 0.1233 per frame`."""
        text = f"{self.number(log_prob)} {self.unit}"
        return f"L1 {text}" if self.is_error else text

    def gap(self, log_prob: float, best: float) -> str:
        """Write how much worse a figure is than the best: `0.054 nats/frame below the best`."""
        if self.is_error:
            return f"L1 {best - log_prob:.4f} {self.unit} above the smallest"
        return f"{best - log_prob:.3f} {self.unit} below the best"

    def gain(self, value: float) -> str:
        """Write by how much a figure has become better: `+0.012 nats/frame`."""
        if self.is_error:
            return f"L1 {formatting.MINUS}{value:.4f} {self.unit}"
        return f"+{value:.3f} {self.unit}"

    def recorded(self, target: float | None) -> float | None:
        """Return a target as runs record it: an error may be given as it is shown."""
        return -abs(target) if self.is_error and target is not None else target

    def finish_axis(self, ax: Axes) -> None:
        """Write a plot's heights as they are in the table; errors fall."""
        if self.is_error:
            ax.yaxis.set_major_formatter(lambda y, _: f"{abs(y):g}")
            ax.invert_yaxis()


RECOGNITION = Terms(
    False, "held-out log-probability", "best", "nats/frame", "nats/frame", "frame accuracy"
)  # fmt: skip
SYNTHESIS = Terms(
    True, "held-out L1 error", "smallest", "per frame", "held-out L1 error", "attention maximum"
)  # fmt: skip


def terms_of(runs: Iterable[RunResult]) -> Terms:
    """Return the terms of synthesis where all runs train it; those that lost their settings have no say."""
    known = [run for run in runs if run.settings]
    return SYNTHESIS if known and all(run.is_synthesis for run in known) else RECOGNITION
