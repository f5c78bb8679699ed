"""State a sweep's result in words: which run to choose, and what limits its speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from speechdp.report.kit import formatting
from speechdp.report.kit.answer import Answer
from speechdp.report.kit.certainty import judging, seeds_text, short_race
from speechdp.report.kit.choice import (
    accurate_enough,
    are_decoded_alike,
    eligible_rows,
    lacks_scores,
    splits_of,
    word_errors_rule,
)
from speechdp.report.kit.metric_names import terms_of
from speechdp.report.kit.outside import load_text, shares_gpus
from speechdp.report.kit.same_machine import ALL_BUT_SPEEDS, SPEEDS, machine_warning
from speechdp.report.kit.speeds import (
    any_raced,
    choose_fastest,
    faster_than,
    is_surely_slower,
    ratio_text,
    speed_phrase,
    times_text,
)
from speechdp.report.runs.derived import Losses, RunFigures, comparable_runs, finished_rows
from speechdp.report.runs.raced import LEAST_ROUNDS
from speechdp.report.runs.results import RunResult
from speechdp.report.runs.samples import Samples
from speechdp.report.runs.steadiness import notable_load
from speechdp.report.sweep.cautions import find_cautions
from speechdp.report.sweep.data_answer import data_advice, other_runs
from speechdp.simulation.gain_sentence import gain_sentence

#: Shares of the step time below this limit nothing.
SMALL_SHARE = 0.03
#: Smaller shares of parts that every training has do not count as a loss, nor do shorter pauses.
USUAL_SHARE = 0.2
#: Limits, %: a GPU that runs kernels for a smaller share of the time is idle; a process above is saturated.
IDLE_GPU, WHOLE_CORE = 80.0, 90.0


@dataclass(frozen=True)
class SweepAnswer(Answer):
    """The result of a sweep in words.

    Attributes:
        limit: what limits the chosen run, with figures; empty if nothing was timed.
        data: problems of its data path and what to try; empty if there are none.
        gain: what would make it faster, and by how much; empty if nothing would, or this is unknown.
        chosen: the chosen run; None if no choice is possible.
    """

    limit: str = ""
    data: tuple[str, ...] = ()
    gain: str = ""
    chosen: RunFigures | None = None

    @property
    def body(self) -> tuple[str, ...]:
        """The text after the headline."""
        return tuple(filter(None, (*self.details, self.limit, *self.data, self.gain)))


def find_answer(rows: Sequence[RunFigures], of_race: tuple[str, ...] = ()) -> SweepAnswer:
    """Apply the rule (`rule_for`) to the sweep's rows; compare those evaluated on the same data.

    Args:
        of_race: cautions about the race, one sentence each.
    """
    labels = formatting.run_labels([row.run for row in rows])
    finished = finished_rows(rows)
    metric = terms_of(row.run for row in rows).metric
    comparable = comparable_rows(rows)
    cautions = (*of_race, *find_cautions(rows, comparable, labels))
    if not comparable:
        return _without_comparison(rows, finished, cautions)
    best = max(eligible_rows(comparable), key=_score)
    eligible = accurate_enough(comparable, best, metric.near_enough(best.score or 0.0))
    raced = any_raced(comparable)
    chosen, alike = choose_fastest(eligible, _rate)
    details = _comparison(comparable, chosen, best, labels)
    if chosen.run.size != 1 and is_surely_slower(chosen.speedup, chosen.speedup_interval):
        label = labels[chosen.run.name]
        details.append(f"On {chosen.run.size} ranks {label} is slower than one rank alone.")
    if chosen.run.model_period is None:
        details.append(_best_period(comparable, eligible, labels))
    warning = machine_warning((row.run for row in comparable), labels, ALL_BUT_SPEEDS if raced else SPEEDS)
    return SweepAnswer(
        _headline(chosen, alike, comparable, labels),
        tuple(filter(None, details)),
        tuple(filter(None, (warning if raced else "", *cautions))),
        "" if raced else warning,
        limit=_limit(chosen, labels),
        data=_data(rows, chosen, labels),
        gain=gain_sentence(chosen.run, labels[chosen.run.name], [row.run for row in rows]),
        # If all other runs are of other data, there was nothing to choose from.
        chosen=None if len(comparable) == 1 and comparable_runs([row.run for row in rows]).others else chosen,
    )


def comparable_rows(rows: Sequence[RunFigures]) -> list[RunFigures]:
    """Return the rows to choose from: finished runs that were timed and evaluated on the same data."""
    alike = comparable_runs([row.run for row in rows])
    judged = [row for row in finished_rows(rows) if row.frames_per_s is not None and row.score is not None]
    return [row for row in judged if alike.has(row.run)]


def rule_for(rows: Sequence[RunFigures]) -> str:
    """Return the rule of the choice, in the terms of the runs' task."""
    terms = terms_of(row.run for row in rows)
    tie = ""
    comparable = comparable_rows(rows)
    if any_raced(comparable):
        tie = " Speed is that of the race; of settings that it cannot tell apart, the most accurate."
        if not all(row.raced for row in comparable):
            tie += " A setting that did not race is chosen only where none that raced is accurate enough."
    near = (
        f"Rule: the fastest finished run whose final {terms.metric.name} is within {terms.tolerance()} of the"
    )
    if not terms.task.decodes:
        return f"{near} {terms.best}.{tie}"
    return f"{near} {terms.best} run's and whose {word_errors_rule(comparable)}.{tie}"


