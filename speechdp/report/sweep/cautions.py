"""Cautions that the reader of a sweep's report must know before trusting it."""

from __future__ import annotations

from collections.abc import Sequence

from speechdp.counting import counted, epoch_text
from speechdp.report.kit import formatting
from speechdp.report.kit.choice import (
    judged_otherwise,
    no_better_than_guessing,
    several_tasks,
    undecoded_caution,
    unlike_caution,
)
from speechdp.report.kit.metric_names import terms_of
from speechdp.report.kit.scripts import several_versions, wrong_way
from speechdp.report.runs.derived import RunFigures, finished_rows, learned
from speechdp.tasks.metrics import LITTLE

#: Relative difference in frames trained on above which a comparison of runs needs a caution.
FRAMES_TOLERANCE = 0.01


def find_cautions(
    rows: Sequence[RunFigures], comparable: Sequence[RunFigures], labels: dict[str, str]
) -> tuple[str, ...]:
    """Return the cautions, one sentence each; `comparable` are the rows that the choice is made from."""
    notes = [*_left_out(rows, labels), *_damages(rows, labels)]
    # For all rows: a run that cannot be judged still shows its speed.
    notes += [
        f"{formatting.capital(labels[row.run.name])}: {lacks}."
        for row in rows
        if (lacks := row.run.without_lost_ranks)
    ]
    judged = [row.run for row in comparable]
    notes.append(no_better_than_guessing(judged, labels))
    if len(learned(judged)) < len(judged):
        notes[-1] += " The plots of this figure, and the target, leave it out."
    notes += [_sizes(comparable, labels), _unequal(comparable)]
    notes.append(_never_averaged(comparable, labels))
    notes += [_averaged(rows, labels), _improving(comparable, labels), _past_best(comparable, labels)]
    notes.append(_one_training_each(comparable))
    runs = [row.run for row in rows]
    notes[:0] = [several_tasks(runs), judged_otherwise(runs, labels), wrong_way(runs)]
    notes.append(several_versions([(row.run, labels[row.run.name]) for row in comparable]))
    if comparable and terms_of(row.run for row in rows).task.decodes:
        named = [labels[row.run.name] for row in comparable]
        if len(rows) == 1 and comparable[0].word_errors is None:
            notes.append("The run is not decoded, so its word error rate is not known.")
        else:
            notes.append(unlike_caution(comparable, named) or undecoded_caution(comparable, named))
    if len(comparable) > 1 and all(row.speedup is None for row in comparable):
        alone = any(run.size == 1 and run.timing is not None for run in runs)
        fitting = " of the same task, data and model size" if alone else ""
        notes.append(f"There is no timed run of one rank{fitting}, so speed-up and efficiency are not known.")
    return tuple(filter(None, notes))


def _one_training_each(comparable: Sequence[RunFigures]) -> str:
    """Return a caution that every difference includes chance; "" if there are no scores to compare."""
    if sum(row.score is not None for row in comparable) < 2:
        return ""
    return (
        "Each setting was trained once: how much of a difference in accuracy is chance is not known. "
        "speechdp compare trains with several --seeds."
    )


def last_gain(row: RunFigures) -> float | None:
    """Return the gain in score from the second last evaluation to the last; None if unknown."""
    values = [evaluation.score for evaluation in row.run.evaluations[-2:]]
    if len(values) < 2 or values[0] is None or values[1] is None:
        return None
    return values[1] - values[0]


def _left_out(rows: Sequence[RunFigures], labels: dict[str, str]) -> list[str]:
    """Name the runs that are not compared; for a single run, the answer itself states its status."""
    notes: list[str] = []
    for status in ("missing", "unfinished") if len(rows) > 1 else ():
        names = [labels[row.run.name] for row in rows if row.run.status == status]
        if names:
            notes.append(f"Not compared, because {status}: {', '.join(names)}.")
    finished = finished_rows(rows)
    if any(row.score is not None for row in finished):
        without = [labels[row.run.name] for row in finished if row.score is None]
        if without:
            notes.append(f"Not compared, because their last score is no number: {', '.join(without)}.")
    return notes


def _damages(rows: Sequence[RunFigures], labels: dict[str, str]) -> list[str]:
    """Name the finished runs with damaged files, because what their figures lack is not visible.

    A single run needs no such note: its page lists the damage.
    """
    if len(rows) == 1:
        return []
    damaged = [row.run for row in rows if row.run.completed and row.run.damage]
    return [f"{formatting.capital(labels[run.name])}: {run.damage}." for run in damaged]


