"""prepare and inspect: corpora in, data directories out, whole or not at all."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import soundfile

from speechdp.cli import main
from speechdp.data.prepare.pipeline import prepare
from speechdp.data.shards.dataset import Dataset
from speechdp.data.shards.shard import Shard
from speechdp.data.signal.audio import read_audio
from speechdp.data.signal.compute import compute_features
from speechdp.data.signal.features import usual_mel_bins
from speechdp.errors import ConfigError, ShardError
from speechdp.labels.hmm import StateInventory
from speechdp.labels.lexicon import Lexicon
from speechdp.options.prepare import FilesOptions, PrepareOptions
from tests.helpers.corpora import digit_folder, kaldi_folder, no_progress, some_fsdd, write_tone


def _prepare(source: Path, data: Path, **options: object) -> Dataset:
    return prepare(PrepareOptions((source, data), workers=1, **options), no_progress).dataset  # type: ignore[arg-type]


def _read(dataset: Dataset, split: str) -> dict[str, tuple[Shard, int]]:
    shards = [dataset.open_shard(split, n) for n in range(len(dataset.splits[split].shards))]
    return {shard.utterance_ids[u]: (shard, u) for shard in shards for u in range(shard.num_utterances)}


def test_every_utterance_arrives_with_its_features(tmp_path: Path) -> None:
    source = digit_folder(tmp_path / "in")
    dataset = _prepare(source, tmp_path / "data", shards=3, num_mel_bins=20)
    dataset.verify()
    assert {name: s.utterances for name, s in dataset.splits.items()} == {"train": 8, "dev": 20, "test": 20}
    assert [len(dataset.splits[name].shards) for name in ("train", "dev", "test")] == [3, 1, 1]
    assert dataset.splits["train"].speakers == 2
    assert (dataset.sampling_rate, dataset.feature_dim, dataset.alignment) == (8000, 20, "flat")
    shard, number = _read(dataset, "test")["1_bob_3"]
    expected = compute_features(read_audio(source / "1_bob_3.wav", 8000), 8000, dataset.features)
    np.testing.assert_array_equal(shard.read(number)[0], expected.astype(np.float16))
    assert (shard.texts[number], shard.speakers[number]) == ("one", "bob")


def test_targets_lexicon_and_classes_agree(tmp_path: Path) -> None:
    dataset = _prepare(digit_folder(tmp_path / "in"), tmp_path / "data", shards=2)
    lexicon = Lexicon.load(dataset.lexicon_path)
    inventory = StateInventory.load(dataset.classes_path)
    assert lexicon.words == ("one", "zero")
    assert inventory.phones == lexicon.phones
    assert dataset.num_classes == inventory.num_classes
    for shard, number in _read(dataset, "dev").values():
        targets = shard.read(number)[1]
        phones = lexicon.pronunciations[shard.texts[number]][0]
        states = [state for phone in phones for state in inventory.classes_of(phone)]
        speech = targets[targets > 2]
        assert list(dict.fromkeys(speech.tolist())) == states


def test_digital_silence_at_the_edges_becomes_silence_targets(tmp_path: Path) -> None:
    source = digit_folder(tmp_path / "in")
    import soundfile  # noqa: PLC0415 - only here

    path = source / "0_ann_0.wav"
    samples = np.concatenate([np.zeros(2400), soundfile.read(path)[0], np.zeros(1600)])
    soundfile.write(path, samples, 8000)
    shard, number = _read(_prepare(source, tmp_path / "data"), "test")["0_ann_0"]
    targets = shard.read(number)[1]
    assert (targets[:29] <= 2).all() and (targets[-19:] <= 2).all()
    assert (targets[45:60] > 2).all()


def test_a_few_real_recordings(tmp_path: Path) -> None:
    source = some_fsdd(tmp_path / "in", ("george", "theo"), (0, 5, 10, 11))
    dataset = _prepare(source, tmp_path / "data", shards=2)
    assert {name: s.utterances for name, s in dataset.splits.items()} == {"train": 40, "dev": 20, "test": 20}
    assert dataset.num_classes == 60
    dataset.verify()


def test_the_same_corpus_gives_the_same_bytes_whoever_works(tmp_path: Path) -> None:
    source = digit_folder(tmp_path / "in", num_indices=16)  # 64 utterances: enough for processes
    seen: list[tuple[str, int, int]] = []
    for name, workers in (("one", 1), ("two", 2)):
        options = PrepareOptions((source, tmp_path / name), shards=2, workers=workers)
        prepare(options, lambda *report: seen.append(report))
    assert ("computing features", 64, 64) in seen
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "two").iterdir())
    for file in files:
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes(), file


def test_a_failing_process_says_what_is_wrong(tmp_path: Path) -> None:
    source = digit_folder(tmp_path / "in", num_indices=16)
    _spoil(source / "1_bob_12.wav")
    with pytest.raises(ConfigError, match=r"1_bob_12\.wav: unreadable audio"):
        prepare(PrepareOptions((source, tmp_path / "data"), workers=2), no_progress)
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("seed", [-1, 2**32])
@pytest.mark.parametrize("given", [{"task": "synthesis"}, {"synthetic": 0.1}, {}])
def test_a_seed_that_not_every_generator_takes_is_refused(seed: int, given: dict[str, object]) -> None:
    paths = (Path("data"),) if "synthetic" in given else (Path("corpus"), Path("data"))
    with pytest.raises(ConfigError, match=rf"--seed {seed}: must lie in 0\.\.4294967295"):
        PrepareOptions(paths, seed=seed, **given)  # type: ignore[arg-type]


def test_another_seed_deals_other_shards(tmp_path: Path) -> None:
    source = digit_folder(tmp_path / "in")
    first, second = (_prepare(source, tmp_path / str(seed), seed=seed, shards=2) for seed in (1, 2))
    assert first.open_shard("train", 0).utterance_ids != second.open_shard("train", 0).utterance_ids
    assert _read(first, "train").keys() == _read(second, "train").keys()


def test_kaldi_directory_with_a_lexicon_in_upper_case(tmp_path: Path) -> None:
    source = kaldi_folder(tmp_path / "in", 12)
    (tmp_path / "lexicon.txt").write_text("".join(f"{w} {w[0]} {w[1]}\n" for w in _DIGITS_UPPER))
    dataset = _prepare(
        source, tmp_path / "data", split="speaker:test=spk1", lexicon=tmp_path / "lexicon.txt", shards=1
    )
    assert dataset.splits.keys() == {"train", "test"}
    shard, number = _read(dataset, "test")["utt1"]
    assert shard.texts[number] == "ONE TWO"


_DIGITS_UPPER = ("ZERO", "ONE", "TWO", "THREE", "FOUR", "FIVE", "SIX", "SEVEN", "EIGHT", "NINE")


def test_too_short_utterances_are_counted_and_kept(tmp_path: Path) -> None:
    source = digit_folder(tmp_path / "in")
    write_tone(source / "0_ann_10.wav", 0.05)  # 5 frames for the 12 states of "zero"
    prepared = prepare(PrepareOptions((source, tmp_path / "data"), workers=1), no_progress)
    assert any(
        "1 utterance has fewer frames than the transcript has states, worst 0_ann_10 (5 frames" in n
        for n in prepared.notices
    )
    shard, number = _read(prepared.dataset, "train")["0_ann_10"]
    targets = shard.read(number)[1]
    assert len(targets) == 5 and (np.diff(targets) != 0).all()


def test_audio_of_no_frame_is_refused(tmp_path: Path) -> None:
    source = digit_folder(tmp_path / "in")
    write_tone(source / "0_ann_10.wav", 0.002)
    with pytest.raises(ConfigError, match=r"0_ann_10\.wav: is shorter than one frame"):
        _prepare(source, tmp_path / "data")


def test_unknown_words_are_listed(tmp_path: Path) -> None:
    source = kaldi_folder(tmp_path / "in")
    (source / "text").write_text("utt0 one xyzzy\nutt1 plughqx\nutt2 one\n")
    with pytest.raises(ConfigError, match="plughqx xyzzy"):
        _prepare(source, tmp_path / "data", split="random:dev=0")


def test_mixed_rates_are_all_told_with_their_numbers(tmp_path: Path) -> None:
    source = digit_folder(tmp_path / "in")
    files = sorted(source.glob("*.wav"))
    for file in files:
        write_tone(file, 0.4, 16000)
    write_tone(files[0], 0.4, 48000)
    write_tone(files[-1], 0.4, 8000)
    with pytest.raises(ConfigError) as refused:
        _prepare(source, tmp_path / "data")
    rates = set(re.findall(r"\.wav has (\d+) Hz", str(refused.value)))
    assert rates == {"8000", "16000", "48000"}
    assert str(refused.value).endswith("add --resample 8000, the lowest, or 16000, as 46 of 48 have")


@pytest.mark.parametrize("skip_incomplete", [False, True])
def test_files_of_several_channels_are_named_in_one_run(tmp_path: Path, skip_incomplete: bool) -> None:
    source = digit_folder(tmp_path / "in")
    first, second, *_ = files = sorted(source.glob("*.wav"))
    soundfile.write(first, np.zeros((4000, 2)), 8000)
    files_options = FilesOptions(skip_incomplete=skip_incomplete)
    with pytest.raises(ConfigError, match=r"has 2 channels; add --channel 1 for the first"):
        _prepare(source, tmp_path / "data", files=files_options)
    soundfile.write(second, np.zeros((4000, 3)), 8000)
    with pytest.raises(
        ConfigError,
        match=rf"{first.name}: has 2 channels, and 1 more of {len(files)} audio files have several: "
        rf".*{second.name}; add --channel 1 for the first",
    ):
        _prepare(source, tmp_path / "data", files=files_options)


def test_mixed_rates_need_resampling(tmp_path: Path) -> None:
    source = digit_folder(tmp_path / "in")
    write_tone(source / "1_ann_11.wav", 0.4, 16000)
    with pytest.raises(
        ConfigError, match=r"mixed sampling rates: .*\.wav has 8000 Hz, .*1_ann_11\.wav has 16000"
    ):
        _prepare(source, tmp_path / "data")
    with pytest.raises(ConfigError, match=r"; add --resample 8000, as 47 of 48 have$"):
        _prepare(source, tmp_path / "data")
    dataset = _prepare(source, tmp_path / "data", resample=8000)
    shard, number = _read(dataset, "train")["1_ann_11"]
    assert dataset.sampling_rate == 8000 and len(shard.read(number)[0]) == 40


def test_a_failed_run_leaves_the_old_data_alone(tmp_path: Path) -> None:
    source = digit_folder(tmp_path / "in")
    before = _prepare(source, tmp_path / "data").checksum
    with pytest.raises(ConfigError, match="data: exists; give another folder or add --overwrite"):
        _prepare(source, tmp_path / "data")
    _spoil(source / "0_ann_3.wav")
    with pytest.raises(ConfigError, match=r"0_ann_3\.wav: unreadable audio"):
        _prepare(source, tmp_path / "data", overwrite=True)
    assert Dataset.open(tmp_path / "data").checksum == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "in"]


def test_overwriting_replaces_everything(tmp_path: Path) -> None:
    source = digit_folder(tmp_path / "in")
    _prepare(source, tmp_path / "data", shards=4)
    dataset = _prepare(source, tmp_path / "data", shards=1, overwrite=True)
    assert len(list(dataset.path.glob("*.h5"))) == 3


def test_data_may_be_made_in_the_folder_of_their_corpus(tmp_path: Path) -> None:
    """What stands there is no audio and no transcript, and is replaced like any other."""
    corpus = digit_folder(tmp_path / "digits")
    recordings = {path.name: path.read_bytes() for path in corpus.iterdir()}
    beside = prepare(PrepareOptions((corpus, tmp_path / "data")), no_progress).dataset
    for overwrite in (False, True):
        options = PrepareOptions((corpus, corpus / "data"), overwrite=overwrite)
        assert prepare(options, no_progress).dataset.checksum == beside.checksum
    assert {path.name: path.read_bytes() for path in corpus.iterdir() if path.is_file()} == recordings
    assert sorted(path.name for path in corpus.iterdir() if path.is_dir()) == ["data"]


def test_folders_of_other_people_are_never_overwritten(tmp_path: Path) -> None:
    source = digit_folder(tmp_path / "in")
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.tex").write_text("")
    (tmp_path / "file").write_text("")
    for name in ("thesis", "file"):
        with pytest.raises(ConfigError, match="give the name of a new folder"):
            _prepare(source, tmp_path / name, overwrite=True)
    assert (tmp_path / "thesis" / "chapter1.tex").exists()
    (tmp_path / "empty").mkdir()
    _prepare(source, tmp_path / "empty")


def test_a_directory_without_data_json_is_not_complete(tmp_path: Path) -> None:
    dataset = _prepare(digit_folder(tmp_path / "in"), tmp_path / "data")
    (dataset.path / "data.json").unlink()
    with pytest.raises(ShardError, match=r"data\.json: cannot be read .*run speechdp prepare"):
        Dataset.open(dataset.path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 7}, "layout version 7"),
        ({"format": "other"}, "not a speechdp-data"),
        ({"splits": 3}, "damaged"),
    ],
)
def test_data_json_of_another_kind(tmp_path: Path, change: dict[str, object], message: str) -> None:
    dataset = _prepare(digit_folder(tmp_path / "in"), tmp_path / "data")
    file = dataset.path / "data.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ShardError, match=message):
        Dataset.open(dataset.path)


def test_a_shard_of_another_directory_is_noticed(tmp_path: Path) -> None:
    source = digit_folder(tmp_path / "in")
    first, second = (_prepare(source, tmp_path / str(seed), seed=seed, shards=2) for seed in (1, 2))
    first.shard_paths("train")[0].write_bytes(second.shard_paths("train")[0].read_bytes())
    with pytest.raises(ShardError, match=r"is not the shard that data\.json lists"):
        first.verify()


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, data = digit_folder(tmp_path / "in"), tmp_path / "data"
    assert main.run(["prepare", str(source), str(data), "--shards", "2", "--features", "mfcc"]) == 0
    assert main.run(["inspect", str(data)]) == 0
    output = capsys.readouterr().out
    for part in ("train", "8000 Hz, mfcc x 13 float16", "flat alignment", "all checksums match"):
        assert part in output


def test_a_damaged_shard_ends_inspect_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset = _prepare(digit_folder(tmp_path / "in"), tmp_path / "data")
    path = dataset.shard_paths("dev")[0]
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert main.run(["inspect", str(dataset.path)]) != 0
    message = capsys.readouterr().err.strip()
    assert str(path) in message and "prepare the data again" in message and "\n" not in message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["one"], "takes SOURCE and DATA"),
        (["one", "two", "--synthetic", "1"], "takes one path"),
        (["one", "--synthetic", "1", "--split", "random:test=0.1"], "--split does not go with --synthetic"),
        (["one", "--synthetic", "0"], "must be more than 0 hours"),
        (["in", "out", "--shards", "0"], "--shards 0"),
        (["in", "out", "--num-ceps", "20"], "--num-ceps goes with --features mfcc; add it or leave"),
        (
            ["d", "--kaldi", "k", "--ali", "a", "--feats", "--features", "mfcc"],
            "--features mfcc does not go with",
        ),
        (
            ["d", "--kaldi", "k", "--ali", "a", "--feats", "--num-mel-bins", "23"],
            "--num-mel-bins does not go with",
        ),
        (
            ["d", "--kaldi", "k", "--ali", "a", "--feats", "--num-ceps", "20"],
            "--num-ceps does not go with --feats",
        ),
        (
            ["d", "--kaldi", "k", "--ali", "a", "--feats", "--channel", "1"],
            "--channel does not go with --feats",
        ),
    ],
)
def test_command_lines_that_are_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main.run(["prepare", *arguments]) != 0
    error = capsys.readouterr().err.strip()
    assert message in error and "\n" not in error


def test_unusable_corpora_end_the_command_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = digit_folder(tmp_path / "in")
    _spoil(source / "0_ann_3.wav")
    assert main.run(["prepare", str(source), str(tmp_path / "data")]) != 0
    error = capsys.readouterr().err.strip().splitlines()[-1]  # after the lines of progress
    assert "0_ann_3.wav: unreadable audio" in error
    assert error.endswith("leave it out, as --skip-incomplete does")
    (kaldi_folder(tmp_path / "kaldi") / "text").write_text("utt0 xyzzy\nutt1 one\nutt2 one\n")
    all_train = ["--split", "random:dev=0"]
    assert main.run(["prepare", str(tmp_path / "kaldi"), str(tmp_path / "data"), *all_train]) != 0
    error = capsys.readouterr().err.strip()
    assert "xyzzy" in error and "--lexicon" in error and "\n" not in error
    assert not (tmp_path / "data").exists()


def test_all_unreadable_audio_is_named_at_once_and_can_be_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = digit_folder(tmp_path / "in")
    junk = [source / f"{name}.wav" for name in ("0_ann_3", "0_bob_4", "1_ann_11")]
    for path in junk:
        path.write_bytes(b"fLaC no longer")
    command = ["prepare", str(source), str(tmp_path / "data"), "--workers", "1"]
    assert main.run(command) != 0
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert f"{junk[0]}: unreadable audio (" in error
    assert f"), and 2 more of 48 audio files cannot be read: {junk[1]}, {junk[2]}; convert" in error
    assert error.endswith("leave them out, as --skip-incomplete does")
    _spoil(source / "1_bob_0.wav")  # its header can be read
    assert main.run([*command, "--skip-incomplete"]) == 0
    said = "left out: 4 utterances that have unreadable audio, first 0_ann_3, 0_bob_4, 1_ann_11, 1_bob_0"
    printed = capsys.readouterr()
    assert said in " ".join((printed.out + printed.err).split())
    splits = Dataset.open(tmp_path / "data").splits.values()
    assert sum(split.utterances for split in splits) == 44


def test_audio_that_cannot_be_left_out_is_not_advised_to_be(tmp_path: Path) -> None:
    source = digit_folder(tmp_path / "in", num_indices=1)
    for path in source.iterdir():
        path.write_bytes(b"fLaC no longer")
    for files in (FilesOptions(), FilesOptions(skip_incomplete=True)):
        with pytest.raises(ConfigError, match=r"and 3 more of 4 audio files .* or leave them out$"):
            _prepare(source, tmp_path / "data", files=files, split="random:dev=0")


def _spoil(path: Path) -> None:
    """Damage a FLAC or WAV file so that its header still reads but the samples do not."""
    write_tone(path.with_suffix(".flac"), 4.0)
    content = path.with_suffix(".flac").read_bytes()
    path.with_suffix(".flac").unlink()
    path.write_bytes(content[:-9000])


def test_the_usual_number_of_mel_filters_depends_on_the_sampling_rate() -> None:
    assert [usual_mel_bins(rate) for rate in (8000, 16000, 44100)] == [24, 40, 40]
