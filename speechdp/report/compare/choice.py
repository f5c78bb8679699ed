"""Put a comparison into words: which strategy to choose on how many ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from speechdp.experiments.compare.plan import FRAMES, TIME
from speechdp.report.compare.groups import Group
from speechdp.report.compare.table import group_terms
from speechdp.report.kit import formatting
from speechdp.report.kit.answer import Answer
from speechdp.report.kit.choice import accurate_enough, metrics_note

#: Seeds that a claim needs.
CLAIM_SEEDS = 3


@dataclass(frozen=True)
class ComparisonAnswer(Answer):
    """Which strategy to choose; `chosen` is the group chosen for each number of ranks."""

    chosen: dict[int, Group] = field(default_factory=dict)


def choose(groups: Sequence[Group]) -> ComparisonAnswer:
    """Apply the rule (`rule_for`) to the groups of every number of ranks above 1."""
    chosen: dict[int, Group] = {}
    details: list[str] = []
    for ranks in sorted({group.ranks for group in groups if group.ranks > 1}):
        rows = [group for group in groups if group.ranks == ranks and group.mode == FRAMES]
        rows = [group for group in rows if group.frames_per_s is not None and group.score is not None]
        if rows:
            best = max(rows, key=lambda group: group.score or 0.0)
            chosen[ranks] = max(accurate_enough(rows, best, _tolerance(best)), key=_speed)
            details += _sentences(ranks, chosen[ranks], best, groups)
    return ComparisonAnswer(_headline(chosen, groups), tuple(details), _cautions(groups), chosen=chosen)


def rule_for(groups: Sequence[Group]) -> str:
    """Return the rule of the choice, in the terms of the runs' task."""
    terms = group_terms(groups)
    words = ", and whose 95 % interval of the word error rate overlaps that of the lowest one"
    speed = f"{terms.amount}/s{' at equal frames' if 'epochs' in terms.kind.measures else ''}"
    return (
        f"Rule, for each number of ranks: the fastest strategy ({speed}) whose mean final "
        f"{terms.metric.name} is within {terms.tolerance()} of the {terms.best}, or within the best one's "
        f"standard deviation over seeds where that is larger{words if terms.task.decodes else ''}."
    )


def _tolerance(best: Group) -> float:
    deviation = best.scores.deviation if best.scores else None
    return max(group_terms([best]).metric.near_enough(best.score or 0.0), deviation or 0.0)


def _headline(chosen: dict[int, Group], groups: Sequence[Group]) -> str:
    if not chosen and any(group.frames_per_s for group in groups if group.ranks > 1):
        return (
            f"No finished run on several ranks has {group_terms(groups).kind.evaluation}, so only speeds can "
            "be compared."
        )
    if not chosen:
        return "No strategy has finished on more than one rank, so there is nothing to choose from yet."
    by_label: dict[str, list[int]] = {}
    for ranks, group in chosen.items():
        by_label.setdefault(group.label, []).append(ranks)
    if len({group.strategy for group in groups if group.ranks > 1}) == 1:
        return f"Only {next(iter(by_label))} was trained on several ranks: there is no choice to make."
    if len(by_label) == 1:
        label, sizes = next(iter(by_label.items()))
        return (
            f"Choose {label}: on {_listed(sizes)} ranks it is the fastest strategy that keeps the accuracy."
        )
    parts = [f"{label} on {_listed(sizes)}" for label, sizes in by_label.items()]
    return (
        f"It depends on the number of ranks. The fastest that keeps the accuracy: {'; '.join(parts)} ranks."
    )


def _sentences(ranks: int, chosen: Group, best: Group, groups: Sequence[Group]) -> list[str]:
    reference = next((g for g in groups if g.ranks == 1 and g.mode == FRAMES and g.frames_per_s), None)
    terms = group_terms([chosen])
    text = f"{ranks} ranks: {chosen.label} with {_rate(chosen)}"
    if reference is not None and reference.frames_per_s and chosen.frames_per_s:
        times = formatting.times(chosen.frames_per_s.mean / reference.frames_per_s.mean)
        text += f" ({times} times one rank, which reaches {terms.number(reference.score)})"
    text += f", {_accuracy(chosen)}"
    if best is chosen:
        text += ", the best of all, too."
    else:
        name = f"{terms.best} {terms.metric.name.removeprefix('held-out ')}"
        text += f"; the {name} is that of {best.label}: {_accuracy(best)} at {_rate(best)}."
    return [text, *_at_equal_time(ranks, chosen, groups)]


def _at_equal_time(ranks: int, chosen: Group, groups: Sequence[Group]) -> list[str]:
    """Say which strategy is the most accurate after as much time, where that was tried."""
    rows = [g for g in groups if g.ranks == ranks and g.mode == TIME and g.score is not None]
    if len(rows) < 2:
        return []
    best = max(rows, key=lambda group: group.score or 0.0)
    if best.strategy == chosen.strategy:
        return [f"In equal time it is the most accurate one: {_accuracy(best)}."]
    own = next((group for group in rows if group.strategy == chosen.strategy), None)
    beside = f", where it has {group_terms([own]).number(own.score)}" if own else ""
    return [f"In equal time {best.label} is the most accurate: {_accuracy(best)}{beside}."]


def _cautions(groups: Sequence[Group]) -> tuple[str, ...]:
    notes = []
    fewest = min((len(group.finished) for group in groups if group.finished), default=0)
    if 0 < fewest < CLAIM_SEEDS:
        seeds = "one seed" if fewest == 1 else f"{fewest} seeds"
        notes.append(
            f"This rests on {seeds}: differences may be chance. A claim needs {CLAIM_SEEDS} "
            "(--seeds 1,2,3 with the same folder keeps what is done)."
        )
    for group in groups:
        for run in group.failures:
            notes.append(f"Failed: {run.record.planned.title}: {run.record.message}")
    waiting = sum(not run.is_finished for group in groups for run in group.runs)
    waiting -= sum(len(group.failures) for group in groups)
    if waiting:
        notes.append(
            f"{waiting} runs have not finished yet; the command of the comparison goes on with them."
        )
    note = metrics_note([run.result for group in groups for run in group.runs if run.result is not None])
    if note:
        notes.append(note)
    elif groups and group_terms(groups).task.decodes and all(group.word_errors is None for group in groups):
        notes.append("No run was decoded: the word error rate played no part in the choice.")
    return tuple(notes)


def _accuracy(group: Group) -> str:
    text = group_terms([group]).with_unit(group.score)
    if group.word_errors is not None:
        text += f" and WER {formatting.percent(group.word_errors.wer, 1)} %"
    return text.replace(" %", "\u00a0%")


def _rate(group: Group) -> str:
    rate = formatting.count(group.frames_per_s.mean if group.frames_per_s else None)
    return f"{rate} {group_terms([group]).amount}/s"


def _speed(group: Group) -> float:
    return group.frames_per_s.mean if group.frames_per_s else 0.0


def _listed(sizes: Sequence[int]) -> str:
    words = [str(size) for size in sizes]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
