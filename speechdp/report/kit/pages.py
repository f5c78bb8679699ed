"""Shared by all reports: writing files, the page's frame, and formatting of settings."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from rich.console import RenderableType

from speechdp.errors import RunError, printable
from speechdp.files import atomic_path, cannot_be_written, or_by_links, remove_left_over
from speechdp.report.kit import formatting, theme
from speechdp.report.kit.answer import Answer
from speechdp.report.kit.canvas import Canvas, dashes

#: Error handler for bytes in file names that are not UTF-8.
_NOT_UTF_8 = "backslashreplace"
#: Writes a picture to a path; returns False without writing if there is nothing to draw.
DrawPicture = Callable[[Path], bool]


@dataclass(frozen=True)
class WrittenReport:
    """The written files, and the result for the terminal.

    Attributes:
        png: the picture to show first; None if the runs recorded nothing to draw.
        table: the report's table.
        answer: the result in words, one sentence per item.
    """

    html: Path
    csv: Path
    png: Path | None
    table: RenderableType
    answer: tuple[str, ...]


@contextlib.contextmanager
def writing_into(folder: Path) -> Iterator[None]:
    """Make `folder` for the block, which writes into it.  Raises RunError if that fails."""
    try:
        folder.mkdir(exist_ok=True)
        yield
    except OSError as error:
        elsewhere = or_by_links(error, folder.parent, folder.name)
        raise RunError(cannot_be_written(error.filename or folder, error) + elsewhere) from error


def write_files(
    folder: Path, name: str, page: str, csv: str, pictures: Mapping[str, DrawPicture]
) -> tuple[Path, Path, Path | None]:
    """Write FOLDER/NAME.html, NAME.csv and a PNG for each picture, each of them atomically.

    Args:
        folder: folder, made if missing.
        name: name of page and table, without suffix.
        page: HTML.
        csv: CSV of the table.
        pictures: functions that draw a picture into a file and return whether it shows anything, by name
            without suffix.

    Returns:
        The paths of page, CSV and the first picture that shows something.

    Raises:
        RunError: the folder cannot be written.
    """
    html_path, csv_path = folder / f"{name}.html", folder / f"{name}.csv"
    with writing_into(folder):
        _write(csv_path, csv)
        paths = {folder / f"{picture}.png": draw for picture, draw in pictures.items()}
        drawn = [path for path, draw in paths.items() if draw(path)]
        _write(html_path, page)
        remove_left_over(html_path)
    return html_path, csv_path, drawn[0] if drawn else None


def _write(path: Path, text: str) -> None:
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors=_NOT_UTF_8)


def render_page(template: str, title: str, answer: Answer, rule: str = "", **values: Any) -> str:
    """Return a page: a self-contained HTML document.

    Args:
        template: name of a file in templates/, which extends base.html.j2; also the kind of report.
        rule: how the answer was found; "": not shown.
        values: other values for the template; everything except Markup is escaped.
    """
    environment = Environment(
        loader=PackageLoader("speechdp.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(breakable=_breakable, figure=_figure, options=_options, sentence=_sentence)
    return environment.get_template(f"{template}.html.j2").render(
        title=printable(title),
        kind=template,
        written=datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        answer=answer,
        rule=rule,
        light_colours=theme.css_variables(dark=False),
        dark_colours=theme.css_variables(dark=True),
        **values,
    )


def swatch(colour: str) -> Markup:
    """Return a coloured spot to put before a name."""
    return Markup('<span class="swatch" style="background: {}"></span>').format(theme.with_variables(colour))


def legend_marks(canvas: Canvas) -> dict[str, Markup]:
    """Return a sample of each name's line, to put before the name."""
    return {name: _stroke(colour, dashes(name, canvas)) for name, colour in canvas.colours.items()}


def _stroke(colour: str, strokes: tuple[float, ...]) -> Markup:
    dashed = Markup(' stroke-dasharray="{}"').format(" ".join(map(str, strokes))) if strokes else ""
    return Markup(
        '<svg viewBox="0 0 26 10" aria-hidden="true"><line x1="1" y1="5" x2="25" y2="5" stroke="{}" '
        'stroke-width="3"{}/></svg>'
    ).format(theme.with_variables(colour), dashed)


