"""The tables of a comparison: one set of columns for the terminal, the page and CSV."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from markupsafe import Markup

from speechdp.experiments.compare.plan import FRAMES, TIME
from speechdp.report.compare.groups import Group, Spread
from speechdp.report.kit import formatting
from speechdp.report.kit.columns import (
    OVER_LOWEST,
    OVER_LOWEST_HIGH,
    OVER_LOWEST_LOW,
    STEPS,
    FigureColumn,
    known_metrics,
    metric_column,
    resumed_note,
    throughput,
)
from speechdp.report.kit.metric_names import Terms, terms_of
from speechdp.report.kit.speeds import RACED_HIGH, RACED_LOW, RACED_SPEED, any_raced, ratio_text
from speechdp.report.kit.tables import Column, RowHead, ShownTable, Value, csv_text, with_figures
from speechdp.report.runs.raced import RacedSpeed

#: Heading and note of each mode's table.
_MODES = {
    FRAMES: ("At equal frames", "Every run trained for the same number of epochs."),
    TIME: (
        "At equal time",
        "Every run trained for about as long as the slowest run at equal frames with as many ranks and the "
        "same seed, with the learning-rate schedule stretched to that time.",
    ),
}
_WHOLE_RUNS = {FRAMES: ("All runs", "Every run is the whole script.")}
_LOWEST_NOTE = "WER over lowest: above the lowest on as many ranks [95 % interval of the difference]."

_TRAFFIC = FigureColumn(
    "sent_bytes_per_s", "sent per rank", "MB/s", "Data that a rank sends per second of training (mean).",
    lambda row: row.sent_per_s, formatting.megabytes, is_detail=True,
)  # fmt: skip
_TO_TARGET = FigureColumn(
    "time_to_target_s", "to target", "s", "Training time to the first evaluation at the target.",
    lambda row: row.time_to_target_s, lambda value: f"{value:,.1f}", is_detail=True,
)  # fmt: skip
_WER = FigureColumn(
    "wer", "WER", "%", "Word error rate of the final model.", lambda row: row.wer,
    lambda value: f"{100 * value:,.1f}",
)  # fmt: skip
_DISTANCE = FigureColumn(
    "replica_distance", "replicas apart", "%",
    "Largest distance of a replica from the evaluated model, divided by that model's norm.",
    lambda row: row.replica_distance, lambda value: formatting.rough(100 * value),
    is_detail=True,
)  # fmt: skip
_STALENESS = FigureColumn(
    "staleness", "staleness", "updates", "Mean age of what was exchanged; asynchronous strategies only.",
    lambda row: row.staleness, formatting.rough,
    is_detail=True,
)  # fmt: skip


def _epochs(group: Group) -> str:
    if group.epochs is None:
        return formatting.MISSING
    low, high = min(group.epochs.values), max(group.epochs.values)
    return f"{low:.0f}" if low == high else f"{low:.0f}-{high:.0f}"


def _seeds(group: Group) -> str:
    finished, runs = len(group.finished), len(group.runs)
    return str(finished) if finished == runs else f"{finished} of {runs}"


_RANKS = Column[Group]("ranks", "ranks", "", "Number of ranks.", lambda group: group.ranks)
_RATE = Column[Group](
    "learning_rate", "learning rate", "",
    "Of those tried, the one with the best held-out value at the end of a run of its own.",
    lambda group: group.learning_rate, formatting.learning_rate,
)  # fmt: skip
_EPOCHS = Column[Group](
    "epochs", "epochs", "", "Passes over the training split.",
    lambda group: group.epochs.mean if group.epochs else None, cell=_epochs, is_detail=True,
)  # fmt: skip
_SEEDS = Column[Group](
    "seeds", "seeds", "", "Finished runs.", lambda group: len(group.finished), cell=_seeds, is_detail=True
)


def _raced_speeds(group: Group) -> list[RacedSpeed]:
    """Return a group's speed in its race; for one rank, which takes part in every race, in each of them."""
    return [group.raced] if group.raced else list(group.alone_on.values())


def _raced_text(group: Group) -> str:
    texts = [ratio_text(speed) for speed in _raced_speeds(group)]
    if len(texts) > 1:
        texts = [f"{text} on {ranks}" for text, ranks in zip(texts, group.alone_on, strict=True)]
    return "; ".join(text.replace(" ", "\u00a0") for text in texts) or formatting.MISSING


