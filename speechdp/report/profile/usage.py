"""Read and plot a profiled job's samples: utilisation and memory of each rank over time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from speechdp.experiments.profile.record import ProfileJob
from speechdp.report.kit.canvas import Canvas, style_axes
from speechdp.report.kit.learning import time_unit
from speechdp.report.kit.utilisation import MAX_LINES, draw_utilisation, utilisation_course
from speechdp.report.runs.samples import Array, Samples


def on_gpus(samples: Samples) -> bool:
    """Return whether GPUs were sampled and it is known which rank uses which GPU."""
    return bool(samples.gpu_of_rank) and bool(np.isfinite(samples.gpu_percent).any())


def utilisation_of(samples: Samples) -> dict[int, Array]:
    """Return the utilisation of each rank's GPU, else of its process (100 is one core), %.  (N,) each"""
    if on_gpus(samples):
        return {rank: samples.gpu_percent[:, gpu] for rank, gpu in samples.gpu_of_rank.items()}
    return {rank: samples.cpu_percent[:, column] for column, rank in enumerate(samples.ranks)}


def memory_of(samples: Samples) -> dict[int, Array]:
    """Return the memory of each rank's GPU, else of its process, bytes.  (N,) each"""
    if on_gpus(samples):
        return {rank: samples.gpu_memory_bytes[:, gpu] for rank, gpu in samples.gpu_of_rank.items()}
    return {rank: samples.rss_bytes[:, column] for column, rank in enumerate(samples.ranks)}


def mean_utilisation(job: ProfileJob) -> float | None:
    """Return the mean utilisation over ranks and time, %; None without samples."""
    values = [series for samples in job.samples for series in utilisation_of(samples).values()]
    known = np.concatenate(values) if values else np.array([])
    known = known[np.isfinite(known)]
    return float(known.mean()) if known.size else None


def usage_limits(jobs: Sequence[ProfileJob]) -> tuple[float, float]:
    """Return the end of the longest job, s, and 1.05 times the highest utilisation, %, for common axes."""
    ends = [steps[-1].start_s + steps[-1].wall_s for job in jobs for steps in job.steps if steps]
    courses = [course for job in jobs if (course := utilisation_course(job.samples)) is not None]
    most = [float(np.nanmax(course.values)) for course in courses]
    return max(ends, default=0.0), 1.05 * max(most, default=0.0)


def draw_usage(ax: Axes, job: ProfileJob, title: str, limits: tuple[float, float], canvas: Canvas) -> bool:
    """Plot utilisation over time, one line per rank or GPU, on axes up to `limits` (s, %)."""
    if not draw_utilisation(ax, job.samples, canvas, title=title):
        return False
    scale, unit = time_unit(limits[0])
    # Use the same time axis for all jobs, unless this job's axis has another unit.
    if limits[0] and ax.get_xlabel() == f"time ({unit})":
        ax.set_xlim(0, limits[0] / scale)
    ax.set_ylim(0, max(105.0, limits[1]))
    return True


def draw_memory_over_time(ax: Axes, job: ProfileJob, canvas: Canvas) -> bool:
    """Plot the memory of each rank over time, MB."""
    series = [
        (rank, samples, values / 1e6)
        for samples in job.samples
        for rank, values in sorted(memory_of(samples).items())
    ]
    if not any(np.isfinite(values).any() for _, _, values in series):
        return False
    what = "GPU memory (NVML)" if on_gpus(series[0][1]) else "memory of the process (RSS)"
    style_axes(ax, f"{what[0].upper()}{what[1:]} over time, {job.name}", "MB", canvas.theme)
    for rank, samples, values in series:
        _draw_rank(ax, rank, samples, values, canvas)
    ax.set_xlim(left=0)
    ax.set_ylim(bottom=0)
    _finish(ax, len(series), canvas)
    return True


def _draw_rank(ax: Axes, rank: int, samples: Samples, values: Array, canvas: Canvas) -> None:
    colour = canvas.theme.runs[rank % len(canvas.theme.runs)]
    (line,) = ax.plot(samples.t_s, values, color=colour, linewidth=1.3, alpha=0.9, label=f"rank {rank}")
    canvas.tip(line, f"rank {rank} on {samples.host}")


def _finish(ax: Axes, num_ranks: int, canvas: Canvas) -> None:
    ax.set_xlabel("time (s)")
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,g}"))
    ax.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    if num_ranks <= MAX_LINES:
        legend_below(ax, canvas)


def legend_below(ax: Axes, canvas: Canvas, handles: Sequence[Artist] | None = None) -> None:
    """Draw the legend below the x axis, as in the utilisation plot of the report."""
    given = {} if handles is None else {"handles": handles}
    ax.legend(
        **given, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.2), frameon=False, fontsize="small",
        labelcolor=canvas.theme.ink, handlelength=1.2, columnspacing=1.2,
    )  # fmt: skip
