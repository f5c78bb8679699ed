"""State a comparison's result in words: which strategy to choose on how many ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from speechdp.chance import least_detectable
from speechdp.counting import counted
from speechdp.experiments.compare.plan import FRAMES, TIME
from speechdp.report.compare.groups import ComparedRun, Group, with_all_seeds
from speechdp.report.compare.headline import (
    CLAIM_SEEDS,
    fewest_seeds,
    headline,
    listed,
    seeds_wanted,
    tolerance,
)
from speechdp.report.compare.rates import one_rate_caution, rate_sentences
from speechdp.report.compare.table import group_terms
from speechdp.report.kit import formatting
from speechdp.report.kit.answer import Answer
from speechdp.report.kit.certainty import seeds_text
from speechdp.report.kit.choice import (
    accurate_enough,
    eligible_rows,
    no_better_than_guessing,
    several_tasks,
    splits_of,
    undecoded_caution,
    unlike_caution,
    word_error_sentences,
    word_errors_rule,
)
from speechdp.report.kit.same_machine import ALL_BUT_SPEEDS, SPEEDS, machine_warning
from speechdp.report.kit.scripts import several_versions, without_seed, wrong_way
from speechdp.report.kit.speeds import (
    any_raced,
    choose_fastest,
    faster_than,
    is_surely_slower,
    ratio_text,
    speed_phrase,
)
from speechdp.report.runs.folders import METRICS_MISSING
from speechdp.simulation.gain_sentence import gain_sentence


@dataclass(frozen=True)
class ComparisonAnswer(Answer):
    """Which strategy to choose.

    Attributes:
        chosen: the chosen group for each number of ranks; that of one rank if no strategy is faster.
    """

    chosen: dict[int, Group] = field(default_factory=dict)


def choose(groups: Sequence[Group], cautions: tuple[str, ...] = ()) -> ComparisonAnswer:
    """Apply the rule (`rule_for`) to the groups of every number of ranks above 1.

    Args:
        cautions: cautions about races and learning rates, one sentence each.
    """
    chosen: dict[int, Group] = {}
    unsure: set[int] = set()
    like_one_rank: set[int] = set()
    details: list[str] = []
    one_rank = _one_rank(groups)
    for ranks in sorted({group.ranks for group in groups if group.ranks > 1}):
        rows = [group for group in groups if group.ranks == ranks and group.mode == FRAMES]
        rows = [group for group in rows if group.frames_per_s is not None and group.score is not None]
        rows = with_all_seeds(rows)
        if rows:
            best = max(eligible_rows(rows), key=_score)
            accurate = accurate_enough(rows, best, tolerance(best))
            fastest, alike = choose_fastest(accurate, _speed)
            unsure |= {ranks} if alike else set()
            suffices = one_rank is not None and _suffices(one_rank, [fastest, *alike], rows, best)
            chosen[ranks] = one_rank if one_rank is not None and suffices else fastest
            like_one_rank |= {ranks} if any(map(_is_like_one_rank, [fastest, *alike])) else set()
            details += _sentences(fastest, best, rows, one_rank)
            details += rate_sentences(rows)
            details += word_error_sentences(rows, lambda group: group.label, f" on {ranks} ranks")
            details += _indistinct_sentences(fastest, alike)
            details += _gain(fastest, rows)
            details += _at_equal_time(ranks, fastest, groups)
            details += _faster_but_worse(fastest, rows, accurate, best)
            details += _by_chance(accurate)
    raced = any_raced(groups)
    machine = _machine(groups, raced=raced)
    found = tuple(filter(None, (machine if raced else "", *cautions, *_cautions(groups))))
    warning = "" if raced else machine
    text = headline(chosen, unsure, like_one_rank, groups, one_rank)
    return ComparisonAnswer(text, tuple(details), found, warning, chosen=chosen)


def rule_for(groups: Sequence[Group]) -> str:
    """Return the rule of the choice, in the terms of the runs' task."""
    terms = group_terms(groups)
    words = f", and whose {word_errors_rule([group for group in groups if group.mode == FRAMES])}"
    speed = f"{terms.amount}/s{' at equal frames' if 'epochs' in terms.kind.measures else ''}"
    if any_raced(groups):
        all_raced = all(group.raced for group in groups if group.ranks > 1 and group.figures)
        elsewhere = "" if all_raced else f"; {speed} where none that is accurate enough raced"
        speed = f"by the race; of strategies that it cannot tell apart, the most accurate{elsewhere}"
    alone = "" if _one_rank(groups) is None else "; one rank where it is as fast and as near to the best"
    return (
        f"Rule, for each number of ranks: the fastest strategy ({speed}) whose mean final "
        f"{terms.metric.name} is within {terms.tolerance()} of the {terms.best}, or within the best one's "
        f"standard deviation over seeds where that is larger{words if terms.task.decodes else ''}{alone}."
    )


