"""Training that is cut off with a step, as in a race: by any strategy, in a loop that knows nothing of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from speechdp.comm.base import Communicator
from speechdp.comm.threads.communicator import run_threads
from speechdp.errors import ConfigError
from speechdp.launching.variables import PAUSE
from speechdp.parallel.stop import Pause
from speechdp.process.ending import Paused
from tests.helpers.own_script import NUM_STEPS, SYNCHRONOUS, Script, make_batch

ASYNCHRONOUS = ["ad_psgd", "parameter_server", "easgd:period=2"]
CUT_AT = 6


@pytest.mark.parametrize("strategy", [*SYNCHRONOUS, *ASYNCHRONOUS])
def test_training_ends_with_the_step_and_is_timed_up_to_it(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PAUSE, str(Pause(CUT_AT, cut=True)))
    monkeypatch.setenv("SPEECHDP_FOLDER", str(tmp_path / "run"))
    passed = []

    def train(comm: Communicator) -> None:
        script = Script(comm, strategy)
        run = script.run
        with pytest.raises(Paused), run:
            for batch in run.batches([make_batch(comm.rank, number) for number in range(NUM_STEPS)]):
                script.step(batch)
                passed.append(run.steps)
            passed.append(-1)
        assert run.steps == CUT_AT

    run_threads(2, train)
    assert sorted(passed) == sorted([*range(1, CUT_AT)] * 2)
    timing = json.loads((tmp_path / "run" / "timing.json").read_text())
    assert [(rank["first_step"], rank["last_step"]) for rank in timing["ranks"]] == [(5, CUT_AT)] * 2
    assert not (tmp_path / "run" / "completed.json").exists()
    assert not (tmp_path / "run" / "owner.json").exists()


def test_a_loop_that_catches_all_errors_of_steps_is_left_at_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As scripts do that pass over batches that are damaged."""
    monkeypatch.setenv(PAUSE, "cut:5")
    monkeypatch.setenv("SPEECHDP_FOLDER", str(tmp_path / "run"))

    def train(comm: Communicator) -> None:
        script, caught = Script(comm, "model_averaging:period=2"), list[Exception]()
        with pytest.raises(Paused), script.run as run:
            for number in range(8):
                try:
                    script.step(make_batch(comm.rank, number))
                except Exception as error:
                    caught.append(error)
            with run.evaluating():
                raise AssertionError("it goes on")
        assert [type(error) for error in caught] == [Paused] * 4 and run.steps == 5

    run_threads(2, train)
    assert json.loads((tmp_path / "run" / "timing.json").read_text())["ranks"][1]["steps"] == 1


def test_a_loop_without_a_with_block_is_cut_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As other libraries' trainers call it: nobody leaves the run after the exception."""
    monkeypatch.setenv(PAUSE, "cut:5")
    monkeypatch.setenv("SPEECHDP_FOLDER", str(tmp_path / "run"))

    def train(comm: Communicator) -> None:
        script = Script(comm, "model_averaging:period=2")
        script.run.__enter__()
        with pytest.raises(Paused):
            script.train()

    run_threads(2, train)
    assert json.loads((tmp_path / "run" / "timing.json").read_text())["ranks"][1]["steps"] == 1


@pytest.mark.parametrize("pause", [Pause(7), Pause(7, evaluated=True), Pause(7, cut=True)])
def test_where_to_pause_goes_through_the_environment(pause: Pause, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PAUSE, str(pause))
    assert Pause.of_environment() == pause


@pytest.mark.parametrize("text", ["cut:", "cut:0", "cut:evaluation:3", "evaluation:x"])
def test_what_is_no_step_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PAUSE, text)
    with pytest.raises(
        ConfigError, match=r"write the number of a step, from 1, or evaluation:STEP, or cut:STEP"
    ):
        Pause.of_environment()
