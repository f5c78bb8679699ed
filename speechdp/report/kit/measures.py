"""Figures of runs as columns: what several reports show, and what a task declares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from speechdp.report.kit import formatting
from speechdp.report.kit.metric_names import Terms, metric_text
from speechdp.report.kit.tables import Column
from speechdp.report.runs.derived import RunFigures
from speechdp.tasks.metrics import Metric


@dataclass(frozen=True)
class Measure:
    """A figure of a run: its column, its value, and how a number of it is written, in the column's unit."""

    key: str
    title: str
    unit: str
    meaning: str
    figure: Callable[[RunFigures], float | None]
    number: Callable[[float], str]

    def written(self, row: RunFigures) -> str:
        """Write a run's figure."""
        value = self.figure(row)
        return formatting.MISSING if value is None else self.number(value)

    def column(self, **others: Any) -> Column[RunFigures]:
        """Return its column.

        Args:
            others: further fields of the column, or other ones.
        """
        fields = {
            "key": self.key, "title": self.title, "unit": self.unit, "meaning": self.meaning,
            "text": self.written, "value": self.figure, **others,
        }  # fmt: skip
        return Column(**fields)


STEPS = Measure(
    "steps", "steps", "", "Steps of the loop; where ranks go at their own pace, of the fastest.",
    lambda row: row.steps, formatting.count,
)  # fmt: skip


def throughput(terms: Terms) -> Measure:
    """Return the throughput, in what such runs count."""
    amount = terms.amount
    return Measure(
        f"{amount}_per_s", f"{amount}/s", "",
        f"{terms.kind.counted} of all ranks over the longest rank's step time, warm-up left out.",
        lambda row: row.frames_per_s, formatting.count,
    )  # fmt: skip


def metric_measure(metric: Metric, *, is_first: bool) -> Measure:
    """Return a metric of held-out data at the end; the first of a task stands under its key on disk."""
    return Measure(
        metric.recorded_as if is_first else metric.key,
        metric.title,
        metric.unit,
        metric.meaning,
        lambda row: row.values.get(metric.key),
        lambda value: metric_text(metric, value),
    )
