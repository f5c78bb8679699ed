"""Render a table as a terminal shows it."""

from __future__ import annotations

import io

from rich.console import Console, RenderableType


def on_terminal(table: RenderableType, width: int = 250) -> str:
    """Return what a terminal with this number of columns, without colours, shows."""
    shown = io.StringIO()
    Console(file=shown, width=width, force_terminal=True, color_system=None).print(table)
    return shown.getvalue()
