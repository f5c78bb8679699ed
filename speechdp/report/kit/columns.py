"""Columns of run figures that several reports show."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from speechdp.decode.paired import Difference
from speechdp.report.kit import formatting
from speechdp.report.kit.metric_names import Terms, metric_text
from speechdp.report.kit.tables import Column
from speechdp.report.runs.derived import RunFigures
from speechdp.report.runs.results import RunResult
from speechdp.tasks.metrics import Metric

FigureColumn = Column[RunFigures]


class _Differing(Protocol):
    @property
    def wer_over_lowest(self) -> Difference | None:
        """Word error rate minus the lowest of the rows it is compared with."""


def _end_of_difference(end: str) -> Callable[[_Differing], float | None]:
    def value(row: _Differing) -> float | None:
        return None if row.wer_over_lowest is None else float(getattr(row.wer_over_lowest, end))

    return value


STEPS = FigureColumn(
    "steps", "steps", "",
    "Steps of the training loop; where ranks train at their own pace, those of the fastest.",
    lambda row: row.steps, formatting.count,
)  # fmt: skip


OVER_LOWEST: Column[Any] = Column(
    "wer_over_lowest", "WER over lowest", "points",
    "Word error rate less the lowest of those beside it, in percentage points, and the 95 % interval of this "
    "difference over the same utterances, and over seeds where there are several; for single models, "
    "chance in training may explain all of it. The lowest itself has 0.0 and no interval.",
    lambda row: None if row.wer_over_lowest is None else row.wer_over_lowest.mean,
    cell=lambda row: formatting.difference(row.wer_over_lowest).replace(" ", "\u00a0"), is_detail=True,
)  # fmt: skip
OVER_LOWEST_LOW, OVER_LOWEST_HIGH = (
    replace(OVER_LOWEST, key=f"{OVER_LOWEST.key}_{end}", value=_end_of_difference(end), cell=None)
    for end in ("low", "high")
)


def throughput(terms: Terms) -> FigureColumn:
    """Return the column of throughput, in the unit that such runs count."""
    amount = terms.amount
    return Column(
        f"{amount}_per_s", f"{amount}/s", "",
        f"{terms.kind.counted} of all ranks over the longest rank's training time (steps, and waiting for "
        "others before evaluations), warm-up left out.",
        lambda row: row.frames_per_s, formatting.count,
    )  # fmt: skip


def resumed_note(runs: Iterable[tuple[RunResult, str]]) -> str:
    """Return a note naming the runs whose times cover only their last start; "" if there are none.

    Args:
        runs: runs and their labels.
    """
    named = [
        f"{label} (from step {formatting.count(run.timed_from)})"
        for run, label in runs
        if run.timed_from is not None
    ]
    if not named:
        return ""
    return f"Resumed, so that speed and shares of time are those since the last start: {', '.join(named)}."


def known_metrics(metrics: Sequence[Metric], rows: Iterable[RunFigures]) -> tuple[Metric, ...]:
    """Return a task's first metric and those that any run has values of; all if no run has values."""
    judged = [row.values for row in rows if row.values]
    return tuple(
        metric
        for place, metric in enumerate(metrics)
        if place == 0 or not judged or any(values.get(metric.key) is not None for values in judged)
    )


def metric_column(metric: Metric, *, is_first: bool) -> FigureColumn:
    """Return the column of a metric on held-out data at the end of training.

    Args:
        is_first: the metric is the first of its task: the column is named by the metric's key on disk.
    """
    return Column(
        metric.recorded_as if is_first else metric.key,
        metric.title,
        metric.unit,
        metric.meaning,
        lambda row: row.values.get(metric.key),
        lambda value: metric_text(metric, value),
        is_detail=not is_first,
    )
