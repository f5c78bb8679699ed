"""The columns of the report's main table, and its CSV."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from speechdp.report.kit import formatting
from speechdp.report.kit.columns import (
    OVER_LOWEST,
    OVER_LOWEST_HIGH,
    OVER_LOWEST_LOW,
    STEPS,
    FigureColumn,
    known_metrics,
    metric_column,
    throughput,
)
from speechdp.report.kit.formatting import ONE_RANK_LABEL
from speechdp.report.kit.metric_names import Terms, terms_of
from speechdp.report.kit.speeds import RACED_HIGH, RACED_LOW, RACED_SPEED, times_text
from speechdp.report.kit.tables import Column, Value, csv_text, with_figures
from speechdp.report.runs.derived import RunFigures, task_of
from speechdp.report.runs.results import Estimate
from speechdp.report.sweep.data_columns import DATA_WAIT

WER = FigureColumn(
    "wer", "WER", "%", "Word error rate of the final model and its 95 % bootstrap interval.",
    lambda row: row.wer, cell=lambda row: formatting.word_errors(row.word_errors),
)  # fmt: skip


def _ser(row: RunFigures) -> Estimate | None:
    return None if row.word_errors is None else row.word_errors.ser


SER = FigureColumn(
    "ser", "SER", "%", "Sentence error rate: share of the utterances with at least one word error.",
    lambda row: None if (ser := _ser(row)) is None else ser.mean, lambda ser: formatting.percent(ser, 1),
)  # fmt: skip


def _strategy(row: RunFigures) -> str:
    label = ONE_RANK_LABEL if row.run.is_baseline else row.run.strategy.replace("_", " ")
    return label or formatting.MISSING


def _skew(row: RunFigures) -> str:
    if row.skew is None:
        return formatting.MISSING
    text = formatting.percent(row.skew.value)
    return text if row.skew.straggler is None else f"{text} (rank {row.skew.straggler})"


def _before_metrics(terms: Terms) -> tuple[FigureColumn, ...]:
    """Return the columns before the metrics: the settings of a run, and its speed."""
    return (
        Column(
            "strategy", "strategy", "", "How the ranks keep one model.", lambda row: row.run.strategy,
            cell=_strategy, is_number=False,
        ),
        Column(
            "period", "period", "", "Steps between averages, unless a unit is given.",
            lambda row: row.run.period,
        ),
        Column("ranks", "ranks", "", "Number of ranks.", lambda row: row.run.size),
        throughput(terms),
        RACED_SPEED,
        Column(
            "speedup", "speed-up", "times",
            f"{terms.amount.capitalize()}/s over those of one rank; of a race the ratio "
            "within rounds and its 95 % interval.",
            lambda row: row.speedup, formatting.times,
            cell=lambda row: times_text(row.speedup, row.speedup_interval).replace(" ", "\u00a0"),
        ),
        Column(
            "efficiency", "effi\u00adciency", "%", "Speed-up divided by the number of ranks.",
            lambda row: row.efficiency, formatting.percent,
        ),
        Column(
            "communication_share", "communi\u00adcation", "%",
            "Share of the training time in exchanges, mean over ranks: communication itself and waiting for "
            "slower ranks (also before evaluations) together; the answer gives them separately.",
            lambda row: row.comm_share, lambda share: formatting.percent(share, 1),
        ),
        DATA_WAIT,
        Column(
            "rank_skew", "rank skew", "%",
            "Own work per step of the slowest rank minus that of the fastest, divided by the mean; "
            "the straggler is named from 5 % on.",
            lambda row: row.skew.value if row.skew else None, cell=_skew,
        ),
    )  # fmt: skip


def all_columns(rows: Sequence[RunFigures]) -> tuple[FigureColumn, ...]:
    """Return every column in the order of the CSV, including the metrics that the runs' tasks declare."""
    terms = terms_of(row.run for row in rows)
    side = "above" if terms.metric.higher_is_better else "below"
    to_target = FigureColumn(
        "time_to_target_s", "to target", "",
        f"Training time until the first evaluation at or {side} the target "
        f"{terms.metric.name.removeprefix('held-out ')}.",
        lambda row: row.time_to_target_s, formatting.seconds,
    )  # fmt: skip
    metrics: dict[str, FigureColumn] = {}
    for task in [row.run.task for row in rows if row.run.settings] or [terms.task]:
        for place, metric in enumerate(known_metrics(task.metrics, rows)):
            metrics.setdefault(metric.key, metric_column(metric, is_first=place == 0))
    steps = [STEPS] if STEPS.key in terms.kind.measures else []
    errors = [WER, OVER_LOWEST, SER] if WER.key in terms.kind.measures else []
    return (*_before_metrics(terms), *steps, *metrics.values(), *errors, to_target)


#: Columns that explain the speed; the table shows them after the results.
_REASONS = ("efficiency", "communication_share", DATA_WAIT.key, "rank_skew", STEPS.key)
#: Columns to leave out of a narrow terminal first, because others tell much the same (a run's name its
#: strategy); speed and accuracy need the room.
_DISPENSABLE = (*_REASONS, "strategy", "speedup", SER.key, "time_to_target_s")


def main_columns(rows: Sequence[RunFigures]) -> tuple[FigureColumn, ...]:
    """Return the columns in which any run has a value; the WER only if a task decodes.

    Columns that explain a speed come after the results.
    """
    hidden = [] if any(row.run.task.decodes for row in rows) else [WER, OVER_LOWEST]
    shown = with_figures((column for column in all_columns(rows) if column not in hidden), rows)
    # Results first, because a window or terminal may be too narrow for all columns.
    sizes = {row.run.size for row in rows if not row.run.is_baseline and row.run.size is not None}
    details = (*_DISPENSABLE, "ranks") if len(sizes) < 2 else _DISPENSABLE
    shown = tuple(replace(column, is_detail=column.is_detail or column.key in details) for column in shown)
    reasons = [column for column in shown if column.key in _REASONS]
    return (*(column for column in shown if column.key not in _REASONS), *reasons)


def csv_of_runs(rows: Sequence[RunFigures], target: float | None, more: Sequence[FigureColumn]) -> str:
    """Return all columns, their additional values, and the columns `more` as CSV, in plain units.

    Shares and rates are 0 to 1, times in s; unknown values are empty.
    """
    metric, columns = task_of(row.run for row in rows).metrics[0], all_columns(rows)
    more = [RACED_LOW, RACED_HIGH, OVER_LOWEST_LOW, OVER_LOWEST_HIGH, *more]
    extra = ("straggler_rank", f"{metric.recorded_as}_best", "wer_low", "wer_high", "words")
    until = None if target is None else metric.score(target)

    def line(row: RunFigures) -> list[Value]:
        errors = row.word_errors
        # A run of another task does not have this metric.
        best = None if row.best_score is None or row.run.metric.key != metric.key else row.best_score
        return [
            row.run.name,
            row.run.status,
            *(column.value(row) for column in columns),
            row.skew.straggler if row.skew else None,
            None if best is None else metric.score(best),
            *((errors.low, errors.high, errors.words) if errors else (None, None, None)),
            until,
            *(column.value(row) for column in more),
        ]

    keys = (column.key for column in columns)
    head = ["run", "status", *keys, *extra, f"target_{metric.key}", *(column.key for column in more)]
    return csv_text(head, map(line, rows))
