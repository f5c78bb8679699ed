"""Synthetic speech: repeatable by seed, disjoint speakers, phone times that fit the sound."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from speechdp.data.espeak.espeak import SpokenWord, Voice, plain_phone, start_espeak, words_of
from speechdp.data.espeak.synthetic_plan import ACCENTS, VARIANTS, plan_corpus
from speechdp.data.prepare.pipeline import prepare
from speechdp.data.shards.dataset import Dataset
from speechdp.data.shards.layout import Stored
from speechdp.data.signal.compute import compute_features
from speechdp.errors import ConfigError
from speechdp.labels.hmm import StateInventory
from speechdp.labels.lexicon import Lexicon, command_words, digit_words
from speechdp.options.prepare import PrepareOptions
from tests.helpers.corpora import needs_espeak, no_progress


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return _prepare(tmp_path_factory.mktemp("synthetic") / "data")


def _prepare(path: Path, seed: int = 3, stored: Stored = "features") -> Dataset:
    options = PrepareOptions(
        (path,),
        synthetic=0.01,
        shards=2,
        num_mel_bins=24,
        dtype="float32",
        mean_normalise=False,
        variance_normalise=False,
        seed=seed,
        store=stored,
    )
    return prepare(options, no_progress).dataset


def test_the_plan_keeps_to_the_seed_and_the_hours() -> None:
    plan = plan_corpus(2.0, 1)
    assert plan == plan_corpus(2.0, 1)
    assert plan != plan_corpus(2.0, 2)
    hours = {name: sum(u.expected_s for u in of_split) / 3600 for name, of_split in plan.items()}
    assert hours["train"] == pytest.approx(1.6, rel=0.01)
    assert hours["dev"] == pytest.approx(0.2, rel=0.02)


def test_no_voice_is_in_two_splits_and_every_word_in_all() -> None:
    for hours in (0.001, 1.0):
        plan = plan_corpus(hours, 1)
        variants = [{u.voice.split("+")[1] for u in of_split} for of_split in plan.values()]
        assert not any(variants[a] & variants[b] for a, b in ((0, 1), (0, 2), (1, 2)))
        for of_split in plan.values():
            assert {w for u in of_split for w in u.text.split()} == {*digit_words(), *command_words()}
            assert len({u.utterance_id for u in of_split}) == len(of_split)


def test_phones_lose_their_marks() -> None:
    names = ("'oU", "u:", "t#", "I2", "3:", "'0", "@L", "_:", ";", ":", "tS", "'aI@", "t[", ",E")
    plain = ("oU", "u", "t", "I", "3r", "Q", "@L", "_", "", "", "tS", "aI@", "t", "E")
    assert tuple(map(plain_phone, names)) == plain


def test_a_pause_that_is_made_for_a_phone_is_its_own() -> None:
    """Of a stop it is the closure; eSpeak NG tells of it behind."""
    samples = np.ones(100, np.float32)
    samples[25:40] = 0  # of the t, whose event is at 40
    samples[62:80] = 0  # "_", in which the t fades, then the closure of p, which nothing tells from it
    events = [("'a", 10, 1), ("t", 40, 1), ("_:", 60, 3), ("p", 80, 4), ("a", 90, 4)]
    assert words_of(["at", "pa"], events, samples) == (
        SpokenWord("at", (("a", 10, 25), ("t", 25, 60))),
        SpokenWord("pa", (("p", 80, 90), ("a", 90, 100))),
    )


def test_a_phone_that_is_all_silent_is_not_taken_for_a_pause() -> None:
    samples = np.ones(60, np.float32)
    samples[20:40] = 0
    events = [("a", 0, 1), ("k", 20, 1), ("t", 40, 1)]
    assert words_of(["act"], events, samples)[0].phones == (("a", 0, 20), ("k", 20, 40), ("t", 40, 60))


@needs_espeak
def test_stops_begin_with_their_closure() -> None:
    espeak = start_espeak()
    speech = espeak.speak(["stop", "eight"], Voice("en-us+m3"), seed=1)
    stops = [phone for word in speech.words for phone in word.phones if phone[0] in "tp"]
    assert [phone for phone, _, _ in stops] == ["t", "p", "t"]
    for _, start, end in stops:
        assert speech.samples[start - 1] != 0
        assert not speech.samples[start : start + espeak.sampling_rate // 50].any()  # 20 ms
        assert speech.samples[start:end].any()  # the burst


@needs_espeak
def test_every_voice_exists() -> None:
    espeak = start_espeak()
    names = [f"{accent}+m3" for accent in ACCENTS] + [f"en-us+{variant}" for variant in VARIANTS]
    for name in names:
        speech = espeak.speak(["yes", "no"], Voice(name), seed=1)
        assert all(word.phones for word in speech.words), name
    with pytest.raises(ConfigError, match="no voice 'xx-yy'"):
        espeak.speak(["yes"], Voice("xx-yy"), seed=1)


@needs_espeak
def test_same_seed_same_bytes(dataset: Dataset, tmp_path: Path) -> None:
    again = _prepare(tmp_path / "again")
    for file in sorted(path.name for path in dataset.path.iterdir()):
        assert (dataset.path / file).read_bytes() == (again.path / file).read_bytes(), file
    assert _prepare(tmp_path / "other", seed=4).checksum != dataset.checksum


@needs_espeak
def test_directory_is_whole_and_small_enough(dataset: Dataset) -> None:
    dataset.verify()
    assert dataset.alignment == "exact" and dataset.sampling_rate == 16000
    assert dataset.split_names == ("train", "dev", "test")
    lexicon = Lexicon.load(dataset.lexicon_path)
    assert set(lexicon.words) == {*digit_words(), *command_words()}
    assert 30 < len(lexicon.phones) <= 80
    assert StateInventory.load(dataset.classes_path).num_classes == dataset.num_classes
    assert sorted(p.name for p in dataset.path.iterdir() if p.suffix != ".h5") == [
        "classes.txt",
        "data.json",
        "files.json",
        "lexicon.txt",
    ]


@needs_espeak
def test_speech_is_loud_where_the_targets_say_so(dataset: Dataset) -> None:
    """Silence targets lie on quiet frames, fricatives on frames whose energy is high up in frequency."""
    inventory = StateInventory.load(dataset.classes_path)
    frames, targets = _all_frames(dataset)
    level = frames.mean(axis=1)
    tilt = frames[:, 16:].mean(axis=1) - frames[:, :8].mean(axis=1)
    silent = targets <= 2
    assert np.median(level[~silent]) - np.median(level[silent]) > 4.0  # natural logarithm of energy
    assert 0.05 < silent.mean() < 0.4
    middle = {phone: targets == inventory.classes_of(phone)[1] for phone in ("s", "oU")}
    assert np.median(tilt[middle["s"]]) - np.median(tilt[middle["oU"]]) > 4.0


@needs_espeak
def test_audio_is_what_the_features_are_made_of(dataset: Dataset, tmp_path: Path) -> None:
    audio = _prepare(tmp_path / "audio", stored="audio")
    with dataset.open_shard("train", 1) as features, audio.open_shard("train", 1) as shard:
        assert shard.utterance_ids == features.utterance_ids
        for u in range(shard.num_utterances):
            samples, targets = shard.read_samples(u)
            np.testing.assert_array_equal(targets, features.read(u)[1])
            made = compute_features(samples.astype(np.float32) / 32768, audio.sampling_rate, audio.features)
            assert np.abs(made - features.read(u)[0]).mean() < 0.02  # rounding to 16 bits


@needs_espeak
def test_targets_spell_the_transcript(dataset: Dataset) -> None:
    inventory = StateInventory.load(dataset.classes_path)
    lexicon = Lexicon.load(dataset.lexicon_path)
    right = total = 0
    with dataset.open_shard("train", 0) as shard:
        for number, text in enumerate(shard.texts):
            targets = shard.read(number)[1]
            phones = [inventory.class_names()[t].rpartition("_")[0] for t in targets]
            spoken = [p for n, p in enumerate(phones) if p != "SIL" and (n == 0 or phones[n - 1] != p)]
            shortest = sum(min(len(v) for v in lexicon.pronunciations[w]) for w in text.split())
            longest = sum(max(len(v) for v in lexicon.pronunciations[w]) for w in text.split())
            right += shortest - 2 <= len(spoken) <= longest  # two equal phones in a row look like one
            total += 1
    assert right >= 0.9 * total


def test_without_espeak_the_remedy_is_named(tmp_path: Path) -> None:
    with (
        mock.patch("importlib.util.find_spec", return_value=None),
        pytest.raises(ConfigError, match=r"pip install 'speechdp\[synthetic\]'"),
    ):
        _prepare(tmp_path / "data")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("hours", "shards"), [(0.0, 1), (-1.0, 1), (1e6, 1), (1.0, 0)])
def test_options_that_make_no_sense(tmp_path: Path, hours: float, shards: int) -> None:
    with pytest.raises(ConfigError):
        PrepareOptions((tmp_path / "data",), synthetic=hours, shards=shards)


def _all_frames(dataset: Dataset) -> tuple[np.ndarray, np.ndarray]:
    read = []
    for split in dataset.split_names:
        for number in range(len(dataset.splits[split].shards)):
            with dataset.open_shard(split, number) as shard:
                read.extend(shard.read(u) for u in range(shard.num_utterances))
    features, targets = zip(*read, strict=True)
    return np.concatenate(features), np.concatenate(targets)
