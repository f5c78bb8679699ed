"""Data that contradict themselves, checksums and all: told in one line before step 1, and by inspect."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from speechdp.cli import main
from speechdp.comm.serial import SerialCommunicator
from speechdp.data.loading.reader import SplitReader
from speechdp.data.shards.alignment_file import write_targets
from speechdp.data.shards.dataset import Dataset
from speechdp.data.shards.shard import Utterance
from speechdp.errors import ConfigError, ShardError, SpeechDPError
from speechdp.options.batch import BatchOptions
from speechdp.options.run import ModelOptions, TrainOptions
from speechdp.train.run import train_run
from speechdp.train.session import Session
from tests.helpers.tiny_data import TinySizes, rewrite_shard, write_tiny_data

OPTIONS = TrainOptions(ModelOptions(layers=1, cells=4), BatchOptions(batch_size=4), epochs=1)


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    return write_tiny_data(tmp_path / "data", TinySizes(train=4, dev=2, test=2))


def train(dataset: Dataset, run: Path, options: TrainOptions = OPTIONS) -> None:
    train_run(Session(dataset, SerialCommunicator(), torch.device("cpu")), options, run)


def inspected(path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the one line in which inspect says what is wrong."""
    assert main.run(["inspect", str(path)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    return line


def with_target(target: int) -> Callable[[list[Utterance]], list[Utterance]]:
    """Return what puts a target into the last utterance, behind its first frames."""

    def change(utterances: list[Utterance]) -> list[Utterance]:
        targets = utterances[-1].targets.copy()
        targets[5] = target
        return [*utterances[:-1], dataclasses.replace(utterances[-1], targets=targets)]

    return change


@pytest.mark.parametrize("split", ["train", "dev"])
@pytest.mark.parametrize("target", [-1, 18])
def test_targets_outside_the_classes(
    dataset: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str], split: str, target: int
) -> None:
    assert dataset.num_classes == 18
    changed = rewrite_shard(dataset, split, with_target(target))
    with changed.open_shard(split, 0) as shard:
        name = shard.utterance_id(shard.num_utterances - 1)
    expected = f"{split}-00000.h5: utterance {name} has target {target}, outside the classes 0..17; prepare"
    with pytest.raises(ShardError, match=expected):
        train(changed, tmp_path / "run")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    assert expected in inspected(changed.path, capsys)


def test_targets_far_into_a_shard_are_found(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("speechdp.data.shards.shard._ROWS_A_READ", 7)
    SplitReader(dataset, "train").close()
    changed = rewrite_shard(dataset, "train", with_target(-1))
    with pytest.raises(ShardError, match="has target -1"):
        SplitReader(changed, "train")


def test_targets_of_an_alignment_outside_the_classes(dataset: Dataset, tmp_path: Path) -> None:
    for number, path in enumerate(dataset.shard_paths("train")):
        with dataset.open_shard("train", number) as shard:
            targets = [shard.read(utterance)[1].copy() for utterance in range(shard.num_utterances)]
            name = shard.utterance_id(0)
            targets[0][0] = dataset.num_classes if number else 0
            write_targets(tmp_path / path.name, shard, targets, "realigned-1")
    message = f"{tmp_path}/train-00001.h5: utterance {name} has target 18, .* delete it and align again"
    with pytest.raises(ShardError, match=message):
        SplitReader(dataset, "train", tmp_path)


_EMPTY = {"shards": [], "utterances": 0, "frames": 0, "speakers": 0}


def _set(*keys: str | int, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(values: Any) -> None:
        for key in keys[:-1]:
            values = values[key]
        values[keys[-1]] = value

    return change


def _listed_twice(values: dict[str, Any]) -> None:
    split = values["splits"]["train"]
    split["shards"] += split["shards"]
    split["utterances"] *= 2
    split["frames"] *= 2


def _of_another_split(values: dict[str, Any]) -> None:
    values["splits"]["dev"] = values["splits"].pop("test")


def _renamed(values: dict[str, Any]) -> None:
    values["splits"]["train"]["shards"][0]["frames"] += 1
    values["splits"]["train"]["shards"][1]["frames"] -= 1


def test_a_data_json_that_is_no_object(dataset: Dataset) -> None:
    (dataset.path / "data.json").write_text("[]")
    with pytest.raises(ShardError, match=r"damaged \(it is no JSON object with format, version, splits"):
        Dataset.open(dataset.path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_set("splits", "train", "utterances", value=5), r"split 'train' has 5 utterances, its shards 4"),
        (_set("splits", "dev", "frames", value=1), r"split 'dev' has 1 frames, its shards \d+"),
        (_listed_twice, r"lists 'train-00000\.h5' twice"),
        (_set("splits", "dev", value=_EMPTY), "split 'dev' has no utterances"),
        (_set("num_classes", value=1 << 61), "2305843009213693952 is no number of classes"),
        (_set("num_classes", value=0), "0 is no number of classes"),
        (_set("num_classes", value=True), "True is no number of classes"),
        (lambda values: values.pop("splits"), "'splits' is missing"),
        (_set("splits", value=[]), "splits is no JSON object of splits by name"),
        (_set("feature_dim", value=7), "it says 7 values a frame, its features have 6"),
    ],
)  # fmt: skip
def test_a_data_json_that_contradicts_itself(
    dataset: Dataset, capsys: pytest.CaptureFixture[str], change: Any, message: str
) -> None:
    rewrite_json(dataset.path, change)
    with pytest.raises(ShardError, match=message):
        Dataset.open(dataset.path)
    assert "data.json: damaged (" in inspected(dataset.path, capsys)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (_set("num_classes", value=1 << 30), "number of classes"),
        (_set("alignment", value="flat"), "alignment"),
        (_set("sampling_rate", value=16000), "sampling rate"),
        (_of_another_split, "split"),
        (_renamed, "number of frames"),
    ],
)
def test_a_data_json_that_contradicts_the_shards(
    dataset: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Any, what: str
) -> None:
    rewrite_json(dataset.path, change)
    with pytest.raises(SpeechDPError, match=r"differs|lists 18 classes"):
        train(Dataset.open(dataset.path), tmp_path / "run")
    with pytest.raises(ShardError, match=rf"h5: is not the shard that data\.json lists \({what} differs\)"):
        Dataset.open(dataset.path).verify()
    inspected(dataset.path, capsys)


