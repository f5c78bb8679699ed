"""Draw a profile's plots: time of functions over ranks, first steps, memory, utilisation."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from speechdp.experiments.profile.derived import STEP, Scaling, job_costs, job_steps
from speechdp.experiments.profile.measured import BACKWARD, FORWARD, WHOLE, Memory
from speechdp.experiments.profile.record import STRONG, ProfileJob, in_order
from speechdp.report.kit import formatting
from speechdp.report.kit.canvas import Canvas, style_axes
from speechdp.report.kit.formatting import number, rank_count
from speechdp.report.profile.palette import fill_of
from speechdp.report.profile.usage import legend_below

#: Functions below this share of the slowest one have no bar; the tables have them.
SMALL_PART = 0.004
#: Number of steps after the warm-up that the plot of first steps shows.
STEPS_BEHIND = 7
#: Parts of a rank's memory, and their opacity, 1: opaque.
_MEMORY_PARTS = (("parameters and gradients", 1.0), ("optimizer", 0.72), ("everything else", 0.42))


def shown_functions(scaling: Scaling) -> list[str]:
    """Return the functions that are large enough for visible bars."""
    largest = {
        name: max(cost.total_s for cost in costs.values())
        for name, costs in scaling.costs.items()
        if name != STEP
    }
    most = max(largest.values(), default=0.0)
    return [name for name, value in largest.items() if value > SMALL_PART * most]


def draw_scaling(ax: Axes, scalings: Sequence[Scaling], title: str, canvas: Canvas) -> bool:
    """Draw a bar for each function and number of ranks, split into forward and backward, ms per step."""
    groups = [(scaling, name) for scaling in scalings for name in shown_functions(scaling)]
    if not groups:
        return False
    style_axes(ax, title, "ms per step", canvas.theme)
    y, longest = 0.0, 0.0
    ticks: list[tuple[float, str]] = []
    for scaling, name in groups:
        top = y
        for ranks in scaling.ranks:
            if ranks in scaling.costs[name]:
                longest = max(longest, _draw_cost(ax, y, scaling, name, ranks, canvas))
                ticks.append((y, str(ranks)))
                y += 1
        ax.annotate(
            name, (0, (top + y - 1) / 2), xytext=(-24, 0), xycoords=("axes fraction", "data"), ha="right",
            textcoords="offset points", va="center", color=canvas.theme.ink, annotation_clip=False,
        )  # fmt: skip
        y += 0.8
    ax.set_yticks([place for place, _ in ticks], [text for _, text in ticks], fontsize="small")
    ax.annotate(
        "ranks", (0, 1), xytext=(-4, 3), xycoords="axes fraction", textcoords="offset points", ha="right",
        va="bottom", color=canvas.theme.muted, fontsize="small", annotation_clip=False,
    )  # fmt: skip
    ax.set_ylim(y - 1.2, -0.7)
    ax.set_xlim(0, longest * 1.22)
    _lines_upright(ax, canvas)
    return True


def _draw_cost(ax: Axes, y: float, scaling: Scaling, name: str, ranks: int, canvas: Canvas) -> float:
    """Draw a function's bar of phases, labelled with time and efficiency; return its length, ms."""
    cost, left = scaling.costs[name][ranks], 0.0
    for phase, seconds in ((FORWARD, cost.forward_s), (BACKWARD, cost.backward_s), (WHOLE, cost.whole_s)):
        if seconds <= 0:
            continue
        fill, _ = fill_of(name, phase)
        (bar,) = ax.barh(y, 1e3 * seconds, left=left, height=0.84, color=fill, linewidth=0)
        canvas.tip(
            bar,
            f"{rank_count(ranks)}, {name} {phase}".strip()
            + f": {formatting.milliseconds(seconds)} ms per step",
        )
        left += 1e3 * seconds
    efficiency = scaling.efficiency(name, ranks) if ranks != scaling.ranks[0] else None
    text, end = number(left), left
    if efficiency is not None:
        text += f" · {formatting.percent(efficiency)} %"
    if scaling.kind == STRONG and efficiency is not None:
        ideal = 1e3 * scaling.costs[name][scaling.ranks[0]].total_s * scaling.ranks[0] / ranks
        (mark,) = ax.plot([ideal, ideal], [y - 0.42, y + 0.42], color=canvas.theme.ink, linewidth=1.4)
        canvas.tip(mark, f"{rank_count(ranks)}, {name}: {number(ideal)} ms if it scaled perfectly")
        end = max(left, ideal)  # clear of the mark
    ax.annotate(
        text, (end, y), xytext=(4, 0), textcoords="offset points", va="center", color=canvas.theme.muted,
        fontsize="small",
    )  # fmt: skip
    return left


def bar_height(scalings: Sequence[Scaling]) -> float:
    """Return the height of the plot of `draw_scaling`, inches."""
    groups = [(scaling, name) for scaling in scalings for name in shown_functions(scaling)]
    bars = sum(len(scaling.costs[name]) for scaling, name in groups)
    return max(1.9, 0.75 + 0.158 * (bars + 0.8 * len(groups)))


