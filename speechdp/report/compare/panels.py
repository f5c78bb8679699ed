"""Draw a comparison: speed against accuracy, learning curves, and staleness for each number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from speechdp.counting import counted
from speechdp.experiments.compare.plan import FRAMES, TIME
from speechdp.parallel.period import PeriodUnit
from speechdp.report.compare.groups import Group
from speechdp.report.compare.table import group_terms
from speechdp.report.kit import formatting
from speechdp.report.kit.canvas import MOST_DOTS, Canvas, dashes, even_numbers, named_canvas, style_axes
from speechdp.report.kit.formatting import ONE_RANK_LABEL
from speechdp.report.kit.learning import (
    HIDDEN,
    curve_points,
    learning_axes,
    lies_on,
    mark_cut_off,
    seen_through,
    thinned,
)
from speechdp.report.kit.periods import PeriodCurve, draw_periods, period_units
from speechdp.report.kit.speeds import any_raced, ranked, ratio_text
from speechdp.report.kit.svg import Panel
from speechdp.report.kit.theme import PRINT, Theme

#: Exchanges older than this share one bar.
OLDEST_BAR = 12
SIZE = (4.4, 3.3)
Points = list[tuple[float, float]]
#: Margin between a point and the edge of its plot, and how far below that edge a point is still shown, as
#: shares of the height.
_EDGE, _NEAR = 0.06, 0.25


def make_canvas(groups: Sequence[Group], theme: Theme) -> Canvas:
    """Return a canvas that gives every strategy its colour on all plots; one rank is grey."""
    labels = list(dict.fromkeys(group.label for group in groups if group.ranks > 1))
    one_rank = [ONE_RANK_LABEL] if any(group.ranks == 1 for group in groups) else []
    return named_canvas([*labels, *one_rank], theme)


def make_panels(groups: Sequence[Group]) -> list[list[Panel]]:
    """Return the plots in lines: one line per kind (none without data), one plot per number of ranks."""
    sizes = sorted({group.ranks for group in groups if group.ranks > 1}) or [1]
    timed = TIME if any(group.mode == TIME and group.finished for group in groups) else FRAMES
    at_frames = [group for group in groups if group.mode == FRAMES]
    at_time = [group for group in groups if group.mode == timed]
    name = group_terms(groups).short_name
    units = period_units(row.run for group in at_frames if group.ranks > 1 for row in group.figures)
    lines = [
        [_panel("speed", f"{name} by speed", r, draw_speed, at_frames) for r in sizes if r > 1],
        [
            _panel("frames", "learning over frames", r, partial(draw_learning, over_time=False), at_frames)
            for r in sizes
        ],
        [
            _panel("time", "learning over time", r, partial(draw_learning, over_time=True), at_time)
            for r in sizes
        ],
        [
            _panel("staleness", "staleness", r, draw_staleness, at_frames)
            for r in sizes
            if any(any(group.ages) for group in at_frames if group.ranks == r)
        ],
        *(
            [
                _panel(f"periods-{unit.value}", "averaging period", r, partial(draw_period, unit), at_frames)
                for r in sizes
            ]
            for unit in units
        ),
    ]
    return [line for line in lines if line]


def plots_note(groups: Sequence[Group]) -> str:
    """Return what the marks of the plots mean."""
    canvas, shown = make_canvas(groups, PRINT), [group for group in groups if group.figures]
    raced, several = any_raced(shown), any(len(group.figures) > 1 for group in shown)
    sentences = []
    if several:
        single = "Thin lines" if raced else "Small dots and thin lines"
        means = "thick lines and dots" if raced else "large dots and thick lines"
        sentences.append(f"{single} are single seeds, {means} their means.")
    if any(group.raced and group.raced.interval for group in shown):
        sentences.append("The line through a dot is the 95 % interval of its speed.")
    if any(dashes(group.label, canvas) for group in shown if group.ranks > 1):
        sentences.append("Strategies with dashed curves have hollow dots.")
    sentences.append("A strategy outside of the plotted range is marked by an arrow.")
    sentences.append("Of two curves with the same values, the one on top is dashed.")
    if len({group.ranks for group in shown if group.ranks > 1}) > 1:
        sentences.append("All learning curves of a row share one vertical range; the rest is cut off.")
    return " ".join(sentences)


def _panel(
    kind: str,
    title: str,
    ranks: int,
    draw: Callable[[Axes, Sequence[Group], int, Canvas], bool],
    groups: Sequence[Group],
) -> Panel:
    name = formatting.rank_count(ranks)
    return Panel(
        f"{kind}-{ranks}", f"{name}: {title}", SIZE, lambda ax, canvas: draw(ax, groups, ranks, canvas)
    )


#: Least width of an axis of ratios: smaller differences do not matter, and need ticks of many digits.
_LEAST_RATIOS = 0.1


def draw_speed(ax: Axes, groups: Sequence[Group], ranks: int, canvas: Canvas) -> bool:
    """Plot the final held-out score against frames/s: a small dot per seed, a large one for their mean."""
    shown = [group for group in groups if group.ranks == ranks and group.frames_per_s and group.scores]
    if not shown:
        return False
    shown = ranked(shown)  # a run's throughput has no place on an axis of ratios
    terms, raced = group_terms(groups), any_raced(shown)
    style_axes(ax, f"{ranks} ranks: {terms.short_name} by speed", terms.metric.unit, canvas.theme)
    for group in shown:
        assert group.frames_per_s is not None and group.scores is not None
        colour = canvas.colours[group.label]
        known = [(row.frames_per_s, row.score) for row in group.figures]
        seeds = [(speed, score) for speed, score in known if speed is not None and score is not None]
        if raced:
            _draw_interval(ax, group, colour)
        elif len(seeds) > 1:
            ax.plot(*zip(*seeds, strict=True), "o", color=colour, markersize=3.2, alpha=0.6)
        filled = not dashes(group.label, canvas)
        (dot,) = ax.plot(
            [_speed(group, raced=raced)], [group.scores.mean], "o", color=colour, markersize=8, zorder=4,
            markerfacecolor=colour if filled else canvas.theme.surface, markeredgewidth=1.6,
        )  # fmt: skip
        canvas.tip(dot, _tip(group))
    speed = "times the baseline, by the race" if raced else f"{terms.amount}/s"
    ax.set_xlabel(speed)
    ax.margins(x=0.12, y=0.14)
    if raced:
        (left, right), least = ax.get_xlim(), 0.5 * _LEAST_RATIOS
        middle = 0.5 * (left + right)
        ax.set_xlim(min(left, middle - least), max(right, middle + least))
    _limit(ax, [[(0.0, y)] for g in shown if g.scores for y in g.scores.values])
    _draw_reference(ax, groups, canvas)
    _reach_for_what_is_near(ax, [group.scores.mean for group in shown if group.scores])
    _mark_what_lies_below(ax, shown, canvas, raced=raced)
    ax.xaxis.set_major_locator(MaxNLocator(5))
    even_numbers(ax.xaxis, fewest=2 if raced else 0)
    terms.finish_axis(ax)
    return True


def _speed(group: Group, *, raced: bool) -> float:
    """Return a group's position on the speed axis."""
    if raced:
        return 0.0 if group.raced is None else group.raced.ratio
    return 0.0 if group.frames_per_s is None else group.frames_per_s.mean


