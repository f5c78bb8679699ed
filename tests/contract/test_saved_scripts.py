"""Scripts that save and go on: at a stop signal that all ranks agree on, from checkpoints that are whole."""

from __future__ import annotations

import errno
import importlib
import os
import re
import secrets
import signal
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from speechdp import DataParallel, exit_codes, run_ranks
from speechdp.comm.base import Communicator
from speechdp.comm.serial import SerialCommunicator
from speechdp.comm.threads.communicator import run_threads
from speechdp.errors import CommunicationError, ConfigError, FolderInUseError, RunError
from speechdp.ownership.claimant import Claimant
from speechdp.ownership.owner import OWNER_FILE, FolderOwner, Surroundings
from speechdp.parallel import script_folder, stop
from speechdp.parallel.run_files import RunDirectory
from speechdp.parallel.script_folder import ScriptFolder
from speechdp.process.ending import Stopped, StoppedUnsaved
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


def test_what_is_logged_is_kept_before_a_checkpoint_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a crash of the machine a checkpoint would else know of lines that are no more."""

    def refuse(path: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def work(comm: Communicator) -> None:
        script = Script(comm, "gradient_averaging", tmp_path)
        with script.run:
            script.step()
            script.save()  # nothing has been logged
            script.run.log(loss=1.0)
            with pytest.raises(RunError, match=r"metrics\.jsonl: cannot be written"):
                script.save()

    monkeypatch.setattr("speechdp.parallel.run_files.sync", refuse)
    run_threads(2, work)


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


def test_a_script_that_stops_without_saving_says_so_and_is_not_taken_for_one_that_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def main(comm: Communicator) -> None:
        script = Script(comm, "gradient_averaging", tmp_path)
        with script.run:
            while True:
                script.step()
                if script.run.should_stop:
                    break
                if script.run.steps == 2:
                    script.run._stop._request.received = "SIGTERM"  # type: ignore[union-attr]

    with pytest.raises(SystemExit) as ended:
        run_ranks(main, backend="threads:2")
    assert ended.value.code == exit_codes.STOPPED_UNSAVED
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(r"speechdp: warning: stopped as requested at step \d+, but .* saved nothing since", line)
    assert line.endswith("call run.save_checkpoint when run.should_stop is true")
    assert not (tmp_path / "completed.json").exists()
    # Nor does it begin again silently, in another process.
    monkeypatch.setattr(script_folder, "_begun_here", set())
    run_threads(2, lambda comm: Script(comm, "gradient_averaging", tmp_path).train())
    (line,) = capsys.readouterr().err.splitlines()
    told = "the previous run in this folder left no checkpoint, so training starts from the beginning"
    assert line == f"speechdp: warning: {tmp_path}: {told}"


def test_what_was_saved_before_this_start_does_not_count(tmp_path: Path) -> None:
    run_threads(1, lambda comm: Script(comm, "bmuf", tmp_path).train())

    def goes_on(comm: Communicator, *, saves: bool) -> None:
        script = Script(comm, "bmuf", tmp_path)
        with script.run:
            ask(script.run)
            if saves:
                script.run.state_dict()  # for a file of its own
            while not script.run.should_stop:
                script.step()

    with pytest.raises(StoppedUnsaved):
        run_threads(1, lambda comm: goes_on(comm, saves=False))
    with pytest.raises(Stopped) as stopped:
        run_threads(1, lambda comm: goes_on(comm, saves=True))
    assert not isinstance(stopped.value, StoppedUnsaved)


def test_what_could_not_be_saved_does_not_count(tmp_path: Path) -> None:
    def fails_to_save(comm: Communicator) -> None:
        script = Script(comm, "gradient_averaging", tmp_path)
        with script.run:
            with pytest.raises(ConfigError):
                script.run.save_checkpoint(odd=object())
            ask(script.run)
            while not script.run.should_stop:
                script.step()

    with pytest.raises(StoppedUnsaved):
        run_threads(1, fails_to_save)


@pytest.mark.parametrize(("size", "name"), [(1, "speechdp: "), (2, "speechdp: rank 0 on ")])
def test_a_script_that_loses_its_folder_names_the_rank(
    size: int, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[tuple[str, int]] = []
    monkeypatch.setattr(
        "speechdp.comm.environment.end_process_with", lambda text, code: said.append((text, code))
    )

    def trains(comm: Communicator) -> None:
        script = Script(comm, "gradient_averaging", tmp_path)
        mine = script.run._folder._owner
        assert (mine is not None) == (comm.rank == 0)
        if mine is not None:
            (tmp_path / OWNER_FILE).unlink()
            other = Claimant.here("train", {})
            FolderOwner(tmp_path, other, Surroundings(print, print), beats=False).acquire()
            mine.beat()
        script.run._folder.release()

    run_threads(size, trains)
    ((text, code),) = said
    assert code == exit_codes.IN_USE and text.startswith(name) and text.count("\n") == 1
    assert f": {tmp_path}: was taken over by speechdp train" in text


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


def test_checkpoints_that_a_script_does_not_load_are_not_lost(
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
    load = DataParallel.load_checkpoint
    monkeypatch.setattr(DataParallel, "load_checkpoint", lambda _: None)  # of a script that loads nothing
    refused("the script has loaded none", ConfigError, lambda comm: dies(comm, at=5))
    assert names(tmp_path) == ["step-00000003", "step-00000006"]
    monkeypatch.setattr(DataParallel, "load_checkpoint", load)
    assert run_threads(2, lambda comm: len(Script(comm, "bmuf:period=2", tmp_path).train())) == [8, 8]


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

    refused("on another number of ranks (2) than this job has (3)", ConfigError, begin("bmuf:period=2"), 3)
    saved = f"{tmp_path}: its checkpoint was saved with the strategy bmuf"
    remedy = "; give the strategy it was saved with, or choose another folder"
    refused(f"{saved}, but this run uses slowmo{remedy}", ConfigError, begin("slowmo:period=2"))
    refused(f"{saved}:period=2, but this run uses bmuf:period=4{remedy}", ConfigError, begin("bmuf:period=4"))
    refused("give DataParallel folder=", ConfigError, lambda c: Script(c, "bmuf", None).run.load_checkpoint())
    for path in (last / f"rank-{rank:04d}.pt" for rank in range(2)):
        with zipfile.ZipFile(path) as archive:
            tensors = [archive.read(part) for part in archive.namelist() if "/data/" in part]
        content = bytearray(path.read_bytes())
        content[content.index(max(tensors, key=len))] ^= 1  # a number is another, and the file opens as ever
        path.write_bytes(content)
    refused("is damaged (the checksum of ", RunError, begin("bmuf:period=2"))
    for rank in range(2):
        (last / f"rank-{rank:04d}.pt").write_bytes(b"no zip")
    refused("is damaged (", RunError, begin("bmuf:period=2"))


@pytest.mark.skipif(not hasattr(torch.serialization, "set_crc32_options"), reason="before torch 2.6")
def test_checkpoints_of_a_script_that_lets_torch_write_no_checksums_are_read(tmp_path: Path) -> None:
    def without_checksums(comm: Communicator) -> None:
        torch.serialization.set_crc32_options(False)  # in this thread
        Script(comm, "bmuf:period=2", tmp_path).train()

    def goes_on(comm: Communicator) -> int:
        script = Script(comm, "bmuf:period=2", tmp_path)
        begun_at = script.run.steps
        with script.run:  # gives the folder up at its end
            return begun_at

    run_threads(2, without_checksums)
    assert run_threads(2, goes_on) == [NUM_STEPS, NUM_STEPS]


def test_a_script_that_finds_no_checkpoint_begins_anew(tmp_path: Path) -> None:
    def dies(comm: Communicator) -> None:
        script = Script(comm, "bmuf:period=2", tmp_path)
        with script.run:
            script.step()
            raise ValueError("died")

    for _ in range(2):
        with pytest.raises(ValueError, match="died"):
            run_threads(2, dies)
    run_threads(2, lambda comm: Script(comm, "bmuf:period=2", tmp_path).train())
    assert read_run(tmp_path).completed


def test_asynchronous_ranks_save_whole_checkpoints(tmp_path: Path) -> None:
    def train(comm: Communicator, steps: int) -> list[int]:
        script = Script(comm, "easgd:period=2", tmp_path)
        with script.run:
            begun_at = script.run.steps
            for _ in range(steps):
                script.step()
            script.save()
        return [begun_at, script.run.steps]

    run_threads(2, lambda comm: train(comm, 3 + comm.rank))
    assert names(tmp_path) == ["step-00000003"]
    (tmp_path / "completed.json").unlink()
    assert run_threads(2, lambda comm: train(comm, 2)) == [[3, 5], [4, 6]]
    assert names(tmp_path) == ["step-00000003", "step-00000005"]


def test_a_step_may_be_saved_twice_and_the_later_counts(tmp_path: Path) -> None:
    def save_twice(comm: Communicator) -> None:
        run = Script(comm, "bmuf", None).run
        run = DataParallel(run.model, run.optimizer, comm, "bmuf", tmp_path)
        with run:
            for note in ("first", "second"):
                run.save_checkpoint(note=note)

    run_threads(2, save_twice)
    assert names(tmp_path) == ["step-00000000", "step-00000000-2"]
    (tmp_path / "completed.json").unlink()

    def loaded(comm: Communicator) -> Any:
        script = Script(comm, "bmuf", None)
        run = DataParallel(script.model, script.run.optimizer, comm, "bmuf", tmp_path)
        saved = run.load_checkpoint()
        with run:
            return saved

    assert run_threads(2, loaded) == [{"note": "second"}] * 2


def test_a_rename_that_the_disk_reports_as_failed_though_it_is_done_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NFS does if it loses the first answer, and the request is sent again."""
    rename = os.rename

    def renamed_twice(source: Path, target: Path) -> None:
        rename(source, target)
        rename(source, target)

    def main(comm: Communicator) -> None:
        script = Script(comm, "gradient_averaging", tmp_path)
        with script.run:
            script.step()
            monkeypatch.setattr(Path, "rename", renamed_twice)
            monkeypatch.setattr(Path, "replace", renamed_twice)
            script.run.save_checkpoint(scheduler=script.scheduler.state_dict())
            monkeypatch.undo()

    run_threads(1, main)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]


