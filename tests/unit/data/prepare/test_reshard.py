"""speechdp shard: another number of shards, the same utterances to the last bit."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import h5py
import numpy as np
import pytest

from speechdp.cli import main
from speechdp.data.prepare.pipeline import prepare
from speechdp.data.prepare.reshard import deal_by_frames, reshard
from speechdp.data.shards import contiguous
from speechdp.data.shards.dataset import Dataset
from speechdp.errors import ConfigError, ShardError
from speechdp.options.prepare import PrepareOptions
from speechdp.options.reshard import Balance, ReshardOptions
from tests.helpers.corpora import digit_folder, no_progress
from tests.helpers.faulty_disk import faulty_disk, full
from tests.helpers.limits import few_files
from tests.helpers.tiny_data import TinySizes, flip_byte, write_tiny_data


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    return write_tiny_data(tmp_path / "data", TinySizes(train=40, dev=7, test=6, shards=3))


def contents(dataset: Dataset, split: str) -> dict[str, tuple[object, ...]]:
    """Everything a split holds, by utterance."""
    found = {}
    for index in range(len(dataset.shard_paths(split))):
        with dataset.open_shard(split, index) as shard:
            for place in range(shard.num_utterances):
                one = shard.read_utterance(place)
                arrays = (one.content.dtype, one.content.tobytes(), one.targets.tobytes())
                assert one.utterance_id not in found
                found[one.utterance_id] = (one.speaker, one.text, *arrays)
    return found


@pytest.mark.parametrize("num_shards", [1, 5, 6])
def test_utterances_stay_the_same_to_the_last_bit(dataset: Dataset, tmp_path: Path, num_shards: int) -> None:
    new = reshard(ReshardOptions(dataset.path, tmp_path / "new", num_shards), no_progress)
    assert new.verify() == Counter({"contiguous": 3 * num_shards})
    for split in ("train", "dev", "test"):
        assert len(new.shard_paths(split)) == num_shards
        assert contents(new, split) == contents(dataset, split)
    for name in ("lexicon.txt", "classes.txt"):
        assert (new.path / name).read_bytes() == (dataset.path / name).read_bytes()


@pytest.mark.parametrize("balance", ["frames", "utterances"])
def test_a_small_split_gets_a_shard_for_each_utterance(
    dataset: Dataset, tmp_path: Path, balance: Balance, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["shard", str(dataset.path), str(tmp_path / "new"), "--shards", "7", "--balance", balance]
    assert main.run(command) == 0
    new = Dataset.open(tmp_path / "new")
    new.verify()
    assert [len(new.shard_paths(split)) for split in ("train", "dev", "test")] == [7, 7, 6]
    assert contents(new, "test") == contents(dataset, "test")
    said = capsys.readouterr().out.splitlines()
    assert [line for line in said if "too few" in line] == [
        "test has 6 utterances, too few for --shards 7: a shard for each"
    ]


@pytest.mark.parametrize(("balance", "unit"), [("frames", "frames"), ("utterances", "utterances")])
def test_shards_are_balanced(dataset: Dataset, tmp_path: Path, balance: Balance, unit: str) -> None:
    new = reshard(ReshardOptions(dataset.path, tmp_path / "new", 6, balance, "train"), no_progress)
    sums = [getattr(shard, unit) for shard in new.splits["train"].shards]
    # Of 6 or 7 utterances of 14 to 50 frames each: by chance alone, sums would differ by more than 50.
    assert max(sums) - min(sums) <= (25 if unit == "frames" else 1)
    assert sum(sums) == getattr(dataset.splits["train"], unit)


def test_dealing_balances_very_unequal_utterances() -> None:
    lengths = np.random.default_rng(0).lognormal(5, 1, 20_000).astype(np.int64) + 1
    sums = np.bincount(deal_by_frames(lengths, 64, 3), weights=lengths)
    assert sums.max() - sums.min() < 1e-3 * sums.mean()
    assert np.bincount(deal_by_frames(np.ones(8, np.int64), 8, 0)).tolist() == [1] * 8


def test_shards_are_samples_of_the_corpus_by_the_seed(dataset: Dataset, tmp_path: Path) -> None:
    ids = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        options = ReshardOptions(dataset.path, tmp_path / name, 2, seed=seed)
        ids.append(reshard(options, no_progress).open_shard("train", 0).utterance_ids)
    assert ids[0] == ids[1] != ids[2]
    assert list(ids[0]) != sorted(ids[0])
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


def test_one_split_is_dealt_and_the_others_are_copied(dataset: Dataset, tmp_path: Path) -> None:
    new = reshard(ReshardOptions(dataset.path, tmp_path / "new", 40, split="train"), no_progress)
    assert [shard.utterances for shard in new.splits["train"].shards] == [1] * 40
    assert new.splits["dev"] == dataset.splits["dev"]
    for path in dataset.shard_paths("dev"):
        assert path.read_bytes() == (new.path / path.name).read_bytes()
    new.verify()


def test_splits_that_stay_may_have_more_shards_than_a_process_may_open_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contiguous, "_MOST_OPEN", 1)
    dataset = write_tiny_data(tmp_path / "data", TinySizes(train=40, dev=40, test=40, shards=40))
    with few_files(30):
        new = reshard(ReshardOptions(dataset.path, tmp_path / "new", 2, split="train"), no_progress)
    assert contents(new, "dev") == contents(dataset, "dev")


def test_what_another_version_put_into_the_directory_stays(dataset: Dataset, tmp_path: Path) -> None:
    values = json.loads((dataset.path / "data.json").read_text()) | {"topology": "kaldi"}
    (dataset.path / "data.json").write_text(json.dumps(values))
    (dataset.path / "topo.txt").write_text("<Topology>\n")
    reshard(ReshardOptions(dataset.path, tmp_path / "new", 2), no_progress)
    assert json.loads((tmp_path / "new" / "data.json").read_text())["topology"] == "kaldi"
    assert (tmp_path / "new" / "topo.txt").read_text() == "<Topology>\n"


def test_shards_of_audio(tmp_path: Path) -> None:
    source = digit_folder(tmp_path / "in")
    options = PrepareOptions((source, tmp_path / "data"), shards=2, workers=1, store="audio")
    dataset = prepare(options, no_progress).dataset
    new = reshard(ReshardOptions(dataset.path, tmp_path / "new", 3), no_progress)
    new.verify()
    assert new.stored == "audio"
    assert contents(new, "test") == contents(dataset, "test")


def test_chunked_shards_become_contiguous(dataset: Dataset, tmp_path: Path) -> None:
    for path in dataset.shard_paths("train"):
        with h5py.File(path, "r+", locking=False) as file:
            rows = file["features"][:]
            del file["features"]
            file.create_dataset("features", data=rows, chunks=(5, 6), compression="gzip")
    assert dataset.verify() == Counter({"chunked gzip": 3, "contiguous": 6})
    new = reshard(ReshardOptions(dataset.path, tmp_path / "new", 2), no_progress)
    assert new.verify() == Counter({"contiguous": 6})
    assert contents(new, "train") == contents(dataset, "train")


def test_few_files_are_open_at_a_time(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contiguous, "_MOST_OPEN", 1)
    new = reshard(ReshardOptions(dataset.path, tmp_path / "new", 2), no_progress)
    assert contents(new, "train") == contents(dataset, "train")


def test_progress_reaches_the_number_of_utterances(dataset: Dataset, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    reshard(ReshardOptions(dataset.path, tmp_path / "new", 2), lambda *report: seen.append(report))
    assert seen[0] == ("dealing utterances", 0, 53) and seen[-1] == ("dealing utterances", 53, 53)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_shards": 0}, "--shards 0: must be at least 1"),
        ({"seed": -1}, "--seed -1: must lie in 0"),
        ({"out": "data"}, "contains the data to be read"),
        ({"out": "."}, "contains the data to be read"),
        (
            {"out": "data/new"},
            r"lies in .*data, which holds prepared data \(data\.json\); give a folder beside",
        ),
        ({"out": "data/new/2"}, "lies in .*data, which holds prepared data"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    dataset: Dataset, tmp_path: Path, change: dict[str, object], message: str
) -> None:
    values = {"num_shards": 2, "out": "new", "seed": 1} | change
    shards, seed = (int(str(values[name])) for name in ("num_shards", "seed"))
    with pytest.raises(ConfigError, match=message):
        reshard(ReshardOptions(dataset.path, tmp_path / str(values["out"]), shards, seed=seed), no_progress)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data"]
    assert all(path.is_file() for path in dataset.path.iterdir())


@pytest.mark.parametrize("split", ["train", "dev"])  # dealt anew; copied
def test_damage_is_noticed_while_copying(dataset: Dataset, tmp_path: Path, split: str) -> None:
    name = flip_byte(dataset.shard_paths(split)[1], 1)
    with pytest.raises(ShardError, match=rf"data/{split}-00001\.h5: utterance {name} is damaged"):
        reshard(ReshardOptions(dataset.path, tmp_path / "new", 4, split="train"), no_progress)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data"]


def test_a_failing_disk_leaves_nothing_behind(dataset: Dataset, tmp_path: Path) -> None:
    options = ReshardOptions(dataset.path, tmp_path / "new", 2)
    with faulty_disk(0, full()) as disk:
        reshard(options, no_progress)
    for fails_at in range(2, disk.num_operations, 7):
        again = ReshardOptions(dataset.path, tmp_path / f"new{fails_at}", 2)
        left = ["data", "new"]
        try:
            with faulty_disk(fails_at, full()):
                reshard(again, no_progress)
            left.append(again.out.name)  # what failed was a sync of a name that had been given already
            Dataset.open(again.out).verify()
        except ShardError as error:
            assert "; free some space, then run again" in str(error)
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted(left)
        shutil.rmtree(again.out, ignore_errors=True)


@pytest.mark.parametrize("name", ["../dev", "/dev", "..", ""])
def test_names_that_lead_out_of_the_directory_are_refused(dataset: Dataset, name: str) -> None:
    text = (dataset.path / "data.json").read_text()
    for place, new in (('"dev": {', f'"{name}": {{'), ('"dev-00000.h5"', f'"{name}"')):
        (dataset.path / "data.json").write_text(text.replace(place, new))
        with pytest.raises(ShardError, match=r"data\.json: damaged \('.*' is not a plain name\)"):
            Dataset.open(dataset.path)


def test_the_command(dataset: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new = tmp_path / "new"
    command = ["shard", str(dataset.path), str(new), "--shards", "4"]
    assert main.run([*command, "--balance", "utterances"]) == 0
    assert [len(split.shards) for split in Dataset.open(new).splits.values()] == [4, 4, 4]
    assert main.run(command) == 1
    assert "add --overwrite" in capsys.readouterr().err
    assert main.run([*command, "--split", "train", "--overwrite"]) == 0
    assert main.run([*command, "--split", "eval", "--overwrite"]) == 1
    assert "has no split 'eval', only train, dev, test" in capsys.readouterr().err