def _draw_interval(ax: Axes, group: Group, colour: str) -> None:
    """Draw the interval of a raced speed through the mean of the scores."""
    speed, scores = group.raced, group.scores
    if speed is not None and scores is not None and speed.interval is not None:
        ax.plot(speed.interval, [scores.mean] * 2, color=colour, linewidth=2, alpha=0.45, zorder=3)


def draw_staleness(ax: Axes, groups: Sequence[Group], ranks: int, canvas: Canvas) -> bool:
    """Plot the share of exchanges by age, strategies side by side."""
    shown = [group for group in groups if group.ranks == ranks and any(group.ages)]
    if not shown:
        return False
    style_axes(ax, f"{ranks} ranks: staleness", "% of exchanges", canvas.theme)
    width = 0.82 / len(shown)
    oldest = min(max(len(group.ages) for group in shown) - 1, OLDEST_BAR)
    for number, group in enumerate(shown):
        ages = [*group.ages[:oldest], sum(group.ages[oldest:])]
        for age, count in enumerate(ages):
            if not count:
                continue
            share = 100 * count / sum(ages)
            (bar,) = ax.bar(
                age + (number - (len(shown) - 1) / 2) * width,
                share,
                width * 0.92,
                color=canvas.colours[group.label],
            )
            canvas.tip(bar, f"{group.label}, staleness {age}: {share:.1f} % of {sum(ages):,} exchanges")
    names = [str(age) for age in range(oldest + 1)]
    if max(len(group.ages) for group in shown) > oldest + 1:
        names[-1] += "+"
    ax.set_xticks(range(oldest + 1), names)
    ax.set_xlabel("staleness (updates made elsewhere)")
    ax.set_xlim(-0.6, oldest + 0.6)
    return True