def draw_first_steps(ax: Axes, job: ProfileJob, warmup_steps: int, canvas: Canvas) -> bool:
    """Plot each function's time in the first steps on a logarithmic axis, mean over ranks."""
    steps = job_steps(job)[: warmup_steps + STEPS_BEHIND]
    costs = job_costs(job, warmup_steps) if steps else {}
    most = max((cost.total_s for name, cost in costs.items() if name != STEP), default=0.0)
    shown = [n for n in in_order(set(costs) - {STEP}) if costs[n].total_s > SMALL_PART * most]
    if len(steps) < 2 or not shown:
        return False
    style_axes(ax, f"First steps of {job.name}, mean over ranks", "ms, logarithmic", canvas.theme)
    ax.set_yscale("log")
    numbers = [together[0].step for together in steps]
    ends: list[tuple[float, str]] = []
    for name in shown:
        values = [1e3 * statistics.fmean(step.seconds(name) for step in together) for together in steps]
        points = [(x, y) for x, y in zip(numbers, values, strict=True) if y > 0]
        if points:
            _draw_function(ax, name, points, canvas)
            ends.append((points[-1][1], name))
    _mark_warmup(ax, numbers, warmup_steps, canvas)
    ax.set_xticks(numbers)
    ax.set_xlabel("step")
    ax.yaxis.set_major_locator(LogLocator(10, (1, 2, 5)))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,g}"))
    _name_ends(ax, ends, canvas)
    return True


def _draw_function(ax: Axes, name: str, points: Sequence[tuple[float, float]], canvas: Canvas) -> None:
    colour = canvas.colours.get(name, canvas.theme.baseline)
    (line,) = ax.plot(*zip(*points, strict=True), color=colour, linewidth=1.8, zorder=3)
    canvas.tip(line, name)
    for x, y in points:
        (dot,) = ax.plot([x], [y], "o", color=colour, markersize=3.8, zorder=4)
        canvas.tip(dot, f"{name}, step {x}: {number(y)} ms")


def _mark_warmup(ax: Axes, numbers: Sequence[int], warmup_steps: int, canvas: Canvas) -> None:
    ax.set_xlim(numbers[0] - 0.4, numbers[-1] + 0.3)
    if numbers[0] > warmup_steps:
        return
    ax.axvspan(
        numbers[0] - 0.4, warmup_steps + 0.5, color=canvas.theme.grid, alpha=0.6, linewidth=0, zorder=0
    )
    ax.annotate(
        "warm-up, left out", (numbers[0] - 0.3, 1), xycoords=("data", "axes fraction"),
        xytext=(0, -3), textcoords="offset points", va="top", color=canvas.theme.muted, fontsize="small",
    )  # fmt: skip


def _name_ends(ax: Axes, ends: Sequence[tuple[float, str]], canvas: Canvas) -> None:
    """Write each function's name at the end of its line; names that would overlap are moved apart."""
    low, high = ax.get_ylim()
    high *= (high / low) ** 0.06  # room for the words at the top
    ax.set_ylim(low, high)
    gap = (high / low) ** 0.062
    placed = 0.0
    for value, name in sorted(ends):
        placed = max(value, placed * gap)
        ax.annotate(
            name, (1, placed), xycoords=("axes fraction", "data"), xytext=(5, 0), textcoords="offset points",
            color=canvas.colours.get(name, canvas.theme.baseline), va="center", annotation_clip=False,
        )  # fmt: skip


def draw_memory_of_ranks(ax: Axes, job: ProfileJob, canvas: Canvas) -> bool:
    """Draw a bar of each rank's peak memory, split into known parts and the rest, MB."""
    if job.memory is None or not job.memory.ranks:
        return False
    memory = job.memory
    style_axes(ax, f"Peak memory, {job.name}", "MB", canvas.theme)
    colour = canvas.theme.runs[0]
    for place, rank in enumerate(memory.ranks):
        left = 0.0
        # Keep the grid from showing through the transparent parts.
        ax.barh(place, rank.peak_bytes / 1e6, height=0.72, color=canvas.theme.surface, linewidth=0)
        known = (rank.parameters_bytes, rank.optimizer_bytes)
        parts = (*known, max(0, rank.peak_bytes - sum(known)))
        for (name, shade), value in zip(_MEMORY_PARTS, parts, strict=True):
            (bar,) = ax.barh(
                place, value / 1e6, left=left, height=0.72, color=colour, alpha=shade, linewidth=0
            )  # fmt: skip
            canvas.tip(bar, f"rank {rank.rank}: {name} {formatting.megabytes(value)} MB")
            left += value / 1e6
        ax.annotate(
            formatting.megabytes(rank.peak_bytes), (left, place), xytext=(5, 0), textcoords="offset points",
            va="center", color=canvas.theme.muted, fontsize="small",
        )  # fmt: skip
    ax.set_yticks(range(len(memory.ranks)), [f"rank {rank.rank}" for rank in memory.ranks])
    ax.set_ylim(len(memory.ranks) - 0.4, -0.6)
    ax.set_xlim(0, 1.16 * max(_known_or_peak(memory)) / 1e6)
    ax.set_xlabel(f"largest / smallest peak {memory.balance:.2f}")
    _lines_upright(ax, canvas)
    keys = [Patch(color=colour, alpha=shade, label=name, linewidth=0) for name, shade in _MEMORY_PARTS]
    legend_below(ax, canvas, keys)
    return True


def _known_or_peak(memory: Memory) -> list[int]:
    return [max(r.peak_bytes, r.parameters_bytes + r.optimizer_bytes, 1) for r in memory.ranks]


def _lines_upright(ax: Axes, canvas: Canvas) -> None:
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,g}"))
    ax.grid(visible=False, axis="y")
    ax.grid(axis="x", color=canvas.theme.grid, linewidth=0.8)
