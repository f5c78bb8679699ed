"""Draw a few steps of every rank, function by function, on one time axis, for the page and as a plot."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from speechdp.experiments.profile.derived import job_steps, waiting_s
from speechdp.experiments.profile.measured import BACKWARD, FORWARD, FunctionTime, StepRecord
from speechdp.experiments.profile.record import ProfileJob, in_order
from speechdp.report.kit.canvas import Canvas, style_axes
from speechdp.report.kit.formatting import number
from speechdp.report.profile.palette import WAITING, WAITING_FILL, fill_of

#: Number of steps shown, and largest number of ranks shown (the first ones).
NUM_STEPS, MAX_RANKS = 3, 32
#: Height of a rank's lane, of its bars and of the time axis, pixels; the page's script relies on the axis.
LANE, BAR, AXIS = 34, 24, 22
#: Width that a bar needs per letter of its name, % of the picture's width, besides a margin.
_PERCENT_A_LETTER = 0.7


@dataclass(frozen=True)
class Bar:
    """A time span of one rank, ms since the start of the picture.

    Attributes:
        function: name of the function; "" for the step itself, which is drawn behind its functions.
        waiting: whether it is the part of an exchange before the last rank arrived.
    """

    rank: int
    step: int
    function: str
    phase: str
    start_ms: float
    duration_ms: float
    text: str
    waiting: bool = False

    @property
    def label(self) -> str:
        """The text in the bar, if there is room."""
        return "" if self.waiting else self.function


@dataclass(frozen=True)
class Gantt:
    """The bars of some steps of a job.

    Attributes:
        lanes: the bars of each rank, steps before their functions.
        width_ms: time from the start of the first bar to the end of the last.
        steps: first and last step.
        hidden_ranks: number of ranks left out because there are too many.
    """

    job: ProfileJob
    lanes: tuple[tuple[Bar, ...], ...]
    width_ms: float
    steps: tuple[int, int]
    hidden_ranks: int

    @property
    def title(self) -> str:
        """Name of the job, and the steps shown."""
        first, last = self.steps
        return f"{self.job.name}, " + (f"step {first}" if first == last else f"steps {first} to {last}")

    @property
    def functions(self) -> list[str]:
        """The functions shown, in the order of a step."""
        return in_order({bar.function for bars in self.lanes for bar in bars} - {""})


def make_gantt(job: ProfileJob, warmup_steps: int) -> Gantt | None:
    """Return consecutive steps after the warm-up that take a typical time; None without steps."""
    together = job_steps(job)
    together = [step for step in together if step[0].step > warmup_steps] or together
    if not together:
        return None
    chosen = _usual(together, NUM_STEPS)
    origin_s = min(step.start_s for step in chosen[0])
    waited = waiting_s(job)
    shown = min(len(chosen[0]), MAX_RANKS)
    lanes = []
    for rank in range(shown):
        bars = [bar for steps in chosen for bar in _bars(rank, steps[rank], origin_s, waited)]
        lanes.append(tuple(sorted(bars, key=lambda bar: (bar.function != "", bar.start_ms))))
    width_ms = max((bar.start_ms + bar.duration_ms for bars in lanes for bar in bars), default=0.0)
    steps = (chosen[0][0].step, chosen[-1][0].step)
    return Gantt(job, tuple(lanes), max(width_ms, 1e-3), steps, len(chosen[0]) - shown)


def _usual(together: list[tuple[StepRecord, ...]], count: int) -> list[tuple[StepRecord, ...]]:
    """Return the `count` consecutive steps whose total time is the median of all such runs of steps."""
    windows = [together[i : i + count] for i in range(max(1, len(together) - count + 1))]
    windows.sort(key=lambda steps: sum(rank.wall_s for step in steps for rank in step))
    return windows[len(windows) // 2]


def _bars(
    rank: int, step: StepRecord, origin_s: float, waited: dict[tuple[int, int, int], float]
) -> Iterator[Bar]:
    where = f"rank {rank}, step {step.step}"
    start, duration = 1e3 * (step.start_s - origin_s), 1e3 * step.wall_s
    yield Bar(rank, step.step, "", "", start, duration, f"{where}: {_ms(duration)}, {step.frames:,} frames")
    for place, function in enumerate(step.functions):
        wait_ms = 1e3 * waited.get((rank, step.step, place), 0.0)
        start, duration = 1e3 * (function.start_s - origin_s), 1e3 * function.duration_s
        if wait_ms > 0:
            text = f"{where}: {function.name}, {WAITING}, {_ms(wait_ms)}"
            yield Bar(rank, step.step, function.name, function.phase, start, wait_ms, text, waiting=True)
        if duration > wait_ms:
            text = f"{where}: {_name(function)}, {_ms(duration - wait_ms)}"
            rest = (start + wait_ms, duration - wait_ms)
            yield Bar(rank, step.step, function.name, function.phase, *rest, text)


def _name(function: FunctionTime) -> str:
    return f"{function.name} {function.phase}".strip()


def _ms(value: float) -> str:
    return f"{number(value)} ms"


def svg_of_gantt(gantt: Gantt) -> str:
    """Return the picture as SVG, with times in % of its width, so that widening it zooms in."""
    height = LANE * len(gantt.lanes) + AXIS
    lanes = "\n".join(_lane(gantt, rank) for rank in range(len(gantt.lanes)))
    return (
        f'<svg class="gantt-time" role="img" aria-label="{html.escape(gantt.title)}, of every rank" '
        f'width="100%" height="{height}" data-ms="{gantt.width_ms:.4f}" data-height="{height}">\n'
        '<defs><pattern id="gantt-waiting" width="6" height="6" patternUnits="userSpaceOnUse" '
        f'patternTransform="rotate(45)"><rect width="6" height="6" fill="{WAITING_FILL}"/>'
        f'<rect width="2" height="6" fill="{fill_of("exchange", "")[0]}"/></pattern></defs>\n'
        f'<g class="ticks">{_ticks(gantt)}</g>\n{lanes}\n</svg>'
    )


def _lane(gantt: Gantt, rank: int) -> str:
    bars = "".join(_bar(gantt, bar) for bar in gantt.lanes[rank])
    return f'<g class="lane" data-rank="{rank}">{bars}</g>'


def _bar(gantt: Gantt, bar: Bar) -> str:
    x, width = 100 * bar.start_ms / gantt.width_ms, 100 * bar.duration_ms / gantt.width_ms
    height = BAR if bar.function else LANE - 4
    top = LANE * bar.rank + (LANE - height) / 2
    place = f'x="{x:.4f}%" y="{top:g}" width="{width:.4f}%" height="{height}"'
    title = f"<title>{html.escape(bar.text)}</title>"
    if not bar.function:
        return f'<g class="step" data-step="{bar.step}">{title}<rect {place}/></g>'
    fill, ink = fill_of(bar.function, bar.phase)
    fill = "url(#gantt-waiting)" if bar.waiting else fill
    label = html.escape(bar.label)
    text = ""
    if label and width >= _PERCENT_A_LETTER * len(bar.label) + 0.8:
        text = f'<text x="{x + width / 2:.4f}%" y="{top + height / 2:g}" fill="{ink}">{label}</text>'
    return (
        f'<g class="bar" data-label="{label}" data-ink="{ink}" data-phase="{html.escape(bar.phase)}">{title}'
        f'<rect {place} fill="{fill}"/>{text}</g>'
    )


def _ticks(gantt: Gantt) -> str:
    step = tick_distance(gantt.width_ms, 9)
    lines = []
    bottom = LANE * len(gantt.lanes)
    for tick in range(int(gantt.width_ms / step) + 1):
        x = 100 * tick * step / gantt.width_ms
        # A label beyond 97 % would extend over the edge.
        first = "" if tick else ' class="first"'
        text = f'<text x="{x:.3f}%" y="{bottom + AXIS - 6}"{first}>{tick * step:g}</text>' if x < 97 else ""
        lines.append(f'<line x1="{x:.3f}%" x2="{x:.3f}%" y1="0" y2="{bottom}"/>{text}')
    return "".join(lines)


def tick_distance(width: float, count: int) -> float:
    """Return 1, 2 or 5 times a power of ten, such that about `count` ticks fit on `width`."""
    power = 10.0 ** math.floor(math.log10(width / count))
    return float(next(power * factor for factor in (1, 2, 5, 10) if power * factor * count >= width))


def draw_gantt(ax: Axes, gantt: Gantt, canvas: Canvas) -> bool:
    """Draw the same picture with matplotlib, for the PNG."""
    style_axes(ax, gantt.title, "ms", canvas.theme)
    for rank, bars in enumerate(gantt.lanes):
        for bar in bars:
            _draw_bar(ax, rank, bar, gantt.width_ms, canvas)
    ax.set_yticks(range(len(gantt.lanes)), [f"rank {rank}" for rank in range(len(gantt.lanes))])
    ax.set_ylim(len(gantt.lanes) - 0.4, -0.6)
    ax.set_xlim(0, gantt.width_ms)
    ax.grid(visible=False, axis="y")
    ax.legend(
        handles=_keys(gantt), ncols=8, loc="upper left", bbox_to_anchor=(0, -0.12), frameon=False,
        fontsize="small", labelcolor=canvas.theme.ink, handlelength=1, handleheight=1, borderaxespad=0.6,
    )  # fmt: skip
    return True


def _draw_bar(ax: Axes, rank: int, bar: Bar, width_ms: float, canvas: Canvas) -> None:
    fill, ink = fill_of(bar.function, bar.phase) if bar.function else (canvas.theme.grid, canvas.theme.ink)
    ax.barh(
        rank, bar.duration_ms, left=bar.start_ms, height=0.78, linewidth=0,
        color=WAITING_FILL if bar.waiting else fill, hatch="////" if bar.waiting else None,
        edgecolor=fill,
    )  # fmt: skip
    if bar.label and 100 * bar.duration_ms / width_ms >= _PERCENT_A_LETTER * len(bar.label) + 0.8:
        x = bar.start_ms + bar.duration_ms / 2
        ax.text(x, rank, bar.label, color=ink, ha="center", va="center", fontsize="small")


def _keys(gantt: Gantt) -> list[Patch]:
    keys = []
    bars = [bar for lane in gantt.lanes for bar in lane if bar.function]
    for name in gantt.functions:
        phases = {bar.phase for bar in bars if bar.function == name and not bar.waiting}
        keys += [
            Patch(color=fill_of(name, phase)[0], label=f"{name} {phase}".strip())
            for phase in (FORWARD, BACKWARD, "")
            if phase in phases
        ]
    if any(bar.waiting for bar in bars):
        keys.append(Patch(facecolor=WAITING_FILL, edgecolor=fill_of("exchange", "")[0], hatch="////",
                          linewidth=0, label=WAITING))  # fmt: skip
    return keys
