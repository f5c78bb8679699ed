"""A run that goes on with more or fewer ranks than it was begun with."""

from __future__ import annotations

import dataclasses
import json
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from speechdp.checkpoint.state import checkpoint_steps
from speechdp.comm.base import Communicator
from speechdp.comm.serial import SerialCommunicator
from speechdp.comm.threads.communicator import run_threads
from speechdp.counting import counted
from speechdp.data.shards.dataset import Dataset
from speechdp.errors import CommunicationError, RunError
from speechdp.options.batch import BatchOptions, LoadingOptions
from speechdp.options.model import ModelOptions
from speechdp.options.run import TrainOptions
from speechdp.parallel.registry import StrategyChoice, parse_strategy
from speechdp.parallel.replica import Replica
from speechdp.parallel.strategy import Strategy
from speechdp.process.ending import Paused
from speechdp.report.runs.folders import read_run
from speechdp.testing import Sgd
from speechdp.timing.timeline import Timeline
from speechdp.train.progress import SilentReporter
from speechdp.train.run import train_run
from speechdp.train.session import Session
from tests.helpers.finished_run import evaluations, model_tensors
from tests.helpers.own_script import named_nowhere
from tests.helpers.slow_disk import checkpoints_completed
from tests.helpers.tiny_data import TinySizes, write_tiny_data

CPU = torch.device("cpu")
MODEL = ModelOptions(layers=1, cells=4, dropout=0.2)
OPTIONS = TrainOptions(MODEL, BatchOptions(batch_size=2), epochs=3, checkpoint_steps=4)
_CASES = (
    "gradient_averaging:every=3",
    "gradient_averaging:every=2,compression=powersgd,rank=1",
    "model_averaging:period=3,momentum=average",
    "model_averaging:period=2,first=best,leave_out=0.05,combine=4",
    "adaptive_averaging:period=3,begin=2,interval=5",
    "adaptive_averaging:rule=stages,period=3,stages=2@30%+5@60%",
    "delayed_averaging:period=6,fragments=2,delay=2",
    "bmuf:period=3",
    "slowmo:period=3",
    "diloco:period=5",
    "dpsgd:topology=random",
    "dpsgd:compression=int8",
    "easgd:mode=sync,period=2",
    "easgd:mode=sync,period=3,compression=int4",
    "model_averaging:period=3,compression=int8",
    "bmuf:period=3,compression=int4",
    "delayed_averaging:period=6,fragments=2,delay=2,compression=int8",
    "gradient_averaging:between_nodes=3,node_size=1",
    "slowmo:period=2,between_nodes=4,node_size=1",
    "model_averaging:period=2,between_nodes=4,node_size=1,compression=int8",
)
SYNCHRONOUS = (*_CASES, *named_nowhere(_CASES, lambda traits: traits.resumes_with_other_size))
#: Have no exchange, or nothing to keep of it, on one rank.
ALONE_OTHERWISE = ("delayed_averaging", "dpsgd", "easgd")
WITH_ROLES = ("ad_psgd", "parameter_server", "easgd")


class KilledError(Exception):
    """Stands for a process that is gone."""


class Watching(SilentReporter):
    """Ends the run after a step; keeps what is said."""

    def __init__(self, dies_at: int = 0) -> None:
        self.dies_at, self.num_steps = dies_at, 0
        self.notices: list[str] = []

    def step(self, epoch: float, frames: int, loss: float | None) -> None:
        self.num_steps += 1
        if self.num_steps == self.dies_at:
            raise KilledError

    def notice(self, text: str) -> None:
        self.notices.append(text)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return write_tiny_data(tmp_path_factory.mktemp("size") / "data", TinySizes(train=40, shards=3))


def kill(dataset: Dataset, options: TrainOptions, run: Path, size: int, at_step: int) -> int:
    """Leave a run that every rank has left after `at_step`; return the step of its last checkpoint."""

    def train(comm: Communicator) -> None:
        with pytest.raises(KilledError):
            train_run(Session(dataset, comm, CPU, Watching(at_step)), options, run)

    with checkpoints_completed():
        run_threads(size, train)
    return next(checkpoint_steps(run))


