"""What the runs of a report have used: utilisation over time, and memory."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes

from speechdp.report.kit.canvas import Canvas
from speechdp.report.kit.utilisation import (
    MemoryBar,
    draw_courses,
    draw_memory,
    draw_utilisation,
    mean_over_columns,
    utilisation_course,
)
from speechdp.report.runs.derived import RunFigures


def has_samples(rows: Sequence[RunFigures]) -> bool:
    """Say whether any run was sampled."""
    return any(len(host.t_s) for row in rows for host in row.run.samples)


def has_memory(rows: Sequence[RunFigures]) -> bool:
    """Say whether any run recorded its ranks' memory."""
    return any(_held(row, on_gpus=False) or _held(row, on_gpus=True) for row in rows)


def sampling_notices(rows: Sequence[RunFigures]) -> list[str]:
    """Return what the samplers of all runs could not read, each once."""
    return list(dict.fromkeys(notice for row in rows for host in row.run.samples for notice in host.notices))


def draw_runs_utilisation(ax: Axes, rows: Sequence[RunFigures], canvas: Canvas) -> bool:
    """Plot a line for each GPU or process of one run, or for each of several runs the mean over its own.

    Returns:
        False, with nothing drawn, where no run was sampled.
    """
    sampled = [row for row in rows if utilisation_course(row.run.samples) is not None]
    if not sampled:
        return False
    if len(rows) == 1:
        return draw_utilisation(ax, sampled[0].run.samples, canvas)
    found = [(row.run.name, utilisation_course(row.run.samples)) for row in sampled]
    courses = [(name, course) for name, course in found if course is not None]
    # Percent of a GPU and of a core do not belong on one axis.
    on_gpus = any(course.on_gpus for _, course in courses)
    lines = [
        (canvas.labels[name], course, mean_over_columns(course), canvas.colours[name])
        for name, course in courses
        if course.on_gpus == on_gpus
    ]
    draw_courses(ax, lines, canvas, "Utilisation over time, mean over ranks")
    return True


def draw_ranks_memory(ax: Axes, rows: Sequence[RunFigures], canvas: Canvas) -> bool:
    """Draw the most memory of each rank of one run, or for each of several runs that of its largest rank.

    Returns:
        False, with nothing drawn, where no run recorded it.
    """
    on_gpus = any(_held(row, on_gpus=True) for row in rows)
    held = [(row, ranks) for row in rows if (ranks := _held(row, on_gpus=on_gpus))]
    if len(rows) == 1 and held:
        colour = canvas.colours[rows[0].run.name]
        live = {} if on_gpus else _live(rows[0])
        bars = [
            MemoryBar(f"rank {rank}", colour, amount, live_bytes=live.get(rank))
            for rank, amount in held[0][1].items()
        ]
        return draw_memory(ax, bars, canvas, on_gpus=on_gpus)
    bars = [
        MemoryBar(
            canvas.labels[row.run.name],
            canvas.colours[row.run.name],
            max(ranks.values()),
            min(ranks.values()) if len(ranks) > 1 else None,
        )
        for row, ranks in held
    ]
    return draw_memory(ax, bars, canvas, on_gpus=on_gpus, title="Memory of the largest rank")


def _live(row: RunFigures) -> dict[int, float]:
    """Return the bytes of each rank's process that were in use at the end, of ranks that recorded it."""
    ranks = () if row.run.timing is None else row.run.timing.ranks
    return {rank.rank: rank.memory.live for rank in ranks if rank.memory.live}


def _held(row: RunFigures, *, on_gpus: bool) -> dict[int, float]:
    """Return the most bytes that each rank has held, of ranks that recorded it."""
    ranks = () if row.run.timing is None else row.run.timing.ranks
    amounts = {rank.rank: rank.memory.gpu if on_gpus else rank.memory.rss for rank in ranks}
    return {rank: amount for rank, amount in amounts.items() if amount}