def _one_rank(groups: Sequence[Group]) -> Group | None:
    """Return the runs on one rank, to which the others are compared."""
    found = (group for group in groups if group.ranks == 1 and group.mode == FRAMES)
    return next((group for group in found if _speed(group) and group.score is not None), None)


def _suffices(one_rank: Group, fastest: Sequence[Group], rows: Sequence[Group], best: Group) -> bool:
    """Return whether one rank is as fast as the fastest on several, and as accurate by the same rule."""
    accurate = accurate_enough([*rows, one_rank], best, tolerance(best))
    is_as_fast = all(_times_one_rank(group, one_rank) <= 1 for group in fastest)
    return is_as_fast and any(group is one_rank for group in accurate)


def _times_one_rank(group: Group, one_rank: Group) -> float:
    """Return a strategy's speed relative to one rank, by the race if one rank took part."""
    if group.raced is not None and group.alone is not None:
        return group.raced.over(group.alone).ratio
    return _speed(group) / _speed(one_rank)


def _is_slower_than_one_rank(group: Group, one_rank: Group) -> bool:
    raced = None if group.raced is None or group.alone is None else group.raced.over(group.alone)
    return is_surely_slower(_times_one_rank(group, one_rank), None if raced is None else raced.interval)


def _is_like_one_rank(group: Group) -> bool:
    """Return whether the race cannot distinguish a strategy's speed from one rank's."""
    speed, alone = group.raced, group.alone
    if speed is None or alone is None or speed.interval is None:
        return False
    return not speed.is_apart_from(alone)


def _faster_but_worse(
    chosen: Group, rows: Sequence[Group], accurate: Sequence[Group], best: Group
) -> list[str]:
    """State why a strategy that is faster than the chosen one was not chosen.

    Args:
        rows: all groups on the same number of ranks.
        accurate: those that are accurate enough.
    """
    faster = faster_than(chosen, rows, _speed)
    if faster is None or any(group is faster for group in accurate):
        return []
    terms = group_terms([faster])
    name = f"{formatting.capital(faster.label)} is faster on {faster.ranks} ranks, {_pace(faster)}"
    if _score(faster) < _score(best) - tolerance(best):
        gap = terms.gap(_score(faster), _score(best))
        return [f"{name}, but {terms.misses}: {gap}{_may_be_chance(faster, best, accurate)}."]
    if faster.word_errors is None:
        return [f"{name}, but not decoded."]
    return [f"{name}, but has too many word errors: {_accuracy(faster)}."]


def _least_detectable(groups: Sequence[Group]) -> float | None:
    """Return the smallest difference of mean scores that seeds are unlikely to explain."""
    return least_detectable([group.scores.values for group in groups if group.scores is not None])


def _may_be_chance(one: Group, best: Group, accurate: Sequence[Group]) -> str:
    """State if a group's distance from the best may be due to seeds; "": it is larger, or this is unknown.

    Apart from this group, only accurate groups (the best is one) show how much seeds vary.  A group that
    fails to learn varies far more between seeds, and says nothing about the others.
    """
    compared = [one, *(group for group in accurate if group is not one)]
    least = _least_detectable(compared)
    is_open = least is not None and 0 < _score(best) - _score(one) < least
    return ", which may be due to the seeds" if is_open else ""


def _by_chance(accurate: Sequence[Group]) -> list[str]:
    """State which differences of the accurate groups' mean scores may be chance; empty if unknown."""
    least = _least_detectable(accurate)
    if not least:
        return []
    metric = group_terms(accurate).metric
    apart = metric.labelled(metric.number(least))
    return [
        f"On {accurate[0].ranks} ranks, among those accurate enough, differences below {apart} may be "
        "due to the seeds alone (95 %)."
    ]


def _indistinct_sentences(chosen: Group, alike: Sequence[Group]) -> list[str]:
    """State which strategies may be as fast as the chosen one."""
    if not alike:
        return []
    others = ", ".join(f"{group.label} ({ratio_text(group.raced)})" for group in alike)
    return [
        f"On {chosen.ranks} ranks the speed of {chosen.label} cannot be told apart from that of {others}."
    ]


def _gain(fastest: Group, rows: Sequence[Group]) -> list[str]:
    """State what would help a strategy most, by the first of its finished runs."""
    found = [result for group in rows for result in group.results]
    own = next(iter(fastest.results), None)
    sentence = "" if own is None else gain_sentence(own, f"{fastest.label} on {fastest.ranks} ranks", found)
    return [sentence] if sentence else []


