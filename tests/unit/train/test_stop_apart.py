"""A request to stop where no steps are taken: while targets are aligned, while a split is decoded."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from speechdp.comm.base import Communicator
from speechdp.comm.serial import SerialCommunicator
from speechdp.comm.threads.communicator import run_threads
from speechdp.data.shards.dataset import Dataset
from speechdp.decode.recogniser import DecodingOptions
from speechdp.decode.split import decode_split
from speechdp.options.batch import BatchOptions
from speechdp.options.run import ModelOptions, TrainOptions
from speechdp.parallel.run_files import RunDirectory
from speechdp.parallel.stop import StopRequest
from speechdp.process.ending import Stopped
from speechdp.tasks.model_file import load_model
from speechdp.train.realign import align
from speechdp.train.run import train_run
from speechdp.train.session import Session
from tests.helpers.tiny_data import write_tiny_data

CPU = torch.device("cpu")
OPTIONS = TrainOptions(ModelOptions(layers=1, cells=4), BatchOptions(batch_size=8), epochs=1)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Dataset, Path]:
    folder = tmp_path_factory.mktemp("stop")
    dataset = write_tiny_data(folder / "data")
    train_run(Session(dataset, SerialCommunicator(), CPU), OPTIONS, folder / "run")
    return dataset, folder / "run"


def all_stop(function: Callable[[Communicator, Callable[[], bool]], object]) -> list[int]:
    """Run on two ranks, of which rank 1 is asked at its third look; return how often each has looked."""
    looks, stopped, lock = [0, 0], [], threading.Lock()

    def on_rank(comm: Communicator) -> None:
        def is_asked() -> bool:
            looks[comm.rank] += 1
            return comm.rank == 1 and looks[1] >= 3

        try:
            function(comm, is_asked)
        except Stopped:
            with lock:
                stopped.append(comm.rank)

    run_threads(2, on_rank)
    assert sorted(stopped) == [0, 1]
    return looks


def test_an_alignment_is_left_by_all_and_made_anew(trained: tuple[Dataset, Path], tmp_path: Path) -> None:
    dataset, run = trained

    def align_until(comm: Communicator, is_asked: Callable[[], bool]) -> None:
        class Asked(StopRequest):
            received = property(lambda _self: "SIGTERM" if is_asked() else None, lambda _self, _value: None)  # type: ignore[assignment]

        align(Session(dataset, comm, CPU, stop=Asked()), OPTIONS, run, None, tmp_path)

    looks = all_stop(align_until)
    assert looks == [15, 3]  # of 12 utterances to train on and 3 held out each
    assert not RunDirectory(tmp_path).is_complete
    reports = run_threads(2, lambda comm: align(Session(dataset, comm, CPU), OPTIONS, run, None, tmp_path))
    assert [report.utterances for report in reports] == [30, 30] and RunDirectory(tmp_path).is_complete


def test_decoding_is_left_by_all_and_writes_nothing(trained: tuple[Dataset, Path], tmp_path: Path) -> None:
    dataset, run = trained
    model = load_model(run, CPU)
    looks = all_stop(
        lambda comm, is_asked: decode_split(
            model, dataset, "train", tmp_path, DecodingOptions(), comm, is_asked
        )
    )
    assert looks == [12, 3] and not [path for path in tmp_path.rglob("*") if path.is_file()]
