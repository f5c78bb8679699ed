"""Runs that were timed while the machine was busy with something else are not compared without a word."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from speechdp.report.runs.derived import run_figures
from speechdp.report.runs.folders import read_run
from speechdp.report.runs.results import RunResult
from speechdp.report.runs.steadiness import find_unsteadiness
from speechdp.report.sweep.answer import find_answer
from speechdp.report.sweep.report import write_report
from speechdp.simulation.measured import read_measured
from tests.helpers.measured_runs import MadeUpSteps
from tests.helpers.runs import MadeUpRun, disturb, write_run, write_sweep

QUIET = MadeUpRun("quiet", period="16", frames_per_s=20_000.0, others=0.1)
#: Its forward passes take 60 % longer.
BUSY = replace(QUIET, name="busy", period="64", frames_per_s=12_500.0, others=1.4)


def runs_of(folder: Path, *runs: MadeUpRun) -> list[RunResult]:
    return [read_run(write_run(run, folder)) for run in runs]


def test_the_pair_that_differs_most_is_found(tmp_path: Path) -> None:
    middle = replace(BUSY, name="middle", frames_per_s=18_000.0)
    found = find_unsteadiness(runs_of(tmp_path, QUIET, BUSY, middle))
    assert found is not None
    assert (found.slow.run.name, found.fast.run.name) == ("busy", "quiet")
    assert found.excess == pytest.approx(0.6)
    assert found.slow.elsewhere == pytest.approx(1.4) and found.fast.elsewhere == pytest.approx(0.1)


def test_what_is_slow_by_itself_is_no_fault_of_the_machine(tmp_path: Path) -> None:
    """Threads that exchange in the background slow their own rank down."""
    assert find_unsteadiness(runs_of(tmp_path, QUIET, replace(BUSY, others=0.1))) is None


def test_a_run_that_slows_itself_down_hides_none_that_others_disturbed(tmp_path: Path) -> None:
    slowest = replace(QUIET, name="slowest", frames_per_s=5_000.0)
    found = find_unsteadiness(runs_of(tmp_path, QUIET, replace(BUSY), slowest))
    assert found is not None and (found.slow.run.name, found.fast.run.name) == ("busy", "quiet")


def test_a_little_more_work_elsewhere_is_no_cause(tmp_path: Path) -> None:
    assert find_unsteadiness(runs_of(tmp_path, QUIET, replace(BUSY, others=0.18))) is None


def test_without_a_record_of_the_load_the_time_alone_counts(tmp_path: Path) -> None:
    assert find_unsteadiness(runs_of(tmp_path, QUIET, replace(BUSY, others=None))) is not None


@pytest.mark.parametrize("name", ["size", "batch_size", "num_parameters"])
def test_other_models_ranks_and_batches_are_not_compared(name: str, tmp_path: Path) -> None:
    other = replace(BUSY, settings={name: 7})
    assert find_unsteadiness(runs_of(tmp_path, QUIET, other)) is None


def test_small_differences_are_noise(tmp_path: Path) -> None:
    assert find_unsteadiness(runs_of(tmp_path, QUIET, replace(BUSY, frames_per_s=19_200.0))) is None


def test_the_page_says_it_before_its_headline(tmp_path: Path) -> None:
    out = write_sweep(tmp_path, [QUIET, BUSY])
    answer = find_answer([run_figures(read_run(out / name), None, None) for name in ("quiet", "busy")])
    assert answer.sentences[0] == (
        "The machine was not the same for all runs: on rank 0 on node-a a forward pass of the same model "
        "took 60 % longer in period 64 (started 2026-11-20 15:42, 1.4 cores busy with other work) than in "
        "period 16 (started 2026-11-20 15:42, 0.1 cores busy with other work). Speeds that were measured one "
        "after another under such conditions say little about the settings: measure them again while nothing "
        "else runs there."
    )
    assert "fastest setting" in answer.sentences[1]
    page = write_report(out).html.read_text(encoding="utf-8")
    assert page.index("The machine was not the same") < page.index("fastest setting")


def test_a_simulation_of_such_runs_says_it_too(tmp_path: Path) -> None:
    for name in ("quiet", "busy"):
        MadeUpSteps().write(tmp_path, name)
    assert read_measured(tmp_path).notes == ()
    disturb(tmp_path / "busy", forward=1.6, others=1.3)
    (note,) = read_measured(tmp_path).notes
    assert "a forward pass of the same model took 60 % longer in busy" in note
    assert note.endswith("or simulate from one run that nothing disturbed.")
    assert read_measured(tmp_path / "busy").notes == ()
