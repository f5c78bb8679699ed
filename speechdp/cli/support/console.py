"""Where rank 0's output goes: a terminal with a progress bar, or plain lines."""

from __future__ import annotations

import os
import shutil
import sys

from rich.console import Console

from speechdp.comm.environment import announced
from speechdp.launching.variables import TERMINAL


def make_console() -> Console:
    """Return the console for progress and tables.

    mpirun gives every rank a pseudo-terminal, also when its own output goes to a file; so under a launcher
    only `speechdp launch` knows, and says so in SPEECHDP_TERMINAL ("COLUMNSxLINES", empty for none).  Names
    are printed as they are: `[bold]` in one is no markup.
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
    # Without a terminal rich would fold at 80 columns.  A file has no edge; tables know that by themselves.
    return Console(force_terminal=False, width=200, markup=False, emoji=False)


def describe_terminal() -> str:
    """Return "COLUMNSxLINES" if our output is a terminal, else "".

    A rank cannot find out itself: mpirun gives every rank a pseudo-terminal of its own as stdout.
    """
    if not sys.stdout.isatty():
        return ""
    size = shutil.get_terminal_size()
    return f"{size.columns}x{size.lines}"
