"""Shards of audio: the samples come back, and the targets are those of a shard of features."""

from __future__ import annotations

import json
from pathlib import Path

import h5py
import numpy as np
import pytest
import soundfile

from speechdp.cli import main
from speechdp.data.prepare.pipeline import prepare
from speechdp.data.shards.dataset import Dataset
from speechdp.data.shards.layout import Stored
from speechdp.data.shards.shard import AudioUtterance, Shard, ShardHeader, ShardWriter
from speechdp.data.signal.audio import read_audio, to_int16
from speechdp.data.signal.compute import compute_features
from speechdp.data.signal.features import FeatureConfig, num_frames_of
from speechdp.errors import ConfigError, ShardError
from speechdp.options.prepare import PrepareOptions
from tests.helpers.corpora import digit_folder, no_progress, write_shard
from tests.helpers.tiny_data import flip_byte

HEADER = ShardHeader(FeatureConfig(num_mel_bins=5), 8000, 9, "flat", "train", "audio")


def make(name: str, num_samples: int, seed: int = 0) -> AudioUtterance:
    rng = np.random.default_rng(seed)
    num_frames = num_frames_of(num_samples, 8000, HEADER.features)
    return AudioUtterance(
        name,
        "ann",
        "één",
        rng.integers(-32768, 32768, num_samples).astype(np.int16),
        rng.integers(0, 9, num_frames).astype(np.int32),
    )


def write_audio_shard(path: Path, sizes: tuple[int, ...] = (800, 41, 1239)) -> Shard:
    with ShardWriter(path, HEADER) as writer:
        for number, size in enumerate(sizes):
            writer.add(make(f"utt-{number}", size, number))
    return Shard(path)


def prepared(source: Path, data: Path, stored: Stored, **options: object) -> Dataset:
    return prepare(
        PrepareOptions((source, data), workers=1, num_mel_bins=20, store=stored, **options),  # type: ignore[arg-type]
        no_progress,
    ).dataset


def test_samples_and_targets_come_back(tmp_path: Path) -> None:
    with write_audio_shard(tmp_path / "a.h5") as shard:
        assert shard.header == HEADER
        assert shard.sample_offsets is not None
        assert shard.sample_offsets.tolist() == [0, 800, 841, 2080]
        for number, size in enumerate((800, 41, 1239)):
            samples, targets = shard.read_samples(number)
            expected = make(f"utt-{number}", size, number)
            assert samples.dtype == np.int16
            np.testing.assert_array_equal(samples, expected.samples)
            np.testing.assert_array_equal(targets, expected.targets)
            assert shard.utterance_id(number) == f"utt-{number}"
            np.testing.assert_array_equal(shard.samples(number), expected.samples)


def test_any_program_can_read_it(tmp_path: Path) -> None:
    write_audio_shard(tmp_path / "a.h5")
    with h5py.File(tmp_path / "a.h5") as file:
        assert (file.attrs["version"], file.attrs["stored"]) == (2, "audio")
        assert "features" not in file
        assert file["samples"].chunks is None and file["samples"].dtype == np.int16
        np.testing.assert_array_equal(file["samples"][800:841], make("", 41, 1).samples)


def test_one_kind_is_not_taken_for_the_other(tmp_path: Path) -> None:
    audio, features = write_audio_shard(tmp_path / "a.h5"), write_shard(tmp_path / "f.h5")
    with pytest.raises(ShardError, match=r"a\.h5: stores audio, not features; .*--store features"):
        audio.read(0)
    with pytest.raises(ShardError, match=r"f\.h5: stores features, not audio; .*--store audio"):
        features.read_samples(0)
    with pytest.raises(ShardError, match="stores audio"):
        _ = audio.features_place


@pytest.mark.parametrize("name", ["samples", "targets", "sample_offsets", "offsets", "crc32", "text"])
def test_a_flipped_byte_is_noticed(tmp_path: Path, name: str) -> None:
    path = write_audio_shard(tmp_path / "a.h5").path
    with h5py.File(path) as file:
        place = file[name].id.get_offset() + file[name].nbytes - 1
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    expected = "utterance utt-2 is damaged" if name in ("samples", "targets") else "damaged"
    with pytest.raises(ShardError, match=rf"a\.h5: .*{expected}"):
        Shard(path).verify()


def test_targets_that_do_not_fit_the_samples_are_refused(tmp_path: Path) -> None:
    good = make("x", 800)
    bad = AudioUtterance("x", "ann", "a", good.samples[:-80], good.targets)
    with (
        pytest.raises(ConfigError, match=r"utterance x: \(10,\) targets for 9 frames"),
        ShardWriter(tmp_path / "a.h5", HEADER) as writer,
    ):
        writer.add(bad)


def test_an_index_that_contradicts_itself_is_refused(tmp_path: Path) -> None:
    """A file of another program, whose checksum is right and whose lengths are wrong."""
    path = write_audio_shard(tmp_path / "a.h5").path
    with h5py.File(path, "r+") as file:
        file["sample_offsets"][1] = 300
        file.attrs["index_sha256"] = _sha256_as_documented(file)
    with pytest.raises(ShardError, match="targets and samples differ in length"):
        Shard(path)


