"""Write columns of figures as a table for the terminal, as CSV and for the page."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from markupsafe import Markup
from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from speechdp.report.kit.formatting import MISSING

#: Units that a figure needs not say where its title stands alone.
_PLAIN_UNITS = ("", "times", "nats/frame", "per frame")

#: More columns than any table has.
_NO_EDGE = 10_000

Value = float | int | str | None
Row = TypeVar("Row")


@dataclass(frozen=True)
class Column(Generic[Row]):
    """One column.

    Attributes:
        key: its name in CSV.
        title, unit: its heading.
        value: a row's figure, in plain units; None where the row has none.
        number: writes a figure in the column's unit.
        cell: writes a row's cell where it shows more than the figure; None: it does not.
        is_notable: whether a row's cell is to catch the eye.
    """

    key: str
    title: str
    unit: str
    meaning: str
    value: Callable[[Row], Value]
    number: Callable[[Any], str] = str
    cell: Callable[[Row], str] | None = None
    is_number: bool = True
    is_notable: Callable[[Row], bool] = lambda row: False

    def text(self, row: Row) -> str:
        """Write a row's cell."""
        if self.cell is not None:
            return self.cell(row)
        value = self.value(row)
        return MISSING if value is None else self.number(value)


@dataclass(frozen=True)
class Cell:
    """A cell of the page's table."""

    column: Column[Any]
    text: str
    sort_key: str
    is_notable: bool


@dataclass(frozen=True)
class RowHead:
    """What stands before a row's figures.

    Attributes:
        short: its name where a column of a terminal is headed by it; "": the same.
        status: what is wrong with it.
        mark: its colour, for the page; None: none.
        is_pale: does not count.
        is_chosen: the answer names it.
        begins: it is of another kind than the row before.
    """

    name: str
    short: str = ""
    status: str = ""
    mark: Markup | None = None
    is_pale: bool = False
    is_chosen: bool = False
    begins: bool = False

    def text(self, name: str) -> Text:
        """Return a name for the terminal, and the status; never markup."""
        return Text(f"{name} ({self.status})" if self.status else name)


@dataclass(frozen=True)
class ShownTable(Generic[Row]):
    """A table, for the page and for a terminal: rich prints it.

    Attributes:
        id: of the page's element.
        first: heading of the rows' names.
        note: what stands below.
        wide_columns: on a narrower terminal it has a line for each figure instead of each row.
    """

    id: str
    title: str
    columns: Sequence[Column[Row]]
    rows: Sequence[tuple[RowHead, Row]]
    first: str = "run"
    note: str = ""
    wide_columns: int = 0

    def cells(self) -> list[tuple[RowHead, list[Cell]]]:
        """Return each row with its cells, for the page."""
        return [(head, [_cell(column, row) for column in self.columns]) for head, row in self.rows]

    @property
    def width(self) -> int:
        """About how many letters it is wide; headings are broken between words."""
        names = max((len(head.name) for head, _ in self.rows), default=0)
        widths = [
            max(*map(len, column.title.split()), *(len(column.text(row)) for _, row in self.rows), 0)
            for column in self.columns
        ]
        return names + sum(widths) + 3 * len(widths)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the form that fits; rich calls this."""
        table = Table(
            title=Text(self.title) if self.title else None,
            title_justify="left",
            title_style="bold",
            caption=Text(self.note, style="table.caption") if self.note else None,
            caption_justify="left",
            header_style="bold",
            box=box.SIMPLE_HEAD,
        )
        if not console.is_terminal:
            options = options.update(max_width=_NO_EDGE)  # of a file: no word has to be broken
        (self._fill_wide if options.max_width >= self.wide_columns else self._fill_tall)(table)
        yield from console.render(table, options)

    def _fill_wide(self, table: Table) -> None:
        """Add one line per row."""
        table.add_column(self.first, overflow="fold", min_width=12)
        for column in self.columns:
            title = column.title.replace("\u00ad", "")
            heading = f"{title}\n{column.unit}" if column.unit else title
            justify = "right" if column.is_number else "left"
            table.add_column(heading, justify=justify, overflow="fold")  # type: ignore[arg-type]
        for number, (head, row) in enumerate(self.rows):
            table.add_row(
                head.text(head.name),
                *(_terminal_cell(column, row) for column in self.columns),
                style="dim" if head.is_pale else "",
                end_section=any(following.begins for following, _ in self.rows[number + 1 : number + 2]),
            )

    def _fill_tall(self, table: Table) -> None:
        """Add one line a figure and one column a row, under the rows' short names."""
        table.padding = (0, 1, 0, 0)
        table.add_column("", no_wrap=True)
        for head, _ in self.rows:
            table.add_column(head.text(head.short or head.name), justify="right", overflow="fold")
        for column in self.columns:
            title = column.title.replace("\u00ad", "")
            name = title if column.unit in _PLAIN_UNITS else f"{title}, {column.unit}"
            table.add_row(Text(name), *(_terminal_cell(column, row) for _, row in self.rows))


def with_figures(columns: Iterable[Column[Row]], rows: Sequence[Row]) -> tuple[Column[Row], ...]:
    """Return the columns in which any row has a figure; all where there is no row."""
    if not rows:
        return tuple(columns)
    return tuple(column for column in columns if any(column.value(row) is not None for row in rows))


def csv_text(head: Sequence[str], lines: Iterable[Sequence[Value]]) -> str:
    """Return lines as CSV; what is not known is empty."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(head)
    for line in lines:
        writer.writerow("" if value is None else value for value in line)
    return buffer.getvalue()


def _terminal_cell(column: Column[Row], row: Row) -> Text:
    return Text(column.text(row), style="bold yellow" if column.is_notable(row) else "")


def _cell(column: Column[Row], row: Row) -> Cell:
    value = column.value(row)
    # Rows without the figure sort last; periods sort as numbers where they are.
    if isinstance(value, str):
        sort_key = value.zfill(12) if value.isdigit() else value
    else:
        sort_key = "" if value is None else repr(float(value))
    return Cell(column, column.text(row), sort_key, column.is_notable(row))