def _without_comparison(
    rows: Sequence[RunFigures], finished: Sequence[RunFigures], cautions: tuple[str, ...]
) -> SweepAnswer:
    timed = [row for row in finished or rows if row.frames_per_s is not None]
    if len(rows) > 1 and not finished:
        timed = []
    labels = formatting.run_labels([row.run for row in rows])
    fastest = max(timed, key=_rate, default=None)
    if len(rows) == 1 and (not rows[0].run.completed or timed):
        headline = _of_single_run(rows[0], formatting.capital(labels[rows[0].run.name]))
    elif fastest is None:
        done = "was timed" if finished or len(rows) == 1 else "that could be chosen has finished"
        headline = f"No run {done}, so there is nothing to choose from yet."
    else:
        headline = (
            f"{formatting.capital(labels[fastest.run.name])} is the fastest with {_speed(fastest)}; how "
            f"accurate the runs are is not known, because "
            f"{lacks_scores([row.run for row in finished], terms_of(row.run for row in rows))}."
        )
    if fastest is None:
        return SweepAnswer(headline, cautions=cautions)
    limit, data = _limit(fastest, labels), _data(rows, fastest, labels)
    gain = gain_sentence(fastest.run, labels[fastest.run.name], [row.run for row in rows])
    return SweepAnswer(headline, cautions=cautions, limit=limit, data=data, gain=gain)


def _of_single_run(row: RunFigures, label: str) -> str:
    """Describe a single run that is unfinished or was not evaluated."""
    facts = [_speed(row)] if row.frames_per_s is not None else []
    facts += [_accuracy(row)] if row.score is not None else []
    known = ", with ".join(facts)
    if not row.run.completed:
        return f"{label} is {row.run.status}: so far {known}." if facts else f"{label} is {row.run.status}."
    if row.score is not None:
        return f"{label}: {known}."
    return (
        f"{label}: {known}; how accurate its model is is not known, because no finished run has "
        f"{terms_of([row.run]).kind.evaluation}."
    )


def _headline(
    chosen: RunFigures, alike: Sequence[RunFigures], rows: Sequence[RunFigures], labels: dict[str, str]
) -> str:
    """Name the chosen run, and those whose speed cannot be distinguished from the fastest's."""
    name = labels[chosen.run.name]
    label = formatting.capital(name)
    if len(rows) == 1:
        return f"{label}: {_speed(chosen)}, with {_accuracy(chosen)}."
    keeps = terms_of(row.run for row in rows).keeps
    figures = f"{_speed(chosen, labels)}, with {_accuracy(chosen)}."
    kind, judged = _kind(chosen, rows), _rests_on(chosen, rows)
    if not alike:
        return f"{label} seems the fastest {kind} that {keeps}, {judged}: {figures}"
    others = ", ".join(f"{labels[row.run.name]} ({ratio_text(row.raced)})" for row in alike)
    return (
        f"No {kind} that {keeps}, {judged}, is known to be faster than {name}: {figures} Its speed cannot be "
        f"told apart from that of {others}."
    )