def draw_period(unit: PeriodUnit, ax: Axes, groups: Sequence[Group], ranks: int, canvas: Canvas) -> bool:
    """Plot the period in force over steps, one line per seed, for strategies that change it in this unit."""
    curves = [
        PeriodCurve(row.run, group.label, canvas.colours[group.label], dashes(group.label, canvas))
        for group in groups
        if group.ranks == ranks
        for row in group.figures
    ]
    title = f"{formatting.rank_count(ranks)}: averaging period"
    return draw_periods(ax, title, curves, unit, canvas, named=False)


def mean_curve(curves: Sequence[Points]) -> Points:
    """Return the mean of several seeds' curves at equal shares of each one's evaluations.

    At equal time, runs of one strategy may differ in their numbers of epochs: their mean, too, ends at the
    mean of their ends, as in the table.
    """
    shares = np.linspace(0, 1, max(map(len, curves)))
    resampled = [
        [np.interp(shares, np.linspace(0, 1, len(curve)), column) for column in zip(*curve, strict=True)]
        for curve in curves
    ]
    xs, ys = np.mean(resampled, axis=0)
    return [(float(x), float(y)) for x, y in zip(xs, ys, strict=True)]


def draw_learning(ax: Axes, groups: Sequence[Group], ranks: int, canvas: Canvas, *, over_time: bool) -> bool:
    """Plot held-out scores over the frames trained on, or over training time."""
    curves = {id(group): _curves(group, over_time) for group in groups}
    shown = [group for group in groups if group.ranks in (1, ranks) and curves[id(group)]]
    if not any(group.ranks == ranks for group in shown):
        return False
    own = [curve for group in shown if group.ranks == ranks for curve in curves[id(group)]]
    longest = max(curve[-1][0] for curve in own)
    terms, title = group_terms(groups), f"{formatting.rank_count(ranks)}: learning over"
    scale = learning_axes(ax, title, longest, terms, canvas, over_time=over_time)
    # The same vertical range for all numbers of ranks.
    _limit(ax, [curve for group in groups for curve in curves[id(group)]])
    low, high = ax.get_ylim()
    nearest = (HIDDEN * longest, HIDDEN * (high - low))
    drawn: list[Points] = []
    for group in shown:
        mean = mean_curve(curves[id(group)])
        hidden = sum(lies_on(mean, other, nearest) for other in drawn)
        _draw_group(ax, group, curves[id(group)], scale, canvas, hidden=hidden)
        drawn.append(mean)
    mark_cut_off(ax, [y for mean in drawn if mean[-1][1] >= low for _, y in mean], terms)
    terms.finish_axis(ax)
    return True


def _draw_group(
    ax: Axes, group: Group, curves: Sequence[Points], scale: float, canvas: Canvas, *, hidden: int
) -> None:
    """Draw the seeds' curves and their mean.

    Args:
        hidden: number of curves drawn before that the mean curve hides; its gaps let them show through.
    """
    colour, strokes = canvas.colours[group.label], dashes(group.label, canvas)
    strokes = strokes or seen_through(hidden)
    style = (0, strokes) if strokes else "-"
    if len(curves) > 1:
        for curve in curves:
            ax.plot(*_scaled(curve, scale), color=colour, linewidth=0.7, alpha=0.55, zorder=2)
    mean = mean_curve(curves)
    # A curve with one point is drawn as a marker.
    size = 0.0 if len(mean) > MOST_DOTS else 3.6 if len(mean) > 1 else 6.0
    (line,) = ax.plot(
        *_scaled(mean, scale), color=colour, linewidth=2, linestyle=style, zorder=3,
        marker="o" if size else "", markersize=size,
    )  # fmt: skip
    canvas.tip(line, _tip(group))