def setting_facts(settings: Mapping[str, Any], unshown: Collection[str] = ()) -> list[tuple[str, str]]:
    """Return settings as (title, text) for a page, without those not set, also inside groups."""
    return [
        (name.replace("_", " "), setting_text(name, value))
        for name, given in settings.items()
        if name not in unshown
        if (value := _given(given)) not in (*_NOT_SET, {})
    ]


#: Values of options that do nothing.
_NOT_SET: tuple[Any, ...] = (None, "", [], False, 0)


def _given(value: Any) -> Any:
    """Return a setting; for a group, those of its settings that are set."""
    if not isinstance(value, dict):
        return value
    return {key: item for key, item in value.items() if item not in _NOT_SET}


def setting_text(title: str, value: Any) -> str:
    """Format a setting for people; leave out what is not set in groups."""
    if isinstance(value, str):
        return value
    if isinstance(value, (list, tuple)):
        words = [item if isinstance(item, str) else json.dumps(item) for item in value]
        if title == "command":
            return shlex.join(words)
        return ", ".join(_how_often(word, words.count(word)) for word in dict.fromkeys(words))
    if isinstance(value, dict):
        given = {key: item for key, item in value.items() if item is not None}
        return ", ".join(f"{key} {_nested(item)}" for key, item in given.items())
    if isinstance(value, int) and not isinstance(value, bool) and value >= 10_000:
        return f"{value:,}"
    return json.dumps(value)


def _how_often(word: str, times: int) -> str:
    return word if times == 1 else f"{word} ({times})"


def _nested(value: Any) -> str:
    """Format a group of settings in brackets, so that it can be listed with others."""
    if not isinstance(value, dict):
        return setting_text("", value)
    given = (f"{key}={_nested(item)}" for key, item in value.items() if item is not None)
    return f"({', '.join(given)})"


def _breakable(name: str) -> Markup:
    """Return a name, escaped, that a narrow cell may break after underscores, colons and dashes."""
    return Markup(re.sub(r"([_:-])", r"\1<wbr>", str(escape(name))))


#: Where a narrow cell may break a figure: before its interval, deviation or remark, and between figures.
_BREAK = re.compile(r"[ \u00a0](?=[\[(±])|(?<=;)[ \u00a0]")


def _figure(text: str) -> str:
    """Return a cell's figure that a narrow table may break before its interval, and nowhere else."""
    return " ".join(part.replace(" ", "\u00a0") for part in _BREAK.split(text))


#: What belongs to the number before it: units, and nouns that are counted.
_UNIT = (
    r"(?:[mµ]?s|min|h|[kMGT]?B(?:/s)?|[MG]bit/s|k?Hz|dB|(?:frames|examples)/s|nats/frame|points?|times|steps?"
    r"|epochs?|ranks?|cores?|seeds?|rounds?|settings?|speakers?|utterances?|words?|errors?|substitutions?|deletions?|insertions?"
    r")\b|%"
)
_NUMBERED = "|".join(rf"(?<=\b{noun})" for noun in ("epoch", "L1", "period", "rank", "seed", "step"))
#: Where a sentence must not be broken: between a number, or its interval, and the unit; inside an interval;
#: between a noun and its number.
_TOGETHER = re.compile(
    rf"(?<=\d) (?={_UNIT})|(?<=\d\]) (?={_UNIT})|(?<=\d,) (?=[{formatting.MINUS}-]?[\d,.]+\])"
    rf"|(?:{_NUMBERED}) (?=\d)"
)


def _sentence(text: str) -> Markup:
    """Return a sentence, escaped, that is not broken inside options and intervals or before units."""
    return _options(_TOGETHER.sub("\u00a0", text))


def _options(text: str) -> Markup:
    """Return a text, escaped, that is not broken inside names of options; copying it yields the original."""
    whole = r'<span class="whole">\g<0></span>'
    return Markup(re.sub(r"(?<!\S)\(?--[a-z][a-z-]*", whole, str(escape(text))))
