"""Captions and notes say what their page shows, and nothing of what it does not show."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.figure import Figure

from speechdp.cli.main import run as speechdp
from speechdp.experiments.profile.record import STRONG, WEAK, read_profile
from speechdp.report.compare.groups import make_groups, read_comparison
from speechdp.report.compare.panels import plots_note
from speechdp.report.compare.report import write_comparison as write_comparison_report
from speechdp.report.compare.table import spread_note
from speechdp.report.kit.canvas import make_canvas
from speechdp.report.kit.theme import PRINT
from speechdp.report.profile.figures import make_pictures
from speechdp.report.runs.derived import sweep_figures
from speechdp.report.runs.folders import read_sweep
from speechdp.report.sweep.answer import find_answer
from speechdp.report.sweep.plots import draw_by_period, draw_learning, throughput_measure
from speechdp.report.sweep.report import write_report
from tests.helpers.comparisons import MadeUpStrategy, write_comparison
from tests.helpers.measured_runs import MadeUpSteps
from tests.helpers.page_reader import words_of
from tests.helpers.profiles import MadeUpProfile, write_profile
from tests.helpers.races import made_up_race, write_made_up_race
from tests.helpers.runs import MadeUpRun, realistic_sweep, write_sweep
from tests.helpers.terminal import on_terminal


def _compared(out: Path, seeds: tuple[int, ...], ranks: tuple[int, ...] = (1, 2), num: int = 2) -> Path:
    strategies = [MadeUpStrategy(f"model_averaging:period={2**n}") for n in range(num)]
    return write_comparison(out, strategies, ranks, seeds, ("frames",))


def test_single_seeds_are_explained_only_where_there_are_several(tmp_path: Path) -> None:
    one = make_groups(read_comparison(_compared(tmp_path / "one", (1,))), None)
    three = make_groups(read_comparison(_compared(tmp_path / "three", (1, 2, 3))), None)
    assert "seed" not in plots_note(one) and spread_note(one) == ""
    assert "dots and thin lines are single seeds" in plots_note(three)
    assert spread_note(three) == "Mean over seeds ± sample standard deviation."


def test_marks_that_only_some_comparisons_have_are_explained_there(tmp_path: Path) -> None:
    few = make_groups(read_comparison(_compared(tmp_path / "few", (1,))), None)
    out = _compared(tmp_path / "many", (1, 2), (1, 2, 4), num=10)
    speeds = {f"model_averaging:period={2**n}": 1 + 0.1 * n for n in range(10)}
    write_made_up_race(out, made_up_race(speeds, strategies={name: name for name in speeds}))
    many = make_groups(read_comparison(out), None)
    for words in ("hollow", "95 % interval", "one vertical range"):
        assert (words in plots_note(few), words in plots_note(many)) == (False, True), words
    # A race's speeds belong to strategies, so their plot has no dots of single seeds.
    assert plots_note(many).startswith("Thin lines are single seeds, thick lines and dots their means.")


def test_the_terminal_says_what_the_target_is_and_that_one_seed_has_no_deviation(tmp_path: Path) -> None:
    text = on_terminal(write_comparison_report(_compared(tmp_path / "out", (1, 2))).table)
    assert "To target: until " in text and "Mean over seeds ± sample standard deviation." in text
    text = on_terminal(write_comparison_report(_compared(tmp_path / "one", (1,))).table)
    assert "To target: until " in text and "deviation" not in text


def test_one_rank_waits_for_no_others(tmp_path: Path) -> None:
    run = MadeUpRun("alone", period=None, size=1, spans=(0.2, 0.0, 0.2, 0.5, 0.08, 0.0))
    report = write_report(write_sweep(tmp_path / "out", [run]))
    told = " ".join(report.answer)
    assert "back most is waiting for data: 20 % of the step time" in told
    assert "communication" not in told and "slower ranks" not in told
    assert "names the straggler" not in words_of(report.html)


def test_the_straggler_is_explained_where_there_is_a_rank_skew(tmp_path: Path) -> None:
    page = words_of(write_report(write_sweep(tmp_path / "out", realistic_sweep())).html)
    assert "rank skew names the straggler" in page


def test_runs_that_all_improve_are_not_listed(tmp_path: Path) -> None:
    runs = [MadeUpRun(f"p{2**n}", period=str(2**n), last_gain=0.05 + 0.01 * n) for n in range(12)]
    rows = sweep_figures(read_sweep(write_sweep(tmp_path / "out", runs)), None)
    (caution,) = [text for text in find_answer(rows).cautions if "improving" in text]
    assert caution.startswith(
        "Every run was still improving at the last evaluation (+0.050 nats/frame to +0.160 nats/frame)."
    )


def test_values_are_left_out_where_they_would_overlap(tmp_path: Path) -> None:
    for number, written in ((5, True), (13, False)):
        runs = [MadeUpRun("gradient_averaging", "gradient_averaging", None)]
        runs += [MadeUpRun(f"p{2**n}", period=str(2**n)) for n in range(number)]
        rows = sweep_figures(read_sweep(write_sweep(tmp_path / f"{number}", runs)), None)
        figure = Figure(figsize=(4.4, 3.1), layout="constrained")
        ax, canvas = figure.add_subplot(), make_canvas(rows, PRINT)
        assert draw_by_period(ax, rows, throughput_measure(rows), canvas)
        assert ("20,000" in [text.get_text() for text in ax.texts]) == written
        assert {tick.get_rotation() for tick in ax.get_xticklabels()} == ({0.0} if written else {45.0})
        assert len(canvas.tips) == len(runs) and all("20,000" in tip for tip in canvas.tips.values())


def test_curves_of_one_colour_differ_in_their_strokes(tmp_path: Path) -> None:
    runs = [MadeUpRun(f"p{2**n}", period=str(2**n), final_log_prob=-0.4 - 0.05 * n) for n in range(10)]
    rows = sweep_figures(read_sweep(write_sweep(tmp_path / "out", runs)), None)
    ax = Figure().add_subplot()
    assert draw_learning(ax, rows, make_canvas(rows, PRINT), over_time=False)
    curves = [line for line in ax.lines if len(line.get_xdata()) > 1]  # type: ignore[arg-type]
    looks = [(line.get_color(), line.is_dashed()) for line in curves]
    assert len(looks) == 10 == len(set(looks))


def test_a_run_that_is_missing_takes_no_accuracy_from_a_narrow_terminal(tmp_path: Path) -> None:
    out = write_sweep(tmp_path / "out", realistic_sweep(), missing=["gone"])
    speeds = {run.name: 1 + 0.1 * n for n, run in enumerate(realistic_sweep())}
    write_made_up_race(out, made_up_race(speeds))
    head = on_terminal(write_report(out).table, 80).partition("\u2500")[0]
    assert "raced speed" in " ".join(head.split()) and "log-prob" in head and "ranks" not in head


def test_a_line_of_perfect_scaling_is_explained_where_it_is_drawn(tmp_path: Path) -> None:
    profile = read_profile(write_profile(tmp_path / "out", MadeUpProfile()))
    caption = next(each.caption for each in make_pictures(profile) if each.name == "functions")
    assert "in strong scaling a line marks perfect scaling" in caption and "% is" in caption
    one = read_profile(write_profile(tmp_path / "one", MadeUpProfile(ranks=(1,))))
    assert {job.kind for job in one.jobs} >= {WEAK, STRONG}
    caption = next(each.caption for each in make_pictures(one) if each.name == "functions")
    assert "perfect" not in caption and "efficiency" not in caption


@pytest.mark.parametrize(
    ("periods", "words"), [("1,16", "the third shows the range"), ("16", "Upright lines are")]
)
def test_the_intervals_of_a_simulation_are_called_what_they_are(
    tmp_path: Path, periods: str, words: str
) -> None:
    run = MadeUpSteps(["node-a"] * 2).write(tmp_path)
    given = ("--ranks", "4,8", "--ranks-per-node", "2", "--bandwidth", "1gbit", "--latency", "50us")
    given = (*given, "--strategies", "model_averaging", "--periods", periods)
    assert speechdp(["simulate", str(run), *given]) == 0
    page = words_of(run / "simulation" / "simulation.html")
    assert words in page and "90 % intervals" in page and "Bands" not in page
