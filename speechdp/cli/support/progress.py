"""Progress of a long command: a progress bar on a terminal, occasional lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

_LINE_EVERY_S = 10.0


@contextmanager
def progress_bar(console: Console) -> Iterator[Callable[[str, int, int], None]]:
    """Yield a function to call with a stage's name, the number done and the total."""
    if console.is_terminal:
        yield from _bars(console)
    else:
        yield _Lines(console)


def _bars(console: Console) -> Iterator[Callable[[str, int, int], None]]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=console) as bars:

        def update(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total)
            bars.update(tasks[stage], completed=done, total=total)

        yield update


class _Lines:
    """Prints a line when a stage begins, every ten seconds while it lasts, and when it is done."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last = -_LINE_EVERY_S
        self._stage = ""
        self._is_whole = False

    def __call__(self, stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        is_new, was_whole, self._is_whole = stage != self._stage, self._is_whole, done >= total
        if not is_new and (was_whole or (not self._is_whole and now - self._last < _LINE_EVERY_S)):
            return
        self._stage, self._last = stage, now
        self._console.print(f"{stage}: {done} of {total}", highlight=False)
