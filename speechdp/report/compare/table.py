"""The table of a comparison: its columns once, written for the terminal, as CSV and for the page."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from speechdp.experiments.compare.plan import FRAMES
from speechdp.report.compare.groups import Group, Spread
from speechdp.report.kit import formatting
from speechdp.report.kit.metric_names import Terms, metric_text, terms_of
from speechdp.report.kit.tables import Cell, Column, Value, make_cell
from speechdp.report.runs.derived import steps_taken
from speechdp.tasks.metrics import Metric

TITLES = {FRAMES: "At equal frames", "time": "At equal time"}
SPREAD_NOTE = "Mean over seeds ± sample standard deviation; one seed has none."


@dataclass(frozen=True)
class TableMeasure:
    """A figure of a group: its column, and how a number is written, in the column's unit."""

    key: str
    title: str
    unit: str
    meaning: str
    spread: Callable[[Group], Spread | None]
    number: Callable[[float], str]


def _times(factor: float, digits: int) -> Callable[[float], str]:
    return lambda value: f"{value * factor:,.{digits}f}".replace("-", formatting.MINUS)


def _distance(value: float) -> str:
    return "0" if value == 0 else f"{100 * value:.2g}"


WER = TableMeasure(
    "wer", "WER", "%", "Word error rate of the final model.", lambda g: g.error_rates, _times(100, 1)
)
_BEFORE_METRICS: tuple[TableMeasure, ...] = (
    TableMeasure(
        "frames_per_s", "frames/s", "", "Frames of all ranks over the longest rank's step time.",
        lambda g: g.frames_per_s, _times(1, 0),
    ),
    TableMeasure(
        "sent_bytes_per_s", "sent", "MB/s a rank", "What a rank sends in a second of training (mean).",
        lambda g: g.sent_per_s, lambda value: f"{value / 1e6:.3g}",
    ),
    TableMeasure(
        "time_to_target_s", "to target", "s", "Training time to the first evaluation at the target.",
        lambda g: g.to_target_s, _times(1, 1),
    ),
)  # fmt: skip
_AFTER_METRICS: tuple[TableMeasure, ...] = (
    WER,
    TableMeasure(
        "replica_distance", "replicas apart", "%",
        "Largest distance of a replica from the model evaluated, over that model's norm.",
        lambda g: g.distance, _distance,
    ),
    TableMeasure(
        "staleness", "staleness", "updates", "Mean age of what was exchanged; asynchronous strategies only.",
        lambda g: g.staleness, lambda value: f"{value:.2g}",
    ),
)  # fmt: skip


def written(measure: TableMeasure, group: Group) -> str:
    """Return mean and deviation of a group's figure, and how many runs have it where not all do."""
    spread = measure.spread(group)
    if spread is None:
        return formatting.MISSING
    text = measure.number(spread.mean)
    if spread.deviation is not None:
        text += f" ± {measure.number(spread.deviation)}"
    finished = len(group.finished)
    return text if len(spread.values) == finished else f"{text} ({len(spread.values)} of {finished})"


def _epochs(group: Group) -> str:
    if group.epochs is None:
        return formatting.MISSING
    low, high = min(group.epochs.values), max(group.epochs.values)
    return f"{low:.0f}" if low == high else f"{low:.0f}-{high:.0f}"


def _seeds(group: Group) -> str:
    return (
        f"{len(group.finished)}"
        if len(group.finished) == len(group.runs)
        else (f"{len(group.finished)} of {len(group.runs)}")
    )


def _mean(measure: TableMeasure) -> Callable[[Group], Value]:
    def value(group: Group) -> Value:
        spread = measure.spread(group)
        return None if spread is None else spread.mean

    return value


def _text(measure: TableMeasure) -> Callable[[Group], str]:
    return lambda group: written(measure, group)


_COUNTS: tuple[Column[Group], ...] = (
    Column("ranks", "ranks", "", "Number of ranks.", lambda g: str(g.ranks), lambda g: g.ranks),
    Column(
        "epochs", "epochs", "", "Passes over the training split.",
        _epochs, lambda g: g.epochs.mean if g.epochs else None,
    ),
    Column("seeds", "seeds", "", "Finished runs.", _seeds, lambda g: len(g.finished)),
)  # fmt: skip


def _steps(group: Group) -> float | None:
    """Return the mean over seeds."""
    timings = [run.result.timing for run in group.finished if run.result is not None]
    steps = [steps_taken(timing) for timing in timings if timing is not None]
    return sum(steps) / len(steps) if steps else None


_STEPS = Column[Group](
    "steps", "steps", "", "Steps of the loop; where ranks go at their own pace, of the fastest.",
    lambda g: formatting.count(_steps(g)), _steps,
)  # fmt: skip


