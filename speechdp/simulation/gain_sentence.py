"""One sentence in reports on what would make a run faster; a run with too few steps needs no model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from speechdp.errors import ConfigError
from speechdp.report.kit import formatting
from speechdp.report.runs.results import RunResult
from speechdp.simulation.measured import LEAST_STEPS, measured_run

if TYPE_CHECKING:
    from speechdp.simulation.gains import Gain

#: Gains whose interval starts below this are not worth mentioning.
_NOTABLE = 1.02
#: Bytes read from the ends of all ranks' timelines together: what a report can read in about 5 s.
_MOST_BYTES = 64 << 20


def gain_sentence(run: RunResult, label: str, others: Sequence[RunResult] = ()) -> str:
    """Return one sentence on what would help a run most; "" if its steps say nothing about it.

    Args:
        label: the run's display name.
        others: runs that the report shows beside it.  If a finished one averages less often, the benefit has
            been measured, and no longer period is proposed.
    """
    if not run.completed or run.timing is None:
        return ""
    if run.has_changed_period:  # predictions are for a constant period
        return ""
    if max(rank.steps for rank in run.timing.ranks) < LEAST_STEPS:  # no need to read timelines
        return ""
    try:
        measured = measured_run(run, last_bytes=_MOST_BYTES // len(run.timing.ranks))
    except ConfigError:  # an older or a short run: there are no steps to predict from
        return ""
    from speechdp.simulation.gains import gains_of  # noqa: PLC0415 (imports torch, for few reports)

    was_tried = any(other.completed and _averages_less(other, run) for other in others)
    notable = [
        gain
        for gain in gains_of(measured)
        if gain.times.low >= _NOTABLE and not (was_tried and gain.averages_less)
    ]
    if not notable:
        return ""
    first, *rest = notable
    more = "".join(f"; {gain.change}, {_times(gain)}" for gain in rest)
    return (
        f"What would help {label} most, by the model of speechdp simulate (time alone, not accuracy): "
        f"{first.change} it would be {_times(first)} as fast{more}."
    )


def _averages_less(other: RunResult, run: RunResult) -> bool:
    """Return whether a run averages less often than another, or with a period that cannot be compared."""
    theirs, own = other.model_period, run.model_period
    if theirs is None or own is None:
        return theirs not in (None, "1")
    if theirs.isdecimal() and own.isdecimal():
        return int(theirs) > int(own)
    return theirs != own


def _times(gain: Gain) -> str:
    times = gain.times
    interval = f"[{formatting.times(times.low)}, {formatting.times(times.high)}]"
    return f"{formatting.times(times.mean)}\u00a0{interval} times"