def test_later_checkpoints_of_a_branch_that_was_left_go_with_the_first_of_the_new_one(tmp_path: Path) -> None:
    early: dict[int, Any] = {}

    def first(comm: Communicator) -> None:
        script = Script(comm, "bmuf:period=2", tmp_path)

        def keep() -> None:
            if script.run.steps == 2:
                early[comm.rank] = script.run.state_dict()

        script.train(keep)

    run_threads(2, first)
    assert names(tmp_path) == ["step-00000009", "step-00000012"]

    def branch(comm: Communicator) -> None:
        script = Script(comm, "bmuf:period=2", None)
        run = DataParallel(script.model, script.run.optimizer, comm, "bmuf:period=2", tmp_path)
        run.load_state_dict(early[comm.rank])
        with run:
            assert comm.rank > 0 or not (tmp_path / "completed.json").exists()
            assert names(tmp_path) == ["step-00000009", "step-00000012"]
            comm.barrier()  # only then rank 0 begins the next
            run.save_checkpoint()
        assert names(tmp_path) == ["step-00000002"]

    run_threads(2, branch)


def test_what_could_not_be_read_back_is_refused_when_it_is_saved(tmp_path: Path) -> None:
    def save(value: Any) -> Callable[[Communicator], None]:
        def on_rank(comm: Communicator) -> None:
            script = Script(comm, "bmuf", tmp_path)
            with script.run:
                script.run.save_checkpoint(fine=[1.5, {"a": torch.ones(2)}], best=value)

        return on_rank

    for value, kind in ((np.float64(0.5), "numpy"), (tmp_path, "pathlib"), (np.ones(2), "numpy")):
        refused("save_checkpoint: best holds a value that cannot be saved (", ConfigError, save(value), 1)
        refused(kind, ConfigError, save(value), 1)
    assert not (tmp_path / "checkpoints").exists()


