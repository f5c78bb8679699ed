"""The tables of a profile, for the page and the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from speechdp.experiments.profile.derived import (
    STEP,
    Scaling,
    first_step_factor,
    job_costs,
    job_steps,
    loader_jobs,
    make_loading,
)
from speechdp.experiments.profile.record import (
    BLOCKING,
    FED,
    POOLED,
    STRONG,
    WEAK,
    Profile,
    ProfileJob,
    in_order,
)
from speechdp.report.kit import formatting
from speechdp.report.kit.formatting import milliseconds, number, rank_count
from speechdp.report.kit.tables import Column, RowHead, ShownTable
from speechdp.report.profile.answer import JUDGED_SHARE
from speechdp.report.profile.usage import mean_utilisation

#: Headings of the comparisons over numbers of ranks.
SCALING_TITLES = {
    WEAK: "Weak scaling: a rank's batch constant",
    STRONG: "Strong scaling: all ranks' batch constant",
}
_LOADER_TITLES = {
    BLOCKING: "blocking trainloader",
    POOLED: "trainloader beside training",
    FED: "trainloader on feeder ranks",
}
#: Efficiencies below this are highlighted.
LOW_EFFICIENCY = 0.75
EFFICIENCY = {
    WEAK: "Time on the fewest ranks divided by the time on this number of ranks.",
    STRONG: "Time on the fewest ranks, divided by the ratio of the numbers of ranks and by the time here.",
}


#: A row's figures by column key; None: there is none.
Figures = dict[str, Any]
ProfileTable = ShownTable[Figures]


def _table(
    name: str,
    title: str,
    first: str,
    columns: Iterable[Column[Figures]],
    rows: Mapping[str, Figures],
    note: str = "",
) -> ProfileTable:
    """Return a table of rows given by their names."""
    heads = [(RowHead(row), figures) for row, figures in rows.items()]
    return ShownTable(f"table-{name}", title, tuple(columns), heads, first, note)


def loader_title(job: ProfileJob) -> str:
    """Name the trainloader of a job, for a heading."""
    return _LOADER_TITLES.get(job.kind, job.name)


def make_tables(profile: Profile, scalings: Sequence[Scaling], job: ProfileJob | None) -> list[ProfileTable]:
    """Return all tables that have something to show; `job` is the one whose steps and memory are shown."""
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


def _ms_column(ranks: int) -> Column[Figures]:
    key = f"ms_{ranks}"

    def cell(row: Figures) -> str:
        cost = row.get(key)
        if cost is None:
            return formatting.MISSING
        total = milliseconds(cost.total_s)
        if not cost.forward_s or not cost.backward_s:
            return total
        return f"{milliseconds(cost.forward_s)} + {milliseconds(cost.backward_s)} = {total}"

    meaning = "Median step after the warm-up, mean over ranks: forward + backward = both."
    return Column(
        key, rank_count(ranks), "ms: forward + backward", meaning,
        lambda row: None if row.get(key) is None else 1e3 * row[key].total_s, cell=cell,
    )  # fmt: skip


def _percent_column(key: str, title: str, meaning: str, low: float = 0.0, digits: int = 0) -> Column[Figures]:
    """Return a column of shares; those below `low` are highlighted if the function is judged."""
    return Column(
        key, title, "%", meaning, lambda row: row.get(key), lambda share: formatting.percent(share, digits),
        is_notable=lambda row: (row.get(key) or 1.0) < low and row.get("share", 0.0) >= JUDGED_SHARE,
    )  # fmt: skip


def _number_column(key: str, title: str, unit: str, meaning: str) -> Column[Figures]:
    return Column(key, title, unit, meaning, lambda row: row.get(key), number)


def _efficiencies(more: Sequence[int], kind: str) -> list[Column[Figures]]:
    meaning = EFFICIENCY[kind]
    return [
        _percent_column(f"efficiency_{n}", f"efficiency, {n} ranks", meaning, LOW_EFFICIENCY) for n in more
    ]


def _scaling_row(scaling: Scaling, function: str) -> Figures:
    costs = scaling.costs[function]
    values: Figures = {f"ms_{ranks}": costs.get(ranks) for ranks in scaling.ranks}
    values |= {f"efficiency_{ranks}": scaling.efficiency(function, ranks) for ranks in scaling.ranks[1:]}
    if scaling.ranks[-1] in costs:
        values["share"] = costs[scaling.ranks[-1]].share
    return values


def _scaling_table(scaling: Scaling) -> ProfileTable:
    share = f"Share of the step on {rank_count(scaling.ranks[-1])}, over all steps after the warm-up."
    columns = [
        *(_ms_column(ranks) for ranks in scaling.ranks),
        *_efficiencies(scaling.ranks[1:], scaling.kind),
        _percent_column("share", "of the step", share, digits=1),
    ]
    rows = {function: _scaling_row(scaling, function) for function in scaling.costs}
    formula = "t1 / tN" if scaling.kind == WEAK else "t1 / (N·tN)"
    note = "Times are medians of the steps; shares are of the time of all steps, and do not follow from them."
    if scaling.ranks[1:]:
        note = f"Efficiency is {formula}, against {rank_count(scaling.ranks[0])}. {note}"
    return _table(f"times-{scaling.kind}", SCALING_TITLES[scaling.kind], "function", columns, rows, note)


def _single_table(scalings: Sequence[Scaling]) -> ProfileTable:
    # Some jobs may have failed, so not every module has all numbers of ranks.
    base, *more = sorted({ranks for scaling in scalings for ranks in scaling.ranks})
    columns = [*(_ms_column(ranks) for ranks in (base, *more)), *_efficiencies(more, WEAK)]
    found = [scaling for scaling in scalings if scaling.kind in scaling.costs]
    rows = {scaling.kind: _scaling_row(scaling, scaling.kind) for scaling in found}
    note = f"Efficiency is t1 / tN, against {rank_count(base)}." if more else ""
    return _table("times-single", "A module alone", "module", columns, rows, note)


def _first_steps_table(job: ProfileJob, warmup_steps: int) -> ProfileTable:
    steps = job_steps(job)[: max(warmup_steps + 1, 2)]
    costs = job_costs(job, warmup_steps)
    rows: dict[str, Figures] = {}
    for name in [*in_order(set(costs) - {STEP}), STEP]:
        values = rows[name] = {}
        for together in steps:
            seconds = [s.wall_s if name == STEP else s.seconds(name) for s in together]
            values[f"step_{together[0].step}"] = 1e3 * sum(seconds) / len(seconds)
        values["usual"] = 1e3 * costs[name].total_s
        values["factor"] = first_step_factor(job, name, warmup_steps)
    columns = [
        *(_number_column(f"step_{s[0].step}", f"step {s[0].step}", "ms", "Mean over ranks.") for s in steps),
        _number_column("usual", "usual", "ms", "Median step after the warm-up."),
        _number_column(
            "factor", "first / usual", "times", "Time of the first step divided by that of a usual one."
        ),
    ]
    return _table("first-steps", f"First steps of {job.name}", "function", columns, rows)


def _loader_table(profile: Profile) -> list[ProfileTable]:
    rows: dict[str, Figures] = {}
    for job in loader_jobs(profile):
        loading = make_loading(job, profile.settings.warmup_steps)
        rows[f"{loader_title(job)} ({job.name})"] = {
            "step": 1e3 * loading.step_s,
            "wait": 1e3 * loading.wait_s,
            "share": loading.share,
            "rate": loading.frames_per_s,
            "use": mean_utilisation(job) if job.sample_paths else None,
        }
    columns = (
        _number_column("step", "step", "ms", "Mean step after the warm-up."),
        _number_column("wait", "waiting for batches", "ms per step", "Mean over steps and ranks."),
        _percent_column("share", "of the step", "Waiting time divided by the step's time.", digits=1),
        _number_column(
            "rate", "frames/s", "", "Frames of all ranks divided by the step time of the slowest rank."
        ),
        _number_column("use", "utilisation", "%", "Mean over ranks and time, as in the picture."),
    )
    note = (
        "Times are means over all steps, because ranks wait for a batch in few of them, which a median does "
        "not show."
    )
    return [_table("loaders", "Trainloaders", "trainloader", columns, rows, note)] if rows else []


def _memory_table(job: ProfileJob) -> ProfileTable:
    assert job.memory is not None
    keys = ("peak_bytes", "rss_bytes", "gpu_peak_bytes", "parameters_bytes", "optimizer_bytes")
    titles = ("peak", "process (RSS)", "GPU (allocated)", "parameters and gradients", "optimizer")
    columns = tuple(
        _number_column(key, title, "MB", "At its peak, in 10^6 bytes.")
        for key, title in zip(keys, titles, strict=True)
        if any(getattr(rank, key) is not None for rank in job.memory.ranks)
    )
    rows = {
        f"rank {rank.rank}": {key: _megabytes(getattr(rank, key)) for key in keys}
        for rank in job.memory.ranks
    }
    note = f"Largest over smallest peak: {job.memory.balance:.3f}."
    return _table("memory", f"Memory of {job.name}", "rank", columns, rows, note)


def _megabytes(value: int | None) -> float | None:
    return None if value is None else value / 1e6