def test_the_checksum_of_the_index_is_the_documented_one(tmp_path: Path) -> None:
    for shard in (write_audio_shard(tmp_path / "a.h5"), write_shard(tmp_path / "f.h5")):
        with h5py.File(shard.path) as file:
            assert _sha256_as_documented(file) == shard.index_sha256


def _sha256_as_documented(file: h5py.File) -> str:
    import hashlib  # noqa: PLC0415 - only here

    attributes = {
        name: value.item() if isinstance(value, np.generic) else value for name, value in file.attrs.items()
    }
    del attributes["index_sha256"]
    digest = hashlib.sha256(json.dumps(attributes, sort_keys=True).encode())
    for name in ("offsets", "crc32", "sample_offsets"):
        if name in file:
            digest.update(file[name][:].tobytes())
    for name in ("utterance_id", "speaker", "text"):
        digest.update(json.dumps(list(file[name].asstr()[:])).encode())
    return digest.hexdigest()


def test_prepared_audio_has_the_targets_of_prepared_features(tmp_path: Path) -> None:
    source = digit_folder(tmp_path / "in")
    audio = prepared(source, tmp_path / "audio", "audio", shards=3)
    features = prepared(source, tmp_path / "features", "features", shards=3)
    assert (audio.stored, features.stored) == ("audio", "features")
    assert json.loads((audio.path / "data.json").read_text())["stored"] == "audio"
    audio.verify()
    for split in ("train", "dev", "test"):
        for index in range(len(features.shard_paths(split))):
            one, other = audio.open_shard(split, index), features.open_shard(split, index)
            assert one.utterance_ids == other.utterance_ids
            assert one.offsets.tolist() == other.offsets.tolist()
            for u in range(one.num_utterances):
                samples, targets = one.read_samples(u)
                stored, expected = other.read(u)
                np.testing.assert_array_equal(targets, expected)
                # 16-bit files lose nothing: the features can be made from the shard to the last bit.
                made = compute_features(samples.astype(np.float32) / 32768, 8000, audio.features)
                np.testing.assert_array_equal(made.astype(np.float16), stored)


def test_the_samples_are_those_of_the_files(tmp_path: Path) -> None:
    source = digit_folder(tmp_path / "in")
    dataset = prepared(source, tmp_path / "data", "audio", shards=1)
    with dataset.open_shard("test", 0) as shard:
        for u in range(shard.num_utterances):
            recorded, _ = soundfile.read(source / f"{shard.utterance_id(u)}.wav", dtype="int16")
            np.testing.assert_array_equal(shard.read_samples(u)[0], recorded)


def test_resampled_audio_keeps_the_targets_of_features(tmp_path: Path) -> None:
    source = digit_folder(tmp_path / "in")
    audio, features = (
        prepared(source, tmp_path / stored, stored, resample=11025, shards=1)  # type: ignore[arg-type]
        for stored in ("audio", "features")
    )
    one, other = audio.open_shard("test", 0), features.open_shard("test", 0)
    for u in range(one.num_utterances):
        samples, targets = one.read_samples(u)
        np.testing.assert_array_equal(targets, other.read(u)[1])
        expected = to_int16(read_audio(source / f"{one.utterance_id(u)}.wav", 11025))
        np.testing.assert_array_equal(samples, expected)


def test_samples_are_rounded_and_clipped() -> None:
    samples = np.array([0, 0.5, -1, 1, 3, -3, 1.4 / 32768, 1.6 / 32768], np.float32)
    assert to_int16(samples).tolist() == [0, 16384, -32768, 32767, 32767, -32768, 1, 2]
    every = np.arange(-32768, 32768).astype(np.int16)
    np.testing.assert_array_equal(to_int16(every.astype(np.float32) / 32768), every)


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, data = digit_folder(tmp_path / "in"), tmp_path / "data"
    assert main.run(["prepare", str(source), str(data), "--store", "audio", "--workers", "1"]) == 0
    assert main.run(["inspect", str(data)]) == 0
    assert "8000 Hz, audio, for log_mel x 24" in capsys.readouterr().out


def test_damaged_audio_is_named(tmp_path: Path) -> None:
    dataset = prepared(digit_folder(tmp_path / "in"), tmp_path / "data", "audio", shards=1)
    name = flip_byte(dataset.shard_paths("train")[0], 3, "targets")
    with pytest.raises(ShardError, match=rf"train-00000\.h5: utterance {name} is damaged"):
        dataset.verify()


@pytest.mark.parametrize("change", [{"stored": "pictures"}, {"version": 1}, {"version": 3}])
def test_a_data_directory_of_another_kind_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    dataset = prepared(digit_folder(tmp_path / "in"), tmp_path / "data", "audio")
    values = json.loads((dataset.path / "data.json").read_text()) | change
    (dataset.path / "data.json").write_text(json.dumps(values))
    with pytest.raises(ShardError, match=r"data\.json: (damaged|has layout version 3)"):
        Dataset.open(dataset.path)