def _rests_on(chosen: RunFigures, rows: Sequence[RunFigures]) -> str:
    """State how weak the evidence is: a sweep trains each setting once, and may not have raced."""
    one_seed = len({row.run.setting("seed") for row in rows}) == 1
    lacks = [f"by {seeds_text(1)}" if one_seed else "by one run of each"]
    rounds = min((len(row.raced.ratios) for row in rows if row.raced is not None), default=0)
    if rounds == 0:
        lacks.append("without a race")
    elif chosen.raced is None:
        lacks.append("by its own speed outside the race")
    elif rounds < LEAST_ROUNDS:
        lacks.append(short_race(rounds))
    return judging(lacks)


def _kind(chosen: RunFigures, rows: Sequence[RunFigures], noun: str = "setting") -> str:
    """Name the rows that a row was chosen from; not all of them if only some raced."""
    if chosen.raced is None or all(row.raced for row in rows):
        return noun
    return f"raced {noun}"


def _comparison(
    rows: Sequence[RunFigures], chosen: RunFigures, best: RunFigures, labels: dict[str, str]
) -> list[str]:
    sentences: list[str] = []
    if len(rows) == 1:
        return sentences
    terms = terms_of(row.run for row in rows)
    first = max(rows, key=_score)
    is_beaten = _score(first) > _score(best)
    among = "Of the decoded runs " if is_beaten else ""
    if best is chosen:
        it = "it" if is_beaten else "It"
        sentences.append(f"{among}{it} has the {terms.best} {terms.metric.name}, too.")
    else:
        the = "the" if is_beaten else "The"
        sentences.append(
            f"{among}{the} {terms.best} {terms.metric.name} is that of {labels[best.run.name]}: "
            f"{_accuracy(best)}, at {_short_speed(best, labels)}."
        )
    if is_beaten:
        side = "smaller" if terms.falls else "better"
        name = formatting.capital(labels[first.run.name])
        sentences.append(f"{name} has a {side} one, {_accuracy(first)}, but is not decoded yet.")
    if (fastest := faster_than(chosen, rows, _rate)) is not None:
        assert fastest.score is not None
        assert best.score is not None
        name, speed = formatting.capital(labels[fastest.run.name]), _short_speed(fastest, labels)
        is_near = fastest.score >= best.score - terms.metric.near_enough(best.score)
        if is_near and _awaits_decoding(fastest, rows):
            return [*sentences, f"{name} is faster ({speed}) but not decoded yet."]
        behind = terms.gap(fastest.score, best.score)
        sentences.append(
            f"{name} is faster ({speed}) but {terms.misses}: {behind}"
            + (f", WER {_wer(fastest)}." if fastest.word_errors else ".")
        )
    return sentences


def _best_period(rows: Sequence[RunFigures], eligible: Sequence[RunFigures], labels: dict[str, str]) -> str:
    """State the best period if a run without one was chosen."""
    with_period = [row for row in rows if row.run.model_period is not None]
    if not with_period:
        return ""
    keeps = terms_of(row.run for row in rows).keeps
    fitting = [row for row in eligible if row.run.model_period is not None]
    if not fitting:
        undecoded = [row for row in with_period if _awaits_decoding(row, rows)]
        if len(undecoded) == len(with_period):
            return "No averaging period has been decoded yet."
        which = "that has been decoded " if undecoded else ""
        return f"No averaging period {which}seems to {keeps.replace('keeps', 'keep', 1)}."
    fastest, alike = choose_fastest(fitting, _rate)
    label, kind = labels[fastest.run.name], _kind(fastest, fitting, "averaging period")
    claim = f"{formatting.capital(label)} seems the fastest {kind} that {keeps}"
    if alike:
        claim = f"No {kind} that {keeps} is known to be faster than {label}"
    return f"{claim}: {_speed(fastest, labels)}, with {_accuracy(fastest)}."