def test_a_second_job_is_refused_while_the_first_trains(tmp_path: Path) -> None:
    first, second = (Script(SerialCommunicator(), "bmuf", None) for _ in range(2))
    run = DataParallel(first.model, first.run.optimizer, SerialCommunicator(), "bmuf", tmp_path)
    other = DataParallel(second.model, second.run.optimizer, SerialCommunicator(), "bmuf", tmp_path)
    with run:
        with pytest.raises(FolderInUseError, match="is in use by speechdp script"):
            other.load_checkpoint()
        run.save_checkpoint()
    other.load_checkpoint()
    with other:
        pass


def test_a_state_goes_on_in_the_folder_of_its_run_only(tmp_path: Path) -> None:
    def train(comm: Communicator, folder: Path) -> None:
        Script(comm, "bmuf:period=2", folder).train()

    for name in ("a", "b"):
        run_threads(2, lambda comm, name=name: train(comm, tmp_path / name))  # type: ignore[misc]
    before = (tmp_path / "b" / "metrics.jsonl").exists(), names(tmp_path / "b")

    def mixed(comm: Communicator) -> None:
        script, other = Script(comm, "bmuf:period=2", tmp_path / "a"), Script(comm, "bmuf:period=2", None)
        state = script.run._loaded
        assert state is not None
        run = DataParallel(other.model, other.run.optimizer, comm, "bmuf:period=2", tmp_path / "b")
        run.load_state_dict(state)
        try:
            with run:
                raise AssertionError("it goes on")
        finally:
            script.run._folder.release()

    refused("the loaded state belongs to another run than the one in this folder", ConfigError, mixed)
    assert before == ((tmp_path / "b" / "metrics.jsonl").exists(), names(tmp_path / "b"))


