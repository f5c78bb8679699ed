"""Runs that were timed while the machine was busy with something else are not compared without a word."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from speechdp.report.kit.same_machine import machine_warning
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
    outside = [one.outside for one in (found.slow, found.fast)]
    assert [load and load.total for load in outside] == [pytest.approx(1.4), pytest.approx(0.1)]


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


GPU = {"index": 0, "clock_mhz": 1980, "lowest_clock_mhz": 1755, "limits": {}, "others": 0, "most_others": 0,
       "others_bytes": 4e6}  # fmt: skip


@pytest.mark.parametrize(
    ("slow", "is_from_outside"),
    [
        (GPU, False),
        ({**GPU, "clock_mhz": 1950}, False),
        ({**GPU, "clock_mhz": 1410}, True),
        ({**GPU, "others": 0.6, "most_others": 1}, True),
        ({**GPU, "others_bytes": 20e9}, True),
        ({key: value for key, value in GPU.items() if key != "others"}, True),
        ({key: value for key, value in GPU.items() if key != "clock_mhz"}, True),
        (None, True),
    ],
)
def test_ranks_on_gpus_are_judged_by_their_gpus(slow: object, is_from_outside: bool, tmp_path: Path) -> None:
    """Equal loads of the cores do not clear the GPU."""
    quiet = replace(QUIET, settings={"device": "cuda"}, gpu=GPU)
    found = find_unsteadiness(
        runs_of(tmp_path, quiet, replace(quiet, name="slow", frames_per_s=12e3, gpu=slow))
    )
    assert (found is not None) == is_from_outside
    # On a GPU that was the same, the cores count as ever: they start its kernels.
    busy = replace(quiet, name="busy", frames_per_s=12e3, others=1.4)
    assert find_unsteadiness(runs_of(tmp_path / "cores", quiet, busy)) is not None


def test_the_warning_names_clock_and_other_users_of_the_gpu(tmp_path: Path) -> None:
    quiet = replace(QUIET, settings={"device": "cuda"}, gpu=GPU, stolen=0.3)
    slow = {**GPU, "clock_mhz": 1410, "others": 1, "most_others": 1, "others_bytes": 20e9}
    runs = runs_of(tmp_path, quiet, replace(quiet, name="slow", frames_per_s=12e3, gpu=slow))
    warning = machine_warning(runs, {"quiet": "A", "slow": "B"})
    stolen = "0.1 cores busy with other work and 0.3 stolen by the virtual machine's host"
    assert f"{stolen}, GPU clock 1,410 MHz, 1 other process with 20.00 GB in the mean)" in warning
    assert f"{stolen}, GPU clock 1,980 MHz)" in warning


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


def test_a_large_difference_is_a_factor(tmp_path: Path) -> None:
    for name in ("quiet", "busy"):
        MadeUpSteps().write(tmp_path, name)
    disturb(tmp_path / "busy", forward=23.0, others=1.3)
    (note,) = read_measured(tmp_path).notes
    assert "a forward pass of the same model took 23.0 times as long in busy" in note
    assert " as in quiet" in note and "% longer" not in note


def test_a_simulation_of_such_runs_says_it_too(tmp_path: Path) -> None:
    for name in ("quiet", "busy"):
        MadeUpSteps().write(tmp_path, name)
    assert read_measured(tmp_path).notes == ()
    disturb(tmp_path / "busy", forward=1.6, others=1.3)
    (note,) = read_measured(tmp_path).notes
    assert "a forward pass of the same model took 60 % longer in busy" in note
    assert note.endswith("or simulate from one run that nothing disturbed.")
    assert read_measured(tmp_path / "busy").notes == ()