def _sentences(fastest: Group, best: Group, rows: Sequence[Group], one_rank: Group | None) -> list[str]:
    """State speed and accuracy of the fastest on its number of ranks, and those of the best.

    Args:
        rows: all groups on the same number of ranks.
    """
    terms = group_terms([fastest])
    text = f"{fastest.ranks} ranks: {fastest.label} {_pace(fastest)}"
    if one_rank is not None:
        reaches = f"which reaches {terms.number(one_rank.score)}"
        if fastest.raced is not None and fastest.alone is None:
            # Do not mix ratios of a race and of separate runs in one sentence.
            text += f" (one rank did not race, {reaches})"
        else:
            times = formatting.times(_times_one_rank(fastest, one_rank))
            unsure = ", from which the race cannot tell it apart and" if _is_like_one_rank(fastest) else ","
            text += f" ({times} times one rank{unsure} {reaches})"
    text += f", {_accuracy(fastest)}"
    of_decoded = " of those decoded" if any(_score(group) > _score(best) for group in rows) else ""
    name = f"{terms.best} {terms.short_name}{of_decoded}"
    if best is not fastest:
        text += f"; the {name} is that of {best.label}: {_accuracy(best)} {_pace(best, 'at')}"
    elif len(rows) > 1:
        text += f", the {name} on {fastest.ranks} ranks"
    sentences = [f"{text}."]
    if one_rank is not None and _is_slower_than_one_rank(fastest, one_rank):
        sentences.append(f"On {fastest.ranks} ranks {fastest.label} is slower than one rank alone.")
    return sentences


def _at_equal_time(ranks: int, chosen: Group, groups: Sequence[Group]) -> list[str]:
    """State which strategy is the most accurate at equal time, if that was tried."""
    tried = [g for g in groups if g.ranks == ranks and g.mode == TIME and g.score is not None]
    if len(tried) < 2:
        return []
    rows, where = with_all_seeds(tried), f"In equal time on {ranks} ranks"
    best = max(rows, key=_score)
    terms = group_terms([best])
    own = next((group for group in tried if group.strategy == chosen.strategy), None)
    enough = (best.score or 0.0) - tolerance(best)
    if own is None:
        return [f"{where} {best.label} {terms.is_best}: {_accuracy(best)}."]
    near = [group for group in rows if group.score is not None and group.score >= enough]
    if len(near) > 1 and any(group is own for group in near):
        good = f"about as small a {terms.short_name} as" if terms.falls else "about as accurate as"
        others = listed(
            [f"{group.label} ({terms.number(group.score)})" for group in near if group is not own]
        )
        verb = "has" if terms.falls else "is"
        return [f"{where} {chosen.label} {verb} {good} {others}: {_accuracy(own)}."]
    if best is own:
        return [f"{where} {best.label} {terms.is_best}, too: {_accuracy(best)}."]
    beside = f", where {chosen.label} has {terms.number(own.score)}"
    if own.scores is not None and not any(group is own for group in rows):
        beside += f" by {len(own.scores.values)} of {len(own.runs)} seeds"
    beside += _may_be_chance(own, best, near)
    return [f"{where} {best.label} {terms.is_best}: {_accuracy(best)}{beside}."]


def _cautions(groups: Sequence[Group]) -> tuple[str, ...]:
    notes = [_few_seeds(groups), one_rate_caution(groups)]
    notes.append(without_seed(group.results for group in groups))
    notes.append(wrong_way([run for group in groups for run in group.results]))
    titled = [(run.result, run.record.planned.title) for group in groups for run in group.finished]
    judged = [(result, title) for result, title in titled if result is not None]
    notes.append(several_versions(judged))
    titles = {result.name: title for result, title in judged}
    notes.append(no_better_than_guessing([result for result, _ in judged], titles))
    for group in groups:
        notes += _of_single_runs(group)
    if any(group.failures and group.figures and group.ranks > 1 for group in groups):
        notes.append("A strategy of which all seeds finished is preferred to one of which some failed.")
    notes += [_averaged(groups), _still_to_come(groups)]
    note = several_tasks([run.result for group in groups for run in group.runs if run.result is not None])
    if note:
        notes.append(note)
    elif groups and group_terms(groups).task.decodes:
        rows = [group for group in groups if group.mode == FRAMES and group.score is not None]
        notes += _decoding(rows or list(groups))
    return tuple(filter(None, notes))


def _few_seeds(groups: Sequence[Group]) -> str:
    """State that there are too few seeds for a claim; "": there are enough, or no run has ended."""
    fewest = fewest_seeds(groups)
    if not 0 < fewest < CLAIM_SEEDS:
        return ""
    wanted = seeds_wanted(groups)
    more = f" (--seeds {wanted} with the same folder keeps what is done)" if wanted else ""
    return (
        f"This rests on {seeds_text(fewest)}: differences may be chance. A claim needs {CLAIM_SEEDS}{more}."
    )


