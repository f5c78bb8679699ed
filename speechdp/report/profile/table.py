"""The tables of a profile, for the page and the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from speechdp.experiments.profile.derived import (
    STEP,
    Scaling,
    first_step_factor,
    job_costs,
    job_steps,
    loader_jobs,
    make_loading,
)
from speechdp.experiments.profile.record import STRONG, WEAK, Profile, ProfileJob, in_order
from speechdp.report.kit import formatting
from speechdp.report.kit.formatting import milliseconds, number, rank_count
from speechdp.report.kit.tables import Cell, Column, make_cell
from speechdp.report.profile.usage import mean_utilisation
from speechdp.report.profile.words import SCALING_TITLES, loader_title

#: An efficiency below this catches the eye.
LOW_EFFICIENCY = 0.75
EFFICIENCY = {
    WEAK: "Time on the fewest ranks over time on so many.",
    STRONG: "Time on the fewest ranks, shared among so many, over their time.",
}


@dataclass(frozen=True)
class Row:
    """A row: what it is of, and its figures by column; None where there is none."""

    name: str
    values: dict[str, Any]


@dataclass(frozen=True)
class ShownTable:
    """A table.

    Attributes:
        id: file-safe.
        first: heading of the rows' names.
        note: what stands below.
    """

    id: str
    title: str
    first: str
    columns: tuple[Column[Row], ...]
    rows: tuple[Row, ...]
    note: str = ""

    @property
    def width(self) -> int:
        """About how many letters it is wide; headings are broken between words."""
        names = max((len(row.name) for row in self.rows), default=0)
        columns = [
            max(
                *(len(word) for word in column.title.split()),
                *(len(column.text(row)) for row in self.rows),
                0,
            )
            for column in self.columns
        ]
        return names + sum(columns) + 3 * len(columns)

    def cells(self) -> list[tuple[Row, list[Cell]]]:
        """Return each row with its cells, for the page."""
        return [(row, [make_cell(column, row) for column in self.columns]) for row in self.rows]


def make_tables(profile: Profile, scalings: Sequence[Scaling], job: ProfileJob | None) -> list[ShownTable]:
    """Return all tables there is something for; `job` is the one whose single steps are shown."""
    tables = [_scaling_table(scaling) for scaling in scalings if scaling.kind in (WEAK, STRONG)]
    single = [scaling for scaling in scalings if scaling.kind not in (WEAK, STRONG)]
    if single:
        tables.append(_single_table(single))
    if job is not None:
        tables += [_first_steps_table(job, profile.settings.warmup_steps)]
    tables += _loader_table(profile)
    if job is not None and job.memory is not None:
        tables.append(_memory_table(job))
    return tables


def _ms_column(ranks: int) -> Column[Row]:
    def text(row: Row) -> str:
        cost = row.values.get(f"ms_{ranks}")
        if cost is None:
            return formatting.MISSING
        total = milliseconds(cost.total_s)
        if not cost.forward_s or not cost.backward_s:
            return total
        return f"{milliseconds(cost.forward_s)} + {milliseconds(cost.backward_s)} = {total}"

    def value(row: Row) -> float | None:
        cost = row.values.get(f"ms_{ranks}")
        return None if cost is None else float(1e3 * cost.total_s)

    meaning = "Median step after the warm-up, mean over ranks: forward + backward = both."
    return Column(f"ms_{ranks}", rank_count(ranks), "ms: forward + backward", meaning, text, value)


def _percent_column(key: str, title: str, meaning: str, low: float = 0.0, digits: int = 0) -> Column[Row]:
    return Column(
        key, title, "%", meaning, lambda row: formatting.percent(row.values.get(key), digits),
        lambda row: row.values.get(key), is_notable=lambda row: (row.values.get(key) or 1.0) < low,
    )  # fmt: skip


def _number_column(key: str, title: str, unit: str, meaning: str) -> Column[Row]:
    def text(row: Row) -> str:
        value = row.values.get(key)
        return formatting.MISSING if value is None else number(value)

    return Column(key, title, unit, meaning, text, lambda row: row.values.get(key))


def _efficiencies(scaling: Scaling, kind: str) -> list[Column[Row]]:
    more = scaling.ranks[1:]
    meaning = EFFICIENCY[kind]
    return [
        _percent_column(f"efficiency_{n}", f"efficiency, {n} ranks", meaning, LOW_EFFICIENCY) for n in more
    ]


def _scaling_row(scaling: Scaling, function: str) -> Row:
    costs = scaling.costs[function]
    values: dict[str, Any] = {f"ms_{ranks}": costs.get(ranks) for ranks in scaling.ranks}
    values |= {f"efficiency_{ranks}": scaling.efficiency(function, ranks) for ranks in scaling.ranks[1:]}
    if scaling.ranks[-1] in costs:
        values["share"] = costs[scaling.ranks[-1]].share
    return Row(function, values)


def _scaling_table(scaling: Scaling) -> ShownTable:
    share = f"Share of the step on {rank_count(scaling.ranks[-1])}, over all steps after the warm-up."
    columns = [
        *(_ms_column(ranks) for ranks in scaling.ranks),
        *_efficiencies(scaling, scaling.kind),
        _percent_column("share", "of the step", share, digits=1),
    ]
    rows = tuple(_scaling_row(scaling, function) for function in scaling.costs)
    formula = "t1 / tN" if scaling.kind == WEAK else "t1 / (N·tN)"
    note = f"Efficiency is {formula}, against {rank_count(scaling.ranks[0])}." if scaling.ranks[1:] else ""
    return ShownTable(
        f"times-{scaling.kind}", SCALING_TITLES[scaling.kind], "function", tuple(columns), rows, note
    )


def _single_table(scalings: Sequence[Scaling]) -> ShownTable:
    widest = max(scalings, key=lambda scaling: len(scaling.ranks))
    columns = [*(_ms_column(ranks) for ranks in widest.ranks), *_efficiencies(widest, WEAK)]
    rows = tuple(_scaling_row(scaling, scaling.kind) for scaling in scalings if scaling.kind in scaling.costs)
    note = f"Efficiency is t1 / tN, against {rank_count(widest.ranks[0])}." if widest.ranks[1:] else ""
    return ShownTable("times-single", "A module alone", "module", tuple(columns), rows, note)


def _first_steps_table(job: ProfileJob, warmup_steps: int) -> ShownTable:
    steps = job_steps(job)[: max(warmup_steps + 1, 2)]
    costs = job_costs(job, warmup_steps)
    rows = []
    for name in [*in_order(set(costs) - {STEP}), STEP]:
        values: dict[str, Any] = {}
        for together in steps:
            seconds = [s.wall_s if name == STEP else s.seconds(name) for s in together]
            values[f"step_{together[0].step}"] = 1e3 * sum(seconds) / len(seconds)
        values["usual"] = 1e3 * costs[name].total_s
        values["factor"] = first_step_factor(job, name, warmup_steps)
        rows.append(Row(name, values))
    columns = [
        *(_number_column(f"step_{s[0].step}", f"step {s[0].step}", "ms", "Mean over ranks.") for s in steps),
        _number_column("usual", "usual", "ms", "Median step after the warm-up."),
        _number_column("factor", "first / usual", "times", "Time of the first step over the usual one."),
    ]
    title = f"First steps of {job.name}"
    return ShownTable("first-steps", title, "function", tuple(columns), tuple(rows))


def _loader_table(profile: Profile) -> list[ShownTable]:
    rows = []
    for job in loader_jobs(profile):
        loading = make_loading(job, profile.settings.warmup_steps)
        rows.append(
            Row(
                f"{loader_title(job)} ({job.name})",
                {
                    "step": 1e3 * loading.step_s,
                    "wait": 1e3 * loading.wait_s,
                    "share": loading.share,
                    "rate": loading.frames_per_s,
                    "use": (mean_utilisation(job) if job.sample_paths else None),
                },
            )
        )
    columns = (
        _number_column("step", "step", "ms", "Mean step after the warm-up."),
        _number_column("wait", "waiting for batches", "ms a step", "Mean over steps and ranks."),
        _percent_column("share", "of the step", "Waiting over the step's time.", digits=1),
        _number_column("rate", "frames/s", "", "Frames of all ranks over the longest rank's step time."),
        _number_column("use", "utilisation", "%", "Mean over ranks and time, as in the picture."),
    )
    if not rows:
        return []
    return [ShownTable("loaders", "Trainloaders", "trainloader", columns, tuple(rows))]


def _memory_table(job: ProfileJob) -> ShownTable:
    assert job.memory is not None
    keys = ("peak_bytes", "rss_bytes", "gpu_peak_bytes", "parameters_bytes", "optimizer_bytes")
    titles = ("peak", "process (RSS)", "GPU (allocated)", "parameters and gradients", "optimizer")
    columns = tuple(
        _number_column(key, title, "MB", "At its peak, in 10^6 bytes.")
        for key, title in zip(keys, titles, strict=True)
        if any(getattr(rank, key) is not None for rank in job.memory.ranks)
    )
    rows = tuple(
        Row(f"rank {rank.rank}", {key: _megabytes(getattr(rank, key)) for key in keys})
        for rank in job.memory.ranks
    )
    note = f"Largest over smallest peak: {job.memory.balance:.3f}."
    return ShownTable("memory", f"Memory of {job.name}", "rank", columns, rows, note)


def _megabytes(value: int | None) -> float | None:
    return None if value is None else value / 1e6


def terminal_tables(tables: Sequence[ShownTable]) -> RenderableType:
    """Return the tables for a terminal; names are plain text, never markup."""
    return Group(*(_terminal_table(table) for table in tables))


def _terminal_table(shown: ShownTable) -> Table:
    table = Table(
        title=Text(shown.title), title_justify="left", header_style="bold", box=box.SIMPLE_HEAD,
        caption=Text(shown.note) if shown.note else None, caption_justify="left",
    )  # fmt: skip
    table.add_column(shown.first, overflow="fold", min_width=11)
    for column in shown.columns:
        table.add_column(f"{column.title}\n{column.unit}", justify="right", overflow="fold")
    for row in shown.rows:
        cells = [
            Text(column.text(row), style="bold yellow" if column.is_notable(row) else "")
            for column in shown.columns
        ]
        table.add_row(Text(row.name), *cells)
    return table
