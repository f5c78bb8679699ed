"""Write columns of figures as a table for the terminal, as CSV, and for the page."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from markupsafe import Markup
from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from speechdp.report.kit.formatting import MISSING

#: Units that need not be shown after a figure's title.
_PLAIN_UNITS = ("", "times", "nats/frame", "per frame")

#: Characters of a line in a file or a pipe.
_PIPED = 128
#: Characters beside a cell: its padding, and the border to the next cell.
_BESIDE = 3
#: Minimum characters of a longer text that may be broken between words.
_TEXT = 20
#: Minimum characters of the rows' names.
_NAME = 12

Value = float | int | str | None
Row = TypeVar("Row")


@dataclass(frozen=True)
class Column(Generic[Row]):
    """One column.

    Attributes:
        key: name in CSV.
        title, unit: heading.
        value: returns a row's figure, in plain units; None if the row has none.
        number: formats a figure in the column's unit.
        cell: formats a row's cell if it shows more than the figure; None: it does not.
        is_notable: whether to highlight a row's cell.
        is_detail: left out first if a terminal is too narrow for all columns.
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
    is_detail: bool = False

    def text(self, row: Row) -> str:
        """Format a row's cell."""
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
    """Head of a row, before its figures.

    Attributes:
        short: name as the heading of a terminal's column; "": the same.
        status: problem of the row.
        mark: colour, for the page; None: none.
        is_pale: the row does not count.
        is_chosen: the answer names the row.
        begins: the row is of another kind than the one before.
    """

    name: str
    short: str = ""
    status: str = ""
    mark: Markup | None = None
    is_pale: bool = False
    is_chosen: bool = False
    begins: bool = False

    def text(self, name: str) -> Text:
        """Return a name and the status for the terminal, verbatim."""
        return Text(f"{name} ({self.status})" if self.status else name)


@dataclass(frozen=True)
class ShownTable(Generic[Row]):
    """A table for the page and, through rich, for a terminal.

    Attributes:
        id: id of the page's element.
        first: heading of the rows' names.
        note: text below the table.
        wide_columns: terminal width below which each figure has a line instead of each row, if that fits.
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
        """Width in characters with all columns, with headings broken between words."""
        return self._wide_width(self.columns, self._name_widths()[1])

    def _wide_width(self, shown: Sequence[Column[Row]], names: int) -> int:
        """Return the width in characters with a line for each row.

        Args:
            names: characters of the rows' names.
        """
        return names + _BESIDE + 1 + sum(self._needs(column) + _BESIDE for column in shown)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the form that fits without breaking a word; called by rich.

        If none fits, columns are left out and named below the table; the page has them.
        """
        room = options.max_width if console.is_terminal else _PIPED
        lines = [] if room >= self.wide_columns else self._fitting_lines(room)
        shown = lines or self._fitting(room)
        left_out = [_plain(column.title) for column in self.columns if column not in shown]
        more = f"Only on the page: {', '.join(left_out)}." if left_out else ""
        caption = "\n".join(filter(None, (self.note, more)))
        table = Table(header_style="bold", box=box.SIMPLE_HEAD)
        if lines:
            self._fill_tall(table, lines, room)
        else:
            self._fill_wide(table, shown, room)
        # Not a title and caption of the table, which would be broken where a narrow table ends.
        title = [Text(self.title, style="bold")] if self.title else []
        below = [Text(caption, style="table.caption")] if caption else []
        parts: list[RenderableType] = [*title, table, *below]
        for part in parts:
            for line in console.render_lines(part, options.update(max_width=room), pad=False):
                yield from _without_blanks(line)
                yield Segment.line()
        if below:  # as there is after a table alone
            yield Segment.line()

    def _fitting(self, room: int) -> list[Column[Row]]:
        """Return the columns that fit on a line; leave out details first, then the last columns."""
        shown = [*self.columns]
        names = self._name_widths()[0]
        while len(shown) > 1 and self._wide_width(shown, names) > room:
            details = [column for column in shown if column.is_detail]
            shown.remove(details[-1] if details else shown[-1])
        return shown

    def _name_widths(self) -> tuple[int, int]:
        """Return the width of the rows' names broken between words, and unbroken."""
        texts = [self.first, *(head.text(head.name).plain for head, _ in self.rows)]
        return max(_NAME, *map(_longest_word, texts)), max(_NAME, *map(len, texts))

    def _needs(self, column: Column[Row]) -> int:
        """Return the minimum width of a column, with headings and text cells broken between words."""
        texts = [line for _, row in self.rows for line in _lines(column, row)]
        longest = max(map(len, texts), default=0)
        if not column.is_number:
            longest = max(min(longest, _TEXT), *map(_longest_word, texts), 0)
        return max(longest, _longest_word(_plain(column.title)), len(column.unit))

    def _wants(self, column: Column[Row]) -> int:
        """Return the width of a column if nothing is broken."""
        cells = (line for _, row in self.rows for line in _lines(column, row))
        return max(map(len, [_plain(column.title), column.unit, *cells]))

    def _fitting_lines(self, room: int) -> list[Column[Row]]:
        """Return the columns whose lines fit, with names and cells broken between words; omit texts first.

        Return none if numbers would have to be left out.
        """
        for shown in ([*self.columns], [column for column in self.columns if column.is_number]):
            if _tall_width(shown, self._tall_needs(shown)) <= room:
                return shown
        return []

    def _tall_needs(self, shown: Sequence[Column[Row]]) -> list[int]:
        """Return the minimum width of each row if it is a column."""
        return [
            max(
                map(
                    _longest_word,
                    (
                        head.text(head.short or head.name).plain,
                        *(line for one in shown for line in _lines(one, row)),
                    ),
                )
            )
            for head, row in self.rows
        ]

    def _fill_wide(self, table: Table, shown: Sequence[Column[Row]], room: int) -> None:
        """Add one line per row."""
        (names, long_names), widths = self._name_widths(), [self._needs(column) for column in shown]
        spare = room - self._wide_width(shown, names)
        # Names and texts first, because a heading on two lines is no loss.
        for is_number in (False, True):
            of_kind = [place for place, column in enumerate(shown) if column.is_number == is_number]
            needs = [widths[place] for place in of_kind] + [names]
            wants = [self._wants(shown[place]) for place in of_kind] + [long_names]
            *widened, names = _widened(needs, wants, spare)
            spare -= sum(widened) + names - sum(needs)
            for place, width in zip(of_kind, widened, strict=True):
                widths[place] = width
        table.add_column(self.first, overflow="fold", width=names)
        for column, width in zip(shown, widths, strict=True):
            title = _plain(column.title)
            heading = f"{title}\n{column.unit}" if column.unit else title
            justify = "right" if column.is_number else "left"
            table.add_column(heading, justify=justify, overflow="fold", width=width)  # type: ignore[arg-type]
        for number, (head, row) in enumerate(self.rows):
            table.add_row(
                head.text(head.name),
                *(_terminal_cell(column, row) for column in shown),
                style="dim" if head.is_pale else "",
                end_section=any(following.begins for following, _ in self.rows[number + 1 : number + 2]),
            )

    def _fill_tall(self, table: Table, shown: Sequence[Column[Row]], room: int) -> None:
        """Add one line per figure and one column per row, under the rows' short names."""
        table.padding = (0, 1, 0, 0)
        table.add_column("", no_wrap=True)
        names = [head.text(head.short or head.name) for head, _ in self.rows]
        needs = self._tall_needs(shown)
        wants = [
            max(len(name.plain), *(len(line) for column in shown for line in _lines(column, row)))
            for name, (_, row) in zip(names, self.rows, strict=True)
        ]
        widths = _widened(needs, wants, room - _tall_width(shown, needs))
        for name, width in zip(names, widths, strict=True):
            table.add_column(name, justify="right", overflow="fold", width=width)
        for column in shown:
            table.add_row(Text(_name_of(column)), *(_terminal_cell(column, row) for _, row in self.rows))


