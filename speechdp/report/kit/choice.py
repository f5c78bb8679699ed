"""Decide which of several trainings are accurate enough to be chosen, and explain their metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

from speechdp.decode.paired import Difference
from speechdp.report.kit import formatting
from speechdp.report.kit.metric_names import Terms, terms_of
from speechdp.report.runs.derived import comparable_runs
from speechdp.report.runs.results import RunResult, WordErrors


class Accuracy(Protocol):
    """The values that the rule uses."""

    @property
    def score(self) -> float | None:
        """Held-out score; higher is better."""

    @property
    def word_errors(self) -> WordErrors | None:
        """Word error rate and its interval."""


Row = TypeVar("Row", bound=Accuracy)


def eligible_rows(rows: Sequence[Row]) -> list[Row]:
    """Return the rows that may be chosen: the decoded ones if these were decoded alike, else all."""
    decoded = [row for row in rows if row.word_errors is not None]
    return decoded if decoded and are_decoded_alike(rows) else list(rows)


def accurate_enough(rows: Sequence[Row], best: Row, tolerance: float) -> list[Row]:
    """Return the rows whose score and word errors are as good as the best; if there are none, the best alone.

    Word errors on different splits, or with differently weighted scores, are not comparable and are ignored.

    Args:
        best: the best score of the `eligible_rows`.
        tolerance: maximum distance from the best score.
    """
    assert best.score is not None
    lowest, among = lowest_word_errors(rows), _num_decoded(rows)
    kept: list[Row] = []
    for row in rows:
        close = row.score is not None and row.score >= best.score - tolerance
        errors = row.word_errors
        if close and (lowest is None or (errors is not None and errors.may_be_as_low_as(lowest, among))):
            kept.append(row)
    return kept or [best]


def lowest_word_errors(rows: Sequence[Accuracy]) -> WordErrors | None:
    """Return the lowest word errors of rows; None if they were not decoded, or not alike."""
    rates = [row.word_errors for row in rows if row.word_errors is not None]
    return min(rates, key=lambda errors: errors.wer, default=None) if are_decoded_alike(rows) else None


def over_lowest(row: Accuracy, rows: Sequence[Accuracy], eligible: Sequence[Accuracy]) -> Difference | None:
    """Return a row's word error rate minus the lowest of several rows; None if unknown.

    It is also unknown if no other row has a rate.

    Args:
        eligible: the rows among which the lowest is taken; a row outside of these can be below it.
    """
    lowest = lowest_word_errors(eligible) if are_decoded_alike(rows) else None
    if lowest is None or row.word_errors is None or _num_decoded(rows) < 2:
        return None
    return row.word_errors.over(lowest, _num_decoded(eligible))


def _num_decoded(rows: Sequence[Accuracy]) -> int:
    return sum(row.word_errors is not None for row in rows)


def word_errors_rule(rows: Sequence[Accuracy]) -> str:
    """Return the rule's clause on word errors, which depends on seeds and errors by utterance."""
    decoded = [row.word_errors for row in rows if row.word_errors is not None]
    is_paired = [e.utterances is not None and len(e.utterances.errors) > 1 for e in decoded]
    paired = (
        "word error rate is not surely above the lowest one (95 % interval of the difference over the same "
        "utterances and the seeds)"
    )
    if decoded and all(is_paired):
        return paired
    overlaps = "95 % interval of the word error rate overlaps that of the lowest one"
    if any(is_paired):
        return f"{paired} or, between single models and where errors are not known by utterance, {overlaps}"
    return overlaps


def word_error_sentences(rows: Sequence[Row], label: Callable[[Row], str], where: str = "") -> list[str]:
    """Return a sentence on which word error rates are surely above the lowest; empty if none is known to be.

    This is known for a rate if both rates are by utterance and at least one of them has several seeds.

    Args:
        label: returns the name of a row.
        where: common property of the rows, ` on 2 ranks`.
    """
    lowest = lowest_word_errors(rows)
    best = ", ".join(label(row) for row in rows if row.word_errors is lowest)
    others = [row for row in rows if row.word_errors is not None and row.word_errors is not lowest]
    found = [(row, over_lowest(row, rows, rows)) for row in others]
    known = [(row, by) for row, by in found if by is not None and by.has_seeds]
    if not known:
        return []
    above = [f"{label(row)} ({formatting.difference(by)} points)" for row, by in known if by.is_sure]
    if above:
        sentence = f"surely above the lowest, that of {best}: {', '.join(above)}"
    else:
        sentence = f"none is surely above the lowest, that of {best}"
    open_ = [label(row) for row in others if not any(row is one for one, _ in known)]
    left = f"; not known by utterance and seeds: {', '.join(open_)}" if open_ else ""
    return [f"Word error rates{where}: {sentence}{left}."]