def go_on(dataset: Dataset, options: TrainOptions, run: Path, size: int) -> list[str]:
    """Finish a run; return what rank 0 said."""

    def train(comm: Communicator) -> list[str]:
        reporter = Watching()
        train_run(Session(dataset, comm, CPU, reporter), options, run, resume=True)
        return reporter.notices

    return run_threads(size, train)[0]


@pytest.mark.parametrize(
    ("strategy", "before", "after"),
    [(strategy, *sizes) for strategy, sizes in zip(SYNCHRONOUS, cycle([(3, 2), (2, 3)]), strict=False)]
    + [(s, *sizes) for s in SYNCHRONOUS if s.startswith(ALONE_OTHERWISE) for sizes in [(2, 1), (1, 2)]],
)
def test_every_frame_is_trained_on_once_in_the_epochs_to_come(
    dataset: Dataset, tmp_path: Path, strategy: str, before: int, after: int
) -> None:
    options = dataclasses.replace(OPTIONS, strategy=StrategyChoice(strategy))
    step = kill(dataset, options, tmp_path, before, at_step=5)
    assert step == 4
    notices = go_on(dataset, options, tmp_path, after)
    (line,) = [n for n in notices if n.startswith("resuming from")]
    sizes = f"written by {counted(before, 'rank')}, with {counted(after, 'rank')}"
    assert line.startswith(f"resuming from step 4, {sizes}: epoch 1 continues")
    lines = evaluations(tmp_path)
    num_frames = dataset.num_frames("train")
    assert [b["frames"] - a["frames"] for a, b in pairwise(lines)] == [num_frames] * 2
    assert all(-5 < line["heldout_log_prob"] < 0 for line in lines), lines
    assert all(bool(tensor.isfinite().all()) for tensor in model_tensors(tmp_path).values())


@pytest.mark.parametrize("compression", ["none", "int8"])
def test_a_single_worker_goes_on_from_the_centre(compression: str) -> None:
    """The centre is the model; the worker's own parameters are not what was evaluated."""

    def at_work(comm: Communicator) -> Strategy:
        replica = Replica(torch.nn.Linear(3, 2), Sgd(learning_rate=0.1))
        timeline = Timeline(None, rank=comm.rank, device=CPU)
        strategy = parse_strategy(f"easgd:mode=sync,period=2,compression={compression}")
        return strategy.attach(replica, comm, timeline)

    def save(comm: Communicator) -> dict[str, Any]:
        strategy = at_work(comm)
        strategy.replica.parameters.values.add_(comm.rank + 1.0)
        with strategy.evaluation_parameters():
            shown = strategy.replica.parameters.values.clone()
        state = {**strategy.state_dict(), "shown": shown, "own": strategy.replica.parameters.values.clone()}
        strategy.close()
        return state

    state = run_threads(2, save)[0]
    assert not torch.equal(state["own"], state["shown"])
    alone = at_work(SerialCommunicator())
    values = alone.replica.parameters.values
    values.copy_(state["own"])  # as a checkpoint is loaded: the replica first
    alone.load_state_dict(state)
    assert torch.equal(values, state["shown"])
    alone.close()


def test_the_epoch_under_way_goes_on_at_the_same_share(dataset: Dataset, tmp_path: Path) -> None:
    """40 utterances are 20 steps of two for one rank and 6 at most for each of four."""
    assert kill(dataset, OPTIONS, tmp_path, 1, at_step=9) == 8
    notices = go_on(dataset, OPTIONS, tmp_path, 4)
    (line,) = [n for n in notices if n.startswith("resuming from")]
    assert "at the same fraction, step 2 of 6 instead of 8 of 20, and may repeat or miss segments" in line
    assert line.endswith("every rank takes 2 segments per step, learning rate 0.002")
    assert [line["step"] for line in evaluations(tmp_path)] == [8 + 4, 8 + 4 + 6, 8 + 4 + 6 + 6]


