"""Synthesis runs: every strategy, resumed, with the same statistics of normalisation on every rank."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from torch import nn

from speechdp.comm.base import Communicator
from speechdp.comm.serial import SerialCommunicator
from speechdp.comm.threads.communicator import run_threads
from speechdp.data.shards.dataset import Dataset
from speechdp.data.transforms.preprocess import AugmentOptions, InputOptions
from speechdp.errors import ConfigError, RunError
from speechdp.options.run import BatchOptions, ModelOptions, TrainOptions
from speechdp.parallel.batch_statistics import average_statistics, averaged_statistics, running_statistics
from speechdp.parallel.registry import StrategyChoice, parse_strategy
from speechdp.report.runs.folders import read_run
from speechdp.tasks.model_file import load_model, load_synthesis_model
from speechdp.testing.tasks import TINY_SPECTROGRAMS
from speechdp.train.run import train_run
from speechdp.train.session import Session
from tests.helpers.finished_run import model_tensors
from tests.helpers.tiny_data import TinySizes, write_tiny_data
from tests.helpers.tiny_speech import TINY_SYNTHESIS, write_tiny_speech

CPU = torch.device("cpu")
STRATEGIES = (
    "gradient_averaging",
    "model_averaging:period=2",
    "bmuf:period=2",
    "ad_psgd",
    "parameter_server",
)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return write_tiny_speech(tmp_path_factory.mktemp("synthesis") / "data", TinySizes(16, 4, 4))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_strategies_train_synthesis_as_well(dataset: Dataset, tmp_path: Path, strategy: str) -> None:
    options = dataclasses.replace(TINY_SYNTHESIS, strategy=StrategyChoice(strategy), epochs=4)
    run_threads(2, lambda comm: train_run(Session(dataset, comm, CPU), options, tmp_path))
    loaded = load_synthesis_model(tmp_path, CPU)
    assert (loaded.sampling_rate, loaded.features) == (8000, TINY_SPECTROGRAMS)
    assert loaded.symbols.num_symbols == dataset.num_classes == loaded.model.num_symbols
    evaluations = read_run(tmp_path).evaluations
    assert len(evaluations) == 4
    first, *later = (evaluation.values["l1_error"] or 0.0 for evaluation in evaluations)
    # Two steps an epoch, and random numbers that ranks of one process draw in any order: at times an epoch is
    # worse.  Ranks that go at their own pace take the steps in any order, too.
    assert 0 < min(later) < (first if parse_strategy(strategy).traits.synchronous else 1.5)
    assert evaluations[-1].score == -later[-1]
    statistics = running_statistics(loaded.model)
    assert statistics and all(bool(x.isfinite().all()) for x in statistics.values())
    assert not any(bool((x == 1).all()) for name, x in statistics.items() if "var" in name)


def test_resumed_is_bitwise_uninterrupted(dataset: Dataset, tmp_path: Path) -> None:
    session, options = Session(dataset, SerialCommunicator(), CPU), TINY_SYNTHESIS
    train_run(session, options, tmp_path / "whole")
    train_run(session, dataclasses.replace(options, max_steps=4), tmp_path / "cut")
    # The end of the first epoch left a checkpoint; what followed is done anew.
    run = tmp_path / "cut"
    for name in ("completed.json", "model.safetensors"):
        (run / name).unlink()
    text = (tmp_path / "whole" / "run.json").read_text()
    (run / "run.json").write_text(text)
    train_run(session, options, run, resume=True)
    first, second = model_tensors(tmp_path / "whole"), model_tensors(run)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_statistics_are_averaged_over_the_ranks_that_trained() -> None:
    def on_rank(comm: Communicator) -> list[torch.Tensor]:
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        for number, buffer in enumerate(running_statistics(model).values()):
            buffer.fill_(10.0 * number + comm.rank)
        average_statistics(model, comm, has_trained=comm.rank != 1)
        return [buffer.clone() for buffer in running_statistics(model).values()]

    for buffers in run_threads(3, on_rank):
        assert [buffer.tolist() for buffer in buffers] == [[1.0, 1.0], [11.0, 11.0]]


def test_a_rank_gone_astray_takes_the_others_statistics() -> None:
    def on_rank(comm: Communicator) -> list[list[float]]:
        model = nn.BatchNorm1d(1)
        model.running_mean.fill_(float("nan") if comm.rank == 1 else 4.0)  # type: ignore[union-attr]
        with averaged_statistics(model, comm, has_trained=True):
            shown = model.running_mean.tolist()  # type: ignore[union-attr]
        return [shown, model.running_mean.tolist()]  # type: ignore[union-attr]

    assert run_threads(2, on_rank) == [[[4.0], [4.0]], [[4.0], [4.0]]]


def test_symbols_of_other_data_are_refused(tmp_path: Path) -> None:
    dataset = write_tiny_speech(tmp_path / "data", TinySizes(4, 2, 2))
    values = json.loads(dataset.symbols_path.read_text())
    values["names"].append("é")
    dataset.symbols_path.write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=r"symbols\.json: lists \d+ classes, data\.json says"):
        train_run(Session(dataset, SerialCommunicator(), CPU), TINY_SYNTHESIS, tmp_path / "run")


def test_models_of_another_task_are_refused(dataset: Dataset, tmp_path: Path) -> None:
    train_run(Session(dataset, SerialCommunicator(), CPU), TINY_SYNTHESIS, tmp_path / "run")
    with pytest.raises(RunError, match="is a synthesis model; use it with speechdp synthesize"):
        load_model(tmp_path / "run", CPU)
    acoustic = write_tiny_data(tmp_path / "data", TinySizes(6, 2, 2))
    options = TrainOptions(ModelOptions(layers=1, cells=4), BatchOptions(batch_size=4), epochs=1)
    session = Session(acoustic, SerialCommunicator(), CPU)
    train_run(session, options, tmp_path / "acoustic")
    with pytest.raises(RunError, match="is an acoustic model; use it with speechdp decode"):
        load_synthesis_model(tmp_path / "acoustic", CPU)
    with pytest.raises(ConfigError, match="holds features, and --task synthesis is trained on spectrograms"):
        train_run(session, TINY_SYNTHESIS, tmp_path / "other")
    with pytest.raises(ConfigError, match="add --task synthesis"):
        train_run(Session(dataset, SerialCommunicator(), CPU), options, tmp_path / "other")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"batch": BatchOptions(chunk_frames=10)}, "--chunk-frames: not with"),
        ({"batch": BatchOptions(left_context=2), "realign": 1}, "--left-context, --realign: not with"),
        ({"alignments": Path("there")}, "--alignments: not with"),
        (
            {"inputs": InputOptions(deltas=1), "augment": AugmentOptions(spec_augment=True)},
            "--deltas, --spec-",
        ),
    ],
)
def test_options_of_acoustic_models_are_refused_together(changes: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        dataclasses.replace(TINY_SYNTHESIS, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("model", "task", "named"),
    [
        (ModelOptions(layers=2), "synthesis", "--layers goes with --task acoustic"),
        (ModelOptions(reduction=2), "acoustic", "--reduction goes with --task synthesis"),
        (ModelOptions("tacotron"), "acoustic", "--preset tacotron: is not a model for --task acoustic"),
        (ModelOptions("tiny"), "synthesis", "choose one of tacotron-tiny"),
        (ModelOptions(reduction=0), "synthesis", "--reduction 0"),
        (ModelOptions(guided_attention=-1.0), "synthesis", "--guided-attention -1"),
    ],
)
def test_models_and_tasks_that_do_not_go_together(model: ModelOptions, task: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        TrainOptions(model, task=task)  # type: ignore[arg-type]