def lacks_scores(runs: Sequence[RunResult], terms: Terms, which: str = "finished run") -> str:
    """Return a clause on why no run has a score.

    Args:
        which: name of the runs.
    """
    if any(run.evaluations for run in runs):
        return f"the last {terms.metric.name} of no {which} is a number"
    return f"no {which} has {terms.kind.evaluation}"


def splits_of(rows: Sequence[Accuracy]) -> list[str]:
    """Return the splits of these rows' word errors."""
    return sorted({row.word_errors.split for row in rows if row.word_errors is not None})


def are_decoded_alike(rows: Sequence[Accuracy]) -> bool:
    """Return whether the word errors of these rows, if any, are comparable.

    They are if split, grammar and rescoring are the same, and the weights of the scores are the same or were
    chosen in the same way.
    """
    known = [row.word_errors for row in rows if row.word_errors is not None and row.word_errors.how]
    searched_alike = len({(errors.grammar, errors.rescoring) for errors in known}) <= 1
    chosen_alike = len({errors.chosen_on for errors in known}) <= 1 and all(e.chosen_on for e in known)
    weighted_alike = len({errors.weights for errors in known}) <= 1
    return len(splits_of(rows)) <= 1 and searched_alike and (chosen_alike or weighted_alike)


def unlike_caution(rows: Sequence[Accuracy], labels: Sequence[str]) -> str:
    """State why word errors were ignored in a choice among rows, one label each; "": they are comparable."""
    if are_decoded_alike(rows):
        return ""
    splits = splits_of(rows)
    if len(splits) > 1:
        return (
            f"The runs were decoded on different splits ({', '.join(splits)}), so the word error rate played "
            "no part in the choice."
        )
    named: dict[str, list[str]] = {}
    for row, label in zip(rows, labels, strict=True):
        if row.word_errors is not None and row.word_errors.how:
            named.setdefault(row.word_errors.how, []).append(label)
    listed = "; ".join(f"{', '.join(of)} with {how}" for how, of in named.items())
    return (
        f"The runs were not decoded alike ({listed}), so the word error rate played no part in the choice: "
        "decode all of them in the same way."
    )


def undecoded_caution(rows: Sequence[Accuracy], labels: Sequence[str]) -> str:
    """State which rows, one label each, could not be chosen because they are not decoded; "": all are."""
    if not splits_of(rows):
        return "No run was decoded: the word error rate played no part in the choice."
    without = [label for row, label in zip(rows, labels, strict=True) if row.word_errors is None]
    return f"Not eligible, because not decoded: {', '.join(without)}." if without else ""


def no_better_than_guessing(runs: Sequence[RunResult], labels: Mapping[str, str]) -> str:
    """Name the runs whose model learned nothing or diverged; "": there are none.

    Args:
        labels: labels of runs, by name.
    """
    lost = [run for run in runs if run.is_guessing]
    if not lost:
        return ""
    terms = terms_of(lost)
    named = ", ".join(
        f"{labels[run.name]} ({terms.number(run.final.score)}, guessing {terms.number(run.guessing)})"
        for run in lost
        if run.final is not None
    )
    return (
        f"Held-out log-probability below that of guessing among the classes: {named}. Such a model has "
        "learned nothing, or lost it again: try a lower --learning-rate."
    )


def several_tasks(runs: Sequence[RunResult]) -> str:
    """State which runs are not compared because they have another task; "": all have the same."""
    terms = terms_of(runs)
    others = [run for run in runs if run.settings and run.metric.key != terms.metric.key]
    if not others:
        return ""
    names = " and ".join(dict.fromkeys(run.metric.name for run in others))
    return (
        f"These runs are of several tasks. Those with a {terms.metric.name} are compared; the others "
        f"have a {names}, which cannot be compared with it."
    )


def judged_otherwise(runs: Sequence[RunResult], labels: Mapping[str, str]) -> str:
    """State which runs are not compared because they were evaluated on other data or classes; "": none.

    Args:
        labels: labels of runs, by name.
    """
    others = comparable_runs(runs).others
    if not others:
        return ""
    listed = ", ".join(f"{labels[run.name]} ({differs})" for run, differs in others)
    return (
        "These runs were not all judged on the same data and classes. Not compared, because the "
        f"{terms_of(runs).metric.name} of the others means something else: {listed}."
    )


def metric_meanings(runs: Sequence[RunResult]) -> str:
    """Explain the metrics of tasks other than recognition; "": all are recognition, or none has any."""
    terms = terms_of(runs)
    if terms.task.decodes or not any(run.evaluations for run in runs):
        return ""
    meanings = "; ".join(f"{metric.name}: {metric.meaning.rstrip('.')}" for metric in terms.task.metrics)
    return f"{formatting.capital(meanings)}."