def _raced_ratio(group: Group) -> float | None:
    """Return the ratio of a group's speed; for one rank in several races, that of the first."""
    return next((speed.ratio for speed in _raced_speeds(group)), None)


#: Also shows one rank, which has a speed in each of the races.
_RACED_SPEED = replace(RACED_SPEED, value=_raced_ratio, cell=_raced_text)


def spread_note(groups: Sequence[Group]) -> str:
    """Return what a cell holds if a strategy has several seeds; "" if none has."""
    seeds = [len(group.finished) for group in groups if group.finished]
    if max(seeds, default=0) < 2:
        return ""
    alone = "; one seed has no deviation" if min(seeds) == 1 else ""
    return f"Mean over seeds ± sample standard deviation{alone}."


def group_terms(groups: Sequence[Group]) -> Terms:
    """Return the terms for the held-out figures of the groups' runs."""
    return terms_of(run.result for group in groups for run in group.runs if run.result is not None)


def written(measure: FigureColumn, group: Group) -> str:
    """Write mean and deviation of a group's figure, and how many runs have it if not all do."""
    spread = group.spread(measure.value)
    if spread is None:
        return formatting.MISSING
    text = measure.number(spread.mean)
    if spread.deviation is not None:
        text += f" ± {_as_exact(measure.number(spread.deviation), text)}"
    finished = len(group.finished)
    return text if len(spread.values) == finished else f"{text} ({len(spread.values)} of {finished})"


def _as_exact(deviation: str, mean: str) -> str:
    """Return a deviation with at most as many decimals as its mean: `0.30` beside `5.92`."""
    digits = len(mean.partition(".")[2])
    if 0 < digits < len(deviation.partition(".")[2]):
        return f"{float(deviation.replace(',', '')):,.{digits}f}"
    return deviation


def _over_seeds(measure: FigureColumn) -> Column[Group]:
    """Return a column with the mean of a figure over seeds."""

    def value(group: Group) -> Value:
        spread = group.spread(measure.value)
        return None if spread is None else spread.mean

    return replace(measure, value=value, cell=lambda group: written(measure, group))  # type: ignore[arg-type,return-value]


def _metric_columns(groups: Sequence[Group]) -> list[FigureColumn]:
    """Return the columns of the metrics of the groups' task."""
    rows = (row for group in groups for row in group.figures)
    known = known_metrics(group_terms(groups).task.metrics, rows)
    return [metric_column(metric, is_first=n == 0) for n, metric in enumerate(known)]


def measures(groups: Sequence[Group]) -> tuple[FigureColumn, ...]:
    """Return the columns of the groups' figures, including the metrics of their task."""
    terms = group_terms(groups)
    speed = replace(throughput(terms), number=lambda value: f"{value:,.0f}")
    metrics = _metric_columns(groups)
    recorded = [measure for measure in (_WER, _DISTANCE) if measure.key in terms.kind.measures]
    return (speed, _TRAFFIC, _TO_TARGET, *metrics, *recorded, _STALENESS)


def shown_columns(groups: Sequence[Group]) -> tuple[Column[Group], ...]:
    """Return the columns that have a figure; the word error rate only if the runs' task decodes."""
    terms = group_terms(groups)
    shown = [measure for measure in measures(groups) if terms.task.decodes or measure is not _WER]
    length = _EPOCHS if _EPOCHS.key in terms.kind.measures else _over_seeds(STEPS)
    # The race's speed stands first: it compares settings, whereas runs had the machine one after another.
    raced = any_raced(groups)
    speed, *others = map(_over_seeds, shown)
    keys = [column.key for column in others]
    if _WER.key in keys:
        others.insert(keys.index(_WER.key) + 1, OVER_LOWEST)
    figures = [_RATE, _RACED_SPEED, replace(speed, is_detail=raced), *others]
    return (_RANKS, length, _SEEDS, *with_figures(figures, groups))


