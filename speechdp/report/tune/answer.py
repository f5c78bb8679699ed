"""State in words what a search has found."""

from __future__ import annotations

from speechdp.counting import counted
from speechdp.experiments.tune.curves import Finish
from speechdp.experiments.tune.record import PREDICT, SettingRecord, TuneRecord
from speechdp.report.kit import formatting
from speechdp.report.kit.answer import Answer
from speechdp.report.kit.metric_names import Terms
from speechdp.report.kit.outside import load_text
from speechdp.report.kit.scripts import several_versions, without_seed, wrong_way
from speechdp.report.tune.search import PREDICTED, Search
from speechdp.report.tune.tables import predicted_text, ratio_text

#: A prediction is called wrong if the interval of the race is away from it by more than this factor.
_OFF = 1.1


def find_answer(search: Search) -> Answer:
    """Return the answer of a search, finished or not."""
    record, terms = search.record, search.terms
    cautions = ["Settings were judged on held-out data, which are no longer fit to report a final figure on."]
    if not record.has_measured:
        return Answer("Nothing is measured yet: the same command tries again, also with other settings.")
    if not record.chosen:
        return Answer("Nothing is chosen yet: the same command continues the search.")
    best = record.of(record.chosen)
    end = best.finish
    if end is None:
        return _alone(search, best) if record.completed else _so_far(search, best)
    assert record.target is not None
    target = _target_text(terms, record.target)
    if not end.is_reached:
        headline = f"{_none_reaches(record, target)}; {best.name} comes closest."
    else:
        compared = any(one.times_s for one in record.tried if one is not best)
        how = "soonest" if compared else "and is the only one left to do so"
        headline = f"{best.name} {_reaches(best, record)} {target} {how}: {_range_text(end)}."
    # The first is gradient averaging itself; with another learning rate it is as fast.
    is_compared = best.ratio is not None and best.setting.raced != record.tried[0].setting.raced
    details = [
        *_expected_text(record),
        f"It {'is predicted to train' if search.speed == PREDICTED else 'trains'} at "
        f"{formatting.count(best.frames_per_s)} {terms.amount}/s with back-end {record.backend}"
        + (f", {ratio_text(best)} times the speed of gradient averaging." if is_compared else "."),
    ]
    others = [one for one in record.tried if one is not best]
    details += [_other(one, other, record) for one in others if (other := one.finish) is not None]
    if record.untold:
        names = ", ".join(record.untold)
        cautions.insert(
            0, f"{names} cannot be told apart from {best.name} with so few seeds and so short a race."
        )
    if len(end.times_s) < 2:
        cautions.insert(0, "There was only one seed, so it is not known which differences are chance.")
    cautions += [*_of_runs(search), *_one_batch_only(record), *_of_rates(record), *_doubts(search)]
    ruled_out = sum(bool(one.out_in) for one in record.tried)
    details.append(
        f"{counted(len(record.tried), 'setting')} were tried, {ruled_out} of them ruled out before the end, "
        f"in {formatting.seconds(record.spent_s)}."
    )
    return Answer(headline, tuple(details), tuple(cautions))


def _so_far(search: Search, best: SettingRecord) -> Answer:
    """State which setting is the best so far in an unfinished search."""
    # Each command reads a setting's own figures again and may have stopped before: look in the rungs, too.
    has_learnt = bool(best.rungs) or any(best.name in rung.scores for rung in search.record.rungs)
    by = f"at {formatting.count(best.frames_per_s)} {search.terms.amount}/s"
    if best.frames_per_s is None:
        by = "as an earlier command found; the race has to be held again"
    cautions = ["The search is not over: the same command continues it."]
    if not has_learnt:
        cautions.insert(0, "It was chosen by its speed alone: how well settings learn was not seen yet.")
    headline = f"{'Best' if has_learnt else 'Fastest'} so far: {best.name}, {by}."
    return Answer(headline, (), tuple(cautions))


def _of_runs(search: Search) -> list[str]:
    """Return cautions on the runs of a script, and on races, e.g. one that was too short."""
    names = [one.setting.raced.name for one in search.record.tried if one.ratio is not None]
    raced = {name: name for name in names}
    labelled = [(run, run.name) for run in search.all_runs]
    of_script = (
        without_seed(search.runs.values()),
        wrong_way(search.all_runs, " in another folder"),
        several_versions(labelled),
    )
    return [
        *search.races.cautions(dict.fromkeys(search.races.races, raced)),
        *filter(None, of_script),
    ]


def _alone(search: Search, best: SettingRecord) -> Answer:
    """State which setting is left if nothing had to be trained, and whether its speed was compared."""
    record, amount = search.record, search.terms.amount
    others = [one for one in record.tried if one is not best]
    uncompared = [one.name for one in others if one.out_in != PREDICT and one.ratio is None]
    headline, cautions = f"{best.name}: all other settings are ruled out by their speed.", list[str]()
    if not others:
        headline = f"{best.name}: no other setting was to be tried."
    elif uncompared:
        by_speed = len(others) - len(uncompared)
        headline = f"{best.name}: all other settings are ruled out, {by_speed or 'none'} of them by speed."
        cautions = [f"The speed of {', '.join(uncompared)} was not compared: the table says why."]
    if best.frames_per_s is None:
        speed = f"It is predicted to train at {predicted_text(best)} {amount}/s; it has not raced."
    else:
        speed = f"It trains at {formatting.count(best.frames_per_s)} {amount}/s."
    return Answer(headline, (speed,), (*cautions, *_doubts(search)))