def test_runs_of_an_experiment_do_not_go_on_from_one_anothers_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script that keeps its state beside itself, as the runs of a comparison find it."""

    def save(comm: Communicator) -> dict[str, Any]:
        script = Script(comm, "bmuf:period=2", tmp_path / "first")
        with script.run:
            return script.run.state_dict()

    monkeypatch.setenv(script_folder.FOLDER, str(tmp_path / "first"))
    states = run_threads(2, save)
    monkeypatch.setattr(script_folder, "_begun_here", set[Path]())  # each run is a process of its own

    def go_on(comm: Communicator, strategy: str = "bmuf:period=2") -> None:
        script = Script(comm, strategy, None)
        script.run.load_state_dict(states[comm.rank])
        with script.run:
            pass

    run_threads(2, go_on)  # a run that was stopped goes on in its own folder
    monkeypatch.setenv(script_folder.FOLDER, str(tmp_path / "second"))
    words = "second: the loaded state belongs to another run; save states in run.folder"
    refused(words, ConfigError, go_on)
    assert not (tmp_path / "second" / "run.json").exists()
    refused(
        "this run uses gradient_averaging; give the strategy it was saved with, or save states in run.folder",
        ConfigError,
        lambda comm: go_on(comm, "gradient_averaging"),
    )
    monkeypatch.delenv(script_folder.FOLDER)
    run_threads(2, go_on)  # by itself a script may go on where it likes


def test_versions_of_the_script_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A report tells whether what it compares was made by one."""
    program, folder = tmp_path / "train.py", tmp_path / "run"
    monkeypatch.setattr("sys.argv", [str(program)])
    monkeypatch.syspath_prepend(str(tmp_path))
    own = tmp_path / "own_module_of_train.py"
    for text, of_module in (("one", "1"), ("one", "1"), ("two", "1"), ("two", "2")):
        program.write_text(text)
        own.write_text(of_module)
        importlib.import_module(own.stem)
        script = Script(SerialCommunicator(), "bmuf", folder)
        with script.run:
            script.step()
            script.save()
    versions = RunDirectory(folder).script_versions()
    monkeypatch.delitem(sys.modules, own.stem)
    assert len(versions) == 3 and all(versions)


def test_another_model_than_the_checkpoints_is_refused_in_a_line(tmp_path: Path) -> None:
    runs: list[DataParallel] = []

    def train(comm: Communicator, width: int, *, damages: bool = False) -> None:
        model = nn.Linear(3, width)
        run = DataParallel(model, torch.optim.AdamW(model.parameters()), comm, "dpsgd", tmp_path)
        runs.append(run)
        run.load_checkpoint()
        if damages and run._loaded is not None:
            run._loaded["strategy"] = {}
        with run:
            run.save_checkpoint()

    run_threads(2, lambda comm: train(comm, 2))
    refused("belongs to another model or optimizer (", ConfigError, lambda comm: train(comm, 4))
    runs.clear()
    refused("belongs to another model or optimizer (", ConfigError, lambda comm: train(comm, 2, damages=True))
    for run in runs:  # nothing is left open
        with pytest.raises(CommunicationError, match="the channel is closed"):
            run.strategy.peers.send(torch.zeros(1), 1 - run.comm.rank)


def test_ranks_that_do_not_share_the_disk_are_told(tmp_path: Path) -> None:
    def save(comm: Communicator) -> None:
        ScriptFolder(tmp_path / str(comm.rank), comm).write_checkpoint({"run": {}, "more": {}}, 1)

    refused("put the run's folder on a file system that all hosts share", RunError, save)


