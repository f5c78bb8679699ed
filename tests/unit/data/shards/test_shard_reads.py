"""Reading shards under all conditions: straight into memory, from failing disks, and with little memory."""

from __future__ import annotations

import fcntl
import gc
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import h5py
import numpy as np
import pytest

from speechdp.data.loading.reader import SplitReader
from speechdp.data.prepare.reshard import reshard
from speechdp.data.shards import contiguous
from speechdp.data.shards.alignment_file import open_targets, write_targets
from speechdp.data.shards.contiguous import ArrayPlace, RowReader
from speechdp.data.shards.dataset import Dataset
from speechdp.data.shards.shard import Shard, ShardHeader, ShardWriter, Utterance
from speechdp.data.signal.features import FeatureConfig
from speechdp.errors import ConfigError, ShardError
from speechdp.options.reshard import ReshardOptions
from tests.helpers.corpora import no_progress, write_shard
from tests.helpers.faulty_reads import FaultyReads
from tests.helpers.limits import few_files
from tests.helpers.tiny_data import TinySizes, write_tiny_data

HOSTILE = ("../../etc/passwd", "a\nb", 'q"\\', "\x1b[31m", "\u202e", "é" * 300, " ", "-rf", "$(id)", "")


def recompressed(path: Path, new: Path, **options: object) -> Shard:
    """Copy a shard as h5repack does, its large arrays in chunks."""
    with h5py.File(path) as source, h5py.File(new, "w") as copy:
        for name, value in source.attrs.items():
            copy.attrs[name] = value
        for name, dataset in source.items():
            if name in ("features", "targets"):
                copy.create_dataset(name, data=dataset[:], chunks=(7, 5)[: dataset.ndim], **options)
            else:
                source.copy(name, copy)
    return Shard(new)


def unaltered(shard: Shard) -> Shard:
    return shard


@pytest.mark.parametrize(
    "change", [unaltered, lambda shard: recompressed(shard.path, shard.path.with_name("b.h5"))]
)
def test_rows_arrive_in_the_callers_memory(tmp_path: Path, change: Callable[[Shard], Shard]) -> None:
    original = write_shard(tmp_path / "a.h5", (7, 1, 12))
    features, targets = original.read(2)
    shard = change(original)
    rows = np.full((6, 5), -1, np.float16)
    shard.reader.read_into(shard.features_place, 11, 4, rows[1:5].data)
    np.testing.assert_array_equal(rows[1:5], features[3:7])
    assert (rows[[0, 5]] == -1).all()
    memory = bytearray(4 * 12)
    shard.reader.read_into(shard.targets_place, 8, 12, memoryview(memory))
    assert bytes(memory) == targets.tobytes()
    shard.reader.read_into(shard.features_place, 3, 0, memoryview(b""))


def test_memory_of_the_wrong_size_and_rows_that_are_not_there(tmp_path: Path) -> None:
    shard = write_shard(tmp_path / "a.h5")
    for start, num, num_bytes in ((0, 2, 19), (0, 2, 21), (19, 2, 20), (-1, 2, 20)):
        with pytest.raises(AssertionError):
            shard.reader.read_into(shard.features_place, start, num, memoryview(bytearray(num_bytes)))


def test_read_only_and_only_when_needed(tmp_path: Path) -> None:
    path = write_shard(tmp_path / "a.h5").path
    path.chmod(0o400)
    reader = RowReader(tmp_path / "gone.h5")
    with pytest.raises(ShardError, match=r"gone\.h5: cannot be read \(No such file"):
        reader.read(ArrayPlace("features", 0, (3, 5), np.dtype(np.float16)), 0, 1)
    with path.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)  # another program's lock does not matter
        Shard(path).verify()


@pytest.mark.parametrize(
    ("options", "storage"),
    [
        ({}, "chunked"),
        ({"compression": "gzip"}, "chunked gzip"),
        ({"compression": "lzf", "shuffle": True}, "chunked lzf"),
        ({"fletcher32": True}, "chunked filtered"),
    ],
)
def test_other_storage_reads_the_same_and_says_so(
    tmp_path: Path, options: dict[str, object], storage: str
) -> None:
    original = write_shard(tmp_path / "a.h5", (30, 1, 40))
    shard = recompressed(original.path, tmp_path / "b.h5", **options)
    assert (original.storage, shard.storage) == ("contiguous", storage)
    shard.verify()
    for u in range(3):
        np.testing.assert_array_equal(shard.read(u)[0], original.read(u)[0])
        np.testing.assert_array_equal(shard.read(u, verify=False)[1], original.read(u)[1])
    assert shard.utterance_ids == original.utterance_ids


def test_strings_of_variable_length_are_read_too(tmp_path: Path) -> None:
    original = write_shard(tmp_path / "a.h5")
    ids = original.utterance_ids
    with h5py.File(original.path, "r+") as file:
        del file["utterance_id"]
        file.create_dataset("utterance_id", data=list(ids), dtype=h5py.string_dtype())
    with Shard(original.path) as shard:
        assert shard.utterance_ids == ids
        assert shard.utterance_id(1) == ids[1]
        shard.verify()


@pytest.mark.parametrize(
    ("kind", "message"),
    [("eio", r"a\.h5: cannot be read \(Input/output error\)"), ("end", r"a\.h5: truncated")],
)
def test_a_disk_that_is_unplugged_in_mid_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, message: str
) -> None:
    shard = write_shard(tmp_path / "a.h5", (9,) * 10)
    monkeypatch.setattr(contiguous, "preadv", FaultyReads(9, kind))  # type: ignore[arg-type]
    for u in range(4):
        shard.read(u)
    with pytest.raises(ShardError, match=message) as raised:
        for u in range(4, 10):
            shard.read(u)
    assert "\n" not in str(raised.value)
    monkeypatch.undo()
    shard.verify()  # plugged in again