def _target_text(terms: Terms, target: float) -> str:
    """Write the target with the name of its metric: `the held-out log-probability −0.407 nats/frame`."""
    text = terms.with_unit(target)
    return f"the {terms.metric.name} {text}" if terms.axis == terms.metric.unit else text


def _other(one: SettingRecord, end: Finish, record: TuneRecord) -> str:
    """State when another one of the last settings reaches the target."""
    if not end.is_reached:
        return f"{one.name}: {_range_text(end)}."
    return f"{one.name} {_reaches(one, record)} it after {_range_text(end)}."


def _none_reaches(record: TuneRecord, target: str) -> str:
    """State that no setting reaches the target, whether single seeds do, and within what time."""
    times = [time for one in record.tried for time in one.times_s]
    every = " with every seed" if any(time is not None for time in times) else ""
    end_s = record.rungs[-1].seconds
    if record.seen_s is None:
        until, reaches = formatting.seconds(end_s), "reaches"
    else:  # curves are extrapolated to at most twice their length
        until, reaches = formatting.seconds(2 * end_s), "is expected to reach"
    return f"None of the last settings {reaches} {target}{every} within {until} of training"


def _one_batch_only(record: TuneRecord) -> list[str]:
    """Return a caution if other batch sizes were tried, but not with the chosen strategy."""
    with_others = list(dict.fromkeys(one.strategy for one in record.tried if one.batch_size))
    chosen = record.of(record.chosen).strategy
    if not with_others or chosen in with_others:
        return []
    return [
        f"Other batches were tried with {' and '.join(with_others)} only; to try them with the chosen "
        f"setting, give the same command another folder and --strategies {chosen}."
    ]


def _of_rates(record: TuneRecord) -> list[str]:
    """Return a caution if all had one learning rate, or if a better one may lie beyond those tried."""
    trained = [one for one in record.tried if one.rungs]
    chosen = record.of(record.chosen)
    rates = sorted({one.learning_rate for one in trained if one.learning_rate is not None})
    if chosen.learning_rate is None:
        return [
            "All settings were trained with the same learning rate, which may suit some better than others: "
            "--learning-rates, with another folder, trains each with several."
        ] * (len(trained) > 1)
    if chosen.learning_rate not in (rates[0], rates[-1]):
        return []
    end = "lowest" if chosen.learning_rate == rates[0] else "highest"
    return [
        f"It has the {end} of the learning rates tried: one beyond it may be better; add it to "
        "--learning-rates, with another folder."
    ]


def _doubts(search: Search) -> list[str]:
    """Return a caution for each doubt about the predictions, if a decision depends on them."""
    record, notes = search.record, list[str]()
    ruled_out = sum(one.out_in == PREDICT for one in record.tried)
    what = f"what was ruled out by prediction ({counted(ruled_out, 'setting')})"
    compared = [one.name for one in record.backends if one.speed is not None]
    rests = [what] if ruled_out and record.backend in search.loads else []
    rests += ["the choice of the back-end"] if len(compared) > 1 else []
    busy = [f"{name}: {load_text(search.loads[name])}" for name in compared if name in search.loads]
    if busy and rests:
        notes.append(
            "While back-ends were measured, they did not have the cores to themselves "
            f"({'; '.join(busy)}), so predictions may be wrong: to be sure of {' and '.join(rests)}, search "
            "again in another folder while nothing else runs there."
        )
    refuted = [text for one in record.tried if (text := _refuted(record, one))]
    if ruled_out and refuted:
        notes.append(
            f"The race refutes a prediction: {refuted[0]}. To be sure of {what}, compare those settings by "
            "`speechdp compare`."
        )
    return notes


def _refuted(record: TuneRecord, one: SettingRecord) -> str:
    """State a setting's predicted and raced speed over the reference's; "" if the race does not refute it."""
    reference = record.tried[0]
    if not (one.predicted and reference.predicted) or one.ratio_low is None or one.ratio_high is None:
        return ""
    predicted = one.predicted / reference.predicted
    if one.ratio_low <= predicted * _OFF and one.ratio_high >= predicted / _OFF:
        return ""
    return (
        f"{one.name} was predicted to be {predicted:.2f} times as fast as {reference.name}, and is "
        f"{ratio_text(one)}"
    )


def _range_text(end: Finish) -> str:
    if not end.is_reached:
        runs = len(end.times_s)
        reached = runs - end.times_s.count(None)
        return (
            f"the target is reached by {reached} of {runs} runs" if reached else "the target is not reached"
        )
    text = f"{formatting.seconds(end.mean_s)} of training"
    if len(end.times_s) < 2:
        return text  # one seed has no range
    low, high = end.range_s
    return f"{text} [{formatting.seconds(low)} to {formatting.seconds(high)}]"


def _reaches(one: SettingRecord, record: TuneRecord) -> str:
    """Return the verb for a setting that reaches the target: measured or expected."""
    return "is expected to reach" if _is_ahead(one, record) else "reaches"


def _is_ahead(one: SettingRecord, record: TuneRecord) -> bool:
    """Return whether a setting did not reach the target with all seeds in the time it was trained."""
    seen_s = record.seen_s
    return seen_s is not None and any(time is None or time > seen_s for time in one.times_s)


def _expected_text(record: TuneRecord) -> tuple[str, ...]:
    """State which times are extrapolated rather than measured; empty if none are."""
    if record.seen_s is None or not any(_is_ahead(one, record) for one in record.tried):
        return ()
    return (
        f"The last settings were trained for {formatting.seconds(record.seen_s)}; later times are "
        "extrapolated from how much less each doubling of the time brought.",
    )