def _awaits_decoding(row: RunFigures, rows: Sequence[RunFigures]) -> bool:
    """Return whether a row lacks word errors that others have and are compared by."""
    return row.word_errors is None and bool(splits_of(rows)) and are_decoded_alike(rows)


def _limit(row: RunFigures, labels: dict[str, str]) -> str:
    """State which loss is the largest, and how large the others are."""
    lost = row.losses
    if lost is None:
        return ""
    causes = [(lost.data_wait, "waiting for data" + _waited_for(row, lost))]
    if row.run.size != 1:
        causes += [
            (lost.exchange, "communication itself"),
            (lost.waiting, "waiting for slower ranks" + _straggler(row)),
        ]
    if lost.slower_compute is not None and row.run.size != 1:
        causes.append(
            (lost.slower_compute, f"computing slower than one rank does alone ({_sharing(row.run)})")
        )
    own = [(lost.update, "the optimizer's update"), (lost.other, "what the loop does beside its steps")]
    causes += [cause for cause in own if cause[0] >= USUAL_SHARE]
    causes.sort(key=lambda cause: -cause[0])
    share, largest = causes[0]
    rest = ", ".join(f"{name} {formatting.percent(value)}\u00a0%" for value, name in causes[1:])
    if share < SMALL_SHARE:
        # Only here, because a large loss would itself make the GPU idle.
        if starting := starting_kernels(row.run.samples):
            return f"What holds {labels[row.run.name]} back most is the host: {starting}"
        return (
            f"Nothing in particular holds {labels[row.run.name]} back: the largest loss is {largest}, "
            f"{formatting.percent(share, 1)} % of the step time.{_pauses(row)}"
        )
    return (
        f"What holds {labels[row.run.name]} back most is {largest}: {formatting.percent(share)} % of the "
        f"step time{_in_its_run(row)}. The other losses: {rest}.{_communication(row)}{_pauses(row)}"
    )


def _pauses(row: RunFigures) -> str:
    """State long pauses of training, which are not included in shares of the step time or in speeds."""
    ranks = row.run.timing.ranks if row.run.timing else ()
    paused = [(rank.eval_s, rank.checkpoint_s) for rank in ranks]
    whole_s = sum(rank.training_s for rank in ranks) + sum(map(sum, paused))
    found = [
        (sum(seconds) / whole_s, name)
        for seconds, name in zip(zip(*paused, strict=True), ("evaluations", "checkpoints"), strict=True)
        if whole_s and sum(seconds) >= USUAL_SHARE * whole_s
    ]
    if not found:
        return ""
    named = " and ".join(f"{formatting.percent(share)}\u00a0% for {name}" for share, name in found)
    return f" Pauses, as shares of its total time: {named}; figures of speed leave them out."


def _sharing(run: RunResult) -> str:
    """State which resources ranks share that make them slower, and with whom."""
    load = notable_load(run)
    shared = ["shared cores or memory"]
    if load is not None:
        shared.append(f"and {load_text(load)}")
    if shares_gpus(run):
        shared.append("and others on its GPUs")
    return ", ".join(shared)


def _in_its_run(row: RunFigures) -> str:
    """State that losses are of the run, not of the race, whose efficiency is shown beside them."""
    return " in its run, not in the race" if row.raced is not None else ""


