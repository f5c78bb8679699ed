"""Tables in a terminal, a file or a pipe."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from speechdp.report.kit.tables import Column, RowHead, ShownTable
from tests.helpers.terminal import on_terminal

NAMES = ("gradient averaging", "model averaging (period=16, momentum=reset)")


def made_up(num_columns: int, wide_columns: int = 0) -> ShownTable[int]:
    """Return a table of two rows; every other of its columns is a detail, and the last but one is a text."""
    columns = [
        Column[int](
            f"figure_{n}", f"held-out figure {n}", "nats/frame", "", lambda row: row, is_detail=n % 2 == 1
        )
        for n in range(num_columns)
    ]
    why = Column[int]("why", "why not", "", "", lambda row: "slower than others by far", is_number=False)
    rows = [(RowHead(name, status="failed"), n) for n, name in enumerate(NAMES)]
    return ShownTable("figures", "At equal frames", [*columns, why], rows, wide_columns=wide_columns)


def piped(table: ShownTable[int]) -> str:
    shown = io.StringIO()
    Console(file=shown, width=200).print(table, crop=False)
    return shown.getvalue()


def words_of(table: ShownTable[int]) -> set[str]:
    """Return all words that a table may have."""
    texts = [
        table.title,
        table.first,
        *NAMES,
        "(failed) nats/frame slower than others by far",
        "Only on the page:",
    ]
    texts += [column.title for column in table.columns]
    return {word.strip(",.") for text in texts for word in text.split()} | {"0", "1"}


@pytest.mark.parametrize("width", [60, 80, 100])
@pytest.mark.parametrize("num_columns", [2, 9])
def test_no_word_is_broken_and_no_line_too_long(width: int, num_columns: int) -> None:
    table = made_up(num_columns)
    text = on_terminal(table, width)
    assert max(map(len, text.splitlines())) <= width
    shown = {word.strip(",.:") for line in text.splitlines() for word in line.split() if "\u2500" not in word}
    assert shown <= {word.strip(":") for word in words_of(table)}


def test_details_are_left_out_first_and_what_is_left_out_is_named() -> None:
    text = " ".join(on_terminal(made_up(6), 110).split())
    assert "Only on the page:" in text
    left_out = text.partition("Only on the page:")[2]
    assert "figure 5" in left_out and "figure 0" not in left_out and "why" not in left_out


def test_a_pipe_gets_lines_of_a_usual_length_without_blanks_at_their_ends() -> None:
    for table in (made_up(3), made_up(30), made_up(9, wide_columns=150)):
        lines = piped(table).splitlines()
        assert max(map(len, lines)) <= 128
        assert all(line == line.rstrip() for line in lines)
    assert "Only on the page" not in piped(made_up(3))


def test_a_table_that_is_too_wide_has_a_line_for_each_figure_where_that_fits() -> None:
    tall = piped(made_up(12, wide_columns=150))
    assert "Only on the page" not in tall
    figures = [line.split("  ")[0].strip() for line in tall.splitlines() if "held-out" in line]
    assert figures == [f"held-out figure {n}" for n in range(12)]


def test_title_and_note_are_not_broken_where_a_narrow_table_ends() -> None:
    column = Column[int]("figure", "figure", "", "", lambda row: row)
    title = "The figure of every run, by the model"
    note = "One figure for each run, measured after the warm-up."
    table = ShownTable("narrow", title, [column], [(RowHead("run"), 1)], note=note)
    lines = on_terminal(table, 100).splitlines()
    assert title in lines and note in lines
    assert max(map(len, on_terminal(table, 30).splitlines())) <= 30


def test_what_follows_a_note_is_set_off_from_it() -> None:
    column = Column[int]("figure", "figure", "", "", lambda row: row)
    table = ShownTable("narrow", "", [column], [(RowHead("run"), 1)], note="A note.")
    assert on_terminal(table, 100).splitlines()[-2:] == ["A note.", ""]


def test_each_of_several_figures_in_a_cell_has_a_line() -> None:
    """In one line they took the room of the columns behind them."""
    speeds = Column[str]("speed", "speed", "", "", str)
    accuracy = Column[str]("accuracy", "accuracy", "", "", lambda row: 0.5)
    rows = [(RowHead("one rank"), "0.80 [0.79, 0.81] on 2; 0.81 [0.80, 0.82] on 4"), (RowHead("a"), "1.00")]
    text = on_terminal(ShownTable("races", "", [speeds, accuracy], rows), 60)
    first, second = [line.strip() for line in text.splitlines() if " on " in line]
    assert first.split("  ")[0] == "one rank" and first.endswith("on 2;        0.5")
    assert second == "0.81 [0.80, 0.82] on 4" and "Only on the page" not in text
