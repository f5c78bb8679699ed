"""Write columns of figures as a table for the terminal, as CSV and for the page."""

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

from speechdp.report.kit import formatting
from speechdp.report.runs.derived import RunFigures, task_of
from speechdp.tasks.metrics import Metric

#: Columns of a terminal that holds a run's figures on one line.
WIDE_COLUMNS = 160
#: Units that a figure needs not say where its title stands alone.
_PLAIN_UNITS = ("", "times", "nats/frame", "per frame")

Value = float | int | str | None


Row = TypeVar("Row")


@dataclass(frozen=True)
class Column(Generic[Row]):
    """One column: heading, what it means, how a row's cell is written and what it is sorted by.

    `is_notable` says of a row whether its cell is to catch the eye.
    """

    key: str
    title: str
    unit: str
    meaning: str
    text: Callable[[Row], str]
    value: Callable[[Row], Value]
    is_number: bool = True
    is_notable: Callable[[Row], bool] = lambda row: False


@dataclass(frozen=True)
class Cell:
    """A cell of the page's table."""

    column: Column[Any]
    text: str
    sort_key: str
    is_notable: bool = False


@dataclass(frozen=True)
class TerminalTable:
    """A table for a terminal: a run a line where that fits, else a figure a line."""

    rows: Sequence[RunFigures]
    columns: Sequence[Column[RunFigures]]
    wide_columns: int = WIDE_COLUMNS
    title: str = ""
    caption: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the form that fits; rich calls this."""
        yield (_wide if options.max_width >= self.wide_columns else _tall)(self)


def target_caption(target: str | None) -> str:
    """Return what stands under the main table: until when the time to target counts."""
    return "" if target is None else f"time to target: until {target} on held-out data"


def _empty_table(table: TerminalTable) -> Table:
    return Table(
        title=table.title or None,
        title_justify="left",
        title_style="bold",
        caption=table.caption,
        caption_justify="left",
        header_style="bold",
        box=box.SIMPLE_HEAD,
    )


def _wide(shown: TerminalTable) -> Table:
    """Return one line per run; names are plain text, never markup."""
    table = _empty_table(shown)
    table.add_column("run", overflow="fold", min_width=12)
    for column in shown.columns:
        title = column.title.replace("\u00ad", "")
        heading = f"{title}\n{column.unit}" if column.unit else title
        justify = "right" if column.is_number else "left"
        table.add_column(heading, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for row in shown.rows:
        style = "" if row.run.status == "complete" else "dim"
        cells = [Text(name_and_status(row)), *(_terminal_cell(column, row) for column in shown.columns)]
        table.add_row(*cells, style=style)
    return table


def _tall(shown: TerminalTable) -> Table:
    """Return one line a figure and one column a run, under the runs' short names."""
    labels = formatting.run_labels([row.run for row in shown.rows])
    table = _empty_table(shown)
    table.padding = (0, 1, 0, 0)
    table.add_column("", no_wrap=True)
    for row in shown.rows:
        heading = labels[row.run.name]
        if row.run.status != "complete":
            heading += f" ({row.run.status})"
        table.add_column(Text(heading), justify="right", overflow="fold")
    for column in shown.columns:
        title = column.title.replace("\u00ad", "")
        name = title if column.unit in _PLAIN_UNITS else f"{title}, {column.unit}"
        table.add_row(Text(name), *(_terminal_cell(column, row) for row in shown.rows))
    return table


def _terminal_cell(column: Column[RunFigures], row: RunFigures) -> Text:
    return Text(column.text(row), style="bold yellow" if column.is_notable(row) else "")


def page_rows(
    rows: Sequence[RunFigures], columns: Sequence[Column[RunFigures]]
) -> list[tuple[RunFigures, list[Cell]]]:
    """Return each row with its cells, for the page."""
    return [(row, [make_cell(column, row) for column in columns]) for row in rows]


def csv_text(
    rows: Sequence[RunFigures],
    target: float | None,
    columns: Sequence[Column[RunFigures]],
    more: Sequence[Column[RunFigures]] = (),
) -> str:
    """Return `columns`, what belongs to them, and `more` columns as CSV, in plain units.

    Shares and rates are 0 to 1, times in s; what is not known is empty.
    """
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    metric = task_of(row.run for row in rows).metrics[0]
    best, until = f"{metric.recorded_as}_best", f"target_{metric.key}"
    extra = ("straggler_rank", best, "wer_low", "wer_high", "words", until)
    writer.writerow(["run", "status", *(column.key for column in columns), *extra, *(c.key for c in more)])
    for row in rows:
        errors = row.word_errors
        values: list[Value] = [row.run.name, row.run.status]
        values += [column.value(row) for column in columns]
        values += [row.skew.straggler if row.skew else None, _recorded(metric, row)]
        values += [errors.low, errors.high, errors.words] if errors else [None, None, None]
        values += [None if target is None else metric.score(target), *(column.value(row) for column in more)]
        writer.writerow("" if value is None else value for value in values)
    return buffer.getvalue()


def _recorded(metric: Metric, row: RunFigures) -> float | None:
    """Return the best value of a metric in a run as it is recorded; None where the run has another metric."""
    if row.best_score is None or row.run.metric.key != metric.key:
        return None
    return metric.score(row.best_score)


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
    return Cell(column, column.text(row), sort_key, column.is_notable(row))
