"""Write the held-out figures of runs in reports, as the runs' task declares its metrics.

Runs are compared by a score: the task's first metric, with its sign reversed if smaller is better.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from matplotlib.axes import Axes

from speechdp.errors import ConfigError
from speechdp.report.kit import formatting
from speechdp.report.runs.derived import task_of
from speechdp.report.runs.results import TRAINER, Evaluation, RunKind, RunResult
from speechdp.tasks.metrics import Metric, TaskRecord


@dataclass(frozen=True)
class Terms:
    """The words for a task's held-out figures and for the kind of its runs."""

    task: TaskRecord
    kind: RunKind = TRAINER

    @property
    def metric(self) -> Metric:
        """The metric that runs are compared by."""
        return self.task.metrics[0]

    @property
    def amount(self) -> str:
        """The unit that throughput counts, e.g. frames."""
        return self.kind.amount

    @property
    def falls(self) -> bool:
        """Whether smaller is better."""
        return not self.metric.higher_is_better

    @property
    def best(self) -> str:
        """The word for the best figure."""
        return "smallest" if self.falls else "best"

    @property
    def short_name(self) -> str:
        """The metric's name without "held-out", for sentences in which that is clear."""
        return self.metric.name.removeprefix("held-out ")

    @property
    def keeps(self) -> str:
        """Predicate of a run that is near enough to the best; an error is not called an accuracy."""
        return f"keeps the {self.short_name} low" if self.falls else "keeps the accuracy"

    @property
    def misses(self) -> str:
        """Clause about a run that is not near enough to the best."""
        return f"its {self.short_name} is too high" if self.falls else "it is not accurate enough"

    @property
    def is_best(self) -> str:
        """Predicate of the run with the best figure."""
        return f"has the {self.best} {self.short_name}" if self.falls else "is the most accurate"

    @property
    def axis(self) -> str:
        """The name of a plot's axis."""
        return self.metric.name if self.metric.unit in ("", "per frame") else self.metric.unit

    def number(self, score: float | None) -> str:
        """Write the figure alone: `−0.407`, or `0.1233` for an error."""
        return metric_text(self.metric, None if score is None else self.metric.score(score))

    def with_unit(self, score: float | None) -> str:
        """Write the figure for use in a sentence: `−0.407 nats/frame`, `L1 0.1233 per frame`."""
        return self.metric.labelled(self.number(score))

    def gap(self, score: float, best: float, of: str = "") -> str:
        """Write how much worse a figure is than the best: `0.05 nats/frame below the best`.

        Args:
            score, best: scores; higher is better.
            of: name of `best` in the sentence, e.g. "that of one rank"; "": the best.
        """
        side = "above" if self.falls else "below"
        return f"{self.metric.labelled(self.metric.number(best - score))} {side} {of or f'the {self.best}'}"

    def gain(self, value: float) -> str:
        """Write an improvement of a figure: `+0.012 nats/frame`."""
        return self.metric.labelled(f"{formatting.MINUS if self.falls else '+'}{self.metric.number(value)}")

    def tolerance(self) -> str:
        """Write how far below the best a model still counts as accurate: `0.02 nats/frame`, `2 %`."""
        metric = self.metric
        if metric.tolerance_is_relative:
            return f"{100 * metric.tolerance:g} %"
        return f"{metric.scale * metric.tolerance:g} {metric.unit}".strip()

    def score_of_target(self, target: float | None) -> float | None:
        """Return the user's target as a score.

        For an error that is never below 0, the sign of the target is ignored.

        Args:
            target: the metric as reports show it: 85 for a share in %, which is recorded as 0.85.

        Raises:
            ConfigError: no model can reach it.
        """
        if target is None:
            return None
        metric = self.metric
        value = target / metric.scale
        score = -abs(value) if self.falls and metric.limit == 0 else metric.score(value)
        if not math.isfinite(score):
            raise ConfigError(f"--target {target:g}: give a number, as the report shows the {metric.name}")
        if metric.limit is not None and not score < metric.score(metric.limit):
            side = "above" if self.falls else "below"
            limit = metric.scale * metric.limit
            example = f"--target={limit + metric.scale * (0.45 if self.falls else -0.45):g}"
            name = self.short_name
            raise ConfigError(f"--target {target:g}: the {name} is {side} {limit:g}, e.g. {example}")
        return score

    def others(self, evaluation: Evaluation) -> str:
        """Write an evaluation's other metrics, all but the first: `frame accuracy 82.1 %`."""
        shown = [(metric, evaluation.values.get(metric.key)) for metric in self.task.metrics[1:]]
        return ", ".join(
            f"{metric.name} {metric_text(metric, value)} {metric.unit}"
            for metric, value in shown
            if value is not None
        )

    def finish_axis(self, ax: Axes) -> None:
        """Label a y axis of scores with the metric's values, as in the table; curves of errors fall."""
        if self.falls or self.metric.scale != 1:
            metric = self.metric
            ax.yaxis.set_major_formatter(lambda y, _: f"{metric.scale * metric.score(y):g}")
        if self.falls:
            ax.invert_yaxis()


def metric_text(metric: Metric, value: float | None) -> str:
    """Write a recorded value without its unit, with a true minus sign."""
    return formatting.MISSING if value is None else metric.number(value).replace("-", formatting.MINUS)


def terms_of(runs: Iterable[RunResult]) -> Terms:
    """Return the terms for some runs: task and kind of the first one that still has its settings."""
    runs = list(runs)
    return Terms(task_of(runs), next((run.kind for run in runs if run.settings or run.script_task), TRAINER))
