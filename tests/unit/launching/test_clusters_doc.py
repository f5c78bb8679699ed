"""docs/clusters.md: every message of the failure table stands in the code."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from speechdp import exit_codes

REPOSITORY = Path(__file__).resolve().parents[3]
PAGE = REPOSITORY / "docs" / "clusters.md"
#: Stands in the code's strings for what is filled in.
GAP = "\0"


def table_rows(heading: str) -> list[list[str]]:
    """Return the cells of the rows of the only table whose first column is called so."""
    lines = PAGE.read_text().splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith(f"| {heading} |"))
    rows = []
    for line in lines[begin + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split(" | ")])
    return rows


def strings_of_the_code() -> Iterator[str]:
    """Yield every string in the package, with gaps where f-strings have values."""
    for path in sorted((REPOSITORY / "speechdp").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [str(v.value) if isinstance(v, ast.Constant) else GAP for v in node.values]
                yield "".join(parts)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


CODE = list(strings_of_the_code())
MESSAGES = [row[2].strip("`") for row in table_rows("symptom") if len(row) > 2 and row[2].startswith("`")]


def test_the_table_has_messages() -> None:
    assert len(MESSAGES) >= 15


@pytest.mark.parametrize("message", MESSAGES)
def test_each_message_is_one_of_the_codes(message: str) -> None:
    pieces = message.split("...")
    assert max(map(len, pieces)) >= 8, f"{message}: nothing to tell it by"
    assert any(has_in_order(text, pieces) for text in CODE), (
        f"{PAGE.name}: no string of speechdp/ reads so, mend the row: {message}"
    )


def has_in_order(text: str, pieces: list[str]) -> bool:
    place = 0
    for piece in pieces:
        place = text.find(piece, place)
        if place < 0:
            return False
        place += len(piece)
    return True


def test_the_exit_codes_are_the_codes() -> None:
    listed = {row[0] for row in table_rows("exit code")}
    ours = {str(value) for name, value in vars(exit_codes).items() if name.isupper()}
    assert ours <= listed
