"""Where rank 0's output goes: a terminal with a live bar, or plain lines."""

from __future__ import annotations

import os
import sys

from rich.console import Console

from speechdp.comm.environment import announced


def make_console() -> Console:
    """Return the console for progress and tables.

    mpirun gives every rank a pseudo-terminal, also when its own output goes to a file; so under a launcher
    only `speechdp launch` knows, and says so in SPEECHDP_TERMINAL ("COLUMNSxLINES", empty for none).
    """
    size = os.environ.get("SPEECHDP_TERMINAL")
    if size is None:
        return Console(force_terminal=False if announced() is not None else None)
    columns, _, lines = size.partition("x")
    if not (columns.isdigit() and lines.isdigit()):
        return Console(force_terminal=False, width=_plain_width())
    return Console(force_terminal=True, width=int(columns), height=int(lines))


def _plain_width() -> int | None:
    # Without a terminal rich would fold tables at 80 columns; a file has no edge.
    return None if sys.stdout.isatty() else 200
