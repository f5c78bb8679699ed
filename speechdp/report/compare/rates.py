"""What a comparison says of the learning rates that it tried."""

from __future__ import annotations

from collections.abc import Sequence

from speechdp.report.compare.groups import Group
from speechdp.report.kit import formatting


def rate_sentences(rows: Sequence[Group]) -> list[str]:
    """Say with which learning rates strategies on as many ranks were compared; none where none were tried.

    Args:
        rows: the strategies on some number of ranks.
    """
    by_rate: dict[float, list[str]] = {}
    for group in rows:
        if group.learning_rate is not None:
            by_rate.setdefault(group.learning_rate, []).append(group.label)
    if not by_rate:
        return []
    where = f"On {formatting.rank_count(rows[0].ranks)}"
    if len(by_rate) == 1:
        return [
            f"{where} all strategies learnt best with the learning rate {next(iter(by_rate)):g}, of those "
            "tried, by one run each."
        ]
    named = "; ".join(f"{rate:g} for {', '.join(labels)}" for rate, labels in sorted(by_rate.items()))
    return [
        f"{where} each strategy has the learning rate with which it learnt best, of those tried, by one run "
        f"each: {named}."
    ]


def one_rate_caution(groups: Sequence[Group]) -> str:
    """Say that strategies were compared with one learning rate; "" where each has its own."""
    compared = {group.strategy for group in groups if group.ranks > 1 and group.score is not None}
    if len(compared) < 2 or any(group.learning_rate is not None for group in groups):
        return ""
    return (
        "All were trained with the same learning rate, which may suit some strategies, and some numbers of "
        "ranks, better than others: --learning-rates, with the same folder, gives each its own."
    )


def rate_cautions(trials: Sequence[Group], groups: Sequence[Group]) -> list[str]:
    """Return what keeps the tried learning rates from telling all: bests at an end, and runs that failed.

    Args:
        trials: the runs that tried them.
        groups: what was compared with those that were chosen.
    """
    tried: dict[tuple[str, int], list[Group]] = {}
    for trial in trials:
        tried.setdefault((trial.strategy, trial.ranks), []).append(trial)
    chosen = {(g.strategy, g.ranks): g.learning_rate for g in groups if g.learning_rate is not None}
    at_end: dict[str, list[str]] = {}
    for key, of in tried.items():
        rates = sorted(trial.learning_rate for trial in of if trial.learning_rate is not None)
        if (rate := chosen.get(key)) in (rates[0], rates[-1]):
            end = f"the lowest, {rate:g}" if rate == rates[0] else f"the highest, {rate:g}"
            name = of[0].label if of[0].ranks == 1 else f"{of[0].label} on {of[0].ranks} ranks"
            at_end.setdefault(end, []).append(name)
    notes = [
        f"Of the learning rates tried {end}, was the best for {', '.join(names)}: one beyond it may be "
        "better; add it to --learning-rates and repeat the command, which keeps what is done."
        for end, names in at_end.items()
    ]
    for trial in trials:
        for run in trial.failures:
            notes.append(f"Not to be chosen: {run.record.planned.title}, which failed: {run.record.message}")
        if trial.finished and trial.score is None:
            notes.append(
                f"Not to be chosen: {trial.runs[0].record.planned.title}, which ended without a score."
            )
    waiting = sum(not (trial.finished or trial.failures) for trial in trials)
    if waiting:
        notes.append(
            f"{waiting} of {len(trials)} runs that try learning rates are still to come; what is shown of "
            "their strategies is not yet with the rate that is best for them."
        )
    return notes
