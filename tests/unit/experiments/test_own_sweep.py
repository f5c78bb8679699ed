"""A sweep of ours: a run that fails ends no other, and what cannot be swept is refused before anything."""

from __future__ import annotations

import dataclasses
import json
import threading
from pathlib import Path

import pytest
import torch

from speechdp.cli.sweep import SweepCommand
from speechdp.comm.background import ExchangeThread
from speechdp.comm.base import Communicator
from speechdp.comm.serial import SerialCommunicator
from speechdp.comm.threads.communicator import run_threads
from speechdp.data.shards.dataset import FLAT, Dataset
from speechdp.decode.results import has_word_errors, wer_path
from speechdp.errors import ConfigError, DivergedError, RunError, SpeechDPError
from speechdp.experiments.race.plan import RaceOptions
from speechdp.experiments.sweep import failures, training
from speechdp.experiments.sweep.failures import failure_of, has_failed
from speechdp.experiments.sweep.plan import SweepPlan
from speechdp.experiments.sweep.training import _train_one_rank, check_sweep, run_sweep
from speechdp.options.run import ModelOptions, TrainOptions
from speechdp.parallel import stop
from speechdp.parallel.stop import StopRequest
from speechdp.process.ending import Stopped
from speechdp.report.sweep.report import write_report
from speechdp.train.progress import SilentReporter
from speechdp.train.session import Session
from tests.helpers.tiny_data import TinySizes, write_tiny_data
from tests.helpers.waiting import LIMIT_S

OPTIONS = TrainOptions(ModelOptions(layers=1, cells=4), epochs=1)
DIVERGED = "the loss is nan at step 3 (epoch 1)"


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return write_tiny_data(tmp_path_factory.mktemp("own") / "data", TinySizes(4, 2, 2, shards=1))


def session(dataset: Dataset) -> Session:
    return Session(dataset, SerialCommunicator(), torch.device("cpu"))


def plan(*periods: str) -> SweepPlan:
    return SweepPlan("model_averaging", periods, (), one_rank_steps=0, decode_split="")


def sweep(dataset: Dataset, out: Path, *periods: str) -> int:
    options = (OPTIONS, plan(*periods), out, lambda name: SilentReporter(), RaceOptions(0))
    return run_sweep(session(dataset), *options)