def test_an_end_that_fails_leaves_signals_and_folder_to_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    script = Script(SerialCommunicator(), "gradient_averaging", tmp_path)

    def full(*_: object) -> None:
        raise RunError("the disk is full")

    monkeypatch.setattr(RunDirectory, "complete", full)
    with pytest.raises(RunError, match="disk is full"), script.run:
        script.step()
        assert not script.run.should_stop and signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before
    assert not (tmp_path / "owner.json").exists()


@pytest.mark.parametrize("strategy", ["gradient_averaging", "model_averaging:period=5", "parameter_server"])
def test_what_is_loaded_counts_at_once_and_stays_as_it_is_changed(strategy: str, tmp_path: Path) -> None:
    def train(comm: Communicator) -> dict[str, Any]:
        script = Script(comm, strategy, tmp_path)
        with script.run:
            for _ in range(3):
                script.step()
            comm.barrier()
            script.run.state_dict()  # a worker goes on from what the server has come to, and saves just that
            script.save()
            return script.run.state_dict()

    def go_on(comm: Communicator, state: dict[str, Any], *, from_folder: bool) -> None:
        script = Script(comm, strategy, tmp_path if from_folder else None)
        if not from_folder:
            script.run.load_state_dict(state)
        run, model = script.run, script.model

        def is_as_saved() -> bool:
            return all(torch.equal(value, state["model"][name]) for name, value in model.state_dict().items())

        assert run.steps == state["steps"] == 3 and is_as_saved()
        assert run.optimizer.state_dict()["param_groups"] == state["optimizer"]["param_groups"]
        run.optimizer.param_groups[0]["lr"] = 0.25
        with run:
            is_worker = strategy == "parameter_server" and comm.rank > 0  # it fetches the server's model
            assert run.steps == 3 and (is_worker or is_as_saved())
            assert run.optimizer.param_groups[0]["lr"] == 0.25
            moments, saved = run.optimizer.state_dict()["state"], state["optimizer"]["state"]
            for number, moment in saved.items():
                assert all(torch.equal(moments[number][name], value) for name, value in moment.items())
            comm.barrier()  # a worker's first step changes the server's model
            script.step()

    states = run_threads(2, train)
    (tmp_path / "completed.json").unlink()
    for from_folder in (False, True):
        run_threads(2, lambda c: go_on(c, states[c.rank], from_folder=from_folder))  # noqa: B023


def test_a_state_from_before_an_option_is_taken() -> None:
    """An option that was added later has its default: what the state was trained with."""

    def check(comm: Communicator) -> None:
        script = Script(comm, "adaptive_averaging:period=2", None)
        with script.run:
            state = script.run.state_dict()
        assert ",rule=adacomm," in state["strategy_options"]
        state["strategy_options"] = "adaptive_averaging:period=2,growth=4.0"
        Script(comm, "adaptive_averaging:period=2", None).run.load_state_dict(state)
        with pytest.raises(ConfigError, match=r"the strategy adaptive_averaging:growth=4\.0, but this run"):
            Script(comm, "adaptive_averaging:period=2,growth=8", None).run.load_state_dict(state)

    run_threads(2, check)


def test_a_state_with_an_option_that_had_no_effect_is_taken() -> None:
    """With powersgd nothing was exchanged during backward, whatever overlap said."""

    def check(comm: Communicator) -> None:
        strategy = "gradient_averaging:compression=powersgd"
        run = wide_run(comm, strategy)
        with run:
            state = run.state_dict()
        now = state["strategy_options"]
        state["strategy_options"] = now.replace("overlap=false", "overlap=true")
        assert state["strategy_options"] != now
        wide_run(comm, strategy).load_state_dict(state)
        with pytest.raises(
            ConfigError, match=r"strategy gradient_averaging:rank=4, but this run uses .*:rank=2"
        ):
            wide_run(comm, f"{strategy},rank=2").load_state_dict(state)
        # Without powersgd it had one.
        plain = wide_run(comm, "gradient_averaging")
        state["strategy_options"] = now.replace("powersgd", "none")
        with pytest.raises(ConfigError, match="strategy gradient_averaging:overlap=false, but this run"):
            plain.load_state_dict(state)

    run_threads(2, check)


def wide_run(comm: Communicator, strategy: str) -> DataParallel:
    """Return a run whose model has a matrix that travels as factors of rank 4."""
    model = nn.Linear(64, 64)
    return DataParallel(model, torch.optim.SGD(model.parameters(), lr=0.1), comm, strategy)


