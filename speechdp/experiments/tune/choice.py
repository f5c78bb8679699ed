"""Train the last settings with the other seeds, and choose the one that reaches the target soonest."""

from __future__ import annotations

import itertools
from dataclasses import replace

from speechdp.errors import RunError
from speechdp.experiments.tune.curves import Curve, Finish, finishes, indistinguishable
from speechdp.experiments.tune.plan import SEED_STOPS
from speechdp.experiments.tune.record import TARGET, SettingRecord
from speechdp.experiments.tune.runs import Leg, TunedRuns
from speechdp.experiments.tune.search import SearchState
from speechdp.report.kit import formatting


def choose_soonest(search: SearchState, runs: TunedRuns) -> None:
    """Train the last settings with the other seeds, as far as the budget allows, and choose.

    If curves can be extrapolated, their expected course after the last rung counts as well.

    Args:
        search: search whose rungs are done.
        runs: runs of the search.

    Raises:
        RunError: none of the last settings can be trained with all seeds, or the disk is full.
        JobStopped: a signal arrived meanwhile.
    """
    end_s = search.record.rungs[-1].seconds
    curves = _trained_with_all_seeds(search, runs)
    if not curves:
        raise RunError(f"{search.request.out}: none of the last settings can be trained with all seeds")
    ahead = runs.continued(curves, end_s)
    target, ends = finishes(ahead, search.request.target.score)
    names = list(ends)
    for name, end in ends.items():
        why = "" if name == names[0] else _why_behind(end, ends[names[0]], names[0])
        scores = tuple(curve.at(end_s) for curve in curves[name])
        search.note(name, times_s=end.times_s, scores=scores, why=why)
    seen = [pair for name in curves for pair in zip(curves[name], ahead[name], strict=True)]
    lasts = [curve.points[-1][0] for curve, further in seen if further is not curve]
    search.record = replace(search.record, target=target, seen_s=min(end_s, *lasts) if lasts else None)
    search.choose(
        names[0], indistinguishable(names, ends, {name: _slack(search.record.of(name)) for name in names})
    )


def choose_again(search: SearchState, runs: TunedRuns, before: float | None) -> None:
    """Choose again in a finished search if it had another target, and print that.

    Args:
        before: earlier target, as given.

    Raises:
        RunError, JobStopped: as `choose_soonest`.
    """
    out = search.request.out
    if before == search.request.target.value:
        search.print_line(f"{out}: this search is over; for another one give another folder")
        return
    search.print_line(f"{out}: this search is over; its runs are judged by the target given now")
    search.settings = {one.name: one.setting for one in search.record.tried}
    # Until the new choice is made, the record keeps the old target, so that the same command chooses again.
    search.record = replace(search.record, settings={**search.record.settings, TARGET: before})
    if search.record.rungs:
        search.jobs.begin()
        choose_soonest(search, runs)
    search.keep(settings=search.request.settings)


def _trained_with_all_seeds(search: SearchState, runs: TunedRuns) -> dict[str, list[Curve]]:
    """Train the last settings with the other seeds, as far as the budget allows.

    Returns:
        Their curves, one for each seed that there was time for, without settings that failed with any seed.
    """
    rungs = search.record.rungs
    ends_s = [rung.seconds for rung in rungs[-SEED_STOPS:]]
    last = [name for name in rungs[-1].scores if name in search.record.left]
    # The first seed's runs are already trained: this reads their curves.
    found = runs.train(runs.legs(last, ends_s[-1], ends_s[-1]), may_end=False)
    curves = {name: [curve] for name, curve in (found or {}).items()}
    for seed in search.request.seeds[1:]:
        # Evaluate at the same times as with the first seed, to know the time to the target equally well.
        parts = list(itertools.pairwise((0.0, *ends_s)))
        found = runs.train([Leg(name, seed, *part) for name in curves for part in parts])
        if found is None:
            search.print_line(f"halving: the budget is used up: without seed {seed}")
            break
        curves = {name: [*curves[name], curve] for name, curve in found.items()}
    return curves


def _why_behind(end: Finish, best: Finish, name: str) -> str:
    if not end.is_reached:
        every = " with every seed" if any(time is not None for time in end.times_s) else ""
        return f"it does not reach the target{every}"
    return f"it reaches the target {formatting.percent(end.mean_s / best.mean_s - 1)} % later than {name}"


def _slack(one: SettingRecord) -> tuple[float, float]:
    """Return the factors by which a setting's times may be shorter or longer, as its speed is an estimate."""
    if one.ratio is None or one.ratio_low is None or one.ratio_high is None:
        return 1.0, 1.0
    return one.ratio / one.ratio_high, one.ratio / one.ratio_low
