"""The report's table: its columns once, written for the terminal, as CSV and for the page."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from speechdp.timing import wording
from speechdp.timing.derived import RunFigures

#: Columns of a terminal that holds a run's figures on one line.
WIDE_COLUMNS = 160

Value = float | int | str | None


Row = TypeVar("Row")


@dataclass(frozen=True)
class Column(Generic[Row]):
    """One column: heading, what it means, how a row's cell is written and what it is sorted by."""

    key: str
    title: str
    unit: str
    meaning: str
    text: Callable[[Row], str]
    value: Callable[[Row], Value]
    is_number: bool = True


@dataclass(frozen=True)
class Cell:
    """A cell of the page's table."""

    column: Column[Any]
    text: str
    sort_key: str


def _period(row: RunFigures) -> str:
    return row.run.period or wording.MISSING


def _skew(row: RunFigures) -> str:
    if row.skew is None:
        return wording.MISSING
    text = wording.percent(row.skew.value)
    return text if row.skew.straggler is None else f"{text} (rank {row.skew.straggler})"


def _wer(row: RunFigures) -> float | None:
    return None if row.word_errors is None else row.word_errors.wer


def _time_to_target(row: RunFigures) -> str:
    return wording.seconds(row.time_to_target_s)


COLUMNS: tuple[Column[RunFigures], ...] = (
    Column(
        "strategy",
        "strategy",
        "",
        "How the ranks keep one model.",
        lambda row: row.run.strategy.replace("_", " ") or wording.MISSING,
        lambda row: row.run.strategy,
        is_number=False,
    ),
    Column("period", "period", "", "Steps between averages, unless a unit is given.", _period, _period),
    Column(
        "ranks",
        "ranks",
        "",
        "Number of ranks.",
        lambda row: wording.MISSING if row.run.size is None else str(row.run.size),
        lambda row: row.run.size,
    ),
    Column(
        "frames_per_s",
        "frames/s",
        "",
        "Frames of all ranks over the longest rank's step time, warm-up left out.",
        lambda row: wording.count(row.frames_per_s),
        lambda row: row.frames_per_s,
    ),
    Column(
        "speedup",
        "speed-up",
        "times",
        "Frames/s over those of one rank.",
        lambda row: wording.times(row.speedup),
        lambda row: row.speedup,
    ),
    Column(
        "efficiency",
        "efficiency",
        "%",
        "Speed-up over the number of ranks.",
        lambda row: wording.percent(row.efficiency),
        lambda row: row.efficiency,
    ),
    Column(
        "communication_share",
        "communi\u00adcation",
        "%",
        "Share of the step time in exchanges, waiting for other ranks included; mean over ranks.",
        lambda row: wording.percent(row.comm_share, 1),
        lambda row: row.comm_share,
    ),
    Column(
        "data_wait_share",
        "data wait",
        "%",
        "Share of the step time without a batch to work on; mean over ranks.",
        lambda row: wording.percent(row.data_wait_share, 1),
        lambda row: row.data_wait_share,
    ),
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
        lambda row: wording.nats(row.log_prob),
        lambda row: row.log_prob,
    ),
    Column(
        "frame_accuracy",
        "frame acc.",
        "%",
        "Held-out frames whose most probable state is the aligned one, at the end of training.",
        lambda row: wording.percent(row.accuracy, 1),
        lambda row: row.accuracy,
    ),
    Column(
        "wer",
        "WER",
        "%",
        "Word error rate of the final model and its 95 % bootstrap interval.",
        lambda row: wording.word_errors(row.word_errors),
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


@dataclass(frozen=True)
class TerminalTable:
    """The table for a terminal: a run a line where that fits, else a figure a line."""

    rows: Sequence[RunFigures]
    target: float | None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the form that fits; rich calls this."""
        yield (_wide if options.max_width >= WIDE_COLUMNS else _tall)(self.rows, _caption(self.target))


def _caption(target: float | None) -> str:
    if target is None:
        return ""
    return f"time to target: until {wording.nats(target)} nats/frame on held-out data"


def _wide(rows: Sequence[RunFigures], caption: str) -> Table:
    """Return one line a run; names are plain text, never markup."""
    table = Table(caption=caption, caption_justify="left", header_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("run", overflow="fold", min_width=12)
    for column in COLUMNS:
        title = column.title.replace("\u00ad", "")
        heading = f"{title}\n{column.unit}" if column.unit else title
        justify = "right" if column.is_number else "left"
        table.add_column(heading, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for row in rows:
        style = "" if row.run.status == "complete" else "dim"
        cells = [Text(name_and_status(row))] + [Text(column.text(row)) for column in COLUMNS]
        table.add_row(*cells, style=style)
    return table


def _tall(rows: Sequence[RunFigures], caption: str) -> Table:
    """Return one line a figure and one column a run, under the runs' short names."""
    labels = wording.run_labels([row.run for row in rows])
    table = Table(
        caption=caption,
        caption_justify="left",
        header_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("", no_wrap=True)
    for row in rows:
        heading = labels[row.run.name]
        if row.run.status != "complete":
            heading += f" ({row.run.status})"
        table.add_column(Text(heading), justify="right", overflow="fold")
    for column in COLUMNS:
        title = column.title.replace("\u00ad", "")
        name = f"{title}, %" if column.unit == "%" else title
        table.add_row(Text(name), *(Text(column.text(row)) for row in rows))
    return table


def page_rows(rows: Sequence[RunFigures]) -> list[tuple[RunFigures, list[Cell]]]:
    """Return each row with its cells, for the page."""
    return [(row, [make_cell(column, row) for column in COLUMNS]) for row in rows]


def csv_text(rows: Sequence[RunFigures], target: float | None) -> str:
    """Return the table as CSV, in plain units: shares and rates 0 to 1, times in s, empty for unknown."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    extra = ("straggler_rank", "heldout_log_prob_best", "wer_low", "wer_high", "words", "target_log_prob")
    writer.writerow(["run", "status", *(column.key for column in COLUMNS), *extra])
    for row in rows:
        errors = row.word_errors
        values: list[Value] = [row.run.name, row.run.status]
        values += [column.value(row) for column in COLUMNS]
        values += [row.skew.straggler if row.skew else None, row.best_log_prob]
        values += [errors.low, errors.high, errors.words] if errors else [None, None, None]
        values.append(target)
        writer.writerow("" if value is None else value for value in values)
    return buffer.getvalue()


def name_and_status(row: RunFigures) -> str:
    """Return the run's name, and its status unless it is complete."""
    return row.run.name if row.run.status == "complete" else f"{row.run.name} ({row.run.status})"


def make_cell(column: Column[Row], row: Row) -> Cell:
    """Return a row's cell in a column."""
    value = column.value(row)
    # Runs without the figure sort last; periods sort as numbers where they are.
    if isinstance(value, str):
        sort_key = value.zfill(12) if value.isdigit() else value
    else:
        sort_key = "" if value is None else repr(float(value))
    return Cell(column, column.text(row), sort_key)
