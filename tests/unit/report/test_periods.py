"""The averaging period in force: recorded while training, read back, and drawn on the pages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from speechdp.comm.serial import SerialCommunicator
from speechdp.parallel.period import Period, PeriodUnit
from speechdp.report.compare.report import write_comparison as write_comparison_report
from speechdp.report.kit.periods import period_units
from speechdp.report.runs.folders import read_run
from speechdp.report.runs.periods import read_periods
from speechdp.report.runs.results import PeriodChange
from speechdp.report.sweep.report import write_report
from speechdp.timing.timeline import Timeline
from tests.helpers.comparisons import MadeUpStrategy, write_comparison
from tests.helpers.own_script import Script
from tests.helpers.runs import MadeUpRun, write_run, write_sweep


def _steps(*changes: tuple[int, float]) -> tuple[PeriodChange, ...]:
    return tuple(PeriodChange(step, Period(value)) for step, value in changes)


def _write_periods(run: Path, *lines: object) -> None:
    (run / "timeline").mkdir(exist_ok=True)
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    (run / "timeline" / "periods.jsonl").write_text(text)


def test_a_scripts_first_parameter_group_sets_the_period_which_is_recorded(tmp_path: Path) -> None:
    """The first group's rate is 0.02, halved every 3 steps; the second's, 0.005, would begin with 16."""
    run = tmp_path / "run"
    strategy = "adaptive_averaging:rule=qsr,alpha=0.02,period=1"
    script = Script(SerialCommunicator(), strategy, options={"folder": run})
    with script.run:
        for first, last in ((0, 3), (3, 5), (5, 9)):
            script.train(first, last)
            script.run.log(valid_loss=1.0 / last)
    read = read_run(run)
    assert read.periods == _steps((0, 1), (3, 4), (7, 16))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["period"] for line in lines] == ["1", "4", "16"]
    assert read.metric.key == "valid_loss" and read.problems == ()
    page = write_report(run).html.read_text()
    assert 'id="plot-periods-steps"' in page
    assert "period 4 from step 3 on" in page and "period 1 first, 16 in the end, 2 changes" in page


def test_only_rank_0_records_periods_and_at_once(tmp_path: Path) -> None:
    for rank in (0, 1):
        path = tmp_path / f"of-{rank}" / f"rank-000{rank}.jsonl"
        timeline = Timeline(path, rank=rank, device=torch.device("cpu"))
        timeline.resume_at(2.5)
        timeline.note_period(3, "600kf")
        written = path.with_name("periods.jsonl")
        assert written.is_file() is (rank == 0)
        if rank == 0:
            assert json.loads(written.read_text()) == {"step": 3, "t": 2.5, "period": "600kf"}
        timeline.close()


def test_a_resumed_run_replaces_what_came_after_its_checkpoint(tmp_path: Path) -> None:
    run = write_run(MadeUpRun("a"), tmp_path)
    assert read_run(run).periods == ()
    _write_periods(
        run,
        {"step": 0, "t": 0.0, "period": "4"},
        {"step": 8, "t": 1.0, "period": "16"},
        {"step": 40, "t": 5.0, "period": "32"},
        # Resumed at step 20: the first window from there on is recorded, changed or not.
        {"step": 24, "t": 3.0, "period": "16"},
        {"step": 56, "t": 6.0, "period": "64"},
    )
    assert read_run(run).periods == _steps((0, 4), (8, 16), (56, 64))


def test_damaged_lines_are_passed_over_and_counted(tmp_path: Path) -> None:
    run = write_run(MadeUpRun("a"), tmp_path)
    _write_periods(
        run,
        {"step": 0, "t": 0.0, "period": "4"},
        {"step": 2, "t": 0.0, "period": "soon"},
        {"step": -1, "t": 0.0, "period": "4"},
        {"step": 3, "t": 0.0, "period": "9" * 300},
        '{"step": 5, "per',
    )
    problems: list[str] = []
    assert read_periods(run, problems) == _steps((0, 4))
    assert problems == ["timeline/periods.jsonl: 4 damaged lines passed over"]


@pytest.mark.parametrize("recorded", [False, True])
def test_the_page_of_a_sweep_draws_the_periods_that_change(tmp_path: Path, recorded: bool) -> None:
    out = write_sweep(
        tmp_path / "sweep", [MadeUpRun("usual"), MadeUpRun("qsr"), MadeUpRun("kaldi", period="9kf")]
    )
    if recorded:
        _write_periods(out / "qsr", {"step": 0, "period": "4"}, {"step": 20, "period": "32"})
        _write_periods(out / "kaldi", {"step": 0, "period": "9kf"})
    page = write_report(out).html.read_text()
    assert ('id="plot-periods-steps"' in page) is recorded
    assert ('id="plot-periods-frames"' in page) is recorded
    assert ("period 32 from step 20 on" in page) is recorded
    assert ("period 9kf throughout" in page) is recorded
    units = period_units(read_run(out / name) for name in ("usual", "qsr", "kaldi"))
    assert units == ([PeriodUnit.STEPS, PeriodUnit.FRAMES] if recorded else [])


def test_the_page_of_a_comparison_draws_them_for_each_number_of_ranks(tmp_path: Path) -> None:
    strategies = [MadeUpStrategy("model_averaging"), MadeUpStrategy("adaptive_averaging:rule=qsr,alpha=0.1")]
    out = write_comparison(tmp_path / "out", strategies, (1, 2, 4), (1, 2), ("frames",))
    assert "plot-periods" not in write_comparison_report(out).html.read_text()
    for run in out.glob("frames-2x-adaptive*"):
        _write_periods(run, {"step": 0, "period": "4"}, {"step": 20, "period": "32"})
    page = write_comparison_report(out).html.read_text()
    assert 'id="plot-periods-steps-2"' in page and "plot-periods-steps-4" not in page
    assert page.count("period 32 from step 20 on") == 2  # a line a seed