def _tall_width(shown: Sequence[Column[Any]], needs: Sequence[int]) -> int:
    """Return the width in characters of the form with a line for each figure.

    Args:
        needs: minimum width of each row's column.
    """
    return max((len(_name_of(column)) for column in shown), default=0) + 3 + sum(width + 2 for width in needs)


def _widened(needs: Sequence[int], wants: Sequence[int], spare: int) -> list[int]:
    """Return widths between minimum and unbroken widths; spare characters go to the narrowest columns."""
    widths = [*needs]
    for _ in range(spare):
        narrow = [place for place, width in enumerate(widths) if width < wants[place]]
        if not narrow:
            break
        widths[min(narrow, key=lambda place: widths[place])] += 1
    return widths


def _plain(title: str) -> str:
    return title.replace("\u00ad", "")


def _name_of(column: Column[Any]) -> str:
    """Return the name of a figure's line, with its unit unless that is obvious."""
    title = _plain(column.title)
    return title if column.unit in _PLAIN_UNITS else f"{title}, {column.unit}"


def _longest_word(text: str) -> int:
    return max(map(len, text.split(" ")))


def _without_blanks(line: Sequence[Segment]) -> list[Segment]:
    """Return a line without trailing blanks."""
    kept = [*line]
    while kept and not kept[-1].text.rstrip(" "):
        kept.pop()
    if kept:
        last = kept.pop()
        kept.append(Segment(last.text.rstrip(" "), last.style))
    return kept


def with_figures(columns: Iterable[Column[Row]], rows: Sequence[Row]) -> tuple[Column[Row], ...]:
    """Return the columns in which any row has a figure; all if there are no rows."""
    if not rows:
        return tuple(columns)
    return tuple(column for column in columns if any(column.value(row) is not None for row in rows))


def csv_text(head: Sequence[str], lines: Iterable[Sequence[Value]]) -> str:
    """Return lines as CSV; unknown values are empty."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(head)
    for line in lines:
        writer.writerow("" if value is None else value for value in line)
    return buffer.getvalue()


def _lines(column: Column[Row], row: Row) -> list[str]:
    """Return the lines of a terminal's cell: each of several figures has one of its own."""
    text = column.text(row)
    return text.replace("; ", ";\n").split("\n") if column.is_number else [text]


def _terminal_cell(column: Column[Row], row: Row) -> Text:
    return Text("\n".join(_lines(column, row)), style="bold yellow" if column.is_notable(row) else "")


def _cell(column: Column[Row], row: Row) -> Cell:
    value = column.value(row)
    # Rows without the figure sort last; periods that are numbers sort as numbers.
    if isinstance(value, str):
        sort_key = value.zfill(12) if value.isdigit() else value
    else:
        sort_key = "" if value is None else repr(float(value))
    return Cell(column, column.text(row), sort_key, column.is_notable(row))
