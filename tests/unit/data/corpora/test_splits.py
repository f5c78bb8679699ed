"""Splits: who goes where, and that nobody is lost."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speechdp.data.corpora.audio_folder import read_audio_folder
from speechdp.data.corpora.corpus import Corpus, CorpusUtterance
from speechdp.data.corpora.splits import choose_rule, deal, parse_split, split_corpus
from speechdp.errors import ConfigError
from tests.helpers.corpora import fsdd_dir


def _corpus(num: int = 100, *, indexed: bool = True) -> Corpus:
    return Corpus.of(
        Path("corpus"),
        (
            CorpusUtterance(f"u{n:04d}", f"spk{n % 4}", "one", Path(f"{n}.wav"), n // 4 if indexed else None)
            for n in range(num)
        ),
    )


def _split(
    corpus: Corpus, spec: str | None, speaker: str | None = None, seed: int = 1
) -> dict[str, set[str]]:
    splits = split_corpus(corpus, choose_rule(corpus, spec, speaker, seed))
    return {name: {u.utterance_id for u in utterances} for name, utterances in splits.items()}


def test_official_split_of_fsdd() -> None:
    corpus = read_audio_folder(fsdd_dir())
    rule = choose_rule(corpus, None, None, 1)
    splits = split_corpus(corpus, rule)
    assert {name: len(utterances) for name, utterances in splits.items()} == {
        "train": 2400, "dev": 300, "test": 300,
    }  # fmt: skip
    assert {u.index for u in splits["test"]} == set(range(5))
    assert {u.index for u in splits["dev"]} == set(range(5, 10))
    assert Counter(u.text for u in splits["test"]) == dict.fromkeys(corpus.words, 30)
    assert rule.spec == "index:test=0-4,dev=5-9"


def test_fsdd_with_a_speaker_held_out() -> None:
    corpus = read_audio_folder(fsdd_dir())
    splits = split_corpus(corpus, choose_rule(corpus, None, "theo", 1))
    assert {name: len(utterances) for name, utterances in splits.items()} == {
        "train": 2250, "dev": 250, "test": 500,
    }  # fmt: skip
    assert {u.speaker for u in splits["test"]} == {"theo"}
    assert "theo" not in {u.speaker for name in ("train", "dev") for u in splits[name]}


def test_single_indices_and_lists_of_ranges() -> None:
    corpus = _corpus()
    splits = _split(corpus, "index:test=0-1+7,dev=3")
    by_id = {u.utterance_id: u.index for u in corpus.utterances}
    assert {by_id[u] for u in splits["test"]} == {0, 1, 7}
    assert {by_id[u] for u in splits["dev"]} == {3}


def test_random_split_is_near_its_fractions_and_keeps_to_the_seed() -> None:
    corpus = _corpus(2000, indexed=False)
    splits = _split(corpus, "random:dev=0.1,test=0.2")
    assert 150 < len(splits["dev"]) < 250
    assert 330 < len(splits["test"]) < 470
    assert splits == _split(corpus, "random:dev=0.1,test=0.2")
    assert splits != _split(corpus, "random:dev=0.1,test=0.2", seed=2)


def test_random_split_does_not_change_when_utterances_are_added() -> None:
    few, many = (_split(_corpus(num, indexed=False), None) for num in (500, 1000))
    for name, utterances in few.items():
        assert utterances <= many[name]


def test_speakers() -> None:
    splits = _split(_corpus(), "speaker:test=spk0+spk1,dev=spk2")
    assert {name: len(utterances) for name, utterances in splits.items()} == {
        "train": 25, "dev": 25, "test": 50,
    }  # fmt: skip


@given(
    st.sampled_from(["index:test=0-4,dev=5-9", "random:dev=0.3,test=0.3", "speaker:test=spk1", None]),
    st.sampled_from([None, "spk0"]),
)
def test_nobody_is_lost_or_twice_there(spec: str | None, speaker: str | None) -> None:
    corpus = _corpus()
    splits = _split(corpus, spec, speaker)
    everyone = [u for utterances in splits.values() for u in utterances]
    assert len(everyone) == len(set(everyone)) == len(corpus.utterances)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("index", "not understood"),
        ("index:test", "not understood"),
        ("index:train=1", "not understood"),
        ("index:test=0,test=1", "not understood"),
        ("index:test=a-b", "invalid literal"),
        ("random:test=lots", "could not convert"),
        ("random:test=0.5,dev=0.5", "add up to less than 1"),
        ("alphabet:test=a", "'alphabet' is not known"),
    ],
)
def test_splits_that_are_not_understood(spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        parse_split(spec, 1)
    assert f"--split {spec}" in str(raised.value)


def test_unknown_speakers_are_refused() -> None:
    for spec, speaker in (("speaker:test=eve", None), (None, "eve")):
        with pytest.raises(ConfigError, match="no speaker 'eve'; its speakers are spk0, spk1, spk2, spk3"):
            choose_rule(_corpus(), spec, speaker, 1)


def test_index_split_of_a_corpus_without_indices_is_refused() -> None:
    with pytest.raises(ConfigError, match="utterance u0000 has no index"):
        _split(_corpus(indexed=False), "index:test=0-4")


def test_empty_splits_are_refused() -> None:
    with pytest.raises(ConfigError, match="falls into test"):
        _split(_corpus(), "index:test=90-99")
    with pytest.raises(ConfigError, match="falls into train"):
        _split(_corpus(), "index:test=0-90")


def test_a_split_may_be_left_out() -> None:
    assert set(_split(_corpus(), "index:test=0-4")) == {"train", "test"}


@given(sizes=st.lists(st.integers(1, 100), min_size=1, max_size=60), num_parts=st.integers(1, 9))
def test_dealing_balances_and_loses_nothing(sizes: list[int], num_parts: int) -> None:
    parts = deal(range(len(sizes)), sizes, num_parts, "seed")
    assert sorted(item for part in parts for item in part) == list(range(len(sizes)))
    assert len(parts) == min(num_parts, len(sizes)) and all(parts)
    loads = [sum(sizes[item] for item in part) for part in parts]
    assert max(loads) - min(loads) <= max(sizes)
    assert parts == deal(range(len(sizes)), sizes, num_parts, "seed")
