"""Shards: what is written is read, and no damage goes unnoticed."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from pathlib import Path
from unittest import mock

import h5py
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from speechdp.data.shards import writer as shard_writer
from speechdp.data.shards.alignment_file import open_targets, write_targets
from speechdp.data.shards.dataset import Dataset
from speechdp.data.shards.shard import Shard, ShardHeader, ShardWriter, Utterance
from speechdp.data.signal.features import FeatureConfig
from speechdp.errors import ConfigError, ShardError
from tests.helpers.corpora import make_utterances, write_shard

_TEXTS = st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\0"), max_size=12)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(1, 9), max_size=6),
    strings=st.lists(st.tuples(_TEXTS, _TEXTS, _TEXTS), min_size=6, max_size=6),
    dtype=st.sampled_from(["float16", "float32"]),
)
def test_what_is_written_is_read(
    tmp_path: Path, lengths: list[int], strings: list[tuple[str, str, str]], dtype: str
) -> None:
    header = ShardHeader(FeatureConfig(num_mel_bins=3, dtype=dtype), 16000, 6, "exact", "dev")  # type: ignore[arg-type]
    rng = np.random.default_rng(len(lengths))
    written = [
        Utterance(*names, rng.standard_normal((n, 3)).astype(dtype), rng.integers(0, 6, n).astype(np.int32))
        for n, names in zip(lengths, strings, strict=False)
    ]
    with ShardWriter(tmp_path / "a.h5", header) as writer:
        for utterance in written:
            writer.add(utterance)
    with Shard(tmp_path / "a.h5") as shard:
        assert shard.header == header
        assert (shard.num_utterances, shard.num_frames) == (len(lengths), sum(lengths))
        assert shard.index_sha256 == writer.index_sha256
        for number, utterance in enumerate(written):
            features, targets = shard.read(number)
            assert features.dtype == np.dtype(dtype)
            np.testing.assert_array_equal(features, utterance.features)
            np.testing.assert_array_equal(targets, utterance.targets)
            names = (shard.utterance_ids[number], shard.speakers[number], shard.texts[number])
            assert names == (utterance.utterance_id, utterance.speaker, utterance.text)


def test_part_of_an_utterance(tmp_path: Path) -> None:
    shard = write_shard(tmp_path / "a.h5")
    features, targets = shard.read(2)
    first = int(shard.offsets[2]) + 3
    np.testing.assert_array_equal(shard.reader.read(shard.features_place, first, 4), features[3:7])
    np.testing.assert_array_equal(shard.reader.read(shard.targets_place, first, 4), targets[3:7])


def test_plain_h5py_reads_the_same(tmp_path: Path) -> None:
    shard = write_shard(tmp_path / "a.h5")
    with h5py.File(tmp_path / "a.h5") as file:
        assert file["features"].chunks is None and file["targets"].chunks is None
        start, end = file["offsets"][2:4]
        np.testing.assert_array_equal(file["features"][start:end], shard.read(2)[0])
        assert file["text"].asstr()[2] == "zero één"


def test_chunked_and_compressed_copy_is_read_too(tmp_path: Path) -> None:
    original = write_shard(tmp_path / "a.h5")
    with h5py.File(tmp_path / "a.h5") as source, h5py.File(tmp_path / "b.h5", "w") as copy:
        for name, value in source.attrs.items():
            copy.attrs[name] = value
        for name, dataset in source.items():
            if name in ("features", "targets"):
                copy.create_dataset(name, data=dataset[:], chunks=True, compression="gzip")
            else:
                source.copy(name, copy)
    with Shard(tmp_path / "b.h5") as shard:
        shard.verify()
        np.testing.assert_array_equal(shard.read(0)[0], original.read(0)[0])


def test_threads_read_one_shard_at_once(tmp_path: Path) -> None:
    shard = write_shard(tmp_path / "a.h5", tuple(range(1, 60)))
    failures: list[BaseException] = []

    def read_all() -> None:
        try:
            shard.verify()
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=read_all) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_closed_shard_opens_again(tmp_path: Path) -> None:
    shard = write_shard(tmp_path / "a.h5")
    before = shard.read(0)[0]
    shard.close()
    np.testing.assert_array_equal(shard.read(0)[0], before)


def test_truncated_shard_is_refused(tmp_path: Path) -> None:
    path = write_shard(tmp_path / "a.h5").path
    whole = path.read_bytes()
    for size in (0, 10, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ShardError, match=r"a\.h5: .*(prepare the data again)") as raised:
            Shard(path).verify()
        assert "\n" not in str(raised.value)


def test_shard_truncated_after_opening(tmp_path: Path) -> None:
    shard = write_shard(tmp_path / "a.h5", (500, 500))
    with shard.path.open("r+b") as file:
        file.truncate(shard.path.stat().st_size // 2)
    with pytest.raises(ShardError, match="truncated"):
        shard.verify()


@pytest.mark.parametrize(
    "name", ["features", "targets", "offsets", "crc32", "utterance_id", "speaker", "text"]
)
def test_a_flipped_byte_in_a_dataset_is_noticed(tmp_path: Path, name: str) -> None:
    path = write_shard(tmp_path / "a.h5").path
    with h5py.File(path) as file:
        place = file[name].id.get_offset() + file[name].nbytes // 2
    _flip(path, place)
    with pytest.raises(ShardError, match=r"a\.h5: "):
        Shard(path).verify()


def test_damage_anywhere_is_noticed_or_harmless(tmp_path: Path) -> None:
    """Flip bytes all over the file: either an error says so, or what is read is still what was written."""
    original = write_shard(tmp_path / "a.h5")
    expected = [original.read(u) for u in range(original.num_utterances)]
    damaged = tmp_path / "b.h5"
    noticed = 0
    for place in range(0, original.path.stat().st_size, 13):
        shutil.copy(original.path, damaged)
        _flip(damaged, place)
        try:
            with Shard(damaged) as shard:
                shard.verify()
                got = [shard.read(u) for u in range(shard.num_utterances)]
                assert shard.texts == original.texts
        except ShardError as error:
            noticed += 1
            assert "\n" not in str(error) and "b.h5" in str(error)
            continue
        for (features, targets), (features_before, targets_before) in zip(got, expected, strict=True):
            np.testing.assert_array_equal(features, features_before)
            np.testing.assert_array_equal(targets, targets_before)
    assert noticed > 20


def test_changed_attribute_is_noticed(tmp_path: Path) -> None:
    path = write_shard(tmp_path / "a.h5").path
    with h5py.File(path, "r+") as file:
        file.attrs["sampling_rate"] = 16000
    with pytest.raises(ShardError, match="checksum"):
        Shard(path)


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        ("version", 4, "layout version 4, this speechdp reads version 1, 2, 3"),
        ("format", "x", "not a speechdp-shard"),
    ],
)
def test_other_versions_and_formats_are_refused(
    tmp_path: Path, attribute: str, value: object, message: str
) -> None:
    path = write_shard(tmp_path / "a.h5").path
    with h5py.File(path, "r+") as file:
        file.attrs[attribute] = value
    with pytest.raises(ShardError, match=message):
        Shard(path)


def test_what_is_not_hdf5_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.h5").write_text("these are not the frames you are looking for")
    with pytest.raises(ShardError, match=r"a\.h5: truncated, damaged or not HDF5"):
        Shard(tmp_path / "a.h5")
    with pytest.raises(ShardError, match="no such shard"):
        Shard(tmp_path / "b.h5")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"targets": np.array([0, 9, 0], np.int32)}, "outside 0..8"),
        ({"targets": np.array([0], np.int32)}, "for 3 frames"),
        ({"features": np.zeros((3, 4))}, "features of shape"),
        ({"features": np.full((3, 5), 1e6)}, "overflow float16"),
        ({"features": np.zeros((0, 5)), "targets": np.zeros(0, np.int32)}, "has no frame"),
        ({"text": "a\0b"}, "NUL"),
    ],
)
def test_values_no_shard_can_hold(tmp_path: Path, change: dict[str, object], message: str) -> None:
    header = ShardHeader(FeatureConfig(num_mel_bins=5), 8000, 9, "flat", "train")
    values = vars(make_utterances((3,), header)[0]) | change
    with pytest.raises(ConfigError, match=message), ShardWriter(tmp_path / "a.h5", header) as writer:
        writer.add(Utterance(**values))
    assert list(tmp_path.iterdir()) == []


def test_full_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    for target in ("copy_rows", "_blocks_of_strings"):
        message = r"No space left on device.*free some space"
        patch = mock.patch.object(shard_writer, target, side_effect=full)
        with patch, pytest.raises(ShardError, match=message):
            write_shard(tmp_path / "a.h5")
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("room_bytes", [5_000, 30_000])  # too little for the frames; for the shard
def test_really_full_disk_leaves_nothing_behind(tmp_path: Path, room_bytes: int) -> None:
    """Limit the size a file of this process may have, which makes the kernel refuse the write."""
    import resource  # noqa: PLC0415 - only where the limit exists
    import signal  # noqa: PLC0415

    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room_bytes, limits[1]))
    try:
        with pytest.raises(ShardError, match=r"a\.h5: cannot be written .*raise the limit on the size"):
            write_shard(tmp_path / "a.h5", (1000, 1000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_rewrite_keeps_the_old_shard(tmp_path: Path) -> None:
    old = write_shard(tmp_path / "a.h5")
    with pytest.raises(ZeroDivisionError), ShardWriter(old.path, old.header) as writer:
        writer.add(make_utterances((4,), old.header)[0])
        raise ZeroDivisionError
    assert Shard(old.path).index_sha256 == old.index_sha256


def test_targets_beside_a_shard(tmp_path: Path) -> None:
    shard = write_shard(tmp_path / "a.h5")
    new = [np.full(n, number, np.int32) for number, n in enumerate((7, 1, 12))]
    write_targets(tmp_path / "a.targets.h5", shard, new, "realigned-1")
    targets = open_targets(tmp_path / "a.targets.h5", shard)
    assert targets.alignment == "realigned-1"
    for number, expected in enumerate(new):
        np.testing.assert_array_equal(targets.read(number), expected)


def test_targets_of_another_shard_are_refused(tmp_path: Path) -> None:
    shard = write_shard(tmp_path / "a.h5")
    other = write_shard(tmp_path / "b.h5", (7, 2, 11))
    write_targets(tmp_path / "t.h5", shard, [shard.read(u)[1] for u in range(3)], "realigned-1")
    # It may be whole, and another run's: the line advised to delete it.
    with pytest.raises(
        ShardError, match=r"another shard than .*; give the alignment that was made of these data"
    ):
        open_targets(tmp_path / "t.h5", other)


def test_damaged_targets_are_noticed(tmp_path: Path) -> None:
    shard = write_shard(tmp_path / "a.h5")
    path = tmp_path / "t.h5"
    write_targets(path, shard, [shard.read(u)[1] for u in range(3)], "realigned-1")
    whole = path.read_bytes()
    with h5py.File(path) as file:
        places = [file[name].id.get_offset() for name in ("targets", "crc32")]
    for place in places:
        path.write_bytes(whole)
        _flip(path, place)
        with pytest.raises(ShardError, match=r"t\.h5: .*align again"):
            open_targets(path, shard).read(0)
    path.write_bytes(whole[:-1])
    with pytest.raises(ShardError, match="truncated"):
        open_targets(path, shard)


def _flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 0x10
    path.write_bytes(content)


@pytest.mark.parametrize("just_written", [True, False])
def test_a_disk_that_does_not_give_data_json_is_no_incomplete_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, just_written: bool
) -> None:
    def fail(path: Path) -> bytes:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(Path, "read_bytes", fail)
    with pytest.raises(
        ShardError, match=r"data\.json: cannot be read \(Stale file handle\); .*network disk"
    ) as told:
        Dataset.open(tmp_path, just_written=just_written)
    assert "run speechdp prepare" not in str(told.value)
    assert ("speechdp inspect" in str(told.value)) == just_written


def test_what_is_missing_just_after_it_was_written_was_taken_away(tmp_path: Path) -> None:
    with pytest.raises(ShardError, match="run speechdp prepare"):
        Dataset.open(tmp_path)
    with pytest.raises(ShardError, match="nothing removes or moves"):
        Dataset.open(tmp_path, just_written=True)


@pytest.mark.parametrize("name", ["data.json", "train-00000.h5", "classes.txt"])
def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path: Path, name: str) -> None:
    (tmp_path / "data.json").touch()
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(ShardError, match=rf"{name}: is a pipe, socket or device, .*; remove it, and copy"):
        Dataset.open(tmp_path)


def test_nobody_is_told_to_remove_a_pipe_elsewhere(tmp_path: Path) -> None:
    """A wrong folder, such as /tmp, has pipes and sockets of other programs."""
    os.mkfifo(tmp_path / "socket-of-others")
    with pytest.raises(ShardError) as refused:
        Dataset.open(tmp_path)
    assert "data.json" in str(refused.value) and "pipe" not in str(refused.value)


def test_a_run_is_no_data_directory(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}", encoding="utf-8")
    with pytest.raises(
        ShardError, match="is a run, not a data directory; give the folder that speechdp prepare"
    ):
        Dataset.open(tmp_path)