def test_a_pause_before_the_first_step_is_recorded_at_that_share(dataset: Dataset, tmp_path: Path) -> None:
    kill(dataset, OPTIONS, tmp_path, 1, at_step=9)

    def pause(comm: Communicator) -> None:
        with pytest.raises(Paused):
            train_run(Session(dataset, comm, CPU, pause_at=8), OPTIONS, tmp_path, resume=True)

    run_threads(4, pause)
    assert [(line["step"], line["epoch"]) for line in evaluations(tmp_path)] == [(8, pytest.approx(2 / 6))]


def test_the_global_batch_stays_where_it_is_given(dataset: Dataset, tmp_path: Path) -> None:
    batch = BatchOptions(global_batch=6)
    options = dataclasses.replace(OPTIONS, batch=batch)
    kill(dataset, options, tmp_path, 3, at_step=5)
    notices = go_on(dataset, options, tmp_path, 2)
    assert any("every rank takes 3 segments per step" in notice for notice in notices), notices


def test_an_epoch_s_end_is_the_same_place_for_any_number_of_ranks(dataset: Dataset, tmp_path: Path) -> None:
    options = dataclasses.replace(OPTIONS, checkpoint_steps=0)
    kill(dataset, options, tmp_path, 2, at_step=13)
    notices = go_on(dataset, options, tmp_path, 3)
    assert any("with 3 ranks: the next epoch begins; every rank" in notice for notice in notices), notices
    num_frames = dataset.num_frames("train")
    assert [line["frames"] for line in evaluations(tmp_path)] == [num_frames, 2 * num_frames, 3 * num_frames]


def test_what_is_recorded_of_ranks_that_are_no_more(dataset: Dataset, tmp_path: Path) -> None:
    kill(dataset, OPTIONS, tmp_path, 3, at_step=6)
    go_on(dataset, OPTIONS, tmp_path, 2)
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["size"] == 2 and record["earlier_sizes"] == [3]
    starts = [json.loads(line) for line in (tmp_path / "starts.jsonl").read_text().splitlines()]
    assert [(start["step"], start["size"]) for start in starts] == [(0, 3), (4, 2)]
    assert len(list((tmp_path / "timeline").glob("rank-*.jsonl"))) == 3
    timing = read_run(tmp_path).timing
    assert timing is not None and [rank.rank for rank in timing.ranks] == [0, 1]


@pytest.mark.parametrize("strategy", WITH_ROLES)
def test_strategies_with_roles_are_refused(dataset: Dataset, tmp_path: Path, strategy: str) -> None:
    assert not parse_strategy(strategy).traits.resumes_with_other_size
    options = dataclasses.replace(OPTIONS, strategy=StrategyChoice(strategy), checkpoint_steps=0, epochs=1)
    run_threads(2, lambda comm: train_run(Session(dataset, comm, CPU), options, tmp_path))
    (tmp_path / "completed.json").unlink()
    with pytest.raises((RunError, CommunicationError), match="written by 2 ranks, cannot be resumed by 3"):
        go_on(dataset, options, tmp_path, 3)
    options = dataclasses.replace(options, loading=LoadingOptions(feeders=2))
    with pytest.raises((RunError, CommunicationError), match="by 3; start with -np 4, of which 2 feed"):
        go_on(dataset, options, tmp_path, 3)


def test_ranks_that_were_not_there_draw_numbers_of_their_own(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds: list[int] = []
    kill(dataset, OPTIONS, tmp_path, 2, at_step=5)
    monkeypatch.setattr(torch, "manual_seed", seeds.append)
    go_on(dataset, OPTIONS, tmp_path, 4)
    fresh = [seed for seed in seeds if seed > 1 << 32]  # those of a start are seed x 65537 + rank
    assert len(set(fresh)) == 2
