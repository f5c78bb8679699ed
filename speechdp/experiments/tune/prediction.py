"""Measure every back-end, predict the speed of all settings with each, choose one, and rule settings out.

Settings that cannot be predicted (other batches, a user's own strategy) are left to the race.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from speechdp.errors import RunError
from speechdp.experiments.jobs import LOGS
from speechdp.experiments.tune.jobs import MEASURED, Measurement
from speechdp.experiments.tune.plan import LAST, Setting, too_slow
from speechdp.experiments.tune.record import MEASURE, PREDICT, BackendRecord, SettingRecord
from speechdp.experiments.tune.search import SearchState
from speechdp.simulation.exchanges import is_untold
from speechdp.simulation.predict import Interval

#: Texts in messages about a rank ended by somebody, by the kernel (out of memory), or by the network.
_LOST = ("SIGKILL", "SIGTERM", "signal 9", "signal 15", "was lost")


def measure(search: SearchState) -> dict[str, Measurement]:
    """Measure every back-end, or the one chosen before; return the results of those that work.

    Raises:
        RunError: none works, or the chosen one does not.
        JobStopped: a signal arrived meanwhile.
    """
    known = {one.name for one in search.record.backends if one.besides is not None}
    chosen = search.backend_before
    if not chosen:
        before = {one.name: one for one in search.record.backends}
        backends = (before.get(name, BackendRecord(name)) for name in search.request.backends)
        search.keep(stage=MEASURE, backends=tuple(replace(one, speed=None, why="") for one in backends))
    found: dict[str, Measurement] = {}
    for name in [chosen] if chosen else search.request.backends:
        result = _measure_backend(search, name, knows_start=name in known)
        if isinstance(result, Measurement):
            found[name] = result
            continue
        if chosen:
            raise RunError(
                f"{search.request.out}: back-end {name}, with which this search has begun, fails: "
                f"{result}; the same command tries again"
            )
        search.print_line(f"measure: back-end {name} is left out: {result}")
        _keep_backend(search, name, why=result)
    if not found:
        reasons = "; ".join(f"with {one.name}: {one.why}" for one in search.record.backends)
        raise RunError(
            f"{search.request.out}: nothing could be trained {reasons}; the output is in "
            f"{search.request.out / MEASURED / LOGS}, and the same command tries again"
        )
    return found


def _measure_backend(search: SearchState, name: str, *, knows_start: bool) -> Measurement | str:
    """Measure a back-end and record it; return the results, or the cause of failure.

    Args:
        knows_start: an earlier command has measured the time of a job besides its steps.
    """
    search.print_line(f"measure: computing, data and exchanges with back-end {name}")
    result = search.jobs.measure(name, knows_start=knows_start)
    if isinstance(result, str) and any(word in result for word in _LOST):  # not the back-end's fault
        search.print_line(f"measure: back-end {name} is tried once more: {result}")
        result = search.jobs.measure(name, knows_start=knows_start)
    if isinstance(result, str):
        return result
    _keep_backend(search, name, link=result.link, exchanges=result.exchanges)
    if result.besides is not None:
        _keep_backend(search, name, start_s=result.besides.start_s, run_s=result.besides.run_s)
        if not knows_start:  # else a rung of an earlier command may have measured it better
            search.keep_besides(result.besides)
    return result


def _keep_backend(search: SearchState, name: str, **changes: Any) -> None:
    backends = (replace(one, **changes) if one.name == name else one for one in search.record.backends)
    search.keep(backends=tuple(backends))


def predict(search: SearchState, measured: Mapping[str, Measurement]) -> str:
    """Predict all settings with every back-end; choose one and return it, and rule settings out.

    Args:
        measured: by back-end, as `measure` returns it.

    Raises:
        RunError: the disk is full.
    """
    tried = search.request.tried
    search.settings = {one.name: one for one in tried}
    refused = {name: found.refused(tried) for name, found in measured.items()}
    speeds = {
        name: found.predict(search.request.ranks, [one for one in tried if one not in refused[name]])
        for name, found in measured.items()
    }
    backend = search.backend_before or _choose_backend(search, speeds)
    shown, why_refused = speeds[backend], refused[backend]
    reasons = too_slow(
        list(shown),
        lambda one, other: shown[one].low > shown[other].high,
        lambda one, other: shown[one].mean / shown[other].mean,
        "predicted",
    )
    records = [
        _record_of(one, shown.get(one), why_refused.get(one, ""), reasons.get(one, "")) for one in tried
    ]
    records += _other_batches(search, [one for one in records if not one.out_in])
    records += _with_rates_before(search, records)
    if not search.backend_before:  # else a rung of an earlier command may have measured it better
        search.keep_besides(search.record.measured_besides(backend))
    _keep_tried(search, records)
    search.print_ruled_out(PREDICT, len(reasons) + len(why_refused))
    untold = [one.name for one in tried if is_untold(one.strategy)]
    if untold:
        search.print_line(
            f"predict: {', '.join(untold)}: not predicted, only raced, because it is not known what is sent "
            "(docs/api.md, A strategy of your own)"
        )
    return backend


def _choose_backend(search: SearchState, speeds: Mapping[str, Mapping[Setting, Interval]]) -> str:
    """Return the first back-end, unless another is surely faster."""
    common = set[Setting].intersection(*[set(of) for of in speeds.values() if of] or [set()])
    found = {name: _overall([of[one] for one in common if of]) for name, of in speeds.items()}
    chosen = next(iter(found))
    for name, speed in found.items():
        kept = found[chosen]
        if speed is not None and (kept is None or speed.low > kept.high):
            chosen = name
    best = found[chosen]
    for name, speed in found.items():
        why = ""
        if name != chosen and speed is not None and best is not None and speed.high < best.low:
            why = f"predicted to be slower than {chosen}"
        elif name != chosen:
            why = f"cannot be told apart from {chosen} by what was measured"
        _keep_backend(search, name, speed=None if speed is None else speed.mean, why=why)
    search.print_line(f"predict: back-end {chosen}")
    return chosen


def _overall(speeds: Sequence[Interval]) -> Interval | None:
    """Return the geometric mean of several speeds; None if there are none."""
    if not speeds:
        return None
    count = len(speeds)
    return Interval(
        math.exp(sum(math.log(one.mean) for one in speeds) / count),
        math.exp(sum(math.log(one.low) for one in speeds) / count),
        math.exp(sum(math.log(one.high) for one in speeds) / count),
    )


def _record_of(setting: Setting, speed: Interval | None, refused: str, slow: str) -> SettingRecord:
    """Return the record of a setting.

    Args:
        speed: predicted speed; None: not predicted.
        refused: why these ranks or their back-end would refuse it; "": they would not.
        slow: why it is too slow; "": it is not, or this is unknown.
    """
    own = SettingRecord.of(setting)
    if refused:
        own = replace(own, out_in=MEASURE, why=refused)
    elif slow:
        own = replace(own, out_in=PREDICT, why=slow)
    if speed is None:
        return own
    return replace(own, predicted=speed.mean, predicted_low=speed.low, predicted_high=speed.high)


def _other_batches(search: SearchState, left: Sequence[SettingRecord]) -> list[SettingRecord]:
    """Return gradient averaging, and the setting predicted to be fastest, with other batches.

    If there are no more settings than in the last rung, return all of them.
    """
    fastest = max(left, key=lambda one: one.predicted or 0.0)
    few = [one.name for one in left] if len(left) <= LAST else []
    added = [
        Setting(search.settings[name].strategy, size)
        for size in search.request.batch_sizes
        for name in dict.fromkeys((search.request.tried[0].name, fastest.name, *few))
    ]
    search.settings |= {one.name: one for one in added}
    return [SettingRecord.of(one) for one in added]


def _with_rates_before(search: SearchState, records: Sequence[SettingRecord]) -> list[SettingRecord]:
    """Return settings with the learning rates that an earlier command tried them with, if any.

    They stay in the record, whose rungs name them, until the race shows which settings continue.
    """
    by_name = {one.name: one for one in records}
    found = []
    for before in search.record.tried:
        own = by_name.get(before.setting.raced.name)
        if own is not None and before.learning_rate is not None:
            found.append(own.at_rate(before.learning_rate))
    search.settings |= {one.name: one.setting for one in found}
    return found


def _keep_tried(search: SearchState, records: Sequence[SettingRecord]) -> None:
    """Record all settings, and those results of an earlier command that belong to them."""
    names, before = {one.name for one in records}, search.record
    kept = before.chosen in names
    search.keep(
        stage=PREDICT,
        tried=tuple(records),
        rungs=tuple(itertools.takewhile(lambda rung: names.issuperset(rung.settings), before.rungs)),
        target=None,
        seen_s=None,
        untold=(),
        chosen=before.chosen if kept else "",
        command=before.command if kept else "",
    )
