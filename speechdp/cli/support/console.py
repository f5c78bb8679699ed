"""Where rank 0's output goes: a terminal with a progress bar, or plain lines."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable

from rich.console import Console

from speechdp.comm.environment import announced
from speechdp.launching.variables import TERMINAL


def make_console() -> Console:
    """Return the console for progress and tables.

    mpirun gives every rank a pseudo-terminal, even if its own output goes to a file.  Only `speechdp launch`
    knows whether there is a terminal, and passes its size in SPEECHDP_TERMINAL ("COLUMNSxLINES"; empty: no
    terminal).  Names are printed verbatim: `[bold]` in a name is not markup.
    """
    size = os.environ.get(TERMINAL)
    if size is None:
        is_plain = announced() is not None or not sys.stdout.isatty()
        return _plain_console() if is_plain else Console(markup=False, emoji=False)
    columns, _, lines = size.partition("x")
    if not (columns.isdigit() and lines.isdigit()):
        return _plain_console()
    return Console(force_terminal=True, width=int(columns), height=int(lines), markup=False, emoji=False)


def _plain_console() -> Console:
    # Without a terminal rich would wrap at 80 columns, but a file has no edge.  Tables handle this already.
    return Console(force_terminal=False, width=200, markup=False, emoji=False)


def line_printer() -> Callable[[str], None]:
    """Return a function that prints a line verbatim, without markup or wrapping."""
    console = make_console()
    return lambda line: console.print(line, markup=False, highlight=False, soft_wrap=True)


def describe_terminal() -> str:
    """Return "COLUMNSxLINES" if our output is a terminal, else "".

    A rank cannot find out by itself, because mpirun gives every rank its own pseudo-terminal as stdout.
    """
    if not sys.stdout.isatty():
        return ""
    size = shutil.get_terminal_size()
    return f"{size.columns}x{size.lines}"
