"""Shards of spectrograms: frames and symbols of each utterance, read into batches, damage noticed."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from speechdp.comm.serial import SerialCommunicator
from speechdp.data.loading.batch import IGNORED_TARGET
from speechdp.data.loading.reader import SplitReader
from speechdp.data.loading.source_options import SourceOptions, open_local_source
from speechdp.data.loading.source_request import SourceRequest
from speechdp.data.plan.epoch_plan import PlanOptions, plan_epoch
from speechdp.data.prepare.reshard import reshard
from speechdp.data.shards.dataset import Dataset
from speechdp.data.shards.shard import Shard
from speechdp.data.transforms.preprocess import AugmentOptions, InputOptions
from speechdp.errors import ConfigError, ShardError
from speechdp.options.reshard import ReshardOptions
from speechdp.testing.tasks import TINY_SPECTROGRAMS
from tests.helpers.corpora import no_progress
from tests.helpers.tiny_data import TinySizes
from tests.helpers.tiny_speech import write_tiny_speech


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return write_tiny_speech(tmp_path_factory.mktemp("speech") / "data", TinySizes(shards=2))


def contents(dataset: Dataset, split: str = "train") -> dict[str, tuple[np.ndarray, np.ndarray]]:
    found = {}
    for path in dataset.shard_paths(split):
        with Shard(path) as shard:
            for number in range(shard.num_utterances):
                found[shard.utterance_id(number)] = shard.read(number)
    return found


def test_layout_is_version_3(dataset: Dataset) -> None:
    assert (dataset.task, dataset.stored, dataset.alignment) == ("synthesis", "spectrograms", "text")
    with h5py.File(dataset.shard_paths("train")[0]) as file:
        assert (file.attrs["version"], file.attrs["stored"]) == (3, "spectrograms")
        assert file["offsets"][-1] == len(file["features"])
        assert file["target_offsets"][-1] == len(file["targets"])
        assert len(file["targets"]) != len(file["features"])
    assert dataset.verify() == {"contiguous": 6}


def test_batches_hold_frames_and_symbols(dataset: Dataset) -> None:
    recorded = contents(dataset)
    reader = SplitReader(dataset, "train")
    plan = plan_epoch(reader.index, PlanOptions(5, 0, 1), 0, 1).ranks[0]
    seen = []
    for number in range(plan.num_batches):
        segments = plan.batch(number)
        batch = reader.batch(segments)
        assert batch.features.dtype == torch.float32 and batch.targets.dtype == torch.int64
        assert batch.num_frames == int(batch.lengths.sum())
        for row in range(len(segments)):
            with Shard(dataset.shard_paths("train")[segments.shard[row]]) as shard:
                name = shard.utterance_id(int(segments.utterance[row]))
            features, symbols = recorded[name]
            length = int(batch.lengths[row])
            np.testing.assert_array_equal(batch.features[row, :length].numpy(), features.astype(np.float32))
            assert batch.features[row, length:].abs().sum() == 0
            np.testing.assert_array_equal(batch.targets[row, : len(symbols)].numpy(), symbols)
            assert (batch.targets[row, len(symbols) :] == IGNORED_TARGET).all()
            seen.append(name)
    assert sorted(seen) == sorted(recorded)
    reader.close()


@pytest.mark.parametrize("num_threads", [1, 2])
def test_an_empty_batch_joins_with_no_frame(dataset: Dataset, num_threads: int) -> None:
    request = SourceRequest("train")
    source = open_local_source(dataset, request, SourceOptions(num_threads=num_threads))
    plan = plan_epoch(source.index, PlanOptions(100, 0, 1), 0, 2)
    batch = source.batch(plan.ranks[0].batch(0).none())
    assert (batch.num_frames, batch.targets.shape[0]) == (0, 0)
    source.close()


def test_symbols_are_counted(dataset: Dataset) -> None:
    reader = SplitReader(dataset, "dev", comm=SerialCommunicator())
    counts = reader.count_classes(dataset.num_classes, 0, 1)
    expected = np.zeros(dataset.num_classes, dtype=np.int64)
    for _, symbols in contents(dataset, "dev").values():
        expected += np.bincount(symbols, minlength=dataset.num_classes)
    np.testing.assert_array_equal(counts[0], expected)
    reader.close()


def test_resharded_data_are_the_same(dataset: Dataset, tmp_path: Path) -> None:
    reshard(ReshardOptions(dataset.path, tmp_path / "other", 3), no_progress)
    other = Dataset.open(tmp_path / "other")
    assert other.symbols_path.read_text() == dataset.symbols_path.read_text()
    before, after = contents(dataset), contents(other)
    assert before.keys() == after.keys()
    for name, (features, symbols) in before.items():
        np.testing.assert_array_equal(after[name][0], features)
        np.testing.assert_array_equal(after[name][1], symbols)


@pytest.mark.parametrize("place", ["features", "targets"])
def test_damage_is_noticed(tmp_path: Path, place: str) -> None:
    dataset = write_tiny_speech(tmp_path / "data", TinySizes(4, 2, 2, shards=1))
    path = dataset.shard_paths("train")[0]
    with h5py.File(path, "r+") as file:
        file[place][0] = file[place][0] + 1
    reader = SplitReader(dataset, "train")
    plan = plan_epoch(reader.index, PlanOptions(4, 0, 1), 0, 1).ranks[0]
    with pytest.raises(ShardError, match=r"train-00000\.h5: utterance train-\d+ is damaged"):
        reader.batch(plan.batch(0))
    reader.close()


def test_symbols_that_do_not_match_are_refused(tmp_path: Path) -> None:
    dataset = write_tiny_speech(tmp_path / "data", TinySizes(4, 2, 2, shards=1))
    path = dataset.shard_paths("train")[0]
    with h5py.File(path, "r+") as file:
        offsets = file["target_offsets"][:]
        del file["target_offsets"]
        file["target_offsets"] = offsets[:-1]
    with pytest.raises(ShardError, match="index"):
        Shard(path)


@pytest.mark.parametrize(
    ("inputs", "augment", "named"),
    [
        (InputOptions(deltas=1), AugmentOptions(), "--deltas"),
        (InputOptions(), AugmentOptions(spec_augment=True), "--spec-augment"),
        (InputOptions(), AugmentOptions(speed_perturb=True), "--speed-perturb"),
    ],
)
def test_what_changes_inputs_is_refused(
    dataset: Dataset, inputs: InputOptions, augment: AugmentOptions, named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        open_local_source(dataset, SourceRequest("train", inputs=inputs, augment=augment), SourceOptions())


def test_sizes_of_a_row(dataset: Dataset) -> None:
    assert dataset.feature_dim == TINY_SPECTROGRAMS.num_mel_bins + TINY_SPECTROGRAMS.num_fft // 2 + 1
