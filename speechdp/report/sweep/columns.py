"""The columns of the report's main table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from speechdp.report.kit import formatting
from speechdp.report.kit.metric_names import SYNTHESIS, terms_of
from speechdp.report.kit.tables import Column
from speechdp.report.runs.derived import RunFigures
from speechdp.report.sweep.data_columns import DATA_WAIT


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


COLUMNS: tuple[Column[RunFigures], ...] = (
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
    Column(
        "heldout_log_prob",
        "log-prob",
        "nats/frame",
        "Mean held-out log-probability of the aligned state, at the end of training.",
        lambda row: formatting.nats(row.log_prob),
        lambda row: row.log_prob,
    ),
    Column(
        "frame_accuracy",
        "frame acc.",
        "%",
        "Held-out frames whose most probable state is the aligned one, at the end of training.",
        lambda row: formatting.percent(row.accuracy, 1),
        lambda row: row.accuracy,
    ),
    Column(
        "wer",
        "WER",
        "%",
        "Word error rate of the final model and its 95 % bootstrap interval.",
        lambda row: formatting.word_errors(row.word_errors),
        _wer,
    ),
    Column(
        "time_to_target_s",
        "to target",
        "",
        "Training time until the first evaluation at or above the target log-probability.",
        _time_to_target,
        lambda row: row.time_to_target_s,
    ),
)

#: What columns of synthesis are called; one without a name is left out.
_OF_SYNTHESIS = {
    "heldout_log_prob": (
        "held-out L1",
        "Absolute error of mel and linear spectrogram (each a mean over bins from 0 to 1) on held-out data, "
        "at the end of training; smaller is better.",
    ),
    "frame_accuracy": (
        "attention max.",
        "Mean of the attention's largest weight on held-out data at the end; 100: a clear choice.",
    ),
    "wer": None,
    "time_to_target_s": ("to target", "Training time until the first evaluation at or below the target L1."),
}


def main_columns(rows: Sequence[RunFigures]) -> tuple[Column[RunFigures], ...]:
    """Return the columns to show, in the terms of the runs' task."""
    if not terms_of(row.run for row in rows).is_error:
        return COLUMNS
    shown: list[Column[RunFigures]] = []
    for column in COLUMNS:
        named = _OF_SYNTHESIS.get(column.key, (column.title, column.meaning))
        if named is not None:
            shown.append(replace(column, title=named[0], meaning=named[1]))
    return tuple(_as_error(column) if column.key == "heldout_log_prob" else column for column in shown)


def _as_error(column: Column[RunFigures]) -> Column[RunFigures]:
    return replace(
        column,
        unit=SYNTHESIS.unit,
        text=lambda row: SYNTHESIS.number(row.log_prob),
        value=lambda row: None if row.log_prob is None else -row.log_prob,
    )
