"""Turn tyro's error messages, which are boxes of many lines, into our one-line messages."""

from __future__ import annotations

import ast
import io
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr

from speechdp import exit_codes
from speechdp.counting import did_you_mean
from speechdp.errors import UsageError

#: Width at which nothing in a box is wrapped.
_WIDTH = "100000"
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
#: Characters of a box's border; a line of only these is a separator.
_BORDER = "╭╮╰╯│─- "
#: Starts of the lines that point to further help.
_MORE = ("For full helptext", "Argument helptext:")
#: Start of the line with unknown words, in a box about missing arguments.
_SURPLUS = "Unrecognized options:"
#: Indentation of a missing argument from the edge of its box; its help is indented further.
_INDENT = 4
_CHOICE = re.compile(
    r"invalid choice '(?P<value>.*)' for argument '(?P<option>.*)'\. Expected one of (?P<choices>\(.*\))\."
)
_NO_VALUE = re.compile(r"Missing value for argument '(?P<option>.*)'\. Expected (?P<count>\d+) values\.")
_BAD_VALUE = re.compile(r"Error parsing (?P<option>.*?): (?P<why>.*)")
_UNKNOWN = re.compile(r"Unrecognized options: (?P<words>.*)")


@contextmanager
def boxes_as_lines(name: str, remedy: str = "") -> Iterator[None]:
    """Let tyro parse in the block, and raise its error as one line.

    Args:
        name: name of the subcommand.
        remedy: remedy for missing or unknown words, if something else must come first; "": none.

    Raises:
        UsageError: in place of tyro's SystemExit with a box.
        SystemExit: raised by tyro after it printed help.
    """
    captured, columns = io.StringIO(), os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = _WIDTH
    try:
        with redirect_stderr(captured):
            yield
    except SystemExit as end:
        if end.code == exit_codes.USAGE:
            raise UsageError(line_of(captured.getvalue(), name, remedy)) from None
        sys.stderr.write(captured.getvalue())
        raise
    else:
        sys.stderr.write(captured.getvalue())
    finally:
        del os.environ["COLUMNS"]
        if columns is not None:
            os.environ["COLUMNS"] = columns


def line_of(box: str, name: str, remedy: str = "") -> str:
    """Return the content of one of tyro's boxes as one line.

    Args:
        box: box as printed, without wrapping.
        name, remedy: as in `boxes_as_lines`.

    Example::

        line_of("╭─ Value error ─────────────╮\\n│ Error parsing --epochs: expected ... │\\n...", "train")
        # "--epochs: expected ..."
    """
    title, *lines = [line for line in _COLOURS.sub("", box).splitlines() if line.strip(_BORDER)]
    # The text starts two characters from the edge, also in boxes without sides (stdout is not UTF-8).
    inner = [line.rstrip(_BORDER)[2:] for line in lines]
    end = next((i for i, line in enumerate(inner) if line.startswith(_MORE)), len(inner))
    return _described(title.strip(_BORDER), inner[:end], name, remedy)


def _described(title: str, body: Sequence[str], name: str, remedy: str) -> str:
    text = " ".join(line.strip() for line in body)
    if remedy and (title == "Required options" or _UNKNOWN.fullmatch(text)):
        return f"{name}: {remedy}"
    if title == "Required options":
        end = next((i for i, line in enumerate(body) if line.startswith(_SURPLUS)), len(body))
        named = [line for line in body[:end] if len(line) - len(line.lstrip()) == _INDENT]
        missing = " and ".join(line.strip().split(", ")[-1] for line in named)  # -o FILE, --out FILE
        surplus = ", ".join(line.strip() for line in body[end + 1 :] if line.strip(_BORDER))
        but = surplus and f", and does not take {surplus}"
        return f"{name} needs {missing}{but}; speechdp {name} --help says what that is"
    for pattern, worded in _WORDINGS.items():
        if match := pattern.fullmatch(text):
            return worded(match, name)
    return f"{title}: {text}"


def _wrong_choice(match: re.Match[str], _name: str) -> str:
    choices = sorted(set(ast.literal_eval(match["choices"])) - {"None"})
    meant = did_you_mean(match["value"], choices)
    return f"{_long(match['option'])} {match['value']}: choose one of {', '.join(choices)}{meant}"


def _no_value(match: re.Match[str], _name: str) -> str:
    return f"{_long(match['option'])} needs {'a value' if match['count'] == '1' else 'values'}"


def _bad_value(match: re.Match[str], _name: str) -> str:
    return f"{_long(match['option'])}: {match['why']}"


def _unknown(match: re.Match[str], name: str) -> str:
    return f"{name} does not take {match['words']}; speechdp {name} --help says what it takes"


def _long(option: str) -> str:
    """Return the long name of an option from tyro's list of its names, `-np/-n/--np`."""
    return option.rsplit("/", maxsplit=1)[-1] if option.startswith("-") else option


#: tyro's messages, each with the function that words it for a subcommand.
_WORDINGS = {_CHOICE: _wrong_choice, _NO_VALUE: _no_value, _BAD_VALUE: _bad_value, _UNKNOWN: _unknown}