def trial_table(
    trials: Sequence[Group], groups: Sequence[Group], marks: Mapping[str, Markup]
) -> ShownTable[Group]:
    """Return the table of the learning rates tried, with the chosen ones marked.

    Args:
        groups: the rows of the other tables.
    """
    taken = {(group.strategy, group.ranks, group.learning_rate) for group in groups}
    rows = [
        (
            RowHead(
                group.label,
                status="failed" if group.failures else "",
                mark=marks.get(group.label),
                is_pale=not group.finished,
                is_chosen=(group.strategy, group.ranks, group.learning_rate) in taken,
                begins=number > 0
                and (trials[number - 1].strategy, trials[number - 1].ranks) != (group.strategy, group.ranks),
            ),
            group,
        )
        for number, group in enumerate(trials)
    ]
    rate = replace(_RATE, meaning="Learning rate of the run.")
    note = "One run each, with a seed of their own; the best of a strategy on as many ranks is marked."
    columns = (_RANKS, rate, *with_figures([*map(_over_seeds, _metric_columns(trials))], trials))
    return ShownTable("learning-rates", "Learning rates tried", columns, rows, "strategy", note)


def make_tables(
    groups: Sequence[Group], chosen: Collection[Group], marks: Mapping[str, Markup]
) -> list[ShownTable[Group]]:
    """Return a table for each mode that has runs.

    Args:
        chosen: the groups that the answer names.
        marks: mark before the name of each strategy.
    """
    columns, tables = shown_columns(groups), []
    modes = _MODES if _EPOCHS.key in group_terms(groups).kind.measures else _WHOLE_RUNS
    for mode, (title, note) in modes.items():
        rows: list[tuple[RowHead, Group]] = []
        for group in groups:
            if group.mode == mode:
                failed = len(group.failures)
                head = RowHead(
                    group.label,
                    status=f"{failed} failed" if failed else "",
                    mark=marks[group.label],
                    is_pale=not group.finished,
                    is_chosen=any(group is other for other in chosen),
                    begins=bool(rows) and rows[-1][1].ranks != group.ranks,
                )
                rows.append((head, group))
        if rows:
            finished = (run for _, group in rows for run in group.finished)
            resumed = resumed_note((run.result, run.record.planned.title) for run in finished if run.result)
            lowest = _LOWEST_NOTE if OVER_LOWEST in columns else ""
            note = " ".join(filter(None, (note, resumed, lowest)))  # noqa: PLW2901
            tables.append(ShownTable(f"figures-{mode}", title, columns, rows, "strategy", note))
    return tables


def csv_of_groups(groups: Sequence[Group], target: float | None) -> str:
    """Return the table as CSV, in plain units: shares and rates 0 to 1, bytes, s; empty if unknown.

    Args:
        groups: the rows of all tables, including the trials of learning rates.
    """
    parts = ("n", "mean", "sd", "min", "max")
    raced_columns = (RACED_SPEED, RACED_LOW, RACED_HIGH)
    differences = (OVER_LOWEST, OVER_LOWEST_LOW, OVER_LOWEST_HIGH)
    all_measures, metric = measures(groups), group_terms(groups).metric
    until = None if target is None else metric.score(target)

    def line(group: Group) -> list[Value]:
        errors, epochs = group.word_errors, group.epochs
        alone = None if group.alone is None else replace(group, raced=group.alone)
        figures = [value for measure in all_measures for value in _parts(group.spread(measure.value))]
        return [
            group.mode, group.ranks, group.strategy, group.learning_rate, len(group.runs),
            len(group.finished), len(group.failures), epochs.mean if epochs else None, *figures,
            errors.low if errors else None, errors.high if errors else None,
            *(column.value(group) for column in differences), until,
            *(column.value(group) for column in raced_columns),
            *(None if alone is None else column.value(alone) for column in raced_columns),
        ]  # fmt: skip

    head = ["mode", "ranks", "strategy", "learning_rate", "seeds", "finished", "failed", "epochs_mean"]
    keys = [f"{measure.key}_{part}" for measure in all_measures for part in parts]
    more = ["wer_low", "wer_high", *(column.key for column in differences), f"target_{metric.key}"]
    raced = [column.key for column in raced_columns]
    # One rank takes part in the race on each number of ranks: write its speed beside those it raced with.
    raced += [f"one_rank_{key}" for key in raced]
    return csv_text([*head, *keys, *more, *raced], map(line, groups))


def _parts(spread: Spread | None) -> list[Value]:
    if spread is None:
        return [0, None, None, None, None]
    return [len(spread.values), spread.mean, spread.deviation, min(spread.values), max(spread.values)]
