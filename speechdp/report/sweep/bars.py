"""Draw bars: how each rank spends the time of a step, and what each run's data path could deliver."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes

from speechdp.report.kit import formatting
from speechdp.report.kit.canvas import Canvas, even_numbers, style_axes
from speechdp.report.kit.theme import SPAN_COLOURS
from speechdp.report.runs.derived import RunFigures
from speechdp.report.runs.results import RankTiming

#: Largest number of ranks with a bar each; of more ranks, three are shown: least, median, most own work.
MAX_BARS_PER_RUN = 8
BAR_ORDER = ("forward", "backward", "update", "h2d", "data_wait", "comm", "other")
SPAN_TITLES = {
    "forward": "forward",
    "backward": "backward",
    "update": "update",
    "h2d": "copy to device",
    "data_wait": "wait for data",
    "comm": "communication",
    "other": "other",
}
#: Title and colour of each kind of time, in the order of the bars.
SPAN_KEYS = tuple((title, SPAN_COLOURS[name][0]) for name, title in SPAN_TITLES.items())


def draw_shares(ax: Axes, rows: Sequence[RunFigures], canvas: Canvas) -> bool:
    """Draw one bar for each rank of each run: the shares of its step time.

    Returns:
        False, with nothing drawn, if no run was timed.
    """
    timed = [row for row in rows if row.run.timing is not None]
    if not timed:
        return False
    style_axes(ax, "Where the time of a step goes", "", canvas.theme)
    y, ticks, names = 0.0, [], []
    for row in timed:
        assert row.run.timing is not None
        shown = shown_ranks(row.run.timing.ranks)
        for rank in shown:
            _draw_bar(ax, y, rank, canvas.labels[row.run.name], canvas)
            ticks.append(y)
            label = canvas.labels[row.run.name]
            if len(row.run.timing.ranks) > 1:
                label = f"{label}, rank {rank.rank}" if rank is shown[0] else f"rank {rank.rank}"
            names.append(label)
            y += 1
        y += 0.55
    ax.set_yticks(ticks, names)
    ax.set_ylim(y - 0.9, -0.6)
    ax.set_xlim(0, 100)
    ax.set_xlabel("% of step time")
    ax.grid(visible=False)
    ax.spines["bottom"].set_visible(False)
    return True


def shown_ranks(ranks: Sequence[RankTiming]) -> list[RankTiming]:
    """Return all ranks; of many, only those with the least, the median and the most own work."""
    if len(ranks) <= MAX_BARS_PER_RUN:
        return list(ranks)
    by_work = sorted(ranks, key=lambda rank: rank.compute_s / max(rank.steps, 1))
    return [by_work[0], by_work[len(by_work) // 2], by_work[-1]]


def num_bars(rows: Sequence[RunFigures]) -> int:
    """Return the number of bars that `draw_shares` draws, for the size of the figure."""
    return sum(len(shown_ranks(row.run.timing.ranks)) for row in rows if row.run.timing is not None)


def rows_with_rates(rows: Sequence[RunFigures]) -> list[RunFigures]:
    """Return the runs with both rates known: what the data path could deliver and what training used."""
    return [row for row in rows if row.frames_per_s and row.data and row.data.deliverable_per_s]


def draw_data_rates(ax: Axes, rows: Sequence[RunFigures], canvas: Canvas) -> bool:
    """Draw the frames/s that each run trained on over those that its data path could deliver.

    Returns:
        False, with nothing drawn, if no run recorded them.
    """
    shown = rows_with_rates(rows)
    if not shown:
        return False
    style_axes(
        ax, "Thick bars: trained on; thin bars: what the data path could deliver", "frames/s", canvas.theme
    )
    rates = [(row, row.frames_per_s or 0.0, row.data.deliverable_per_s or 0.0) for row in shown if row.data]
    for y, (row, trained, deliverable) in enumerate(rates):
        label = canvas.labels[row.run.name]
        for value, height, colour, what in (
            (
                deliverable,
                0.24,
                canvas.theme.baseline,
                f"could deliver about {formatting.estimate(deliverable)}",
            ),
            (trained, 0.6, canvas.colours[row.run.name], f"trained on {formatting.count(trained)}"),
        ):
            (bar,) = ax.barh(y, value, height=height, color=colour, linewidth=0)
            canvas.tip(bar, f"{label}: {what} frames/s")
        ax.annotate(
            formatting.estimate(deliverable), (max(deliverable, trained), y), xytext=(5, 0),
            textcoords="offset points", va="center", color=canvas.theme.muted, fontsize="small",
        )  # fmt: skip
    ax.set_yticks(range(len(shown)), [canvas.labels[row.run.name] for row in shown])
    ax.set_ylim(len(shown) - 0.4, -0.6)
    ax.set_xlim(0, 1.1 * max(max(trained, deliverable) for _, trained, deliverable in rates))
    even_numbers(ax.xaxis)
    ax.grid(visible=False, axis="y")
    ax.grid(axis="x", color=canvas.theme.grid, linewidth=0.8)
    return True


def _draw_bar(ax: Axes, y: float, rank: RankTiming, label: str, canvas: Canvas) -> None:
    seconds_of = {**rank.spans_s, "comm": rank.comm_s, "other": rank.other_s}
    total = max(rank.training_s, sum(seconds_of.values())) or 1.0
    left = 0.0
    for name in BAR_ORDER:
        share = 100 * seconds_of.get(name, 0.0) / total
        if share <= 0:
            continue
        fill, ink = SPAN_COLOURS[name]
        (bar,) = ax.barh(y, share, left=left, height=0.78, color=fill, linewidth=0)
        per_step = formatting.milliseconds(seconds_of[name] / max(rank.steps, 1))
        where = f"{label}, rank {rank.rank}" + (f" on {rank.host}" if rank.host else "")
        canvas.tip(bar, f"{where}: {SPAN_TITLES[name]} {share:.1f} %, {per_step} ms per step")
        if share >= 5:
            ax.text(
                left + share / 2, y, f"{share:.0f}", color=ink, ha="center", va="center", fontsize="small"
            )
        left += share
