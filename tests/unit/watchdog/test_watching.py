"""What a rank that trains tells the others: where it is, and whether it waits for them."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from speechdp.checkpoint import rank_file
from speechdp.comm.base import Communicator
from speechdp.comm.serial import SerialCommunicator
from speechdp.comm.threads.communicator import run_threads
from speechdp.data.shards.dataset import Dataset
from speechdp.options.faults import FaultOptions
from speechdp.options.run import TrainOptions
from speechdp.timing.timeline import Span
from speechdp.train.build import build_trainer
from speechdp.train.progress import SilentReporter
from speechdp.train.run import train_run
from speechdp.train.session import Session
from speechdp.train.trainer import Trainer
from speechdp.train.watching import _Observer
from speechdp.watchdog.status import RankStatus, StatusFolder
from tests.helpers.options import options_with
from tests.helpers.tiny_data import write_tiny_data
from tests.helpers.waiting import wait_until

CPU = torch.device("cpu")
OPTIONS = options_with(layers=1, cells=4, batch_size=4)
DEADLINE_S = 120.0


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return write_tiny_data(tmp_path_factory.mktemp("watching") / "data")


def once(options: TrainOptions, **faults: Any) -> TrainOptions:
    return dataclasses.replace(options, epochs=1, faults=FaultOptions(**faults))


class Seen(SilentReporter):
    """Trains on only when both ranks have written: a run may be over before their threads get a core."""

    def __init__(self, run: Path) -> None:
        self._folder = StatusFolder(run)

    def step(self, epoch: float, frames: int, loss: float | None) -> None:
        wait_until(lambda: all(self._folder.read(rank) for rank in (0, 1)), "the statuses of both ranks")


def test_every_rank_of_a_run_writes_its_status(dataset: Dataset, tmp_path: Path) -> None:
    def train(comm: Communicator) -> None:
        session = Session(dataset, comm, CPU, Seen(tmp_path), facts={"hosts": ["n1", "n2"]})
        train_run(session, once(OPTIONS), tmp_path)

    (tmp_path / "status").mkdir()
    (tmp_path / "status" / "hung.txt").write_text("of an earlier start")
    run_threads(2, train)
    statuses = [json.loads(path.read_text()) for path in sorted((tmp_path / "status").iterdir())]
    assert [status["rank"] for status in statuses] == [0, 1]
    assert all(status["pid"] > 0 and status["written"].startswith("20") for status in statuses)


def test_without_a_timeout_nothing_watches(dataset: Dataset, tmp_path: Path) -> None:
    session = Session(dataset, SerialCommunicator(), CPU)
    train_run(session, once(OPTIONS, hang_timeout=0), tmp_path)
    assert not (tmp_path / "status").exists()


def test_no_thread_outlives_a_run(dataset: Dataset, tmp_path: Path) -> None:
    train_run(Session(dataset, SerialCommunicator(), CPU), once(OPTIONS), tmp_path)
    # Where a disk is slow, the run does not wait for the thread that writes to it.
    wait_until(
        lambda: not {t.name for t in threading.enumerate()} & {"speechdp-watchdog", "speechdp-status"},
        "the end of the watchdog's threads",
    )


def test_closing_a_trainer_is_watched(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watching: list[bool] = []

    def close(trainer: Trainer) -> None:
        watching.append("speechdp-watchdog" in [thread.name for thread in threading.enumerate()])

    monkeypatch.setattr(Trainer, "close", close)
    train_run(Session(dataset, SerialCommunicator(), CPU), once(OPTIONS), tmp_path)
    assert watching == [True]


def test_every_step_and_evaluated_batch_is_a_beat(dataset: Dataset, tmp_path: Path) -> None:
    session = Session(dataset, SerialCommunicator(), CPU)
    with ExitStack() as stack:
        trainer, _ = build_trainer(session, OPTIONS, tmp_path, stack)
        pulse = trainer.parts.pulse
        trainer.parts.evaluator.evaluate(trainer.parts.model, trainer.parts.task)
        assert pulse.beats == 1  # 6 utterances are one batch
        trainer.save()
        trainer.flush()
        pieces = len(list(rank_file._pieces(trainer._writer._snapshot)))
        assert pulse.beats == 3 + pieces  # asked for, waited for, and every piece of the file


def looked_at(trainer: Trainer, session: Session) -> RankStatus:
    """Return what another thread sees of this one."""
    observer = _Observer(session, trainer)
    found: list[RankStatus] = []
    thread = threading.Thread(target=lambda: found.append(observer.look(still_s=2.0, finds_waits=True)))
    thread.start()
    thread.join(DEADLINE_S)
    return found[0]


class OneOfTwo(SerialCommunicator):
    """Says that there is another rank."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 2


def test_what_a_rank_is_doing(dataset: Dataset, tmp_path: Path) -> None:
    alone = Session(dataset, SerialCommunicator(), CPU)
    with ExitStack() as stack:
        trainer, _ = build_trainer(alone, OPTIONS, tmp_path, stack)
        session = dataclasses.replace(alone, comm=OneOfTwo(), facts={"hosts": ["n1", "n2"]})
        assert _Observer(session, trainer).others() == {1: "rank 1 on n2"}
        status = looked_at(trainer, session)
        assert (status.doing, status.doing_s, status.waits) == ("start", 2.0, False)
        for span in Span:
            with trainer.parts.timeline.span(span):
                status = looked_at(trainer, session)
            assert (status.doing, status.waits) == (span.value, span is Span.COMM)
            assert 0 <= status.doing_s < DEADLINE_S
        trainer.parts.pulse.beat("saving the model")
        assert looked_at(trainer, session).doing == "saving the model"


def test_waiting_is_seen_where_no_span_tells_of_it(dataset: Dataset, tmp_path: Path) -> None:
    """In an evaluation ranks wait for the others' sums."""
    seen: list[RankStatus] = []

    def check(comm: Communicator) -> None:
        session = Session(dataset, comm, CPU)
        with ExitStack() as stack:
            trainer, _ = build_trainer(session, OPTIONS, tmp_path, stack)
            if comm.rank == 0:
                observer = _Observer(session, trainer)
                watcher = threading.Thread(target=lambda: wait_for(observer, seen))
                watcher.start()
                with trainer.parts.timeline.event(Span.EVAL):
                    comm.barrier()
                watcher.join(DEADLINE_S)
            else:
                deadline_s = time.monotonic() + DEADLINE_S
                while not seen and time.monotonic() < deadline_s:
                    time.sleep(0.01)
                comm.barrier()

    run_threads(2, check)
    assert seen[0].doing == "eval" and seen[0].waits


def wait_for(observer: _Observer, seen: list[RankStatus]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline_s:
        status = observer.look(0.0, True)
        if status.waits and status.doing == "eval":
            seen.append(status)
            return
        time.sleep(0.01)
