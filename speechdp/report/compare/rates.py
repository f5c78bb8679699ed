"""Sentences of a comparison on the learning rates that it tried."""

from __future__ import annotations

from collections.abc import Sequence

from speechdp.experiments.compare.plan import FRAMES
from speechdp.report.compare.groups import Group
from speechdp.report.compare.headline import tolerance
from speechdp.report.kit import formatting


def rate_sentences(rows: Sequence[Group]) -> list[str]:
    """State the learning rates with which strategies were compared; no sentence if none were tried.

    Args:
        rows: the strategies on one number of ranks.
    """
    by_rate: dict[float, list[str]] = {}
    for group in rows:
        if group.learning_rate is not None:
            by_rate.setdefault(group.learning_rate, []).append(group.label)
    if not by_rate:
        return []
    where = f"On {formatting.rank_count(rows[0].ranks)}"
    if len(by_rate) == 1:
        ((rate, labels),) = by_rate.items()
        who = "all strategies" if len(labels) > 1 else labels[0]
        return [
            f"{where} {who} learnt best with the learning rate {formatting.learning_rate(rate)}, of those "
            "tried, by one run each."
        ]
    named = "; ".join(
        f"{formatting.learning_rate(rate)} for {', '.join(labels)}"
        for rate, labels in sorted(by_rate.items())
    )
    return [
        f"{where} each strategy has the learning rate with which it learnt best, of those tried, by one run "
        f"each: {named}."
    ]


def one_rate_caution(groups: Sequence[Group]) -> str:
    """Return a caution if strategies were compared with one learning rate; "" if each has its own."""
    compared = {group.strategy for group in groups if group.ranks > 1 and group.score is not None}
    if len(compared) < 2 or any(group.learning_rate is not None for group in groups):
        return ""
    return (
        "All were trained with the same learning rate, which may suit some strategies, and some numbers of "
        "ranks, better than others: --learning-rates gives each its own."
    )


def rate_cautions(trials: Sequence[Group], groups: Sequence[Group]) -> list[str]:
    """Return cautions on the learning rates tried: near alternatives, bests at an end, failures.

    Args:
        trials: the runs that tried learning rates.
        groups: the groups that were compared, with the rates chosen.
    """
    near, at_end = _near_and_at_end(trials, groups)
    notes = []
    if near:
        notes.append(
            "One run each does not tell which learning rate is better if they differ no more than runs with "
            f"other seeds, or than the tolerance: {'; '.join(near)}."
        )
    notes += [
        f"Of the learning rates tried {end}, was the best for {', '.join(names)}: one beyond it may be "
        "better; add it to --learning-rates and repeat the command, which keeps what is done."
        for end, names in at_end.items()
    ]
    return [*notes, *_not_chosen(trials)]


def _near_and_at_end(
    trials: Sequence[Group], groups: Sequence[Group]
) -> tuple[list[str], dict[str, list[str]]]:
    """Return which chosen rates have equally good alternatives, and which are the lowest or highest tried.

    Args:
        trials, groups: as in `rate_cautions`.

    Returns:
        "RATES beside RATE for NAME" for each of the former; for the latter, names by e.g. "the lowest, 0.01".
    """
    tried: dict[tuple[str, int], list[Group]] = {}
    for trial in trials:
        tried.setdefault((trial.strategy, trial.ranks), []).append(trial)
    chosen = {(g.strategy, g.ranks): g for g in groups if g.learning_rate is not None and g.mode == FRAMES}
    at_end: dict[str, list[str]] = {}
    near: list[str] = []
    for key, of in tried.items():
        if (group := chosen.get(key)) is None or group.learning_rate is None:
            continue
        rates = sorted(trial.learning_rate for trial in of if trial.learning_rate is not None)
        rate = formatting.learning_rate(group.learning_rate)
        name = group.label if group.ranks == 1 else f"{group.label} on {group.ranks} ranks"
        if alike := _as_good(group, of):
            others = ", ".join(map(formatting.learning_rate, alike))
            near.append(f"{others} beside {rate} for {name}")
        # If a rate further in is as good, there is no sign that one beyond the end would be better.
        elif group.learning_rate in (rates[0], rates[-1]):
            end = f"the {'lowest' if group.learning_rate == rates[0] else 'highest'}, {rate}"
            at_end.setdefault(end, []).append(name)
    return near, at_end


def _not_chosen(trials: Sequence[Group]) -> list[str]:
    """Name the trials that cannot be chosen, and state how many are still to come."""
    notes = []
    for trial in trials:
        for run in trial.failures:
            notes.append(f"Cannot be chosen: {run.record.planned.title}, which failed: {run.record.message}")
        if trial.finished and trial.score is None:
            notes.append(
                f"Cannot be chosen: {trial.runs[0].record.planned.title}, which ended without a score."
            )
    waiting = sum(not (trial.finished or trial.failures) for trial in trials)
    if waiting:
        notes.append(
            f"{waiting} of {len(trials)} runs that try learning rates have not finished yet; a strategy "
            "is shown once all of its own have."
        )
    return notes


def _as_good(group: Group, trials: Sequence[Group]) -> list[float]:
    """Return the learning rates whose single run learnt as well as the one with the chosen rate.

    As for strategies, the metric and the differences between seeds decide how near is near enough.  The trial
    of the chosen rate had another seed than the group's runs, so their difference counts, too.

    Args:
        group: the runs at equal frames with the chosen rate.
        trials: trials of the same strategy on the same number of ranks.
    """
    scores = {t.learning_rate: t.score for t in trials if t.learning_rate is not None and t.score is not None}
    best = next((trial for trial in trials if trial.learning_rate == group.learning_rate), None)
    if best is None or best.score is None:
        return []
    by_seed = 0.0 if group.score is None else abs(best.score - group.score)
    least = best.score - max(tolerance(best), tolerance(group), by_seed)
    return sorted(rate for rate, score in scores.items() if score >= least and rate != group.learning_rate)