def group_terms(groups: Sequence[Group]) -> Terms:
    """Return what the held-out figures of the groups' runs are called."""
    return terms_of(run.result for group in groups for run in group.runs if run.result is not None)


def measures(groups: Sequence[Group]) -> tuple[TableMeasure, ...]:
    """Return the figures of the groups, those that their task declares among them."""
    metrics = [
        _metric_measure(metric, is_first=place == 0)
        for place, metric in enumerate(group_terms(groups).task.metrics)
    ]
    if not is_of_script(groups):
        return (*_BEFORE_METRICS, *metrics, *_AFTER_METRICS)
    speed = "What `step(weight=)` counts (frames, tokens, examples; else steps) of all ranks in a second."
    items = replace(_BEFORE_METRICS[0], key="items_per_s", title="items/s", meaning=speed)
    return (items, *_BEFORE_METRICS[1:], *metrics, _AFTER_METRICS[-1])


def is_of_script(groups: Sequence[Group]) -> bool:
    """Tell whether a script of the user's was run."""
    return any(run.result is not None and run.result.is_of_script for group in groups for run in group.runs)


def titles(groups: Sequence[Group]) -> dict[str, str]:
    """Return the heading of each mode's table; a script has but one."""
    return {FRAMES: "All runs"} if is_of_script(groups) else TITLES


def _metric_measure(metric: Metric, *, is_first: bool) -> TableMeasure:
    return TableMeasure(
        metric.recorded_as if is_first else metric.key,
        metric.title,
        metric.unit,
        metric.meaning,
        lambda group: group.values.get(metric.key),
        lambda value: metric_text(metric, value),
    )


def shown_columns(groups: Sequence[Group]) -> tuple[Column[Group], ...]:
    """Return the columns to show: no word error rate where the runs' task has none."""
    decodes = group_terms(groups).task.decodes
    shown = [measure for measure in measures(groups) if decodes or measure is not WER]
    counts = (_COUNTS[0], _STEPS, _COUNTS[2]) if is_of_script(groups) else _COUNTS
    return (*counts, *(Column(m.key, m.title, m.unit, m.meaning, _text(m), _mean(m)) for m in shown))


@dataclass(frozen=True)
class ComparisonTable:
    """The table for a terminal."""

    groups: Sequence[Group]
    target: float | None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield one table a mode; rich calls this."""
        for mode, title in titles(self.groups).items():
            rows = [group for group in self.groups if group.mode == mode]
            if rows:
                yield _terminal_table(rows, title, shown_columns(self.groups))
        if self.target is not None:
            until = group_terms(self.groups).with_unit(self.target)
            yield Text(f"to target: until {until}.  {SPREAD_NOTE}")


def _terminal_table(groups: Sequence[Group], title: str, columns: Sequence[Column[Group]]) -> Table:
    table = Table(title=title, title_justify="left", header_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("strategy", overflow="fold", min_width=12)
    for column in columns:
        table.add_column(f"{column.title}\n{column.unit}", justify="right", overflow="fold")
    for index, group in enumerate(groups):
        last_of_ranks = index + 1 < len(groups) and groups[index + 1].ranks != group.ranks
        cells = [Text(group.label)] + [Text(column.text(group)) for column in columns]
        table.add_row(*cells, end_section=last_of_ranks, style="" if group.finished else "dim")
    return table


def page_rows(groups: Sequence[Group], columns: Sequence[Column[Group]]) -> list[tuple[Group, list[Cell]]]:
    """Return each group with its cells, for the page."""
    return [(group, [make_cell(column, group) for column in columns]) for group in groups]


def csv_text(groups: Sequence[Group], target: float | None) -> str:
    """Return the table as CSV, in plain units: shares and rates 0 to 1, bytes, s; empty for unknown."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    parts = ("n", "mean", "sd", "min", "max")
    all_measures, metric = measures(groups), group_terms(groups).metric
    keys = [f"{measure.key}_{part}" for measure in all_measures for part in parts]
    head = ["mode", "ranks", "strategy", "seeds", "finished", "failed", "epochs_mean"]
    writer.writerow([*head, *keys, "wer_low", "wer_high", f"target_{metric.key}"])
    until = None if target is None else metric.score(target)
    for group in groups:
        values: list[Value] = [group.mode, group.ranks, group.strategy, len(group.runs), len(group.finished)]
        values += [len(group.failures), group.epochs.mean if group.epochs else None]
        for measure in all_measures:
            values += _parts(measure.spread(group))
        errors = group.word_errors
        values += [errors.low, errors.high] if errors else [None, None]
        writer.writerow("" if value is None else value for value in [*values, until])
    return buffer.getvalue()


def _parts(spread: Spread | None) -> list[Value]:
    if spread is None:
        return [0, None, None, None, None]
    return [len(spread.values), spread.mean, spread.deviation, min(spread.values), max(spread.values)]
