"""What a table looks like on a terminal."""

from __future__ import annotations

import io

from rich.console import Console, RenderableType


def on_terminal(table: RenderableType, width: int = 250) -> str:
    """Return what a terminal of so many columns, without colours, shows."""
    shown = io.StringIO()
    Console(file=shown, width=width, force_terminal=True, color_system=None).print(table)
    return shown.getvalue()
