"""Read the changes of the averaging period: timeline/periods.jsonl of a run whose strategy changes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from speechdp.errors import ConfigError
from speechdp.jsonl import read_lines
from speechdp.parallel.period import Period
from speechdp.report.runs.records import amount, note_damaged_lines, words
from speechdp.report.runs.results import PeriodChange
from speechdp.timing.steps import PERIODS_FILE

#: Largest plausible step or period; a larger number can only be damage, and cannot be drawn.
_MOST = 1e15


def read_periods(run_dir: Path, problems: list[str], *, grows: bool = False) -> tuple[PeriodChange, ...]:
    """Return the changes of the averaging period, ordered by step; none if it was constant.

    Args:
        problems: a line is appended if the file is damaged or cannot be read.
        grows: whether a job may be writing it, as for `read_lines`.
    """
    path = run_dir / "timeline" / PERIODS_FILE
    if not path.is_file():
        return ()
    try:
        lines = read_lines(path, grows=grows)
    except OSError as error:
        problems.append(f"timeline/{path.name}: cannot be read ({error.strerror})")
        return ()
    changes: list[PeriodChange] = []
    num_damaged = lines.num_damaged
    for record in lines.records:
        change = _change(record)
        if change is None:
            num_damaged += 1
            continue
        # A resumed run repeats the steps after its checkpoint.
        while changes and changes[-1].step >= change.step:
            changes.pop()
        if not changes or changes[-1].period != change.period:
            changes.append(change)
    note_damaged_lines(f"timeline/{path.name}", num_damaged, problems)
    return tuple(changes)


def _change(record: dict[str, Any]) -> PeriodChange | None:
    step = amount(record, "step")
    try:
        period = Period.parse(words(record.get("period")))
    except ConfigError:
        return None
    if step is None or max(step, period.value) > _MOST:
        return None
    return PeriodChange(int(step), period)