def test_a_run_that_diverges_ends_no_other_and_is_shown(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = training.train_or_resume

    def diverge(session: Session, options: TrainOptions, run_dir: Path) -> None:
        train(session, options, run_dir)
        if run_dir.name == "model_averaging-1":
            (run_dir / "completed.json").unlink()
            raise DivergedError(DIVERGED)

    monkeypatch.setattr(training, "train_or_resume", diverge)
    assert sweep(dataset, tmp_path, "1", "2") == 1
    record = json.loads((tmp_path / "sweep.json").read_text())
    assert record["failed"] == {"model_averaging-1": DIVERGED} and record["completed"] is False
    assert (tmp_path / "model_averaging-2" / "completed.json").is_file()
    assert f"Failed: Period 1: {DIVERGED}" in " ".join(write_report(tmp_path).answer)
    # It may be left out, and others added.
    assert sweep(dataset, tmp_path, "2", "4") == 0
    record = json.loads((tmp_path / "sweep.json").read_text())
    assert record["runs"] == ["model_averaging-2", "model_averaging-4"] and record["completed"] is True
    assert record["ranks"] == 1 and "failed" not in record


@pytest.mark.parametrize("alignment", [FLAT, "exact"])
def test_one_rank_and_targets_that_are_only_spread_are_told_of_first(
    dataset: Dataset, tmp_path: Path, alignment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(
        "speechdp.experiments.sweep.training.run_sweep", lambda *given: said.append("runs") or 0
    )
    monkeypatch.setattr("speechdp.cli.report.print_report", lambda *given: None)

    class Noting(SilentReporter):
        def notice(self, text: str) -> None:
            said.append(text)

    data = Dataset.open(dataset.path)
    data.alignment = alignment
    alone = Session(data, SerialCommunicator(), torch.device("cpu"), Noting())
    command = SweepCommand(data.path, tmp_path, OPTIONS, "1,2", reference="", decode_split="", race=0)
    assert command._on_rank(alone) == 0
    *spread, on_one, runs = said
    assert "speechdp launch -np 2 -- sweep" in on_one and runs == "runs"
    assert len(spread) == (alignment == FLAT) and all("only spread each transcript" in one for one in spread)


@pytest.mark.parametrize("failing", [[0, 1], [1], [0]])
def test_all_ranks_go_on_only_where_all_have_failed(
    failing: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Where all fail the last may be late; else it is waited for in vain.
    monkeypatch.setattr(failures, "_PATIENCE_S", LIMIT_S if len(failing) == 2 else 1.0)
    seen: dict[int, str | None] = {}

    def rank(comm: Communicator) -> None:
        def train() -> None:
            if comm.rank in failing:
                raise DivergedError(f"{DIVERGED} on rank {comm.rank}")

        try:
            seen[comm.rank] = failure_of(comm, tmp_path, train, synchronous=True)
        except RunError as error:
            seen[comm.rank] = f"raised: {error}"

    run_threads(2, rank, timeout_s=240.0)
    if len(failing) == 2:
        assert seen == {0: f"{DIVERGED} on rank 0", 1: f"{DIVERGED} on rank 0"} and not has_failed(tmp_path)
    else:
        (alone,) = failing
        assert seen == {1 - alone: None, alone: f"raised: {DIVERGED} on rank {alone}"}
        assert has_failed(tmp_path)  # the next command trains it after the others


def test_ranks_that_fail_between_other_exchanges_do_not_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failures, "_PATIENCE_S", LIMIT_S)  # both fail, however late
    seen: list[str] = []

    def rank(comm: Communicator) -> None:
        def train() -> None:
            comm.sent_bytes += comm.rank  # one has begun another exchange
            raise DivergedError(DIVERGED)

        with pytest.raises(RunError, match="the loss is nan"):
            failure_of(comm, tmp_path, train, synchronous=True)
        seen.append("raised")

    run_threads(2, rank, timeout_s=240.0)
    assert seen == ["raised", "raised"]


def test_a_run_whose_exchanges_may_go_on_ends_the_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failures, "_PATIENCE_S", LIMIT_S)  # both fail, however late
    over = threading.Event()
    seen: list[str] = []

    def wait() -> None:
        over.wait()

    def rank(comm: Communicator) -> None:
        def train() -> None:
            if comm.rank == 1:
                ExchangeThread("waiting for a rank that has failed", wait)
            raise DivergedError(DIVERGED)

        with pytest.raises(RunError, match="the loss is nan"):
            failure_of(comm, tmp_path, train, synchronous=True)
        seen.append("raised")

    try:
        run_threads(2, rank, timeout_s=240.0)
    finally:
        over.set()
    assert seen == ["raised", "raised"]


def test_what_cannot_be_swept_is_refused_before_a_run_is_trained(dataset: Dataset, tmp_path: Path) -> None:
    unknown = SweepPlan("model_averaging", ("2",), (), one_rank_steps=0, decode_split="no-such")
    with pytest.raises(SpeechDPError, match="no-such"):
        check_sweep(session(dataset), OPTIONS, unknown, tmp_path)
    (tmp_path / "sweep.json").write_text(json.dumps({"runs": ["model_averaging-2"], "ranks": 4}))
    with pytest.raises(ConfigError, match="was begun on 4 ranks, and runs on 1 would not compare with those"):
        check_sweep(session(dataset), OPTIONS, plan("2"), tmp_path)
    check_sweep(session(dataset), OPTIONS, plan("2"), tmp_path, restarted=True)
    (tmp_path / "sweep.json").write_text(json.dumps({"runs": ["model_averaging-2"]}))
    check_sweep(session(dataset), OPTIONS, plan("2"), tmp_path)  # of an earlier version
    (tmp_path / "sweep.json").write_text(json.dumps({"version": 2, "runs": ["model_averaging-2"]}))
    with pytest.raises(ConfigError, match=r"is of version 2, .*; use the speechdp that wrote it, or choose"):
        check_sweep(session(dataset), OPTIONS, plan("2"), tmp_path)
    (tmp_path / "sweep.json").unlink()
    slow = dataclasses.replace(OPTIONS, slow_ranks="7:3")
    with pytest.raises(ConfigError, match="there is no rank 7"):
        check_sweep(session(dataset), slow, plan("2"), tmp_path)


def test_a_full_disk_ends_the_sweep(tmp_path: Path) -> None:
    def rank(comm: Communicator) -> None:
        def train() -> None:
            raise RunError("checkpoints: cannot be written (No space left on device); free some space")

        with pytest.raises(RunError, match="No space left"):
            failure_of(comm, tmp_path, train, synchronous=True)

    run_threads(2, rank, timeout_s=240.0)
    assert not has_failed(tmp_path)


@pytest.mark.parametrize("damage", ["", '{"wer": 0.1, "wor', '{"wer": null}', "[]"])
def test_a_damaged_record_of_word_errors_is_none(tmp_path: Path, damage: str) -> None:
    assert not has_word_errors(tmp_path, "test")
    wer_path(tmp_path, "test").write_text('{"wer": 0.25}')
    assert has_word_errors(tmp_path, "test")
    wer_path(tmp_path, "test").write_text(damage)
    assert not has_word_errors(tmp_path, "test")


@pytest.mark.parametrize("damage", [None, "", "u1 0 1 0 4\nu2 ", "u1 0 1 0 4\n\0"])
def test_a_decoding_without_its_errors_by_utterance_is_made_again(tmp_path: Path, damage: str | None) -> None:
    """Where they were damaged, reports told to decode again by hand what sweep and compare had decoded."""
    counts = {"insertions": 0, "deletions": 1, "substitutions": 1, "words": 8}
    record = {"wer": 0.25, **counts, "errors": "hypotheses/test.errors"}
    wer_path(tmp_path, "test").write_text(json.dumps(record))
    (tmp_path / "hypotheses").mkdir()
    path = tmp_path / "hypotheses" / "test.errors"
    if damage is not None:
        path.write_text(damage)
    assert not has_word_errors(tmp_path, "test")
    path.write_text("u1 0 1 0 4\nu2 0 0 1 4\n")
    assert has_word_errors(tmp_path, "test")


def test_rank_0_alone_hears_of_a_signal_that_another_has_got(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others waited for the end of its run, deaf to signals."""
    stops, asked = [StopRequest(), StopRequest()], 0

    def train(session: Session, options: TrainOptions, run_dir: Path) -> None:
        nonlocal asked
        assert session.comm.size == 1
        while asked < 10_000:
            asked += 1
            stops[1].received = "SIGUSR1"
            if session.is_asked_to_stop():
                assert session.stop is not None and session.stop.received == "SIGUSR1"
                raise Stopped

    monkeypatch.setattr(training, "train_or_resume", train)
    monkeypatch.setattr(stop, "_INTERVAL_S", 0.0)

    def rank(comm: Communicator) -> None:
        session = Session(dataset, comm, torch.device("cpu"), stop=stops[comm.rank])
        with pytest.raises(Stopped):
            _train_one_rank(session, OPTIONS, plan("1"), tmp_path, "1 of 1")

    run_threads(2, rank)
    assert asked < 100 and stops[0].received is None


def test_rank_0_alone_that_fails_lets_the_others_know(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(session: Session, options: TrainOptions, run_dir: Path) -> None:
        raise DivergedError(DIVERGED)

    monkeypatch.setattr(training, "train_or_resume", train)

    def rank(comm: Communicator) -> str | None:
        session = Session(dataset, comm, torch.device("cpu"))
        return _train_one_rank(session, OPTIONS, plan("1"), tmp_path, "1 of 1")

    assert run_threads(2, rank) == [DIVERGED, DIVERGED]
