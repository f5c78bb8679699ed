"""The columns of the report's main table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from speechdp.report.kit import formatting
from speechdp.report.kit.metric_names import metric_text
from speechdp.report.kit.tables import Column
from speechdp.report.runs.derived import RunFigures, steps_taken, task_of
from speechdp.report.sweep.data_columns import DATA_WAIT
from speechdp.tasks.metrics import Metric


def _period(row: RunFigures) -> str:
    return row.run.period or formatting.MISSING


def _skew(row: RunFigures) -> str:
    if row.skew is None:
        return formatting.MISSING
    text = formatting.percent(row.skew.value)
    return text if row.skew.straggler is None else f"{text} (rank {row.skew.straggler})"


def _wer(row: RunFigures) -> float | None:
    return None if row.word_errors is None else row.word_errors.wer


def _time_to_target(row: RunFigures) -> str:
    return formatting.seconds(row.time_to_target_s)


_BEFORE_METRICS: tuple[Column[RunFigures], ...] = (
    Column(
        "strategy",
        "strategy",
        "",
        "How the ranks keep one model.",
        lambda row: row.run.strategy.replace("_", " ") or formatting.MISSING,
        lambda row: row.run.strategy,
        is_number=False,
    ),
    Column("period", "period", "", "Steps between averages, unless a unit is given.", _period, _period),
    Column(
        "ranks",
        "ranks",
        "",
        "Number of ranks.",
        lambda row: formatting.MISSING if row.run.size is None else str(row.run.size),
        lambda row: row.run.size,
    ),
    Column(
        "frames_per_s",
        "frames/s",
        "",
        "Frames of all ranks over the longest rank's step time, warm-up left out.",
        lambda row: formatting.count(row.frames_per_s),
        lambda row: row.frames_per_s,
    ),
    Column(
        "speedup",
        "speed-up",
        "times",
        "Frames/s over those of one rank.",
        lambda row: formatting.times(row.speedup),
        lambda row: row.speedup,
    ),
    Column(
        "efficiency",
        "efficiency",
        "%",
        "Speed-up over the number of ranks.",
        lambda row: formatting.percent(row.efficiency),
        lambda row: row.efficiency,
    ),
    Column(
        "communication_share",
        "communi\u00adcation",
        "%",
        "Share of the step time in exchanges, waiting for other ranks included; mean over ranks.",
        lambda row: formatting.percent(row.comm_share, 1),
        lambda row: row.comm_share,
    ),
    DATA_WAIT,
    Column(
        "rank_skew",
        "rank skew",
        "%",
        "Slowest minus fastest rank's own work a step, over the mean; the straggler is named from 5 % on.",
        _skew,
        lambda row: None if row.skew is None else row.skew.value,
    ),
)
WER = Column[RunFigures](
    "wer",
    "WER",
    "%",
    "Word error rate of the final model and its 95 % bootstrap interval.",
    lambda row: formatting.word_errors(row.word_errors),
    _wer,
)


def all_columns(rows: Sequence[RunFigures]) -> tuple[Column[RunFigures], ...]:
    """Return every column, as the CSV has them: those of the metrics are what the runs' tasks declare."""
    main = task_of(row.run for row in rows).metrics[0]
    to_target = Column[RunFigures](
        "time_to_target_s",
        "to target",
        "",
        f"Training time until the first evaluation at or {'above' if main.higher_is_better else 'below'} the "
        f"target {main.name.removeprefix('held-out ')}.",
        _time_to_target,
        lambda row: row.time_to_target_s,
    )
    metrics: dict[str, Column[RunFigures]] = {}
    for task in [row.run.task for row in rows if row.run.settings] or [task_of(())]:
        for place, metric in enumerate(task.metrics):
            metrics.setdefault(metric.key, _metric_column(metric, is_first=place == 0))
    if all(row.run.is_of_script for row in rows):
        return _script_columns(tuple(metrics.values()), to_target)
    return (*_BEFORE_METRICS, *metrics.values(), WER, to_target)


def _script_columns(
    metrics: tuple[Column[RunFigures], ...], to_target: Column[RunFigures]
) -> tuple[Column[RunFigures], ...]:
    """Return the columns of runs of a user's script: its steps, and what it counts instead of frames."""
    steps = Column[RunFigures](
        "steps", "steps", "", "Steps of the loop.", lambda row: formatting.count(_steps(row)), _steps
    )
    items = "What `step(weight=)` counts (frames, tokens, examples; else steps), of all ranks together,"
    meanings = {
        "frames_per_s": ("items_per_s", "items/s", f"{items} over the longest rank's step time."),
        "speedup": ("speedup", "speed-up", "Items/s over those of one rank."),
    }
    before = []
    for column in _BEFORE_METRICS:
        key, title, meaning = meanings.get(column.key, (column.key, column.title, column.meaning))
        before.append(replace(column, key=key, title=title, meaning=meaning))
    return (*before, steps, *metrics, to_target)


def _steps(row: RunFigures) -> int | None:
    return None if row.run.timing is None else steps_taken(row.run.timing)


def main_columns(rows: Sequence[RunFigures]) -> tuple[Column[RunFigures], ...]:
    """Return the columns to show: no word error rate where no run's task has one."""
    decodes = any(row.run.task.decodes for row in rows)
    return tuple(column for column in all_columns(rows) if decodes or column is not WER)


def _metric_column(metric: Metric, *, is_first: bool) -> Column[RunFigures]:
    return Column(
        metric.recorded_as if is_first else metric.key,
        metric.title,
        metric.unit,
        metric.meaning,
        lambda row: metric_text(metric, row.values.get(metric.key)),
        lambda row: row.values.get(metric.key),
    )