def test_reads_that_come_back_short_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = write_shard(tmp_path / "a.h5", (9, 30))
    disk = FaultyReads(0, "short")
    monkeypatch.setattr(contiguous, "preadv", disk)
    shard.verify()
    assert disk.num_reads > 20
    assert shard.utterance_ids == ("utt-0", "utt-1")


@pytest.mark.parametrize("chunked", [False, True])
def test_a_file_truncated_in_mid_epoch(tmp_path: Path, chunked: bool) -> None:
    shard = write_shard(tmp_path / "a.h5", (500,) * 4)
    if chunked:
        shard = recompressed(shard.path, tmp_path / "b.h5", compression="gzip")
    shard.read(0)
    with shard.path.open("r+b") as file:
        file.truncate(shard.path.stat().st_size // 3)
    with pytest.raises(ShardError, match=rf"{shard.path.name}: .*(truncated|damaged)"):
        shard.verify()


@pytest.mark.parametrize("chunked", [False, True])
def test_a_split_may_have_more_shards_than_a_process_may_open_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunked: bool
) -> None:
    monkeypatch.setattr(contiguous, "_MOST_OPEN", 4)
    dataset = write_tiny_data(tmp_path / "data", TinySizes(train=40, shards=40))
    if chunked:
        for path in dataset.shard_paths("train"):
            recompressed(path, path.with_suffix(".new"), compression="gzip").close()
            path.with_suffix(".new").replace(path)
    with dataset.open_shards("train") as shards:
        expected = [shard.read_utterance(0) for shard in shards]
    with few_files(20), dataset.open_shards("train") as shards, ThreadPoolExecutor(3) as threads:
        read = threads.map(lambda place: shards[place % 40].read_utterance(0), range(200))
        for place, utterance in enumerate(read):
            assert utterance.utterance_id == expected[place % 40].utterance_id
            np.testing.assert_array_equal(utterance.targets, expected[place % 40].targets)


def test_fewer_files_are_open_where_a_process_may_open_few(tmp_path: Path) -> None:
    """So that the advice, to write fewer shards, can be followed."""
    dataset = write_tiny_data(tmp_path / "data", TinySizes(train=40, shards=40))
    with ExitStack() as open_already, few_files(120):
        for _ in range(100):
            open_already.enter_context(Path("/").joinpath("proc/self/stat").open())
        reshard(ReshardOptions(dataset.path, tmp_path / "few", 2), no_progress)
        SplitReader(Dataset.open(tmp_path / "few"), "train").close()
        with pytest.raises(ShardError, match=r"\(ulimit -n\), then run again; or write fewer shards with"):
            SplitReader(dataset, "train")


def test_targets_of_an_alignment_fail_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = write_shard(tmp_path / "a.h5")
    write_targets(tmp_path / "t.h5", shard, [shard.read(u)[1] for u in range(3)], "realigned-1")
    targets = open_targets(tmp_path / "t.h5", shard)
    monkeypatch.setattr(contiguous, "preadv", FaultyReads(0))
    with pytest.raises(ShardError, match=r"t\.h5: cannot be read"):
        targets.read(1)


def test_ids_from_anywhere_do_no_harm(tmp_path: Path) -> None:
    header = ShardHeader(FeatureConfig(num_mel_bins=3), 8000, 4, "flat", "train")
    frames, targets = np.zeros((2, 3), np.float16), np.zeros(2, np.int32)
    with ShardWriter(tmp_path / "a.h5", header) as writer:
        for name in HOSTILE:
            writer.add(Utterance(name, name, name, frames, targets))
    shard = Shard(tmp_path / "a.h5")
    assert shard.utterance_ids == shard.speakers == shard.texts == HOSTILE
    for u, name in enumerate(HOSTILE):
        assert shard.utterance_id(u) == shard.speaker(u) == shard.text(u) == name
    with h5py.File(shard.path, "r+") as file:
        file["targets"][2:4] = 1  # of the id that holds a line feed
    with pytest.raises(ShardError, match=r"utterance 'a\\nb' is damaged") as raised:
        shard.verify()
    assert str(raised.value).isprintable()


def test_an_id_that_is_no_text_is_refused(tmp_path: Path) -> None:
    header = ShardHeader(FeatureConfig(num_mel_bins=3), 8000, 4, "flat", "train")
    with pytest.raises(ConfigError, match="not Unicode"), ShardWriter(tmp_path / "a.h5", header) as writer:
        writer.add(Utterance("\ud800", "s", "t", np.zeros((1, 3)), np.zeros(1, np.int32)))
    assert list(tmp_path.iterdir()) == []


def test_an_open_shard_takes_little_memory(tmp_path: Path) -> None:
    """Bytes an utterance after opening; transcripts and ids of usual length are not among them."""
    num_utterances = 50_000
    header = ShardHeader(FeatureConfig(num_mel_bins=3), 8000, 4, "flat", "train")
    frames, targets = np.zeros((1, 3), np.float16), np.zeros(1, np.int32)
    with ShardWriter(tmp_path / "a.h5", header) as writer:
        for number in range(num_utterances):
            name = f"speaker-{number % 977:03}-{number:08}"
            writer.add(Utterance(name, name[:11], f"a transcript of some words {number}", frames, targets))
    Shard(tmp_path / "a.h5")  # what h5py loads once does not count
    gc.collect()
    tracemalloc.start()
    try:
        shard = Shard(tmp_path / "a.h5")
        gc.collect()
        kept, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert shard.num_utterances == num_utterances
    assert shard.utterance_id(num_utterances - 1).endswith("00049999")
    assert kept <= 20 * num_utterances + 100_000
    assert most <= 150 * num_utterances  # strings were hashed a block at a time
