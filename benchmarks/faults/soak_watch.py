"""What benchmarks/faults/soak.py sees of a run while faults come, and how it is shown."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from speechdp.cli.support.console import make_console

WINDOW_S = 3.0


@dataclass(frozen=True)
class Event:
    """A fault and what it cost.

    Attributes:
        at_s: since the start of the disturbed run.
        kind, where: of the fault.
        restarts: whether the job had to be started again.
        step: last step known of when it came.
        checkpoint: step of the last checkpoint then.
        resumed_from: step of the checkpoint that the run went on from; None: it went on as it was.
        lost_steps: steps taken again.
        back_s: until steps were as fast as before; None: the run was over first.
    """

    at_s: float
    kind: str
    where: str
    restarts: bool
    step: int
    checkpoint: int
    resumed_from: int | None
    lost_steps: int
    back_s: float | None


class Watch:
    """Looks at a run's status files: how far rank 0 is, and how fast."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._seen: list[tuple[float, int]] = []

    def step(self) -> int:
        """Return the last step known of; -1: none."""
        try:
            status = json.loads((self._run / "status" / "rank-0000.json").read_text())
            step = int(status["step"])
        except (OSError, ValueError, LookupError):
            step = -1
        now = time.monotonic()
        self._seen = [(at, seen) for at, seen in self._seen if now - at < 10 * WINDOW_S] + [(now, step)]
        return step

    def speed(self, since: float = 0.0) -> float:
        """Return steps a second over the last window, counting from `since`; 0 where that is too short."""
        now = time.monotonic()
        window = [(at, step) for at, step in self._seen if at >= max(since, now - WINDOW_S)]
        if len(window) < 2 or window[-1][0] - window[0][0] < 0.8 * WINDOW_S:
            return 0.0
        return (window[-1][1] - window[0][1]) / (window[-1][0] - window[0][0])


def show(events: Sequence[Event]) -> None:
    """Print a row for each kind of fault."""
    table = Table(title="faults")
    for column in (
        "fault",
        "times",
        "steps lost, median and most",
        "back at full speed after s, median and most",
    ):
        table.add_column(column)
    for kind in dict.fromkeys(event.kind for event in events):
        same = [event for event in events if event.kind == kind]
        back = [event.back_s for event in same if event.back_s is not None]
        lost = [event.lost_steps for event in same]
        table.add_row(
            kind,
            str(len(same)),
            f"{statistics.median(lost):.0f}, {max(lost)}",
            f"{statistics.median(back):.1f}, {max(back):.1f}" if back else "",
        )
    make_console().print(table)