def starting_kernels(samples: Sequence[Samples]) -> str:
    """Return a sentence if GPUs are idle because one host core launches their kernels one by one; else ""."""
    sampled = [host for host in samples if len(host.t_s) and host.gpu_of_rank]
    if not sampled:
        return ""
    # Means over the ranks' own GPUs and processes; the median excludes start, evaluation and checkpoints.
    used = [host.gpu_percent[:, sorted(set(host.gpu_of_rank.values()))] for host in sampled]
    on_gpus = np.concatenate([percent.mean(axis=1) for percent in used])
    on_cores = np.concatenate([host.cpu_percent.mean(axis=1) for host in sampled])
    if not (np.isfinite(on_gpus).any() and np.isfinite(on_cores).any()):
        return ""
    gpu, core = float(np.nanmedian(on_gpus)), float(np.nanmedian(on_cores))
    if gpu >= IDLE_GPU or core <= WHOLE_CORE:
        return ""
    return (
        f"a kernel runs on a GPU {gpu:.0f}\u00a0% of the time, while the process that starts the kernels "
        f"keeps a core busy ({core:.0f}\u00a0%). Larger batches (--batch-size) give each kernel more to do; "
        "a faster GPU would change little."
    )


def _communication(row: RunFigures) -> str:
    """State how two of the losses make up the table's share of communication."""
    share = formatting.percent(row.comm_share, 1)
    if row.run.size == 1 or row.comm_share is None or share == "0.0":
        return ""
    both = "communication itself and waiting for slower ranks together"
    return f" The table's communication, {share} %, is {both}."


def _data(rows: Sequence[RunFigures], named: RunFigures, labels: dict[str, str]) -> tuple[str, ...]:
    """State the limits of the named run's data path, and which other runs wait for data."""
    others = other_runs([row for row in rows if row is not named], labels)
    return (*data_advice(named, labels[named.run.name]), *others)


def _straggler(row: RunFigures) -> str:
    if row.skew is None or row.skew.straggler is None:
        return ""
    host = f" on {row.skew.straggler_host}" if row.skew.straggler_host else ""
    return f" (the slowest is rank {row.skew.straggler}{host})"


def _waited_for(row: RunFigures, lost: Losses) -> str:
    """Name the rank that the others wait for while it waits for data; "" if all wait for data alike."""
    by_others = lost.data_wait - (row.data_wait_share or 0.0)
    if by_others < SMALL_SHARE or row.skew is None or row.skew.straggler is None:
        return ""
    return f" (rank {row.skew.straggler}, and the others for it)"


def _short_speed(row: RunFigures, labels: dict[str, str]) -> str:
    if row.raced is not None and row.raced.baseline != row.run.name:
        return speed_phrase(row.raced, row.run.name, labels.get(row.raced.baseline, row.raced.baseline))
    return f"{formatting.count(row.frames_per_s)} {row.run.kind.amount}/s"


def _speed(row: RunFigures, labels: dict[str, str] | None = None) -> str:
    """State a run's speed: relative to the others by the race, if labels are given, and by itself."""
    ranks = "" if row.run.size is None else f" on {formatting.rank_count(row.run.size)}"
    text = f"{formatting.count(row.frames_per_s)} {row.run.kind.amount}/s{ranks}"
    if row.raced is not None:
        text += " in its run"
    if labels is not None and row.raced is not None and row.raced.baseline != row.run.name:
        text = f"{_short_speed(row, labels)}, {text}"
    if row.speedup is not None and row.run.size != 1:
        speedup = times_text(row.speedup, row.speedup_interval).replace(" ", "\u00a0")
        efficiency = formatting.percent(row.efficiency)
        raced = "in the race " if row.has_raced_speedup else ""
        text += f" ({raced}{speedup} times one rank, efficiency {efficiency} %)"
    return text


def _accuracy(row: RunFigures) -> str:
    text = terms_of([row.run]).with_unit(row.score)
    return f"{text} and WER {_wer(row)}" if row.word_errors else text


def _wer(row: RunFigures) -> str:
    assert row.word_errors is not None
    rate, _, interval = formatting.word_errors(row.word_errors).partition(" ")
    # Non-breaking spaces keep the figure together.
    return f"{rate} % {interval}".rstrip().replace(" ", "\u00a0")


def _score(row: RunFigures) -> float:
    return row.score or 0.0


def _rate(row: RunFigures) -> float:
    return row.frames_per_s or 0.0
