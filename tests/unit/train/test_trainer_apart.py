"""Training with asynchronous strategies: all data once an epoch, meetings, stopping, and going on."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from speechdp.checkpoint.state import checkpoint_steps
from speechdp.comm.base import Communicator
from speechdp.comm.threads.communicator import run_threads
from speechdp.data.shards.dataset import Dataset
from speechdp.options.batch import BatchOptions
from speechdp.options.run import ModelOptions, TrainOptions
from speechdp.parallel.registry import StrategyChoice
from speechdp.parallel.stop import StopRequest
from speechdp.process.ending import Paused, Stopped
from speechdp.train import trainer
from speechdp.train.progress import SilentReporter
from speechdp.train.run import train_run
from speechdp.train.session import Session
from tests.helpers.finished_run import evaluations, model_tensors
from tests.helpers.tiny_data import TinySizes, write_tiny_data
from tests.helpers.waiting import LIMIT_S

CPU = torch.device("cpu")
OPTIONS = TrainOptions(ModelOptions(layers=1, cells=4), BatchOptions(batch_size=2), epochs=2)
STRATEGIES = ["parameter_server", "parameter_server:dedicated=true", "easgd:period=2", "ad_psgd"]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return write_tiny_data(tmp_path_factory.mktemp("apart") / "data", TinySizes(train=41))


def frames_trained(run: Path) -> list[int]:
    """Return the frames of each rank's timeline."""
    return [
        sum(json.loads(line).get("frames", 0) for line in path.read_text().splitlines())
        for path in sorted((run / "timeline").glob("rank-*.jsonl"))
    ]


class After(SilentReporter):
    """Goes on when another rank has come so far: by itself this one could train on all the data meanwhile."""

    def __init__(self, other: threading.Event) -> None:
        self._other = other

    def step(self, epoch: float, frames: int, loss: float | None) -> None:
        assert self._other.wait(LIMIT_S)