def _curves(group: Group, over_time: bool) -> list[Points]:
    curves = [curve_points(row.run.evaluations, over_time) for row in group.figures]
    return [[(x, y) for x, y, _ in thinned(curve)] for curve in curves if curve]


def _scaled(points: Points, scale: float) -> tuple[list[float], list[float]]:
    return [x / scale for x, _ in points], [y for _, y in points]


def _limit(ax: Axes, curves: Sequence[Points]) -> None:
    """Show the range of the better three quarters, so that a failing strategy does not flatten the rest."""
    heights = sorted(([y for _, y in curve] for curve in curves), key=lambda ys: -ys[-1])
    kept = heights[: max(1, -(-3 * len(heights) // 4))]
    best, worst_end = max(ys[-1] for ys in kept), min(ys[-1] for ys in kept)
    steepness = best - min(min(ys) for ys in kept)
    if steepness > best - worst_end:  # curves, not single points: show part of the rise
        shown = max(2.5 * (best - worst_end), 0.12 * steepness, 1e-3)
        ax.set_ylim(best - shown, best + 0.08 * shown)
    else:
        room = max(0.2 * steepness, 0.01)
        ax.set_ylim(worst_end - room, best + room)
    ax.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))


def _draw_reference(ax: Axes, groups: Sequence[Group], canvas: Canvas) -> None:
    """Draw the accuracy of one rank as a reference line."""
    reference = next((group for group in groups if group.ranks == 1 and group.score is not None), None)
    if reference is None or reference.score is None:
        return
    (low, high), score = ax.get_ylim(), reference.score
    bottom, top = min(low, score), max(high, score)
    room = _EDGE * (top - bottom)
    if low <= score <= high:
        ax.set_ylim(min(low, score - room), max(high, score + room))
    else:  # a distant line makes the plot so high that the other edge needs a larger margin, too
        ax.set_ylim(bottom - room, top + room)
    line = ax.axhline(score, color=canvas.theme.baseline, linewidth=1.4, linestyle=(0, (5, 2.5)), zorder=0)
    canvas.tip(line, _tip(reference))


def _reach_for_what_is_near(ax: Axes, scores: Sequence[float]) -> None:
    """Include points slightly below the plot, because cutting them off would gain hardly any height."""
    low, high = ax.get_ylim()
    near = [score for score in scores if low - _NEAR * (high - low) <= score < low]
    if near:
        ax.set_ylim(min(near) - _EDGE * (high - low), high)


def _mark_what_lies_below(ax: Axes, groups: Sequence[Group], canvas: Canvas, *, raced: bool) -> None:
    """Draw an arrow at the lower edge for a strategy whose accuracy lies below the plot."""
    (low, high), terms = ax.get_ylim(), group_terms(groups)
    for group in groups:
        if group.frames_per_s is None or group.score is None or group.score >= low:
            continue
        x, y = _speed(group, raced=raced), low + 0.05 * (high - low)
        (mark,) = ax.plot(
            [x],
            [y],
            "^" if terms.falls else "v",
            color=canvas.colours[group.label],
            markersize=8,
            zorder=4,
        )
        canvas.tip(mark, f"{_tip(group)} ({'above' if terms.falls else 'below'} the plotted range)")
        ax.annotate(
            terms.number(group.score), (x, y), xytext=(7, 0), textcoords="offset points", va="center",
            color=canvas.theme.muted, fontsize="small",
        )  # fmt: skip


def _tip(group: Group) -> str:
    speed = formatting.count(group.frames_per_s.mean if group.frames_per_s else None)
    terms = group_terms([group])
    text = f"{group.label}: {terms.with_unit(group.score)} at {speed} {terms.amount}/s"
    if group.raced is not None:
        text += f", {ratio_text(group.raced)} times the baseline in the race"
    if group.word_errors is not None:
        text += f", WER {formatting.percent(group.word_errors.wer, 1)} %"
    return f"{text}; {counted(len(group.finished), 'seed')}"
