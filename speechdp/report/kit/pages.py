"""What all reports have in common: where they are written, their templates, what is refused."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from rich.console import RenderableType

from speechdp.errors import RunError
from speechdp.files import cannot_be_written


@dataclass(frozen=True)
class WrittenReport:
    """What was written, and its result for the terminal.

    Attributes:
        png: None where the runs recorded nothing to draw.
        table: the report's table.
        answer: the result in words, one sentence an item.
    """

    html: Path
    csv: Path
    png: Path | None
    table: RenderableType
    answer: tuple[str, ...]


@contextlib.contextmanager
def writing_into(folder: Path) -> Iterator[None]:
    """Make `folder` for the block that writes into it.  Raises RunError if that fails."""
    try:
        folder.mkdir(exist_ok=True)
        yield
    except OSError as error:
        raise RunError(cannot_be_written(folder, error)) from error


def page_templates() -> Environment:
    """Return the templates of the pages; whatever is put into one is escaped."""
    return Environment(
        loader=PackageLoader("speechdp.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
