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
from speechdp.report.kit.metric_names import SYNTHESIS, Terms, terms_of
from speechdp.report.kit.tables import Cell, Column, Value, make_cell

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


MEASURES: tuple[TableMeasure, ...] = (
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
    TableMeasure(
        "heldout_log_prob", "log-prob", "nats/frame", "Mean held-out log-probability at the end of training.",
        lambda g: g.log_probs, _times(1, 3),
    ),
    TableMeasure(
        "frame_accuracy", "frame acc.", "%", "Held-out frames whose most probable state is the aligned one.",
        lambda g: g.accuracy, _times(100, 1),
    ),
    TableMeasure(
        "wer", "WER", "%", "Word error rate of the final model.", lambda g: g.error_rates, _times(100, 1),
    ),
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


COLUMNS: tuple[Column[Group], ...] = (
    Column("ranks", "ranks", "", "Number of ranks.", lambda g: str(g.ranks), lambda g: g.ranks),
    Column(
        "epochs", "epochs", "", "Passes over the training split.",
        _epochs, lambda g: g.epochs.mean if g.epochs else None,
    ),
    Column("seeds", "seeds", "", "Finished runs.", _seeds, lambda g: len(g.finished)),
    *(Column(m.key, m.title, m.unit, m.meaning, _text(m), _mean(m)) for m in MEASURES),
)  # fmt: skip


#: Titles and meanings of a comparison of synthesis.
_OF_SYNTHESIS = {
    "heldout_log_prob": ("held-out L1", "Mean absolute error of spectrograms on held-out data at the end."),
    "frame_accuracy": ("attention max.", "Mean of the attention's largest weight on held-out data."),
}


def group_terms(groups: Sequence[Group]) -> Terms:
    """Return what the held-out figures of the groups' runs are called."""
    return terms_of(run.result for group in groups for run in group.runs if run.result is not None)


def shown_columns(groups: Sequence[Group]) -> tuple[Column[Group], ...]:
    """Return the columns to show, in the terms of the runs' task."""
    if not group_terms(groups).is_error:
        return COLUMNS
    shown: list[Column[Group]] = []
    for column in COLUMNS:
        title, meaning = _OF_SYNTHESIS.get(column.key, (column.title, column.meaning))
        named = replace(column, title=title, meaning=meaning)
        if column.key == "heldout_log_prob":
            error = TableMeasure(
                column.key, title, SYNTHESIS.unit, meaning, _errors, lambda value: f"{value:.4f}"
            )
            named = replace(named, unit=error.unit, text=_text(error), value=_mean(error))
        if column.key != "wer":
            shown.append(named)
    return tuple(shown)


def _errors(group: Group) -> Spread | None:
    spread = group.log_probs
    return None if spread is None else replace(spread, values=tuple(-value for value in spread.values))


@dataclass(frozen=True)
class ComparisonTable:
    """The table for a terminal."""

    groups: Sequence[Group]
    target: float | None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield one table a mode; rich calls this."""
        for mode, title in TITLES.items():
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
    keys = [f"{measure.key}_{part}" for measure in MEASURES for part in parts]
    head = ["mode", "ranks", "strategy", "seeds", "finished", "failed", "epochs_mean"]
    writer.writerow([*head, *keys, "wer_low", "wer_high", "target_log_prob"])
    for group in groups:
        values: list[Value] = [group.mode, group.ranks, group.strategy, len(group.runs), len(group.finished)]
        values += [len(group.failures), group.epochs.mean if group.epochs else None]
        for measure in MEASURES:
            values += _parts(measure.spread(group))
        errors = group.word_errors
        values += [errors.low, errors.high] if errors else [None, None]
        writer.writerow("" if value is None else value for value in [*values, target])
    return buffer.getvalue()


def _parts(spread: Spread | None) -> list[Value]:
    if spread is None:
        return [0, None, None, None, None]
    return [len(spread.values), spread.mean, spread.deviation, min(spread.values), max(spread.values)]