def test_a_class_list_of_another_length_is_refused_before_a_run_is_begun(
    dataset: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the model has an output for is what classes.txt lists, whatever data.json and shards agree on."""
    (dataset.path / "classes.txt").write_text("".join(f"{number} pdf-{number}\n" for number in range(20)))
    with pytest.raises(ConfigError, match=r"classes\.txt: lists 20 classes, data\.json says 18"):
        train(dataset, tmp_path / "run")
    assert not (tmp_path / "run" / "run.json").exists()
    assert "classes.txt: lists 20 classes" in inspected(dataset.path, capsys)


def test_a_split_whose_only_shard_is_empty(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dataset = write_tiny_data(tmp_path / "data", TinySizes(train=4, dev=2, test=2, shards=1))
    with pytest.raises(ShardError, match="split 'dev' has no utterances"):
        rewrite_shard(dataset, "dev", lambda utterances: [])
    assert "split 'dev' has no utterances" in inspected(dataset.path, capsys)


def test_shards_exchanged_between_two_directories(
    dataset: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the same names, counts, lengths and words: only what was said differs."""

    def louder(utterances: list[Utterance]) -> list[Utterance]:
        return [dataclasses.replace(u, features=np.float32(2) * u.features) for u in utterances]

    other = tmp_path / "other"
    shutil.copytree(dataset.path, other)
    rewrite_shard(Dataset.open(other), "train", louder)
    Dataset.open(other).verify()
    shutil.copy(other / "train-00000.h5", dataset.path)
    with pytest.raises(ShardError, match=r"train-00000\.h5: is not the shard .*\(checksum differs\)"):
        train(dataset, tmp_path / "run")
    assert "train-00000.h5: is not the shard" in inspected(dataset.path, capsys)


def rewrite_json(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    values = json.loads((path / "data.json").read_text())
    change(values)
    (path / "data.json").write_text(json.dumps(values))
