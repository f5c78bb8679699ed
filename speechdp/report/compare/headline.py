"""The headline of a comparison: claims no more than its evidence supports."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from speechdp.experiments.compare.plan import FRAMES
from speechdp.experiments.race.plan import ROUNDS
from speechdp.report.compare.groups import Group
from speechdp.report.compare.table import group_terms
from speechdp.report.kit import formatting
from speechdp.report.kit.certainty import judging, seeds_text, short_race
from speechdp.report.kit.choice import accurate_enough, are_decoded_alike, lacks_scores
from speechdp.report.kit.metric_names import Terms
from speechdp.report.kit.scripts import distinct_trainings
from speechdp.report.runs.raced import LEAST_ROUNDS

#: Number of seeds that a claim needs.
CLAIM_SEEDS = 3


@dataclass(frozen=True)
class _Evidence:
    """The reason why a choice is only likely.

    Attributes:
        lack: its weak basis, e.g. `judging by one seed and a race of 2 rounds`; "": the basis suffices.
        remedy: options with which the same command finds out; "": none, or the same command as it is does.
    """

    lack: str = ""
    remedy: str = ""


def headline(
    chosen: Mapping[int, Group],
    unsure: set[int],
    like_one_rank: set[int],
    groups: Sequence[Group],
    one_rank: Group | None,
) -> str:
    """State what to choose, or what seems best if there are too few seeds or rounds to know.

    Args:
        chosen: chosen group on each number of ranks.
        unsure: numbers of ranks on which others may be as fast as the chosen group.
        like_one_rank: numbers of ranks on which the race cannot tell one rank from the fastest strategy.
        groups: all groups.
        one_rank: the runs on one rank, the reference for the others; None: there are none.
    """
    if not chosen:
        return _without_choice(groups)
    alone_there = {
        ranks: chosen[ranks].label
        for ranks in _with_one_finished(groups)
        if ranks in chosen and chosen[ranks].ranks > 1
    }
    alone = [ranks for ranks, group in chosen.items() if group.ranks == 1]
    known = "known to be " if like_one_rank & set(alone) else ""
    lost = _lost_sentences(chosen, one_rank)
    there_is_a_choice = len({group.strategy for group in groups if group.ranks > 1}) > 1
    if there_is_a_choice and alone_there and len(alone_there) == len(chosen):
        return " ".join([f"{_only_finished(alone_there)}, so there is nothing to choose from yet.", *lost])
    compared = {ranks: group for ranks, group in chosen.items() if ranks not in alone_there} or {**chosen}
    evidence = _evidence(compared, groups)
    keeps = _as_accurate(group_terms(groups)) if lost else group_terms(groups).keeps
    by_label: dict[str, list[int]] = {}
    for ranks, group in compared.items():
        if group.ranks > 1:
            by_label.setdefault(group.label, []).append(ranks)
    sentences = []
    if len(alone) == len(compared):
        sentences.append(_do_not_spread(alone, keeps, evidence, known))
    elif not there_is_a_choice:
        sentences.append(
            f"Only {next(iter(by_label))} was trained on several ranks: there is no choice to make."
        )
    else:
        of = ", of those that raced" if _some_did_not_race(chosen, groups) else ""
        sentences.append(_choice(by_label, unsure, (keeps, of), evidence))
    sentences += lost
    if alone_there and there_is_a_choice:
        sentences.append(f"{_only_finished(alone_there)}.")
    if alone and len(alone) < len(compared):
        sentences.append(_not_there(alone, group_terms(groups).keeps, evidence, known))
    if evidence.remedy and (there_is_a_choice or alone):
        sentences.append(f"To know, repeat the command with {evidence.remedy}.")
    return " ".join(sentences)


def _without_choice(groups: Sequence[Group]) -> str:
    """State why no group is chosen."""
    if any(group.frames_per_s for group in groups if group.ranks > 1):
        runs = [run.result for group in groups if group.ranks > 1 for run in group.finished if run.result]
        lacks = lacks_scores(runs, group_terms(groups), "finished run on several ranks")
        return f"{formatting.capital(lacks)}, so only speeds can be compared."
    return "No strategy has finished on more than one rank, so there is nothing to choose from yet."


def _choice(
    by_label: Mapping[str, list[int]], unsure: set[int], which: tuple[str, str], evidence: _Evidence
) -> str:
    """Name the choice on each number of ranks.

    Args:
        by_label: numbers of ranks on which each label is chosen.
        which: predicate of the strategies it is chosen from, and a phrase that limits them, or "".
    """
    keeps, of = which
    if len(by_label) == 1:
        ((label, sizes),) = by_label.items()
        none = f"none that {keeps}{of}{',' if of else ''} is known to be faster"
        fastest = f"it is the fastest strategy that {keeps}{of}"
        if evidence.lack:
            fastest = f"it was the fastest strategy that {keeps}{of}"
        reason = f"on {listed(sizes)} ranks {none if unsure & set(sizes) else fastest}"
        if evidence.lack:
            return f"{formatting.capital(label)} seems the best choice, {evidence.lack}: {reason}."
        return f"Choose {label}: {reason}."
    parts = "; ".join(f"{label} on {listed(sizes)}" for label, sizes in by_label.items())
    fastest, depends = "The fastest that", "It depends on the number of ranks."
    if any(unsure & set(sizes) for sizes in by_label.values()):
        fastest = "None is known to be faster of those that"
    if evidence.lack:
        depends = f"It seems to depend on the number of ranks, {evidence.lack}."
    return f"{depends} {fastest} {keeps}{of}: {parts} ranks."


def _do_not_spread(sizes: Sequence[int], keeps: str, evidence: _Evidence, known: str) -> str:
    """Advise training on one rank.

    Args:
        known: `known to be ` if the race cannot tell one rank from a strategy; "" if one rank is faster.
    """
    if evidence.lack:
        return (
            f"This training seems not worth distributing, {evidence.lack}: one rank alone {keeps}, and no "
            f"strategy on {listed(sizes)} ranks that does so was {known}faster."
        )
    faster = f"One rank alone {keeps}, and no strategy on {listed(sizes)} ranks that does so is {known}faster"
    if known:
        return f"{faster}: nothing shows that distributing this training gains time."
    return f"{faster}: do not distribute this training."


def _not_there(sizes: Sequence[int], keeps: str, evidence: _Evidence, known: str) -> str:
    if evidence.lack:
        as_fast = "no strategy there was known to be faster" if known else "was as fast"
        return f"{listed(sizes)} ranks seem to gain nothing: one rank alone {keeps}, too, and {as_fast}."
    if known:
        return (
            f"Nothing shows a gain on {listed(sizes)} ranks: one rank alone {keeps}, too, and no strategy "
            "there is known to be faster."
        )
    return f"Do not use {listed(sizes)} ranks: one rank alone {keeps}, too, and is as fast."


def _as_accurate(terms: Terms) -> str:
    """Return the predicate of the chosen group if all groups on several ranks are worse than one rank."""
    return f"has as small a {terms.short_name} as any there" if terms.falls else "is as accurate as any there"


def _lost_sentences(chosen: Mapping[int, Group], one_rank: Group | None) -> list[str]:
    """State where the chosen group is less accurate than one rank by more than the rule allows."""
    if one_rank is None:
        return []
    labels = {group.label for group in chosen.values() if group.ranks > 1}
    lost: list[str] = []
    for ranks, group in chosen.items():
        if group.ranks > 1 and (text := _lost(group, one_rank)):
            lost.append(f"on {ranks} ranks {'it' if len(labels) == 1 else group.label} {text}")
    return [formatting.capital(f"{'; '.join(lost)}, more than the rule allows.")] if lost else []


def _lost(group: Group, one_rank: Group) -> str:
    """State how much less accurate than one rank a group is; "" if the rule counts it as accurate."""
    pair = [one_rank, group]
    decoded = are_decoded_alike(pair) and None not in (one_rank.word_errors, group.word_errors)
    near = one_rank.score is not None and (group.score or 0.0) >= one_rank.score - tolerance(one_rank)
    kept = accurate_enough(pair, one_rank, tolerance(one_rank)) if decoded else pair if near else [one_rank]
    if one_rank.score is None or group.score is None or any(row is group for row in kept):
        return ""
    text = "" if near else f"ends {group_terms(pair).gap(group.score, one_rank.score, 'one rank')}"
    if decoded and group.word_errors and one_rank.word_errors:
        own, alone = (
            formatting.percent(row.word_errors.wer, 1) for row in (group, one_rank) if row.word_errors
        )
        more = group.word_errors.over(one_rank.word_errors)
        by = "" if more is None or more.mean <= 0 else f", {formatting.difference(more)} points more"
        errors = f"WER {own}\u00a0% against {alone}\u00a0%"
        if own != alone:
            text = f"{text} ({errors}{by})" if text else f"has {errors} of one rank{by}"
    return text


def _evidence(compared: Mapping[int, Group], groups: Sequence[Group]) -> _Evidence:
    """Return what a choice lacks: seeds, or a race with intervals for each number of ranks."""
    seeds = fewest_seeds(groups)
    lacks, remedies = list[str](), list[str]()
    if seeds < CLAIM_SEEDS:
        lacks.append(f"by {seeds_text(seeds)}")
        remedies += [f"--seeds {wanted}"] if (wanted := seeds_wanted(groups)) else []
    rounds = {
        ranks: min((len(g.raced.ratios) for g in groups if g.ranks == ranks and g.raced), default=0)
        for ranks in compared
    }
    without = [ranks for ranks, number in rounds.items() if number == 0]
    short = [ranks for ranks, number in rounds.items() if 0 < number < LEAST_ROUNDS]
    if without:
        lacks.append(
            "without a race" + (f" on {listed(without)} ranks" if len(without) < len(rounds) else "")
        )
    if short:
        fewest = min(rounds[ranks] for ranks in short)
        lacks.append(f"{'by ' if without or not lacks else ''}{short_race(fewest)}")
    outside = [r for r, group in compared.items() if group.ranks > 1 and not group.raced and rounds[r]]
    if outside:
        lacks.append(f"by its own speed outside the race on {listed(outside)} ranks")
    waiting = any(not run.is_finished for group in groups for run in group.runs)
    if short or (without and not waiting):
        is_script = "epochs" not in group_terms(groups).kind.measures
        remedies.append(f"--race {LEAST_ROUNDS if is_script else ROUNDS}")
    return _Evidence(judging(lacks), " ".join(remedies))


def fewest_seeds(groups: Sequence[Group]) -> int:
    """Return the smallest number of seeds that a strategy can be judged by; 0: none has finished.

    Seeds that made no difference to a script count as one.
    """
    judged = [min(group.num_judged, distinct_trainings(group.results)) for group in groups]
    return min(filter(None, judged), default=0)


def seeds_wanted(groups: Sequence[Group]) -> str:
    """Return enough seeds for a claim, including the planned ones; "": enough are planned already."""
    planned = sorted({run.record.seed for group in groups for run in group.runs})
    if len(planned) >= CLAIM_SEEDS:
        return ""
    more = itertools.count(planned[-1] + 1)
    return ",".join(map(str, [*planned, *itertools.islice(more, CLAIM_SEEDS - len(planned))]))


def _with_one_finished(groups: Sequence[Group]) -> list[int]:
    """Return the numbers of ranks on which only one of several strategies has figures to compare."""
    found: dict[int, set[str]] = {}
    for group in groups:
        if group.ranks > 1 and group.mode == FRAMES and group.frames_per_s and group.score is not None:
            found.setdefault(group.ranks, set()).add(group.strategy)
    planned = {ranks: {group.strategy for group in groups if group.ranks == ranks} for ranks in found}
    return [ranks for ranks, names in found.items() if len(names) == 1 < len(planned[ranks])]


def _only_finished(labels: dict[int, str]) -> str:
    """Name the only strategy that has finished on each of these numbers of ranks."""
    sizes: dict[str, list[int]] = {}
    for ranks, label in labels.items():
        sizes.setdefault(label, []).append(ranks)
    named = " and ".join(f"{label} on {listed(of)}" for label, of in sizes.items())
    return f"Only {named} ranks {'has' if len(sizes) == 1 else 'have'} finished"


def _some_did_not_race(chosen: Mapping[int, Group], groups: Sequence[Group]) -> bool:
    """Return whether some choice was made by a race in which not all groups on as many ranks took part."""
    return any(
        group.raced is None and bool(group.figures)
        for ranks, choice in chosen.items()
        if choice.raced is not None
        for group in groups
        if group.ranks == ranks
    )


def tolerance(best: Group) -> float:
    """Return the distance from the best score up to which a group counts as accurate."""
    deviation = best.scores.deviation if best.scores else None
    return max(group_terms([best]).metric.near_enough(best.score or 0.0), deviation or 0.0)


def listed(items: Sequence[int | str]) -> str:
    """Write numbers of ranks, or names: `2`, `2, 4 and 8`."""
    words = [str(item) for item in items]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