def test_states_of_other_ranks_are_refused() -> None:
    def save(comm: Communicator) -> dict[str, Any]:
        script = Script(comm, "gradient_averaging", None)
        with script.run:
            return script.run.state_dict()

    states = run_threads(2, save)

    def check(comm: Communicator) -> None:
        script = Script(comm, "gradient_averaging", None)
        saved = f"the state was saved by rank {1 - comm.rank} of 2"
        words = f"{saved}, this is rank {comm.rank} of 2; use as many ranks and load on each"
        # Each rank's own refusal: which of the two comes first is a matter of chance.
        with pytest.raises(ConfigError, match=words):
            script.run.load_state_dict(states[1 - comm.rank])

    run_threads(2, check)


def test_states_of_different_steps_are_refused() -> None:
    def check(comm: Communicator) -> None:
        script, other = (Script(comm, "gradient_averaging", None) for _ in range(2))
        with script.run:
            states = []
            for _ in range(2):
                states.append(script.run.state_dict())
                script.step()
        other.run.load_state_dict(states[comm.rank])
        parameter = next(other.model.parameters())
        own = parameter.data = parameter.data.clone()
        try:
            with other.run:
                raise AssertionError("its ranks are at different steps")
        finally:
            assert parameter.data_ptr() == own.data_ptr()  # nothing was done before the refusal

    refused("rank 0 loads step 0, rank 1 step 1; load states that were saved together", ConfigError, check)


def test_a_full_disk_is_said_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """/dev/full takes the place of the file."""
    monkeypatch.setattr(secrets, "token_hex", lambda _: "guessed")
    (tmp_path / ".model.pt.guessed.tmp").symlink_to("/dev/full")
    script = Script(SerialCommunicator(), "bmuf", None)
    with pytest.raises(RunError, match=re.escape("No space left on device")):
        script.run.save(tmp_path / "model.pt")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("strategy", ["gradient_averaging", "bmuf:period=3", "ad_psgd"])
def test_a_script_pauses_where_its_environment_says_and_goes_on(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(stop.PAUSE, "5")
    pauses_at(strategy, tmp_path, 5)
    timing = read_run(tmp_path).timing
    assert timing is not None and [rank.steps for rank in timing.ranks] == [5 - timing.warmup_steps] * 2
    monkeypatch.setenv(stop.PAUSE, "7")
    pauses_at(strategy, tmp_path, 7)
    monkeypatch.delenv(stop.PAUSE)
    run_threads(2, lambda comm: Script(comm, strategy, tmp_path).train())
    assert read_run(tmp_path).completed


def pauses_at(strategy: str, folder: Path, step: int) -> None:
    def check(comm: Communicator) -> None:
        script = Script(comm, strategy, folder)
        with pytest.raises(Stopped):
            script.train()
        assert script.run.steps == step

    run_threads(2, check)
    assert not (folder / "completed.json").exists()


@pytest.mark.parametrize("strategy", ["gradient_averaging", "ad_psgd"])
def test_a_script_may_be_told_to_pause_when_it_has_been_evaluated(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(stop.PAUSE, "evaluation:5")

    def check(comm: Communicator) -> None:
        script = Script(comm, strategy, tmp_path)

        def evaluate() -> None:
            if script.run.steps % 4 == 0:
                with script.run.evaluating():
                    script.run.log(valid_loss=1.0 / script.run.steps)

        with pytest.raises(Stopped):
            script.train(evaluate)
        assert script.run.steps == 8

    run_threads(2, check)
    assert [one.step for one in read_run(tmp_path).evaluations] == [4, 8]


@pytest.mark.parametrize("text", ["soon", "0", "evaluation:", "-3", "5.5"])
def test_a_pause_that_is_no_step_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(stop.PAUSE, text)
    with pytest.raises(ConfigError, match=f"{stop.PAUSE}={text}: write the number of a step"):
        stop.Pause.of_environment()


def test_a_checkpoint_that_memory_does_not_hold_is_not_to_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_threads(2, lambda comm: Script(comm, "bmuf:period=2", tmp_path).train())

    def short_of_memory(*_: object, **__: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9000 bytes.")

    monkeypatch.setattr(torch, "load", short_of_memory)
    refused(
        ".pt: cannot be read (Cannot allocate memory); free some memory, or raise its limit (",
        RunError,
        lambda comm: Script(comm, "bmuf:period=2", tmp_path),
    )
