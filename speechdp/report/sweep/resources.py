"""Plot the resources that the runs of a report used: utilisation over time, and memory."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes

from speechdp.report.kit.canvas import Canvas
from speechdp.report.kit.utilisation import (
    Course,
    MemoryBar,
    clock_course,
    draw_course,
    draw_courses,
    draw_memory,
    mean_over_columns,
    utilisation_course,
)
from speechdp.report.runs.derived import RunFigures


def has_samples(rows: Sequence[RunFigures]) -> bool:
    """Return whether any run was sampled."""
    return any(len(host.t_s) for row in rows for host in row.run.samples)


def has_clocks(rows: Sequence[RunFigures]) -> bool:
    """Return whether the GPU clock of any run was read."""
    return any(clock_course(row.run.samples) is not None for row in rows)


def has_memory(rows: Sequence[RunFigures]) -> bool:
    """Return whether any run recorded its ranks' memory."""
    return any(_held(row, on_gpus=False) or _held(row, on_gpus=True) for row in rows)


def sampling_notices(rows: Sequence[RunFigures]) -> list[str]:
    """Return the notices of all runs' samplers on what they could not read, without repetitions."""
    return list(dict.fromkeys(notice for row in rows for host in row.run.samples for notice in host.notices))


def draw_runs_utilisation(ax: Axes, rows: Sequence[RunFigures], canvas: Canvas) -> bool:
    """Plot the utilisation of each GPU or process of one run; for several runs, the mean of each run.

    Returns:
        False, with nothing drawn, if no run was sampled.
    """
    courses = [(row, utilisation_course(row.run.samples)) for row in rows]
    return _draw_runs(ax, courses, canvas, "Utilisation over time", "ranks")


def draw_runs_clocks(ax: Axes, rows: Sequence[RunFigures], canvas: Canvas) -> bool:
    """Plot the SM clock of each GPU of one run; for several runs, the mean over the GPUs of each run.

    Returns:
        False, with nothing drawn, if no clock was read.
    """
    courses = [(row, clock_course(row.run.samples)) for row in rows]
    return _draw_runs(ax, courses, canvas, "GPU clock over time", "GPUs")


def _draw_runs(
    ax: Axes, found: Sequence[tuple[RunFigures, Course | None]], canvas: Canvas, title: str, over: str
) -> bool:
    """Plot one run's own lines; for several runs, means over its ranks or GPUs, named by `over`."""
    courses = [(row.run.name, course) for row, course in found if course is not None]
    if not courses:
        return False
    if len(found) == 1:
        return draw_course(ax, courses[0][1], canvas, title=title)
    # Percentages of GPUs and of cores do not belong on one axis.
    on_gpus = any(course.on_gpus for _, course in courses)
    lines = [
        (canvas.labels[name], course, mean_over_columns(course), canvas.colours[name])
        for name, course in courses
        if course.on_gpus == on_gpus
    ]
    draw_courses(ax, lines, canvas, f"{title}, mean over {over}")
    return True


def draw_ranks_memory(ax: Axes, rows: Sequence[RunFigures], canvas: Canvas) -> bool:
    """Draw the peak memory of each rank of one run; for several runs, that of the largest rank of each.

    Returns:
        False, with nothing drawn, if no run recorded it.
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
    """Return the bytes in use by each rank's process at the end, for ranks that recorded them."""
    ranks = () if row.run.timing is None else row.run.timing.ranks
    return {rank.rank: rank.memory.live for rank in ranks if rank.memory.live}


def _held(row: RunFigures, *, on_gpus: bool) -> dict[int, float]:
    """Return the peak memory of each rank, bytes, for ranks that recorded it."""
    ranks = () if row.run.timing is None else row.run.timing.ranks
    amounts = {rank.rank: rank.memory.gpu if on_gpus else rank.memory.rss for rank in ranks}
    return {rank: amount for rank, amount in amounts.items() if amount}
