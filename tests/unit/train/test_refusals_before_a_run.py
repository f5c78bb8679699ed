"""What cannot be trained is refused before a run is begun: the corrected command finds no run in its way."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from speechdp.comm.serial import SerialCommunicator
from speechdp.data.shards.dataset import Dataset
from speechdp.data.transforms.preprocess import AugmentOptions, InputOptions
from speechdp.errors import ConfigError, RunError, ShardError
from speechdp.options.batch import BatchOptions, LoadingOptions
from speechdp.options.run import ModelOptions, TrainOptions
from speechdp.train.run import train_run
from speechdp.train.session import Session
from tests.helpers.tiny_data import write_tiny_data

OPTIONS = TrainOptions(ModelOptions(layers=1, cells=4), BatchOptions(batch_size=4), epochs=1)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return write_tiny_data(tmp_path_factory.mktemp("refusals") / "data")


def train(dataset: Dataset, run: Path, *, resume: bool = False, **changes: Any) -> None:
    session = Session(dataset, SerialCommunicator(), torch.device("cpu"))
    train_run(session, dataclasses.replace(OPTIONS, **changes), run, resume=resume)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"augment": AugmentOptions(speed_perturb=True)}, "--store audio"),
        ({"augment": AugmentOptions(noise_snr_db="5-10")}, "--store audio"),
        ({"loading": LoadingOptions(preprocess_on="gpu")}, "this rank computes on the CPU"),
        ({"train_split": "trane"}, "has no split 'trane'"),
        ({"alignments": Path("/dev/null/none")}, "/dev/null/none: no such alignment directory"),
    ],
)
def test_a_mistake_leaves_no_run_behind(
    dataset: Dataset, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises((ConfigError, ShardError), match=message):
        train(dataset, tmp_path / "run", **changes)
    assert not (tmp_path / "run" / "run.json").exists()
    train(dataset, tmp_path / "run")


def test_a_global_batch_and_batches_by_frames_train(dataset: Dataset, tmp_path: Path) -> None:
    for name, batch in (("global", BatchOptions(global_batch=8)), ("frames", BatchOptions(batch_frames=200))):
        train(dataset, tmp_path / name, batch=batch, inputs=InputOptions(deltas=1))
        assert (tmp_path / name / "completed.json").is_file()


def test_where_batches_are_made_may_change_on_resume(dataset: Dataset, tmp_path: Path) -> None:
    train(dataset, tmp_path / "run", loading=LoadingOptions(loader_threads=3))
    train(dataset, tmp_path / "run", resume=True, loading=LoadingOptions(loader_threads=2))
    with pytest.raises(ConfigError):
        train(dataset, tmp_path / "run", resume=True, inputs=InputOptions(deltas=1))


def test_the_timing_of_a_run_tells_what_its_data_path_did(dataset: Dataset, tmp_path: Path) -> None:
    train(dataset, tmp_path / "run", augment=AugmentOptions(spec_augment=True))
    (rank,) = json.loads((tmp_path / "run" / "timing.json").read_text())["ranks"]
    data = rank["data"]
    assert data["frames"] == dataset.num_frames("train") <= data["computed_frames"]
    assert data["storage"] == "contiguous" and data["stored"] == "features"
    assert set(data["stages_s"]) == {"read", "preprocess"} | ({"collate"} & set(data["stages_s"]))


def test_a_complete_run_whose_model_is_gone_gets_it_again(dataset: Dataset, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(dataset, run)
    model, timing = run / "model.safetensors", (run / "timing.json").read_bytes()
    written = model.read_bytes()
    model.unlink()
    train(dataset, run, resume=True)
    assert model.read_bytes() == written and (run / "timing.json").read_bytes() == timing
    model.unlink()
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(RunError, match=r"is complete, but holds neither .* nor a checkpoint to make it of"):
        train(dataset, run, resume=True)
    assert (run / "metrics.jsonl").is_file()
