"""Scripts that save and go on: at a stop signal that all ranks agree on, from checkpoints that are whole."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from speechdp import DataParallel, exit_codes, run_ranks
from speechdp.comm.base import Communicator
from speechdp.comm.serial import SerialCommunicator
from speechdp.comm.threads.communicator import run_threads
from speechdp.errors import ConfigError, RunError
from speechdp.parallel import stop
from speechdp.process.ending import Stopped
from speechdp.report.runs.derived import run_figures
from speechdp.report.runs.folders import read_run
from tests.unit.parallel.test_stop import Clock

NUM_STEPS = 12


class Script:
    """A script that saves every third step and where it is asked to stop; its scheduler, too."""

    def __init__(self, comm: Communicator, strategy: str, folder: Path | None) -> None:
        self.comm = comm
        self.model = nn.Linear(3, 2).double()
        with torch.no_grad():
            for number, parameter in enumerate(self.model.parameters(), start=1):
                parameter.copy_(torch.arange(parameter.numel()).view(parameter.shape) / 10 / number)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
        self.run = DataParallel(self.model, optimizer, comm, strategy, folder)
        saved = self.run.load_checkpoint() if folder is not None else None
        if saved is not None:
            self.scheduler.load_state_dict(saved["scheduler"])

    def step(self) -> None:
        generator = torch.Generator().manual_seed(100 * self.comm.rank + self.run.steps)
        x = torch.randn(2 + self.comm.rank, 3, generator=generator, dtype=torch.float64)
        with self.run.step(weight=len(x)) as step:
            step.backward((self.model(x) - 1).square().sum())
        self.scheduler.step()

    def save(self) -> None:
        self.run.save_checkpoint(scheduler=self.scheduler.state_dict())

    def train(self, after_step: Callable[[], object] = lambda: None) -> torch.Tensor:
        with self.run:
            while self.run.steps < NUM_STEPS:
                self.step()
                after_step()
                if self.run.folder is not None:
                    if self.run.steps % 3 == 0:
                        self.save()
                    if self.run.should_stop:
                        self.save()
                        break
        return nn.utils.parameters_to_vector(self.model.parameters()).detach()


def ask(run: DataParallel) -> None:
    """Do as a signal to this rank does: threads get none."""
    assert not run.should_stop and run._stop is not None
    run._stop._request.received = "SIGTERM"


@pytest.fixture(autouse=True)
def _an_agreement_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop, "time", Clock(1.0))


@pytest.mark.parametrize("strategy", ["gradient_averaging", "bmuf:period=3", "dpsgd"])
@pytest.mark.parametrize("size", [1, 3])
def test_a_stopped_script_goes_on_as_if_it_had_not_been(strategy: str, size: int, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    stopped_at = []

    def is_stopped(comm: Communicator) -> None:
        script = Script(comm, strategy, folder)
        with pytest.raises(Stopped):
            script.train(lambda: ask(script.run) if script.run.steps == 4 and comm.rank == size - 1 else None)
        stopped_at.append(script.run.steps)

    run_threads(size, is_stopped)
    assert len(set(stopped_at)) == 1 and 4 < stopped_at[0] < 8
    assert not (folder / "completed.json").exists()

    def goes_on(comm: Communicator) -> None:
        whole = Script(comm, strategy, None).train()
        script = Script(comm, strategy, folder)
        assert torch.equal(script.train(), whole), f"{strategy}: stopped and resumed is another run"

    run_threads(size, goes_on)
    run = read_run(folder)
    assert run.completed and run_figures(run, None, None).steps == NUM_STEPS


@pytest.mark.parametrize("strategy", ["ad_psgd", "parameter_server", "easgd:period=2"])
def test_asynchronous_ranks_learn_of_it_where_they_meet(strategy: str, tmp_path: Path) -> None:
    def check(comm: Communicator) -> None:
        script = Script(comm, strategy, tmp_path)
        with pytest.raises(Stopped), script.run:
            for number in range(1, 9):
                script.step()
                if number == 2 and comm.rank == 1:
                    ask(script.run)
                assert script.run.should_stop == (number > 4)
                if number == 4:
                    with script.run.evaluating():
                        pass
        assert script.run.steps == 8

    run_threads(2, check)


def test_a_script_that_was_not_told_any_more_completes_its_run(tmp_path: Path) -> None:
    def check(comm: Communicator) -> None:
        script = Script(comm, "ad_psgd", tmp_path)
        with script.run:
            script.step()
            ask(script.run)
            with script.run.evaluating():
                pass

    run_threads(2, check)
    assert (tmp_path / "completed.json").is_file()


def test_only_a_script_that_looks_is_spared_by_signals(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SPEECHDP_FOLDER", str(tmp_path / "run"))
    before = signal.getsignal(signal.SIGTERM)

    def main(comm: Communicator) -> None:
        script = Script(comm, "gradient_averaging", tmp_path)
        with script.run:
            script.step()
            assert signal.getsignal(signal.SIGTERM) == before
            assert not script.run.should_stop
            signal.raise_signal(signal.SIGTERM)
            while not script.run.should_stop:
                script.step()
            script.save()
            return

    with pytest.raises(SystemExit) as ended:
        run_ranks(main, backend="serial")
    assert ended.value.code == exit_codes.STOPPED and signal.getsignal(signal.SIGTERM) == before
    assert (tmp_path / "run" / "checkpoints").is_dir() and not (tmp_path / "run" / "completed.json").exists()


def test_ranks_that_are_threads_end_with_the_same_exit_code(tmp_path: Path) -> None:
    def main(comm: Communicator) -> None:
        script = Script(comm, "gradient_averaging", tmp_path)
        script.train(lambda: ask(script.run) if script.run.steps == 2 else None)

    with pytest.raises(SystemExit) as ended:
        run_ranks(main, backend="threads:2")
    assert ended.value.code == exit_codes.STOPPED


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_the_last_two_are_kept_and_what_a_kill_leaves_does_not_count(tmp_path: Path) -> None:
    run_threads(2, lambda comm: Script(comm, "bmuf:period=2", tmp_path).train())
    assert names(tmp_path) == ["step-00000009", "step-00000012"]
    (tmp_path / "checkpoints/step-00000012").rename(tmp_path / "checkpoints/step-00000015.tmp")
    (tmp_path / "completed.json").unlink()
    steps = run_threads(2, _loaded_steps(tmp_path))
    assert steps == [9, 9]


def _loaded_steps(folder: Path) -> Callable[[Communicator], int]:
    def load(comm: Communicator) -> int:
        script = Script(comm, "bmuf:period=2", folder)
        assert script.scheduler.last_epoch == 9
        with script.run:
            begun_at = script.run.steps
            script.step()
        return begun_at

    return load


def test_a_run_that_begins_anew_leaves_no_checkpoint_of_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(comm: Communicator, *, at: int) -> None:
        script = Script(comm, "bmuf:period=2", tmp_path)

        def after_step() -> None:
            if script.run.steps == at:
                raise ValueError("died")

        script.train(after_step)

    with pytest.raises(ValueError, match="died"):
        run_threads(2, lambda comm: dies(comm, at=8))
    assert names(tmp_path) == ["step-00000003", "step-00000006"]
    monkeypatch.setenv("SPEECHDP_RESUME", "1")
    monkeypatch.setattr(DataParallel, "load_checkpoint", lambda _: None)  # of a script that loads nothing
    with pytest.raises(ValueError, match="died"):
        run_threads(2, lambda comm: dies(comm, at=5))
    assert names(tmp_path) == ["step-00000003"]


def refused(
    words: str, kind: type[Exception], function: Callable[[Communicator], Any], size: int = 2
) -> None:
    with pytest.raises(kind, match=re.escape(words)) as error:
        run_threads(size, function)
    assert "\n" not in str(error.value)


def test_what_cannot_be_gone_on_from_is_refused_in_a_line(tmp_path: Path) -> None:
    run_threads(2, lambda comm: Script(comm, "bmuf:period=2", tmp_path).train())
    last = tmp_path / "checkpoints/step-00000012"

    def begin(strategy: str) -> Callable[[Communicator], Script]:
        return lambda comm: Script(comm, strategy, tmp_path)

    refused("of another number of ranks (2) than this job has (3)", ConfigError, begin("bmuf:period=2"), 3)
    refused("with slowmo cannot go on from the state of rank", ConfigError, begin("slowmo:period=2"))
    refused("give DataParallel folder=", ConfigError, lambda c: Script(c, "bmuf", None).run.load_checkpoint())
    for rank in range(2):
        (last / f"rank-{rank:04d}.pt").write_bytes(b"no zip")
    refused("is damaged (", RunError, begin("bmuf:period=2"))


def test_states_of_different_steps_are_refused() -> None:
    def check(comm: Communicator) -> None:
        script, other = (Script(comm, "gradient_averaging", None) for _ in range(2))
        with script.run:
            states = []
            for _ in range(2):
                states.append(script.run.state_dict())
                script.step()
        other.run.load_state_dict(states[comm.rank])
        with other.run:
            raise AssertionError("its ranks are at different steps")

    refused("rank 0 loads step 0, rank 1 step 1; load states that were saved together", ConfigError, check)


def test_a_full_disk_is_said_in_a_line(tmp_path: Path) -> None:
    """/dev/full takes the place of the file."""
    (tmp_path / f".model.pt.{os.getpid()}.tmp").symlink_to("/dev/full")
    script = Script(SerialCommunicator(), "bmuf", None)
    with pytest.raises(RunError, match=re.escape("No space left on device")):
        script.run.save(tmp_path / "model.pt")
    assert list(tmp_path.iterdir()) == []