def _of_single_runs(group: Group) -> list[str]:
    """Name the runs of a group that lack a score, were disturbed, or failed."""
    notes = []
    for run in group.unjudged:
        lacks = _lacks_score(run, group_terms([group]).metric.name)
        notes.append(f"{_title(run)}: {lacks}; strategies of which all seeds have one are preferred.")
    for run in group.finished:
        if run.result is not None and len(run.result.sizes) > 1:
            sizes = " and then ".join(map(str, run.result.sizes))
            notes.append(f"{_title(run)}: it trained on {sizes} ranks, which changes speed and accuracy.")
        if run.result is not None and (lacks := run.result.without_lost_ranks):
            notes.append(f"{_title(run)}: {lacks}.")
        if run.result is not None and run.result.damage:
            notes.append(f"{_title(run)}: {run.result.damage}.")
    return [*notes, *(f"Failed: {run.record.planned.title}: {run.record.message}" for run in group.failures)]


def _still_to_come(groups: Sequence[Group]) -> str:
    """State how many runs have not ended; "": all have."""
    waiting = sum(not run.is_finished for group in groups for run in group.runs)
    waiting -= sum(len(group.failures) for group in groups)
    if not waiting:
        return ""
    have, them = ("has", "it") if waiting == 1 else ("have", "them")
    return (
        f"{counted(waiting, 'run')} {have} not finished yet; the command of the comparison continues {them}."
    )


def _averaged(groups: Sequence[Group]) -> str:
    """State that final models are means of the last epochs' models, and for how many the last is better."""
    means = [run for group in groups for run in group.results if run.mean is not None]
    if not means:
        return ""
    worse = sum(run.is_mean_worse for run in means)
    note = f"; in {worse} of {counted(len(means), 'run')} the last one alone is better" if worse else ""
    return (
        f"Final models are means of the last epochs' models (--average-epochs){note} (speechdp report of a "
        "run has both figures)."
    )


def _decoding(rows: Sequence[Group]) -> list[str]:
    """State how word errors affected the choices, each made among equal numbers of ranks and one rank."""
    labels = {
        id(group): group.label if group.ranks == 1 else f"{group.label} on {group.ranks} ranks"
        for group in rows
    }
    notes, alike, without = list[str](), dict[int, Group](), list[int]()
    for ranks in sorted({group.ranks for group in rows if group.ranks > 1} or {1}):
        compared = [group for group in rows if group.ranks in (1, ranks)]
        unlike = unlike_caution(compared, [labels[id(group)] for group in compared])
        notes += [unlike] if unlike else []
        own = [group for group in compared if group.ranks == ranks]
        if not unlike and not splits_of(own) and splits_of(rows):
            # Nothing was left out of this choice, so do not call any of these not eligible.
            without.append(ranks)
        elif not unlike:
            alike |= {id(group): group for group in compared}
    if without:
        notes.append(
            f"No run on {listed(without)} ranks was decoded: the word error rate played no part in the "
            "choice there."
        )
    if alike:
        notes.append(undecoded_caution(list(alike.values()), [labels[key] for key in alike]))
    return notes


def _lacks_score(run: ComparedRun, metric: str) -> str:
    """State why a finished run has no score, and what to do if its metrics were deleted."""
    if run.result is None or run.result.evaluations:
        return f"its last {metric} is no number"
    if METRICS_MISSING not in run.result.problems:
        return f"it has no {metric}"
    remedy = f"delete {run.result.path} and repeat the command to train it again"
    return f"it has no {metric} ({METRICS_MISSING}; {remedy})"


def _title(run: ComparedRun) -> str:
    return formatting.capital(run.record.planned.title)


def _machine(groups: Sequence[Group], *, raced: bool) -> str:
    runs = {
        run.result.name: (run.result, run.record.planned.title)
        for group in groups
        for run in group.finished
        if run.result is not None
    }
    return machine_warning(
        [result for result, _ in runs.values()],
        {name: title for name, (_, title) in runs.items()},
        ALL_BUT_SPEEDS if raced else SPEEDS,
    )


def _accuracy(group: Group) -> str:
    text = group_terms([group]).with_unit(group.score)
    if group.word_errors is not None:
        text += f" and WER {formatting.percent(group.word_errors.wer, 1)} %"
    return text.replace(" %", "\u00a0%")


def _pace(group: Group, preposition: str = "with") -> str:
    """State a group's speed: only by the race if it raced."""
    if group.raced is None:
        rate = formatting.count(group.frames_per_s.mean if group.frames_per_s else None)
        return f"{preposition} {rate} {group_terms([group]).amount}/s"
    baseline = formatting.strategy_label(group.raced.baseline, group.ranks)
    speed = speed_phrase(group.raced, group.label, baseline)
    return f"{preposition} {speed} in the race"


def _score(group: Group) -> float:
    return group.score or 0.0


def _speed(group: Group) -> float:
    return group.frames_per_s.mean if group.frames_per_s else 0.0
