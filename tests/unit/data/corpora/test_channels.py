"""Audio files of several channels: which one is read, by options and by Kaldi's tables."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import soundfile

from speechdp.cli.main import run as speechdp
from speechdp.cli.support.command_line import parse
from speechdp.data.corpora.kaldi_dir import ReadingRules, read_audio_table, read_kaldi_dir
from speechdp.data.corpora.reader import read_corpus
from speechdp.data.prepare.pipeline import Prepared, prepare
from speechdp.data.shards.dataset import Dataset
from speechdp.data.signal.audio import AudioPart, probe, read_audio, to_int16
from speechdp.data.signal.channel import Channel, parse_channel
from speechdp.errors import ConfigError, SeveralChannelsError, ShardError
from speechdp.options.prepare import FilesOptions, KaldiOptions, PrepareOptions
from tests.helpers.corpora import kaldi_folder, no_progress, write_tone

Samples = npt.NDArray[np.float32]
RATE = 8000


def write_stereo(path: Path, seed: int = 0, seconds: float = 1.0) -> Samples:
    """Write noise of two channels to a file; return it, (S, 2)."""
    noise = np.random.default_rng(seed).integers(-9000, 9000, (int(seconds * RATE), 2)) / 32768
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, noise, RATE, subtype="PCM_16")
    return noise.astype(np.float32)


def folder_of_stereo(folder: Path, speakers: int = 4) -> dict[str, Samples]:
    """Write a corpus of two files of two channels a speaker; return the samples of each utterance."""
    sounds = {}
    for number in range(2 * speakers):
        path = folder / f"speaker{number // 2}" / f"utt{number}.wav"
        sounds[path.stem] = write_stereo(path, number)
        path.with_suffix(".txt").write_text("one two")
    return sounds


def prepared(source: Path, data: Path, channel: Channel | None, **options: object) -> Prepared:
    values = {"split": "random:dev=0", "store": "audio", "workers": 1, "overwrite": True, **options}
    return prepare(
        PrepareOptions((source, data), files=FilesOptions(channel=channel), **values),  # type: ignore[arg-type]
        no_progress,
    )


@pytest.mark.parametrize("channel", [1, 2, "mix"])
def test_one_channel_or_the_mean_is_read(tmp_path: Path, channel: Channel) -> None:
    both = write_stereo(tmp_path / "two.wav")
    expected = both.mean(axis=1) if channel == "mix" else both[:, int(channel) - 1]
    part = AudioPart(tmp_path / "two.wav", of_several=channel)
    np.testing.assert_allclose(read_audio(part, RATE), expected, atol=1e-7)
    cut = AudioPart(tmp_path / "two.wav", 0.25, 0.5, of_several=channel)
    np.testing.assert_allclose(read_audio(cut, RATE), expected[2000:4000], atol=1e-7)
    assert probe(part).channel == channel
    assert probe(cut).num_samples == 2000
    # What is named outright counts, and a file of one channel is read as it is.
    np.testing.assert_array_equal(read_audio(dataclasses.replace(part, channel=1), RATE), both[:, 1])
    write_tone(tmp_path / "one.wav", 1.0)
    one = AudioPart(tmp_path / "one.wav", of_several=channel)
    np.testing.assert_array_equal(read_audio(one, RATE), read_audio(tmp_path / "one.wav", RATE))
    assert probe(one).channel is None


def test_a_channel_that_is_not_there_is_refused(tmp_path: Path) -> None:
    write_stereo(tmp_path / "two.wav")
    with pytest.raises(ConfigError, match=r"two\.wav: has 2 channels, so channel 3 cannot be read; give ano"):
        probe(AudioPart(tmp_path / "two.wav", of_several=3))


@pytest.mark.parametrize("channel", ["0", "-1", "left", "1.5", "", "²"])
def test_what_is_no_channel_is_refused(tmp_path: Path, channel: str) -> None:
    with pytest.raises(
        ConfigError, match=r"--channel .*: give the number of a channel, 1 for the first, or "
    ):
        parse_channel(channel)
    with pytest.raises(ConfigError, match="--channel"):
        parse("prepare", ["corpus", "data", f"--channel={channel}"])


def test_a_folder_is_prepared_of_a_channel_and_its_model_s_data_alike(tmp_path: Path) -> None:
    sounds = folder_of_stereo(tmp_path / "corpus")
    with pytest.raises(SeveralChannelsError, match=r"; add --channel 1 for the first, or another, or --cha"):
        prepared(tmp_path / "corpus", tmp_path / "data", None)
    done = prepared(tmp_path / "corpus", tmp_path / "data", 2)
    assert "of 8 files of several channels: channel 2 of 8" in done.notices
    assert json.loads((tmp_path / "data" / "data.json").read_text())["channel"] == 2

    def stored(data: Path, split: str) -> dict[str, Samples]:
        with Dataset.open(data).open_shards(split) as shards:
            return {
                shard.utterance_ids[i]: shard.samples(i)
                for shard in shards
                for i in range(shard.num_utterances)
            }

    found = stored(tmp_path / "data", "train")
    assert found.keys() == sounds.keys()
    for name, samples in found.items():
        np.testing.assert_array_equal(samples, to_int16(sounds[name][:, 1]))
    # Another corpus for a model of these data: the same channel, unless another is asked for.
    like = {"like": tmp_path / "data", "split": None}
    for given, channel in ((None, 1), (1, 0)):
        prepared(tmp_path / "corpus", tmp_path / "new", given, **like)
        assert Dataset.open(tmp_path / "new").channel == channel + 1
        for name, samples in stored(tmp_path / "new", "test").items():
            np.testing.assert_array_equal(samples, to_int16(sounds[name][:, channel]))


def test_the_option_of_no_use_is_said(tmp_path: Path) -> None:
    for number in range(3):
        path = write_tone(tmp_path / "corpus" / f"utt{number}.wav", 1.0)
        path.with_suffix(".txt").write_text("one two")
    done = prepared(tmp_path / "corpus", tmp_path / "data", "mix")
    assert "--channel mix: all audio has one channel already" in done.notices
    like = prepared(tmp_path / "corpus", tmp_path / "new", None, like=tmp_path / "data", split=None)
    assert not any("channel" in notice for notice in like.notices)


def test_inspect_shows_the_channel(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder_of_stereo(tmp_path / "corpus", 1)
    prepared(tmp_path / "corpus", tmp_path / "data", "mix")
    assert speechdp(["inspect", str(tmp_path / "data")]) == 0
    assert "of files of several channels: their mean\n" in capsys.readouterr().out
    manifest = tmp_path / "data" / "data.json"
    manifest.write_text(manifest.read_text().replace('"channel": "mix"', '"channel": "left"'))
    with pytest.raises(ShardError, match="'left' is no channel"):
        Dataset.open(tmp_path / "data")


def telephone(folder: Path, sides: str) -> tuple[Path, Samples]:
    """Write a Kaldi data directory of a telephone call, whose utterances are its sides."""
    source = kaldi_folder(folder, 2)
    both = write_stereo(source / "wav" / "call.wav")
    (source / "wav.scp").write_text("utt0 wav/call.wav\nutt1 wav/call.wav\n")
    (source / "reco2file_and_channel").write_text(sides)
    return source, both


@pytest.mark.parametrize("sides", ["utt0 call A\nutt1 call B\n", "utt0 call 1\nutt1 call 2\n"])
def test_the_sides_of_a_call_are_apart(tmp_path: Path, sides: str) -> None:
    source, both = telephone(tmp_path, sides)
    for rules in (ReadingRules(), ReadingRules(channel="mix")):
        utterances = read_kaldi_dir(source, rules).utterances
        for channel, utterance in enumerate(utterances):
            np.testing.assert_array_equal(read_audio(utterance.audio, RATE), both[:, channel])
    (source / "segments").write_text("utt0 utt0 0.25 0.5\nutt1 utt1 0.25 0.5\n")
    for channel, utterance in enumerate(read_kaldi_dir(source).utterances):
        np.testing.assert_array_equal(read_audio(utterance.audio, RATE), both[2000:4000, channel])
    # The column of segments counts from 0, and before the other table.
    (source / "segments").write_text("utt0 utt0 0.25 0.5 1\nutt1 utt1 0.25 0.5 0\n")
    for channel, utterance in zip((1, 0), read_kaldi_dir(source).utterances, strict=True):
        np.testing.assert_array_equal(read_audio(utterance.audio, RATE), both[2000:4000, channel])


def test_what_the_table_lacks_is_of_the_option(tmp_path: Path) -> None:
    source, both = telephone(tmp_path, "utt1 call B\n")
    audio = read_audio_table(source)
    with pytest.raises(SeveralChannelsError):
        probe(audio["utt0"])
    audio = read_audio_table(source, ReadingRules(channel="mix"))
    np.testing.assert_allclose(read_audio(audio["utt0"], RATE), both.mean(axis=1), atol=1e-7)
    np.testing.assert_array_equal(read_audio(audio["utt1"], RATE), both[:, 1])


def test_files_of_one_channel_keep_it_whatever_the_table_says(tmp_path: Path) -> None:
    source = kaldi_folder(tmp_path, 2)
    plain = read_corpus(source, None).utterances
    (source / "reco2file_and_channel").write_text("utt0 call A\nutt1 call B\n")
    for before, after in zip(plain, read_corpus(source, None).utterances, strict=True):
        np.testing.assert_array_equal(read_audio(before.audio, RATE), read_audio(after.audio, RATE))


def test_what_is_read_of_a_kaldi_alignment_s_audio_is_said(tmp_path: Path) -> None:
    source, _ = telephone(tmp_path, "utt0 call A\nutt1 call B\n")
    (tmp_path / "pdfs").write_text("".join(f"{name} {'0 ' * 98}\n" for name in ("utt0", "utt1")))
    aligned = KaldiOptions(kaldi=source, ali_pdf=tmp_path / "pdfs")
    options = PrepareOptions((tmp_path / "data",), from_kaldi=aligned, split="random:dev=0", workers=1)
    said = "of 1 file of several channels: channel 1 of 1, channel 2 of 1"
    assert said in prepare(options, no_progress).notices
    like = PrepareOptions(
        (tmp_path / "new",), from_kaldi=KaldiOptions(kaldi=source), like=tmp_path / "data", workers=1
    )
    assert said in prepare(like, no_progress).notices
    for name in ("utt0", "utt1"):
        write_tone(source / "wav" / f"{name}.wav", 1.0)
    (source / "wav.scp").write_text("utt0 wav/utt0.wav\nutt1 wav/utt1.wav\n")
    options = dataclasses.replace(options, files=FilesOptions(channel=1), overwrite=True)
    assert "--channel 1: all audio has one channel already" in prepare(options, no_progress).notices


@pytest.mark.parametrize("line", ["utt0 call", "utt0 call 0", "utt0 call left", "utt0 call A B"])
def test_a_line_without_channel_is_refused(tmp_path: Path, line: str) -> None:
    source, _ = telephone(tmp_path, f"utt1 call B\n{line}\n")
    with pytest.raises(
        ConfigError, match=r"reco2file_and_channel:2: utt0 call.*: is not understood; write RECORDING FILE CH"
    ):
        read_kaldi_dir(source)