def _sizes(comparable: Sequence[RunFigures], labels: dict[str, str]) -> str:
    """Return a caution if runs had different numbers of ranks, or if one changed its number."""
    sizes = [row.run.sizes for row in comparable]
    if len({size for each in sizes for size in each}) < 2:
        return ""
    if len(comparable) == 1:
        then = " and then ".join(map(str, sizes[0]))
        return f"The run trained on {then} ranks, which changes speed and accuracy too."
    listed = ", ".join(
        f"{labels[row.run.name]} on {' and then '.join(map(str, each))}"
        for row, each in zip(comparable, sizes, strict=True)
    )
    return f"The runs did not all train on as many ranks, which changes speed and accuracy too: {listed}."


def _unequal(comparable: Sequence[RunFigures]) -> str:
    trained = [row.frames_trained for row in comparable if row.frames_trained]
    if not trained or max(trained) <= min(trained) * (1 + FRAMES_TOLERANCE):
        return ""
    kind = comparable[0].run.kind
    return (
        f"The runs trained on different amounts of {kind.material} ({formatting.count(min(trained))} to "
        f"{formatting.count(max(trained))} {kind.amount}), so their models are not strictly comparable."
    )


def _never_averaged(comparable: Sequence[RunFigures], labels: dict[str, str]) -> str:
    """Name the runs that ended before their first averaging."""
    named = [
        f"{labels[row.run.name]} ({counted(row.steps, 'step')})"
        for row in comparable
        if row.steps is not None and (row.run.model_period or "").isdecimal()
        if int(row.run.model_period or 0) >= row.steps
    ]
    if not named:
        return ""
    return (
        f"Too short for their period, so averaged only at evaluations: {', '.join(named)}. This shows "
        "nothing about the period."
    )


def _averaged(rows: Sequence[RunFigures], labels: dict[str, str]) -> str:
    """Name the final models that are means of the last epochs' models, with the last model's own score."""
    named: list[str] = []
    for row in rows:
        mean, last = row.run.mean, row.run.last
        if mean is None or mean.evaluation.score is None or last is None or last.score is None:
            continue
        terms = terms_of([row.run])
        better = ", which is better" if row.run.is_mean_worse else ""
        named.append(
            f"{labels[row.run.name]} (mean of {mean.num_epochs}: {terms.with_unit(mean.evaluation.score)}; "
            f"last alone: {terms.number(last.score)}{better})"
        )
    if not named:
        return ""
    return f"Final models are means of the last epochs' models (--average-epochs): {', '.join(named)}."


def _improving(comparable: Sequence[RunFigures], labels: dict[str, str]) -> str:
    """Name the runs that were still improving at the end; "" for a single run, which is not compared."""
    compared = [row for row in comparable if not row.run.is_guessing] if len(comparable) > 1 else []
    gains = [
        (gain, row)
        for row in compared
        if (gain := last_gain(row)) is not None and row.score is not None and gain > LITTLE * abs(row.score)
    ]
    if not gains:
        return ""
    terms = terms_of(row.run for row in comparable)
    if len(gains) == len(comparable):
        ordered = sorted(gain for gain, _ in gains)
        ends = dict.fromkeys(map(terms.gain, (ordered[0], ordered[-1])))
        named = f"Every run was still improving at the last evaluation ({' to '.join(ends)})"
    else:
        each = ", ".join(f"{labels[row.run.name]} ({terms.gain(gain)})" for gain, row in gains)
        named = f"Still improving at the last evaluation: {each}"
    return f"{named}. After more training the runs may rank differently."


def _past_best(comparable: Sequence[RunFigures], labels: dict[str, str]) -> str:
    """Name the runs that got worse again after their best, as an overfitting model does."""
    named: list[str] = []
    for row in comparable:
        terms = terms_of([row.run])
        # Judge training itself by its last model, not by the mean of the last epochs' models.
        last = row.run.last
        if row.best_score is None or last is None or last.score is None:
            continue
        if not row.run.metric.is_past(row.best_score, last.score):
            continue
        best = next(each for each in row.run.evaluations if each.score == row.best_score)
        when = f"step {best.step}" if best.epoch is None else f"epoch {epoch_text(best.epoch)}"
        scores = f"{terms.with_unit(row.best_score)} after {when}, {terms.number(last.score)} at the end"
        named.append(f"{labels[row.run.name]} ({scores})")
    if not named:
        return ""
    return (
        f"Past the best: {', '.join(named)}. Such a model overfits: use fewer epochs, more data or more "
        "dropout."
    )
