"""Rounds of training and alignment: what each starts from, when they end, and what stays as it was begun."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from speechdp import remedies
from speechdp.cli.support.out_folder import OutFolder, inputs_of
from speechdp.comm.base import Communicator
from speechdp.comm.serial import SerialCommunicator
from speechdp.comm.threads.communicator import run_threads
from speechdp.data.shards.dataset import Dataset
from speechdp.errors import ConfigError, RunError
from speechdp.experiments.arguments import refuse_throughout
from speechdp.options.batch import BatchOptions
from speechdp.options.optimizer import OptimizerOptions
from speechdp.options.run import ModelOptions, RealignFrom, TrainOptions
from speechdp.ownership.overwrite import RUN
from speechdp.train import realign
from speechdp.train.realign import (
    last_alignment,
    make_alignments,
    train_or_resume,
    train_with_realignment,
)
from speechdp.train.run import train_run
from speechdp.train.session import Session
from tests.helpers.finished_run import assert_equal_runs, model_tensors
from tests.helpers.tiny_data import TinySizes, write_tiny_data

CPU = torch.device("cpu")
ALONE = SerialCommunicator()
#: Two rounds that hardly move: where a round starts can be told by where it ends.
OPTIONS = TrainOptions(
    ModelOptions(layers=1, cells=4, dropout=0.2),
    BatchOptions(batch_size=4),
    OptimizerOptions("adam", learning_rate=1e-6),
    epochs=1,
    realign=2,
)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return write_tiny_data(tmp_path_factory.mktemp("realign") / "data", TinySizes(train=12, dev=4))


def record_of(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text()))


def change(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    content = record_of(path)
    edit(content)
    path.write_text(json.dumps(content))


def distance(one: Path, other: Path) -> float:
    """Return how far the weights of two runs are from one another, at most."""
    first, second = model_tensors(one), model_tensors(other)
    return max((first[k] - second[k]).abs().max().item() for k in first if k.startswith("model."))


@pytest.mark.parametrize(
    ("start", "starts"),
    [("last", [None, 1, None]), ("throughout", [None, 1, 2]), ("scratch", [None, None, None])],
)
def test_what_rounds_start_from(
    dataset: Dataset, tmp_path: Path, start: RealignFrom, starts: list[int | None]
) -> None:
    options = dataclasses.replace(OPTIONS, seed=3, realign_from=start)
    train_with_realignment(Session(dataset, ALONE, CPU), options, tmp_path)
    runs = [tmp_path / "realign" / "1", tmp_path / "realign" / "2", tmp_path]
    begun = [record_of(run / "run.json")["options"]["initial_model"] for run in runs]
    assert begun == [None if k is None else str(tmp_path / "realign" / str(k)) for k in starts]


def test_a_round_continues_from_the_weights_of_the_one_before(dataset: Dataset, tmp_path: Path) -> None:
    session = Session(dataset, ALONE, CPU)
    moving = dataclasses.replace(OPTIONS, optimizer=OptimizerOptions("adam", learning_rate=0.05), realign=0)
    train_run(session, moving, tmp_path / "first")
    still = dataclasses.replace(OPTIONS, realign=0, initial_model=tmp_path / "first")
    train_run(session, still, tmp_path / "next")
    train_run(session, dataclasses.replace(still, initial_model=None), tmp_path / "anew")
    assert distance(tmp_path / "first", tmp_path / "next") < 1e-3
    assert distance(tmp_path / "first", tmp_path / "anew") > 0.05


def test_models_that_cannot_be_continued_are_refused(dataset: Dataset, tmp_path: Path) -> None:
    session, once = Session(dataset, ALONE, CPU), dataclasses.replace(OPTIONS, realign=0)
    train_run(session, once, tmp_path / "first")
    larger = dataclasses.replace(
        once, model=ModelOptions(layers=1, cells=5), initial_model=tmp_path / "first"
    )
    with pytest.raises(ConfigError, match=r"--initial-model .*first: has other sizes or inputs"):
        train_run(session, larger, tmp_path / "larger")
    spliced = dataclasses.replace(
        once, inputs=dataclasses.replace(once.inputs, deltas=1), initial_model=tmp_path / "first"
    )
    with pytest.raises(ConfigError, match=r"--initial-model .*first: has other sizes or inputs"):
        train_run(session, spliced, tmp_path / "spliced")
    nowhere = dataclasses.replace(once, initial_model=tmp_path / "nowhere")
    with pytest.raises(RunError, match="nowhere: no such folder"):
        train_run(session, nowhere, tmp_path / "other")
    # None of them has begun a run that would be in the way of the corrected command.
    assert not any((tmp_path / name).exists() for name in ("larger", "spliced", "other"))


def test_a_checkpoint_does_not_need_the_model_it_began_with(dataset: Dataset, tmp_path: Path) -> None:
    session, once = Session(dataset, ALONE, CPU), dataclasses.replace(OPTIONS, realign=0)
    train_run(session, once, tmp_path / "first")
    later = dataclasses.replace(once, initial_model=tmp_path / "first", epochs=2)
    train_run(session, later, tmp_path / "run")
    (tmp_path / "run" / "completed.json").unlink()
    shutil.rmtree(tmp_path / "first")
    train_run(session, later, tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "completed.json").is_file()


def test_what_is_to_be_read_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    for options in (
        TrainOptions(initial_model=tmp_path),
        TrainOptions(alignments=tmp_path / "alignments" / "tied"),
    ):
        with pytest.raises(ConfigError, match=r"lies in .*, which --overwrite empties"):
            OutFolder(tmp_path, True, inputs_of(tmp_path.parent / "data", options)).check(RUN)
    options = TrainOptions(alignments=tmp_path.parent / "alignments")
    with pytest.raises(ConfigError, match=r"^DATA .*data: lies in .*, which --overwrite empties"):
        OutFolder(tmp_path, True, inputs_of(tmp_path / "data", options)).check(RUN)
    OutFolder(tmp_path, True, inputs_of(tmp_path.parent / "data", options)).check(RUN)


@pytest.mark.parametrize(
    ("settled", "rounds"), [(1.01, 1), (0.0, 3)], ids=["settles at once", "never settles"]
)
@pytest.mark.parametrize("size", [1, 2])
def test_rounds_end_when_alignments_settle(
    dataset: Dataset,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    settled: float,
    rounds: int,
    size: int,
) -> None:
    monkeypatch.setattr(realign, "SETTLED_SHARE", settled)
    monkeypatch.setattr(realign, "MOST_ROUNDS", 3)
    options = dataclasses.replace(OPTIONS, realign="auto")

    def work(comm: Communicator) -> Path | None:
        return make_alignments(Session(dataset, comm, CPU), options, tmp_path)

    folder = tmp_path / "alignments"
    assert run_threads(size, work) == [folder / str(rounds)] * size
    assert sorted(path.name for path in folder.iterdir()) == [str(k + 1) for k in range(rounds)]
    assert last_alignment(tmp_path, options) == folder / str(rounds)
    frames = dataset.num_frames("train") + dataset.num_frames("dev")
    for number in range(1, rounds + 1):
        record = record_of(folder / str(number) / "completed.json")
        assert record["frames"] == frames
        assert record["changed_share"] == round(record["changed_frames"] / frames, 6)
    made = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert run_threads(size, work) == [folder / str(rounds)] * size
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == made


def test_rounds_go_on_where_they_were_interrupted(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = Session(dataset, ALONE, CPU)
    train_with_realignment(session, OPTIONS, tmp_path / "once")

    def fail(*_args: object, **_more: object) -> None:
        raise KeyError("killed")

    with monkeypatch.context() as patches, pytest.raises(KeyError):
        patches.setattr(realign, "align", fail)
        train_with_realignment(session, OPTIONS, tmp_path / "again")
    train_with_realignment(session, OPTIONS, tmp_path / "again", resume=True)
    assert_equal_runs(tmp_path / "once", tmp_path / "again")
    assert_equal_runs(tmp_path / "once" / "realign" / "2", tmp_path / "again" / "realign" / "2")


def test_a_damaged_round_is_begun_anew_by_itself(dataset: Dataset, tmp_path: Path) -> None:
    """--overwrite would delete all rounds; or, of a run of a sweep, all of its runs."""
    session, run = Session(dataset, ALONE, CPU), tmp_path / "realign" / "1"
    options = dataclasses.replace(OPTIONS, realign=0)
    train_or_resume(session, options, run)
    (run / "completed.json").unlink()
    for checkpoint in (run / "checkpoints").iterdir():
        (checkpoint / "checkpoint.json").write_text("{}")
    with remedies.of_command({"resume", "overwrite"}):
        for damage, said in ("", "no checkpoint can be used: .*"), ("{", r"run\.json: cannot be read .*"):
            (run / "run.json").write_text(damage or (run / "run.json").read_text())
            with pytest.raises(RunError, match=f"{said}; delete {run}, then continue with --resume$"):
                train_or_resume(session, options, run)


def test_other_rounds_than_those_of_the_run_are_refused_before_any_is_trained(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, begun = Session(dataset, ALONE, CPU), dataclasses.replace(OPTIONS, realign=1)
    train_with_realignment(session, begun, tmp_path / "run")
    (tmp_path / "run" / "completed.json").unlink()  # as if it had been interrupted
    made = sorted((tmp_path / "run").rglob("*"))
    monkeypatch.setattr(realign, "SETTLED_SHARE", 0.0)
    others: list[dict[str, Any]] = [{"realign": 2}, {"context": "left"}, {"realign": "auto"}]
    for rounds in (dataclasses.replace(begun, **other) for other in others):
        with pytest.raises(ConfigError, match=r"run\.json: .* begun on .*/1, and --realign \w+ leads"):
            train_with_realignment(session, rounds, tmp_path / "run", resume=True)
    assert sorted((tmp_path / "run").rglob("*")) == made
    train_with_realignment(session, begun, tmp_path / "run", resume=True)
    monkeypatch.setattr(realign, "SETTLED_SHARE", 1.01)
    train_with_realignment(session, dataclasses.replace(begun, realign="auto"), tmp_path / "run", resume=True)
    train_run(session, dataclasses.replace(OPTIONS, realign=0), tmp_path / "plain")
    with pytest.raises(ConfigError, match="begun on the targets in DATA, and --realign 1 leads"):
        train_with_realignment(session, begun, tmp_path / "plain", resume=True)
    assert not (tmp_path / "plain" / "realign").exists()


@pytest.mark.parametrize(
    "changes", [{"realign": "auto"}, {"realign": 1, "realign_from": "throughout"}, {"context": "left"}]
)
def test_a_complete_run_whose_targets_are_gone_is_left_as_it_is(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    monkeypatch.setattr(realign, "SETTLED_SHARE", 1.01)
    options = dataclasses.replace(OPTIONS, **{"realign": 0, **changes})
    run_threads(2, lambda comm: train_with_realignment(Session(dataset, comm, CPU), options, tmp_path))
    shutil.rmtree(tmp_path / "alignments")
    shutil.rmtree(tmp_path / "realign", ignore_errors=True)
    made = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}

    def again(comm: Communicator) -> None:
        train_with_realignment(Session(dataset, comm, CPU), options, tmp_path, resume=True)

    run_threads(2, again)
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    changed = {path for path in made.keys() | kept.keys() if made.get(path) != kept.get(path)}
    assert changed <= {tmp_path, tmp_path / "completed.json"}
    start = {"realign_from": "throughout"} if options.realign_from == "last" else {"realign_from": "last"}
    if options.realign:
        with pytest.raises(ConfigError, match="begun with other options"):
            other = dataclasses.replace(options, **start)
            train_with_realignment(Session(dataset, ALONE, CPU), other, tmp_path, resume=True)


@pytest.mark.parametrize(
    ("made", "asked", "folder"),
    [
        ({"realign": 2}, {"realign_criterion": "full-sum"}, "1"),
        ({"realign": 1, "context": "left"}, {"realign_epochs": 2}, "1"),
        ({"realign": 2, "realign_from": "last", "context": "left"}, {"realign_from": "scratch"}, "2"),
    ],
)
def test_a_complete_run_after_rounds_with_other_options_is_refused(
    dataset: Dataset, tmp_path: Path, made: dict[str, Any], asked: dict[str, Any], folder: str
) -> None:
    """The record of its last alignment does not tell, nor do the options of the run proper."""
    session, begun = Session(dataset, ALONE, CPU), dataclasses.replace(OPTIONS, **made)
    train_with_realignment(session, begun, tmp_path)
    with pytest.raises(ConfigError, match=rf"alignments/{folder}: was made with other options"):
        train_with_realignment(session, dataclasses.replace(begun, **asked), tmp_path, resume=True)
    train_with_realignment(session, begun, tmp_path, resume=True)


def test_states_in_context_that_other_rounds_made_are_refused_before_any_is_trained(
    dataset: Dataset, tmp_path: Path
) -> None:
    session, begun = Session(dataset, ALONE, CPU), dataclasses.replace(OPTIONS, realign=0, context="left")
    train_with_realignment(session, begun, tmp_path)
    with pytest.raises(ConfigError, match=r"alignments/tied: was made with other options"):
        train_with_realignment(session, dataclasses.replace(begun, realign=1), tmp_path, resume=True)
    assert not (tmp_path / "realign").exists()


def test_rounds_that_an_earlier_version_began_go_on_as_they_were_begun(
    dataset: Dataset, tmp_path: Path
) -> None:
    """It began every one from initial weights, and recorded neither that nor the share that changed."""
    session, scratch = Session(dataset, ALONE, CPU), dataclasses.replace(OPTIONS, realign_from="scratch")
    folder = make_alignments(session, scratch, tmp_path)
    assert folder is not None
    whole = model_tensors(tmp_path / "realign" / "2")
    (folder / "completed.json").unlink()
    with pytest.raises(ConfigError, match=r"realign/2/run.json: .* \(--initial-model was not given"):
        make_alignments(session, OPTIONS, tmp_path)
    change(tmp_path / "alignments" / "1" / "completed.json", lambda c: c.pop("made_by"))
    change(tmp_path / "realign" / "2" / "run.json", lambda c: c["options"].pop("initial_model"))
    assert make_alignments(session, OPTIONS, tmp_path) == folder
    assert "realign_from" not in record_of(folder / "completed.json")["made_by"]
    assert all(torch.equal(value, whole[k]) for k, value in model_tensors(tmp_path / "realign" / "2").items())
    assert make_alignments(session, OPTIONS, tmp_path) == make_alignments(session, scratch, tmp_path)


def test_alignments_of_other_starts_are_not_taken(dataset: Dataset, tmp_path: Path) -> None:
    session = Session(dataset, ALONE, CPU)
    make_alignments(session, OPTIONS, tmp_path)
    with pytest.raises(ConfigError, match=r"alignments/2: was made with other options .*--realign-from last"):
        make_alignments(session, dataclasses.replace(OPTIONS, realign_from="scratch"), tmp_path)


def test_without_an_alignment_there_is_no_last_one(tmp_path: Path) -> None:
    (tmp_path / "alignments" / "1").mkdir(parents=True)
    with pytest.raises(RunError, match="holds no whole alignment"):
        last_alignment(tmp_path, OPTIONS)


def test_options_that_do_not_go_together() -> None:
    with pytest.raises(ConfigError, match="--realign-from: goes with --realign; leave it out"):
        TrainOptions(realign_from="scratch")
    with pytest.raises(ConfigError, match="--initial-model: only for acoustic models"):
        TrainOptions(ModelOptions(criterion="ctc"), initial_model=Path("RUN"))
    with pytest.raises(ConfigError, match="runs that are compared start from initial weights"):
        refuse_throughout(TrainOptions(realign="auto", realign_from="throughout"))


def test_new_options_leave_fingerprints_as_they_were() -> None:
    """The run itself is begun with the targets and without the options that made them, as ever."""
    plain = TrainOptions(alignments=Path("a"))
    for start in ("last", "scratch", "throughout"):
        rounds = TrainOptions(realign=2, realign_from=start)
        assert rounds.on_alignments(Path("a")).fingerprint() == plain.fingerprint()
    assert TrainOptions().fingerprint() == "897388f258dfd87a"
    other = dataclasses.replace(plain, initial_model=Path("RUN"))
    assert other.fingerprint() != plain.fingerprint()
