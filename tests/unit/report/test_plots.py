"""Plots, apart from what they show."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from matplotlib.figure import Figure

from speechdp.report.compare.groups import make_groups, read_comparison
from speechdp.report.compare.panels import draw_learning as draw_compared
from speechdp.report.compare.panels import draw_speed
from speechdp.report.compare.panels import make_canvas as compare_canvas
from speechdp.report.kit.canvas import even_numbers, make_canvas
from speechdp.report.kit.theme import PRINT
from speechdp.report.runs.derived import run_figures
from speechdp.report.runs.results import RankTiming, RunResult, RunTiming
from speechdp.report.sweep.bars import draw_shares
from tests.helpers.comparisons import MadeUpStrategy, write_comparison
from tests.helpers.races import made_up_race, write_made_up_race


def test_a_home_without_room_for_matplotlib_s_cache_is_not_complained_of(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    ended = subprocess.run(
        [sys.executable, "-c", "import speechdp.report.kit.svg"],
        env={**os.environ, "MPLCONFIGDIR": str(tmp_path / "file" / "folder")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stderr == ""


def test_curves_of_the_same_values_and_single_points_are_seen(tmp_path: Path) -> None:
    strategies = [MadeUpStrategy("a"), MadeUpStrategy("b"), MadeUpStrategy("c", log_prob=-0.3)]
    out = write_comparison(tmp_path / "out", strategies, (2,), (1,), ("frames",))
    first, hidden, single = (out / f"frames-2x-{name}-seed1-12ep" / "metrics.jsonl" for name in "abc")
    hidden.write_text(first.read_text())
    single.write_text(single.read_text().splitlines()[-1] + "\n")  # a script that logs once
    groups = make_groups(read_comparison(out), None)
    ax = Figure().add_subplot()
    assert draw_compared(ax, groups, 2, compare_canvas(groups, PRINT), over_time=False)
    below, above, point = ax.lines
    assert not below.is_dashed() and above.is_dashed() and above.get_zorder() >= below.get_zorder()
    assert point.get_marker() == "o" and point.get_markersize() > below.get_markersize() > 0


def test_what_lies_just_below_the_picture_is_not_cut_off(tmp_path: Path) -> None:
    """The line of one rank far above gives the picture a height in which the lower strategy has room, too."""
    ends = {"a": -1.2, "b": -1.2, "c": -1.21, "d": -1.25}
    strategies = [MadeUpStrategy(name, log_prob=end) for name, end in ends.items()]
    out = write_comparison(tmp_path / "out", strategies, (1, 2), (1,), ("frames",))
    groups = make_groups(read_comparison(out), None)
    ax = Figure().add_subplot()
    assert draw_speed(ax, groups, 2, compare_canvas(groups, PRINT))
    lowest = min(group.score for group in groups if group.score is not None)
    assert ax.get_ylim()[0] < lowest and not [line for line in ax.lines if line.get_marker() == "v"]


def test_dots_are_whole_where_one_rank_is_far_away(tmp_path: Path) -> None:
    strategies = [MadeUpStrategy("a", log_prob=-1.2), MadeUpStrategy("b", log_prob=-1.21)]
    out = write_comparison(tmp_path / "out", strategies, (1, 2), (1,), ("frames",))
    groups = make_groups(read_comparison(out), None)
    scores = [group.score for group in groups if group.ranks == 2 and group.score is not None]
    one_rank = next(group.score for group in groups if group.ranks == 1)
    assert one_rank is not None and one_rank > max(scores) + 20 * (max(scores) - min(scores))
    ax = Figure().add_subplot()
    assert draw_speed(ax, groups, 2, compare_canvas(groups, PRINT))
    low, high = ax.get_ylim()
    assert all(min(score - low, high - score) > 0.04 * (high - low) for score in (*scores, one_rank))


def test_the_dot_of_a_seed_has_that_seeds_speed_and_score(tmp_path: Path) -> None:
    out = write_comparison(tmp_path / "out", [MadeUpStrategy("a")], (2,), (1, 2, 3, 4), ("frames",))
    (group,) = make_groups(read_comparison(out), None)
    without_score, without_speed, *whole = group.figures
    figures = (replace(without_score, score=None), replace(without_speed, frames_per_s=None), *whole)
    groups = [replace(group, figures=figures)]
    ax = Figure().add_subplot()
    assert draw_speed(ax, groups, 2, compare_canvas(groups, PRINT))
    seeds, _ = ax.lines
    assert list(seeds.get_xdata()) == [row.frames_per_s for row in whole]
    assert list(seeds.get_ydata()) == [row.score for row in whole]


def test_settings_as_fast_as_each_other_are_not_drawn_apart(tmp_path: Path) -> None:
    names = ("a", "b")
    out = write_comparison(
        tmp_path / "out", [MadeUpStrategy(name) for name in names], (2,), (1,), ("frames",)
    )
    speeds = {"a": 1.0, "b": 1.0002}
    write_made_up_race(
        out, made_up_race(speeds, noise=0.0, rounds=2, strategies={name: name for name in names})
    )
    groups = make_groups(read_comparison(out), None)
    ax = Figure().add_subplot()
    assert draw_speed(ax, groups, 2, compare_canvas(groups, PRINT))
    left, right = ax.get_xlim()
    assert left < 1 < right and right - left > 0.09


def test_a_comparison_s_curve_whose_beginning_is_cut_off_says_so(tmp_path: Path) -> None:
    out = write_comparison(
        tmp_path / "out", [MadeUpStrategy("a"), MadeUpStrategy("b")], (2,), (1,), ("frames",)
    )
    groups = make_groups(read_comparison(out), None)
    ax = Figure().add_subplot()
    assert draw_compared(ax, groups, 2, compare_canvas(groups, PRINT), over_time=False)
    assert ax.get_xlabel().endswith("\nearlier evaluations lie below")


def test_ticks_of_an_axis_are_written_alike_and_differ() -> None:
    for ticks, texts in (
        ([1.0, 1.004, 1.008], ["1.000", "1.004", "1.008"]),
        ([750_000, 1_000_000, 1_250_000], ["750,000", "1,000,000", "1,250,000"]),
        ([-4.2, -4.0], ["\u22124.2", "\u22124.0"]),
        ([0, 500], ["0", "500"]),
    ):
        ax = Figure().add_subplot()
        ax.set_yticks(ticks)
        even_numbers(ax.yaxis)
        assert ax.yaxis.get_major_formatter().format_ticks(ticks) == texts


def test_a_tip_has_the_milliseconds_of_a_long_step() -> None:
    timing = RunTiming(0, (RankTiming(0, "", 2, 100, 5.0, {"forward": 3.0, "backward": 2.0}),))
    rows = [run_figures(RunResult("a", Path(), {}, (), timing, None, True, True, ()), None, None)]
    canvas = make_canvas(rows, PRINT)
    assert draw_shares(Figure().add_subplot(), rows, canvas)
    assert "one rank, rank 0: forward 60.0 %, 1,500 ms per step" in canvas.tips.values()
