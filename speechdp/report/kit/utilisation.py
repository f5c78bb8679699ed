"""Draw the utilisation of GPUs or processes and the GPU clocks over time, and the memory of each rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

from speechdp.report.kit import formatting
from speechdp.report.kit.canvas import Canvas, style_axes
from speechdp.report.kit.learning import time_unit
from speechdp.report.runs.samples import Array, Samples
from speechdp.timing.memory import memory_balance

GPU_AXIS = "GPU utilisation (NVML), %"
CPU_AXIS = "CPU of the rank's process\n(psutil; no GPU), % of a core"
CLOCK_AXIS = "SM clock (NVML), MHz"
#: More lines than this are drawn as median and range, more bars as minimum, median and maximum.
MAX_LINES = 8
MAX_BARS = 16
#: Maximum points of a line. CPU time is sampled in hundredths of a second, so a point is the mean over half a
#: second or more.
_MAX_POINTS = 240
_POINT_S = 0.5


@dataclass(frozen=True)
class Course:
    """Utilisation or clocks over time; NaN where not sampled.

    Attributes:
        axis: kind of the values: GPU_AXIS, CPU_AXIS or CLOCK_AXIS.
        t_s: (B,) middle of each interval, s.
        values: (B, C) mean over the interval, % or MHz.
        labels: labels of the C columns.
    """

    axis: str
    t_s: Array
    values: Array
    labels: tuple[str, ...]

    @property
    def on_gpus(self) -> bool:
        """Whether the columns are GPUs."""
        return self.axis != CPU_AXIS

    @property
    def unit(self) -> str:
        """Unit of the values."""
        return "MHz" if self.axis == CLOCK_AXIS else "%"


def utilisation_course(samples: Sequence[Samples]) -> Course | None:
    """Return the utilisation of all hosts' GPUs or, if none was sampled, of all ranks' processes.

    Args:
        samples: samples of each host.

    Returns:
        None if there are no samples.
    """
    if any(np.isfinite(host.gpu_percent).any() for host in samples):
        return _course(samples, GPU_AXIS, lambda host: (host.gpu_percent, _gpu_labels(host)))
    return _course(samples, CPU_AXIS, lambda host: (host.cpu_percent, _rank_labels(host)))


def clock_course(samples: Sequence[Samples]) -> Course | None:
    """Return the SM clocks of all hosts' GPUs; None if none was read.

    Args:
        samples: samples of each host.
    """
    return _course(samples, CLOCK_AXIS, lambda host: (host.clock_mhz, _gpu_labels(host)))


def _course(
    samples: Sequence[Samples], axis: str, columns_of: Callable[[Samples], tuple[Array, list[str]]]
) -> Course | None:
    """Return the means over intervals; None if there are none.

    Args:
        columns_of: returns (N, C) values of a host and the names of its columns.
    """
    samples = [host for host in samples if len(host.t_s)]
    if not samples:
        return None
    times = [host.elapsed_s for host in samples]
    start, end = min(float(t[0]) for t in times), max(float(t[-1]) for t in times)
    shortest = 1 / min(host.hz for host in samples)
    # At least two samples, because the sampler is not punctual enough for one in each interval.
    width = max((end - start) / _MAX_POINTS, min(_POINT_S, (end - start) / 20), 2 * shortest)
    # Equal intervals: a shorter last one might have only a sample or two.
    edges: Array = np.linspace(start, max(end, start + shortest), max(1, round((end - start) / width)) + 1)
    columns: list[Array] = []
    labels: list[str] = []
    for host, t in zip(samples, times, strict=True):
        # Rank numbers are unique in the job, GPU numbers only on a host.
        prefix = f"{host.host} " if len(samples) > 1 and axis != CPU_AXIS else ""
        values, names = columns_of(host)
        known = [i for i in range(values.shape[1]) if not np.isnan(values[:, i]).all()]
        columns += [_means(t, values[:, i], edges, host.section) for i in known]
        labels += [prefix + names[i] for i in known]
    if not columns:
        return None
    return Course(axis, (edges[:-1] + edges[1:]) / 2, np.stack(columns, axis=1), tuple(labels))


def draw_utilisation(
    ax: Axes, samples: Sequence[Samples], canvas: Canvas, *, title: str = "Utilisation over time"
) -> bool:
    """Plot a line for each GPU or, if there are none, for each rank's process.

    Args:
        ax: axes to draw on.
        samples: samples of one run, for each host.
        canvas: colours; collects tooltips.
        title: title of the plot.

    Returns:
        False, with nothing drawn, if there are no samples.
    """
    return draw_course(ax, utilisation_course(samples), canvas, title=title)


def draw_course(ax: Axes, course: Course | None, canvas: Canvas, *, title: str) -> bool:
    """Plot a line for each column of one run; for many columns their median and range.

    Args:
        ax: axes to draw on.
        course: values over time, (B,) seconds and (B, columns); None: nothing was sampled.
        canvas: colours; collects tooltips.
        title: title of the plot.

    Returns:
        False, with nothing drawn, if nothing was sampled.
    """
    if course is None:
        return False
    colours = canvas.theme.runs
    if len(course.labels) <= MAX_LINES:
        lines = [
            (label, course.values[:, i], colours[i % len(colours)]) for i, label in enumerate(course.labels)
        ]
    else:
        lines = [(f"median of {len(course.labels)}", _over_columns(np.median, course.values), colours[0])]
    draw_courses(ax, [(label, course, values, c) for label, values, c in lines], canvas, title)
    if len(course.labels) > MAX_LINES:
        low, high = _over_columns(np.min, course.values), _over_columns(np.max, course.values)
        scale, _ = _time_scale([course])
        band = ax.fill_between(course.t_s / scale, low, high, color=colours[0], alpha=0.2, linewidth=0)
        canvas.tip(band, f"least to most of {len(course.labels)}")
    return True


def draw_courses(
    ax: Axes, lines: Sequence[tuple[str, Course, Array, str]], canvas: Canvas, title: str
) -> None:
    """Plot (label, course, (B,) values, colour) of each line, with a legend if there are several."""
    theme = canvas.theme
    style_axes(ax, title, "", theme)
    scale, unit = _time_scale([course for _, course, _, _ in lines])
    axis, of = lines[0][1].axis, lines[0][1].unit
    for label, course, values, colour in lines:
        (line,) = ax.plot(course.t_s / scale, values, color=colour, linewidth=1.3, label=label, zorder=3)
        extreme = f"most {np.nanmax(values):.0f}" if of == "%" else f"least {np.nanmin(values):.0f}"
        canvas.tip(line, f"{label}: mean {np.nanmean(values):.0f} {of}, {extreme} {of}")
    ax.set_ylabel(axis)
    ax.set_xlabel(f"time ({unit})")
    ax.set_ylim(0, max(105.0, ax.get_ylim()[1]))  # from 0 also for clocks, to show relative changes
    latest = max(float(course.t_s[-1]) for _, course, _, _ in lines) / scale
    ax.set_xlim(min(0.0, *(float(course.t_s[0]) / scale for _, course, _, _ in lines)), 1.01 * latest)
    if len(lines) > 1:
        ax.legend(
            ncols=min(len(lines), 4), loc="upper center", bbox_to_anchor=(0.5, -0.2), frameon=False,
            fontsize="small", labelcolor=theme.ink, handlelength=1.2, columnspacing=1.2,
        )  # fmt: skip


@dataclass(frozen=True)
class MemoryBar:
    """A bar: the peak memory of a rank or, with `least_bytes`, the largest and smallest of a run's ranks.

    `live_bytes`: the part that was in use at the end.
    """

    label: str
    colour: str
    most_bytes: float
    least_bytes: float | None = None
    live_bytes: float | None = None


def draw_memory(
    ax: Axes, bars: Sequence[MemoryBar], canvas: Canvas, *, on_gpus: bool, title: str = "Memory of each rank"
) -> bool:
    """Draw a bar for each rank or run, and state how evenly the memory is distributed.

    Returns:
        False, with nothing drawn, if there are no bars.
    """
    if not bars:
        return False
    shown = _least_median_most(bars) if len(bars) > MAX_BARS else list(bars)
    theme = canvas.theme
    what = "peak GPU memory of tensors (torch)" if on_gpus else "peak resident memory of the process"
    unit, divisor = ("GB", 1e9) if max(bar.most_bytes for bar in bars) >= 1e9 else ("MB", 1e6)
    style_axes(ax, title, unit, theme)
    for y, bar in enumerate(shown):
        (drawn,) = ax.barh(y, bar.most_bytes / divisor, height=0.62, color=bar.colour, linewidth=0)
        text = (formatting.times if unit == "GB" else formatting.count)(bar.most_bytes / divisor)
        tip = f"{bar.label}: {text} {unit} at most{_in_use(bar, unit, divisor)}{_spread(bar)}"
        canvas.tip(drawn, tip)
        ax.annotate(
            text + _in_use(bar, unit, divisor) + _spread(bar),
            (bar.most_bytes / divisor, y), xytext=(5, 0), textcoords="offset points",
            va="center", color=theme.ink, fontsize="small",
        )  # fmt: skip
    ax.set_yticks(range(len(shown)), [bar.label for bar in shown])
    ax.set_ylim(max(len(shown), 2) - 0.4, -0.6)
    ax.set_xlim(0, 1.18 * max(bar.most_bytes for bar in bars) / divisor)
    ax.grid(visible=False, axis="y")
    ax.grid(axis="x", color=theme.grid, linewidth=0.8)
    balance = memory_balance(bar.most_bytes for bar in bars)
    between_ranks = len(bars) > 1 and all(bar.least_bytes is None for bar in bars)
    note = f"; most / least rank {formatting.times(balance)}" if between_ranks else ""
    ax.set_xlabel(f"{what}{note}")
    return True


def mean_over_columns(course: Course) -> Array:
    """Return (B,) the mean over the sampled columns; NaN if there are none."""
    return _over_columns(np.mean, course.values)


def _rank_labels(host: Samples) -> list[str]:
    return [f"rank {rank}" for rank in host.ranks]


def _gpu_labels(host: Samples) -> list[str]:
    """Return labels of each GPU and the ranks that use it."""
    labels = []
    for i in range(len(host.gpus)):
        ranks = [str(rank) for rank, gpu in sorted(host.gpu_of_rank.items()) if gpu == i]
        used = f" (rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)})" if ranks else ""
        labels.append(f"GPU {host.gpu_numbers[i]}{used}")
    return labels


def _means(t: Array, values: Array, edges: Array, section: NDArray[np.int64]) -> Array:
    """Return (B,) the mean of the values in each interval.

    Intervals that a late sampler missed are interpolated.  Intervals are NaN where the sampler did not run
    (between sections) or could not read the value.
    """
    known = ~np.isnan(values)
    num = len(edges) - 1
    place = np.minimum(np.searchsorted(edges, t[known], side="right") - 1, num - 1)
    counts = np.bincount(place, minlength=num)
    sums = np.bincount(place, weights=values[known], minlength=num)
    means = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
    middles = (edges[:-1] + edges[1:]) / 2
    unsampled = np.histogram(t, edges)[0] == 0
    for number in np.unique(section):
        own = known & (section == number)
        if own.any():
            inside = unsampled & (middles > t[own][0]) & (middles < t[own][-1])
            means[inside] = np.interp(middles[inside], t[own], values[own])
    return means


def _over_columns(function: Callable[[Array], float], values: Array) -> Array:
    known = [row[~np.isnan(row)] for row in values]
    return np.array([function(row) if len(row) else np.nan for row in known])


def _time_scale(courses: Iterable[Course]) -> tuple[float, str]:
    return time_unit(max(float(course.t_s[-1]) for course in courses))


def _least_median_most(bars: Sequence[MemoryBar]) -> list[MemoryBar]:
    by_size = sorted(bars, key=lambda bar: bar.most_bytes)
    return [by_size[0], by_size[len(by_size) // 2], by_size[-1]]


def _in_use(bar: MemoryBar, unit: str, divisor: float) -> str:
    """State how much of a process's memory was in use at the end, if recorded."""
    if not bar.live_bytes:
        return ""
    return f", {(formatting.times if unit == 'GB' else formatting.count)(bar.live_bytes / divisor)} in use"


def _spread(bar: MemoryBar) -> str:
    """State how evenly memory is distributed over a run's ranks, if it has several."""
    if not bar.least_bytes:
        return ""
    return f" (most / least {formatting.times(bar.most_bytes / bar.least_bytes)})"
