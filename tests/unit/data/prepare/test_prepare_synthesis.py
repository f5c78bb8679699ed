"""prepare --task synthesis: recordings, joined or not, and synthetic voices become spectrograms and texts."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from speechdp.cli import main
from speechdp.data.corpora.corpus import CorpusUtterance
from speechdp.data.corpora.joining import JoinRule, join_recordings, plan_joins
from speechdp.data.corpora.reader import read_corpus
from speechdp.data.espeak.voice_plan import VOICES, plan_voices, voices_of
from speechdp.data.prepare import vocabulary
from speechdp.data.prepare.pipeline import prepare
from speechdp.data.prepare.recordings import recording_path
from speechdp.data.prepare.reshard import reshard
from speechdp.data.shards.dataset import Dataset
from speechdp.data.shards.shard import Shard
from speechdp.data.signal.audio import read_audio
from speechdp.data.signal.spectrogram import compute_spectrogram, spectrogram_config
from speechdp.errors import ConfigError
from speechdp.labels.lexicon import Lexicon
from speechdp.labels.symbols import SymbolInventory
from speechdp.options.prepare import PrepareOptions, SpeechOptions
from speechdp.options.reshard import ReshardOptions
from tests.helpers.corpora import DIGITS, digit_folder, kaldi_folder, no_progress, some_fsdd, tone, write_tone


def _prepare(source: Path, data: Path, **options: Any) -> Dataset:
    return prepare(_options(source, data, **options), no_progress).dataset


def _options(source: Path, data: Path, **options: Any) -> PrepareOptions:
    names = {field.name for field in dataclasses.fields(SpeechOptions)}
    speech = SpeechOptions(**{name: options.pop(name) for name in names & options.keys()})
    settings = {"workers": 1, "shards": 2} | options
    return PrepareOptions((source, data), task="synthesis", for_synthesis=speech, **settings)


def _read(dataset: Dataset, split: str) -> dict[str, tuple[Shard, int]]:
    shards = [dataset.open_shard(split, n) for n in range(len(dataset.splits[split].shards))]
    return {shard.utterance_ids[u]: (shard, u) for shard in shards for u in range(shard.num_utterances)}


def test_recordings_become_spectrograms_and_symbols(tmp_path: Path) -> None:
    source = digit_folder(tmp_path / "in")
    dataset = _prepare(source, tmp_path / "data")
    dataset.verify()
    assert (dataset.task, dataset.alignment, dataset.sampling_rate) == ("synthesis", "text", 8000)
    assert dataset.feature_dim == 80 + 257
    symbols = SymbolInventory.load(dataset.symbols_path)
    assert dataset.num_classes == symbols.num_symbols
    shard, number = _read(dataset, "test")["1_bob_3"]
    features, targets = shard.read(number)
    samples = read_audio(source / "1_bob_3.wav", 8000)
    expected = compute_spectrogram(samples, 8000, spectrogram_config(8000))
    np.testing.assert_array_equal(features, expected.astype(np.float16))
    assert symbols.decode(targets) == (*"one", "<end>")
    np.testing.assert_array_equal(read_audio(recording_path(dataset.path, "1_bob_3"), 8000), samples)
    kept = {path.stem for path in (dataset.path / "recordings").glob("*.flac")}
    assert kept == _read(dataset, "dev").keys() | _read(dataset, "test").keys()


def test_joined_recordings_of_one_speaker_and_split(tmp_path: Path) -> None:
    source = some_fsdd(tmp_path / "in", ("george", "theo"), (0, 5, 10, 11), digits=6)
    dataset = _prepare(source, tmp_path / "data", speakers="theo", join="1-3", join_times=2)
    dataset.verify()
    assert dataset.split.endswith(";speakers=theo;join=1-3,times=2")
    symbols = SymbolInventory.load(dataset.symbols_path)
    words: Counter[str] = Counter()
    for shard, number in _read(dataset, "train").values():
        text = shard.texts[number]
        features, targets = shard.read(number)
        assert shard.speakers[number] == "theo" and 1 <= len(text.split()) <= 3
        assert targets.tolist() == symbols.encode(text).tolist()
        assert len(features) > 15 * len(text.split())
        words.update(text.split())
    assert words == dict.fromkeys(("zero", "one", "two", "three", "four", "five"), 4)


def _utterances(split: str, count: int) -> list[CorpusUtterance]:
    return [
        CorpusUtterance(f"{split}{n}", f"s{n % 2}", DIGITS[n // 2 % 10], Path(f"{n}.wav"))
        for n in range(count)
    ]


def test_plans_of_joining() -> None:
    splits = {"train": _utterances("train", 80), "dev": _utterances("dev", 8), "test": _utterances("test", 8)}
    rule = JoinRule(2, 3, times=2)
    planned = plan_joins(splits, rule, 5)
    assert planned == plan_joins(splits, rule, 5)
    assert planned != plan_joins(splits, rule, 6)
    assert list(planned) == ["train", "dev", "test"]
    for name, utterances in planned.items():
        uses = Counter(path for u in utterances for path in u.recordings)
        assert set(uses.values()) == {2} and len(uses) == len(splits[name])
        assert {len(u.recordings) for u in utterances} <= {2, 3}
        assert len({u.utterance_id for u in utterances}) == len(utterances)
        parity = {u.speaker: {int(path.stem) % 2 for path in u.recordings} for u in utterances}
        assert parity == {"s0": {0}, "s1": {1}}
    held_out = {u.text for name in ("dev", "test") for u in planned[name]}
    assert not [u for u in planned["train"] if u.text in held_out]


def test_what_does_not_come_out_even_is_used_all_the_same() -> None:
    planned = plan_joins({"train": _utterances("train", 10)}, JoinRule(3, 3), 1)["train"]
    assert sorted(len(u.recordings) for u in planned) == [2, 2, 3, 3]  # five a speaker


def test_joining_levels_and_pauses() -> None:
    loud, quiet = tone(0.5, seed=1), 0.01 * tone(0.4, seed=2)
    joined = join_recordings([loud, quiet], 8000, np.random.default_rng(3))
    pause = len(joined) - len(loud) - len(quiet) - 2 * 400  # 50 ms at both ends
    assert 480 <= pause <= 960
    first, second = joined[400:4400], joined[4400 + pause : 4400 + pause + 3200]
    levels = [20 * np.log10(np.sqrt(np.mean(np.square(part)))) for part in (first, second)]
    assert levels == pytest.approx([-25, -25], abs=0.1)
    between = joined[4400 : 4400 + pause]
    assert 0 < np.abs(between).max() < 0.02
    assert np.abs(join_recordings([np.zeros(80, np.float32)], 8000, np.random.default_rng(1))).max() == 0


def test_the_same_bytes_whoever_works(tmp_path: Path) -> None:
    source = digit_folder(tmp_path / "in", num_indices=40)
    for name, workers in (("one", 1), ("two", 2)):
        _prepare(source, tmp_path / name, workers=workers, join="1-2")
    files = sorted(path for path in (tmp_path / "one").rglob("*") if path.is_file())
    assert len(files) > 10
    for file in files:
        other = tmp_path / "two" / file.relative_to(tmp_path / "one")
        assert other.read_bytes() == file.read_bytes(), file


def test_phones_through_a_lexicon_in_upper_case(tmp_path: Path) -> None:
    source = kaldi_folder(tmp_path / "in", 12)
    (tmp_path / "lexicon.txt").write_text("ONE W AH N\nTWO T UW\n" + "".join(f"{w} X\n" for w in _REST))
    dataset = _prepare(
        source,
        tmp_path / "data",
        input="phones",
        lexicon=tmp_path / "lexicon.txt",
        split="speaker:test=spk1",
    )
    symbols = SymbolInventory.load(dataset.symbols_path)
    shard, number = _read(dataset, "test")["utt1"]
    assert symbols.decode(shard.read(number)[1]) == ("W", "AH", "N", "<space>", "T", "UW", "<end>")
    assert dataset.lexicon_path.is_file()


def test_words_are_said_as_a_lexicon_in_any_case_says_them(tmp_path: Path) -> None:
    source = kaldi_folder(tmp_path / "in", 3)
    (source / "text").write_text("utt0 Well-nigh two\nutt1 one\nutt2 two\n")
    path = tmp_path / "lexicon.txt"
    entries = ("WELL W E L", "Nigh N AY", "NIGH N IY", "TWO T U", "two T UW", "one W AH N", "thin TH AH N")
    path.write_text("".join(f"{entry}\n" for entry in entries))
    dataset = _prepare(source, tmp_path / "data", input="phones", lexicon=path, split="speaker:test=spk1")
    symbols = SymbolInventory.load(dataset.symbols_path)
    said = "W E L <space> N AY <space> T UW <space> W AH N <end>"
    assert symbols.decode(symbols.encode("Well-nigh two one")) == tuple(said.split())
    assert "TH" not in symbols.names


def test_unknown_words_are_refused_or_guessed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = kaldi_folder(tmp_path / "in", 3)
    (source / "text").write_text("utt0 won two\nutt1 two\nutt2 one\n")
    (tmp_path / "lexicon.txt").write_text("one W AH N\ntwo T UW\n")
    given = {"input": "phones", "lexicon": tmp_path / "lexicon.txt", "split": "speaker:test=spk1"}
    remedy = (
        "1 word without a pronunciation: won; add them to .*, or have them guessed by --unknown-words g2p"
    )
    with pytest.raises(ConfigError, match=remedy):
        _prepare(source, tmp_path / "data", **given)
    asked: list[tuple[str, ...]] = []

    def guess(
        words: Sequence[str], lexicon: Lexicon, model: Path | None, _phones: Collection[str]
    ) -> dict[str, tuple[str, ...]]:
        asked.append(tuple(words))
        return {"won": lexicon.pronunciations["one"][0]} if model is None else {}

    monkeypatch.setattr(vocabulary, "guess_pronunciations", guess)
    dataset = _prepare(source, tmp_path / "data", unknown_words="g2p", **given)
    assert asked == [("won",)]
    assert SymbolInventory.load(dataset.symbols_path).pronunciations["won"] == ("W", "AH", "N")
    with pytest.raises(ConfigError, match="g2p knows none either; add them to"):
        _prepare(source, tmp_path / "other", unknown_words="g2p", g2p_model=tmp_path / "m", **given)
    (source / "text").write_text("utt0 one <noise> two\nutt1 two\nutt2 one\n")
    with pytest.raises(ConfigError, match="have 1 mark that cannot be spoken, first <noise>; take them out"):
        _prepare(source, tmp_path / "other", **given)


def test_texts_are_the_same_for_kaldi_directories_and_folders(tmp_path: Path) -> None:
    source = kaldi_folder(tmp_path / "in", 3)
    (source / "text").write_text("utt0 It is 3.5 miles, Mr. Smith!\nutt1 No: 3:20?\nutt2 Two\n")
    kaldi = _prepare(source, tmp_path / "kaldi", split="speaker:test=spk1")
    (source / "wav.scp").unlink()
    folder = _prepare(source, tmp_path / "folder", split="speaker:test=spk1")
    texts = [
        {name: shard.text(u) for part in ("train", "test") for name, (shard, u) in _read(data, part).items()}
        for data in (kaldi, folder)
    ]
    assert texts[0] == texts[1]
    assert texts[0]["utt0"] == "it is three point five miles, mr. smith!"
    assert texts[0]["utt1"] == "no, three, twenty?"


_REST = ("ZERO", "THREE", "FOUR", "FIVE", "SIX", "SEVEN", "EIGHT", "NINE")


def test_new_texts_are_counted(tmp_path: Path) -> None:
    source = kaldi_folder(tmp_path / "in", 12)
    text = (source / "text").read_text().replace("utt3 three two", "utt3 Never, ever: 3")
    (source / "text").write_text(text)
    prepared = prepare(_options(source, tmp_path / "data", split="speaker:test=spk1"), no_progress)
    # spk1 says one two (twice), never ever three, five two, seven two, nine two; spk0 the even ones.
    assert prepared.notices == ("texts that do not occur in train: 6 of 6 in test",)
    shard, number = _read(prepared.dataset, "test")["utt3"]
    assert shard.texts[number] == "never, ever, three"


@pytest.mark.parametrize("text", ["utt0 caf\u00e9 10%\n", "utt0 ...\n", "utt0 1000000\n"])
def test_texts_that_cannot_be_spelled_name_the_utterance(tmp_path: Path, text: str) -> None:
    source = kaldi_folder(tmp_path / "in", 3)
    (source / "text").write_text(text + "utt1 one\nutt2 two\n")
    with pytest.raises(ConfigError, match=r"utt0\.wav: utterance utt0: (?!.*refused)"):
        _prepare(source, tmp_path / "data", split="speaker:test=spk1")
    (source / "text").write_text(text + "utt1 one\n" + text.replace("utt0", "utt2"))
    with pytest.raises(ConfigError, match=r"utt0\.wav: utterance utt0: .*; 1 more text is refused, of utt2$"):
        _prepare(source, tmp_path / "data", split="speaker:test=spk1")
    assert not (tmp_path / "data").exists()


def test_resharding_keeps_texts_and_recordings(tmp_path: Path) -> None:
    dataset = _prepare(digit_folder(tmp_path / "in"), tmp_path / "data")
    other = reshard(ReshardOptions(dataset.path, tmp_path / "more", 4), no_progress)
    other.verify()
    before, after = _read(dataset, "dev"), _read(other, "dev")
    assert before.keys() == after.keys()
    for name, (shard, number) in before.items():
        for one, two in zip(shard.read(number), after[name][0].read(after[name][1]), strict=True):
            np.testing.assert_array_equal(one, two)
        assert recording_path(other.path, name).is_file()


def test_voices() -> None:
    assert voices_of(None) == VOICES[:1]
    assert voices_of("3") == VOICES[:3]
    assert voices_of("en-us+m1") == ("en-us+m1",)
    for wrong in ("0", "99", "en-us+nobody", "klingon"):
        with pytest.raises(ConfigError, match=f"--speakers {wrong.replace('+', '.')}: "):
            voices_of(wrong)


def test_plans_of_voices() -> None:
    plan = plan_voices(0.5, VOICES[:2], 1)
    assert plan == plan_voices(0.5, VOICES[:2], 1)
    assert plan != plan_voices(0.5, VOICES[:2], 2)
    assert [{u.voice for u in part} for part in plan.values()] == [set(VOICES[:2])] * 3
    train = {u.text for u in plan["train"]}
    assert not [u for name in ("dev", "test") for u in plan[name] if u.text in train]
    hours = sum(u.expected_s for part in plan.values() for u in part) / 3600
    assert hours == pytest.approx(0.5, rel=0.05)


@pytest.mark.skipif(
    importlib.util.find_spec("espeakng_loader") is None, reason="espeakng-loader is not installed"
)
def test_a_synthetic_voice(tmp_path: Path) -> None:
    options = PrepareOptions(
        (tmp_path / "data",),
        synthetic=0.004,
        task="synthesis",
        for_synthesis=SpeechOptions(input="phones"),
        shards=2,
        resample=8000,
    )
    prepared = prepare(options, no_progress)
    dataset = prepared.dataset
    dataset.verify()
    assert dataset.split_names == ("train", "dev", "test")
    assert "2 of 2 in test" in prepared.notices[0]
    shard, number = next(iter(_read(dataset, "test").values()))
    samples = read_audio(recording_path(dataset.path, shard.utterance_ids[number]), 8000)
    again = compute_spectrogram(samples, 8000, dataset.features)
    np.testing.assert_array_equal(shard.read(number)[0], again.astype(np.float16))
    symbols = SymbolInventory.load(dataset.symbols_path)
    assert symbols.encode(shard.texts[number]).tolist() == shard.read(number)[1].tolist()
    assert not list(dataset.path.glob(".*"))


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, data = digit_folder(tmp_path / "in"), tmp_path / "data"
    arguments = ["prepare", str(source), str(data), "--task", "synthesis", "--shards", "2"]
    assert main.run([*arguments, "--speakers", "ann", "--join", "1-2"]) == 0
    assert main.run(["inspect", str(data)]) == 0
    output = " ".join(capsys.readouterr().out.split())
    for part in (
        "spectrograms 80 mel + 257 linear float16, 50 ms every 12.5 ms, 512 points",
        "33 symbols (characters), split by index:test=0-4,dev=5-9, speakers=ann, join=1-2,times=1",
        "joined 24 recordings into",
        "texts that do not occur in train:",
        "all checksums match",
    ):
        assert part in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--join", "1-3"], "--join goes with --task synthesis"),
        (["--workers", "0"], "--workers 0: give at least 1, or leave it out"),
        (["--input", "phones"], "--input goes with --task synthesis"),
        (["--task", "synthesis", "--store", "audio"], "--store audio does not go with --task synthesis"),
        (["--task", "synthesis", "--features", "mfcc"], "--features mfcc does not go"),
        (["--task", "synthesis", "--kaldi", "k"], "--kaldi and what belongs to it does not go"),
        (["--task", "synthesis", "--join-times", "2"], "--join-times: it goes with --join A-B"),
        (["--task", "synthesis", "--join", "3-1"], "--join 3-1: give A-B"),
        (["--task", "synthesis", "--join", "some"], "--join some: is not understood"),
        (["--task", "synthesis", "--join", "1-2", "--join-times", "0"], "--join-times 0: give at least 1"),
        (["--task", "synthesis", "--speakers", "ann+eve"], "has no speaker 'eve'; its speakers are ann, bob"),
        (["--task", "synthesis", "--lexicon", "l"], "--lexicon goes with --input phones"),
        (["--task", "synthesis", "--unknown-words", "g2p"], "--unknown-words g2p goes with --input phones"),
        (["--task", "synthesis", "--synthetic", "1"], "takes one path"),
    ],
)
def test_options_that_do_not_go_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    for name in ("0_ann_0", "0_bob_0"):
        write_tone(tmp_path / "in" / f"{name}.wav")
    assert main.run(["prepare", str(tmp_path / "in"), str(tmp_path / "out"), *arguments]) != 0
    error = capsys.readouterr().err.strip()
    assert message in error and "\n" not in error


def test_joining_does_not_go_with_synthetic_speech(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["prepare", str(tmp_path / "out"), "--task", "synthesis", "--synthetic", "0.1"]
    assert main.run([*arguments, "--join", "1-3"]) != 0
    assert "--join: eSpeak NG already speaks whole texts; leave it out" in capsys.readouterr().err


def test_recordings_of_train_are_a_corpus_for_a_recogniser(tmp_path: Path) -> None:
    dataset = _prepare(digit_folder(tmp_path / "in"), tmp_path / "data", keep_recordings="all")
    kept = {f: len(list((tmp_path / "data" / f).glob("*.flac"))) for f in ("recordings", "recordings-train")}
    held_out = sum(split.utterances for name, split in dataset.splits.items() if name != "train")
    assert kept == {"recordings": held_out, "recordings-train": dataset.num_utterances("train")}
    corpus = read_corpus(tmp_path / "data" / "recordings-train", None)
    texts = {u.utterance_id: (u.text, u.speaker) for u in corpus.utterances}
    for name, (shard, number) in _read(dataset, "train").items():
        assert texts[name] == (shard.text(number), shard.speaker(number))