class Begun(SilentReporter):
    """Tells that its rank has taken a step."""

    def __init__(self, has_begun: threading.Event) -> None:
        self._has_begun = has_begun

    def step(self, epoch: float, frames: int, loss: float | None) -> None:
        self._has_begun.set()


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_all_frames_are_trained_on_once_an_epoch(
    dataset: Dataset, tmp_path: Path, size: int, strategy: str
) -> None:
    if "dedicated" in strategy and size == 1:
        pytest.skip("a server alone has nobody to serve")
    options = dataclasses.replace(OPTIONS, strategy=StrategyChoice(strategy), checkpoint_steps=3)
    has_begun = threading.Event()
    if "dedicated" in strategy:
        has_begun.set()  # rank 0 never takes a step

    def train(comm: Communicator) -> None:
        reporter = Begun(has_begun) if comm.rank == 0 else After(has_begun)
        train_run(Session(dataset, comm, CPU, reporter), options, tmp_path)

    run_threads(size, train)
    num_frames = dataset.num_frames("train")
    assert [line["frames"] for line in evaluations(tmp_path)] == [num_frames, 2 * num_frames]
    assert sum(frames_trained(tmp_path)) == 2 * num_frames
    assert (frames_trained(tmp_path)[0] == 0) == ("dedicated" in strategy)
    assert all(bool(t.isfinite().all()) for t in model_tensors(tmp_path).values())
    ranks = json.loads((tmp_path / "timing.json").read_text())["ranks"]
    assert (sum(rank["sent_bytes"] for rank in ranks) > 0) == (size > 1)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_paused_run_is_scored_where_it_pauses_and_goes_on(
    dataset: Dataset, tmp_path: Path, strategy: str
) -> None:
    options = dataclasses.replace(OPTIONS, strategy=StrategyChoice(strategy))

    def train(comm: Communicator, pause_at: int, *, resume: bool) -> None:
        train_run(Session(dataset, comm, CPU, pause_at=pause_at), options, tmp_path, resume=resume)

    with pytest.raises(Paused):
        run_threads(2, lambda comm: train(comm, 4, resume=False))
    (paused,) = evaluations(tmp_path)
    with pytest.raises(Paused):
        run_threads(2, lambda comm: train(comm, 4, resume=True))  # at once: nothing is left to do
    assert evaluations(tmp_path) == [paused]
    assert (
        paused["step"] == 4 and 0 < paused["epoch"] < 1 and 0 < paused["frames"] < dataset.num_frames("train")
    )
    run_threads(2, lambda comm: train(comm, 0, resume=True))
    epochs = [line["epoch"] for line in evaluations(tmp_path)]
    assert epochs == [paused["epoch"], 1, 2]
    assert evaluations(tmp_path)[-1]["frames"] == 2 * dataset.num_frames("train")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_stopped_run_goes_on_and_trains_on_the_rest(
    dataset: Dataset, tmp_path: Path, strategy: str
) -> None:
    options = dataclasses.replace(OPTIONS, strategy=StrategyChoice(strategy))
    is_asked = threading.Event()

    class AskLater(SilentReporter):
        """Asks to stop in the middle of the first epoch."""

        def __init__(self, request: StopRequest) -> None:
            self.request, self.steps = request, 0

        def step(self, epoch: float, frames: int, loss: float | None) -> None:
            self.steps += 1
            if self.steps == 2:
                self.request.received = "SIGTERM"
                is_asked.set()

    def train(comm: Communicator) -> None:
        request = StopRequest()
        reporter = AskLater(request) if comm.rank == 1 else After(is_asked)
        train_run(Session(dataset, comm, CPU, reporter, request), options, tmp_path)

    with pytest.raises(Stopped):
        run_threads(2, train)
    assert next(checkpoint_steps(tmp_path)) > 0 and not (tmp_path / "completed.json").exists()
    run_threads(2, lambda comm: train_run(Session(dataset, comm, CPU), options, tmp_path, resume=True))
    num_frames = dataset.num_frames("train")
    assert [line["frames"] for line in evaluations(tmp_path)] == [num_frames, 2 * num_frames]
    assert sum(frames_trained(tmp_path)) == 2 * num_frames  # nothing twice, nothing left out


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_run_resumed_after_its_last_batch_is_timed_by_its_timeline(
    dataset: Dataset, tmp_path: Path, strategy: str
) -> None:
    """It only meets then, which takes no time of training."""
    options = dataclasses.replace(OPTIONS, strategy=StrategyChoice(strategy))

    def train(comm: Communicator, *, resume: bool) -> None:
        train_run(Session(dataset, comm, CPU), options, tmp_path, resume=resume)

    run_threads(2, lambda comm: train(comm, resume=False))
    assert json.loads((tmp_path / "timing.json").read_text())["exchange_s"] is None
    for name in ("completed.json", "model.safetensors", "timing.json"):
        (tmp_path / name).unlink()  # killed between the last checkpoint and the end
    run_threads(2, lambda comm: train(comm, resume=True))
    assert (tmp_path / "completed.json").is_file() and not (tmp_path / "timing.json").exists()


def test_a_slow_rank_trains_on_less(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pause lasts until the other has trained on most of the data: by the clock that may get no core."""
    options = dataclasses.replace(OPTIONS, strategy=StrategyChoice("ad_psgd"), slow_ranks="1:100", epochs=1)
    has_come_far = threading.Event()

    class Fast(SilentReporter):
        def __init__(self) -> None:
            self.left = 14  # of 21 batches

        def step(self, epoch: float, frames: int, loss: float | None) -> None:
            self.left -= 1
            if self.left == 0:
                has_come_far.set()

    def pause(seconds: float) -> None:
        assert has_come_far.wait(LIMIT_S)

    def train(comm: Communicator) -> None:
        reporter = Fast() if comm.rank == 0 else SilentReporter()
        train_run(Session(dataset, comm, CPU, reporter), options, tmp_path)

    monkeypatch.setattr(trainer, "time", SimpleNamespace(**{**vars(time), "sleep": pause}))
    run_threads(2, train)
    fast, slow = frames_trained(tmp_path)
    assert fast + slow == dataset.num_frames("train") and slow < fast / 2
