"""Splits: who goes where, and that nobody is lost."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speechdp.data.corpora.audio_folder import read_audio_folder
from speechdp.data.corpora.corpus import Corpus, CorpusUtterance
from speechdp.data.corpora.splits import (
    RANDOM_DEFAULT,
    SPEAKERS_DEFAULT,
    choose_rule,
    deal,
    original_name,
    parse_split,
    speakers_on_both_sides,
    split_corpus,
)
from speechdp.data.prepare.divided_corpus import warn_of_speakers, warn_of_splits
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
    few, many = (_split(_corpus(num, indexed=False), RANDOM_DEFAULT) for num in (500, 1000))
    for name, utterances in few.items():
        assert utterances <= many[name]


def test_speakers() -> None:
    splits = _split(_corpus(), "speaker:test=spk0+spk1,dev=spk2")
    assert {name: len(utterances) for name, utterances in splits.items()} == {
        "train": 25, "dev": 25, "test": 50,
    }  # fmt: skip


@given(
    st.sampled_from(
        ["index:test=0-4,dev=5-9", "random:dev=0.3,test=0.3", "speaker:test=spk1", "speakers:dev=0.3", None]
    ),
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
        ("speakers:test=ann", "could not convert"),
        ("speakers:test=0.5,dev=0.5", "add up to less than 1"),
    ],
)
def test_splits_that_are_not_understood(spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        parse_split(spec, 1)
    assert f"--split {spec}" in str(raised.value)


def _spoken(num_speakers: int, *, speaker: str = "spk{}") -> Corpus:
    """Make a corpus in which each speaker says three times as much as the one before, up to 27 times."""
    return Corpus.of(
        Path("corpus"),
        (
            CorpusUtterance(f"u{n:03d}-{take}", speaker.format(n), "one", Path("a.wav"))
            for n in range(num_speakers)
            for take in range(3 ** (n % 4))
        ),
    )


def _speakers(
    corpus: Corpus, spec: str | None, held_out: str | None = None, seed: int = 1
) -> dict[str, set[str]]:
    splits = split_corpus(corpus, choose_rule(corpus, spec, held_out, seed))
    assert sum(len(part) for part in splits.values()) == len(corpus.utterances)
    return {name: {u.speaker for u in part} for name, part in splits.items()}


@pytest.mark.parametrize(
    ("num_speakers", "spec", "counts"),
    [
        (74, "speakers:dev=0.1,test=0.2", (52, 7, 15)),
        (74, "speakers:dev=0.05", (70, 4, 0)),
        (20, None, (16, 2, 2)),
        (4, None, (2, 1, 1)),  # at least one speaker a split
        (3, None, (1, 1, 1)),
        (10, "speakers:dev=0,test=0.25", (8, 0, 2)),
    ],
)
def test_shares_of_speakers_are_exact_and_no_speaker_is_in_two_splits(
    num_speakers: int, spec: str | None, counts: tuple[int, int, int]
) -> None:
    corpus = _spoken(num_speakers)
    speakers = _speakers(corpus, spec)
    assert tuple(len(speakers.get(name, ())) for name in ("train", "dev", "test")) == counts
    assert sum(counts) == num_speakers == len(set().union(*speakers.values()))
    assert speakers == _speakers(corpus, spec)
    rule = choose_rule(corpus, spec, None, 1)
    assert rule.spec == (spec or SPEAKERS_DEFAULT)
    if num_speakers > 10:
        assert speakers != _speakers(corpus, spec, seed=2)


def test_a_held_out_speaker_is_the_test_part_and_no_other() -> None:
    speakers = _speakers(_spoken(11), "speakers:dev=0.2,test=0.3", "spk3")
    assert speakers["test"] == {"spk3"} and len(speakers["dev"]) == 2 and len(speakers["train"]) == 8


@pytest.mark.parametrize(
    ("num_speakers", "held_out", "counts", "remedy"),
    [
        (2, None, "3 speakers, it has 2", "--held-out-speaker spk0 --split random:dev=0.1"),
        (1, None, "3 speakers, it has 1", f"--split {RANDOM_DEFAULT}"),
        (2, "spk0", "2 speakers, it has 1", f"--split {RANDOM_DEFAULT}"),
    ],
)
def test_too_few_speakers_are_refused_with_a_remedy_that_helps(
    num_speakers: int, held_out: str | None, counts: str, remedy: str
) -> None:
    corpus = _spoken(num_speakers)
    with pytest.raises(ConfigError) as caught:
        choose_rule(corpus, SPEAKERS_DEFAULT, held_out, 1)
    assert f"--split {SPEAKERS_DEFAULT} needs {counts}; choose {remedy}" in str(caught.value)
    speaker, spec = _options(remedy)
    choose_rule(corpus, spec, held_out or speaker, 1)


def _options(remedy: str) -> tuple[str | None, str]:
    """Return --held-out-speaker and --split of a remedy."""
    words = remedy.split()
    given = dict(zip(words[::2], words[1::2], strict=True))
    return given.get("--held-out-speaker"), given["--split"]


def test_shares_that_are_too_large_for_the_speakers_lead_to_usual_ones() -> None:
    with pytest.raises(ConfigError, match=f"choose --split {SPEAKERS_DEFAULT}"):
        choose_rule(_spoken(3), "speakers:dev=0.5,test=0.45", None, 1)


def test_takes_divide_a_corpus_only_where_every_split_gets_some() -> None:
    def counted(most: int, first: int = 0) -> Corpus:
        return Corpus.of(
            Path("corpus"),
            (
                CorpusUtterance(f"{speaker}-{take}", f"spk{speaker}", "one", Path("a.wav"), take)
                for speaker in range(20)
                for take in range(first, first + (most if speaker == 0 else 5))
            ),
        )

    # As in Speech Commands: who says a word ten times is rare.
    assert choose_rule(counted(12), None, None, 1).spec == SPEAKERS_DEFAULT
    assert choose_rule(counted(50), None, None, 1).spec == "index:test=0-4,dev=5-9"
    assert choose_rule(counted(50, first=10), None, None, 1).spec == SPEAKERS_DEFAULT


def test_utterances_are_divided_at_random_where_speakers_are_not_known_or_too_few() -> None:
    for corpus in (_spoken(2), _spoken(30, speaker="unknown")):
        assert choose_rule(corpus, None, None, 1).spec == RANDOM_DEFAULT
    assert choose_rule(_spoken(30), None, None, 1, by_speaker=False).spec == RANDOM_DEFAULT


def test_speakers_on_both_sides_are_found() -> None:
    corpus = _corpus()
    mixed = split_corpus(corpus, choose_rule(corpus, "index:test=0-4", None, 1))
    assert speakers_on_both_sides(mixed) == ["spk0", "spk1", "spk2", "spk3"]
    apart = split_corpus(corpus, choose_rule(corpus, "speakers:test=0.25", None, 1))
    assert speakers_on_both_sides(apart) == []
    for alone in (_spoken(4, speaker="ann"), _spoken(30, speaker="unknown")):
        assert (
            speakers_on_both_sides(split_corpus(alone, choose_rule(alone, "random:dev=0.5", None, 1))) == []
        )


@pytest.mark.parametrize(
    ("speakers", "remedy"),
    [
        (("bob", "ann"), "--held-out-speaker ann --split random:dev=0.1"),
        (("c", "b", "a"), f"--split {SPEAKERS_DEFAULT}"),
    ],
)
def test_the_warning_of_speakers_on_both_sides_names_a_split_that_helps(
    speakers: tuple[str, ...], remedy: str
) -> None:
    corpus = Corpus.of(
        Path("corpus"),
        (
            CorpusUtterance(f"{copy}{speaker}-{take}", f"{copy}{speaker}", "one", Path("a.wav"))
            for speaker in speakers
            for take in range(30)
            for copy in ("", "sp0.9-")
        ),
    )
    splits = split_corpus(corpus, choose_rule(corpus, "random:test=0.5", None, 1))
    (warning,) = warn_of_speakers(splits)
    assert f"{len(speakers)} speakers are both" in warning and f"({remedy} keeps" in warning
    speaker, spec = _options(remedy)
    apart = split_corpus(corpus, choose_rule(corpus, spec, speaker, 1))
    assert sorted(apart) == ["dev", "test", "train"]  # to train, to choose scales by, and to be tested
    assert warn_of_speakers(apart) == ()


def test_a_split_of_a_single_utterance_is_warned_of() -> None:
    utterances = [CorpusUtterance(f"u{n}", f"spk{n}", "one", Path("a.wav")) for n in range(6)]
    splits = {"train": utterances[:2], "dev": utterances[4:5], "test": utterances[5:]}
    (warning,) = warn_of_splits(splits)
    assert warning.startswith("warning: dev and test hold a single utterance each, on which an error rate")
    (warning,) = warn_of_splits({**splits, "dev": utterances[2:4]})
    assert warning.startswith("warning: test holds a single utterance, on")
    assert warn_of_splits({"test": utterances[:1]}) == ()  # prepared for a model: as many as there are


def test_a_dev_part_larger_than_train_is_warned_of() -> None:
    utterances = [CorpusUtterance(f"u{n}", f"spk{n}", "one", Path("a.wav")) for n in range(9)]
    (warning,) = warn_of_splits({"train": utterances[:4], "dev": utterances[4:]})
    assert warning == "warning: dev holds 5 utterances, train only 4; if that is not meant, see --split"
    assert warn_of_splits({"train": utterances[:4], "dev": utterances[5:]}) == ()


def test_copies_of_a_speaker_or_an_utterance_stay_with_the_original() -> None:
    copies = ("{}", "sp0.9-{}", "sp1.1-{}", "{}-noise", "rev1-sp0.9-{}", "sp1.1-{}-reverb-babble")
    corpus = Corpus.of(
        Path("corpus"),
        (
            CorpusUtterance(copy.format(f"u{n}-{take}"), copy.format(f"spk{n}"), "one", Path("a.wav"))
            for n in range(20)
            for take in range(3)
            for copy in copies
        ),
    )
    for spec, held_out in (
        (None, None),
        ("random:dev=0.2,test=0.2", None),
        ("speakers:dev=0.1", "sp0.9-spk3"),
    ):
        splits = split_corpus(corpus, choose_rule(corpus, spec, held_out, 1))
        of_utterance = {u.utterance_id: name for name, part in splits.items() for u in part}
        assert len(set(of_utterance.values())) > 1
        for n in range(20):
            for take in range(3):
                assert len({of_utterance[copy.format(f"u{n}-{take}")] for copy in copies}) == 1
        if spec is None:
            assert len({u.speaker for u in splits["dev"]}) == 2 * len(copies)
            assert speakers_on_both_sides(splits) == []
    (one, copy), (*_, other) = corpus.utterances[:2], corpus.utterances
    apart = {"train": [one], "dev": [copy], "test": [other]}
    assert speakers_on_both_sides(apart) == []  # of two speakers, who else should be dev
    another = next(u for u in corpus.utterances if original_name(u.speaker) == "spk5")
    assert speakers_on_both_sides({**apart, "test": [other, another]}) == ["spk0"]
    assert speakers_on_both_sides({"train": [one, other], "dev": [copy]}) == ["spk0"]


def test_copies_of_a_speaker_who_is_named_go_along() -> None:
    names = ("ann", "sp0.9-ann", "rev1-sp0.9-ann", "sp1.1-bob", "eve", "sp0.9-eve")
    corpus = Corpus.of(
        Path("corpus"), (CorpusUtterance(f"{name}-1", name, "one", Path("a.wav")) for name in names)
    )
    for spec in ("speaker:test=ann,dev=bob", "speaker:test=sp0.9-ann,dev=sp1.1-bob"):
        speakers = _speakers(corpus, spec)
        assert speakers["test"] == {"ann", "sp0.9-ann", "rev1-sp0.9-ann"}
        assert speakers["dev"] == {"sp1.1-bob"} and speakers["train"] == {"eve", "sp0.9-eve"}
    asked_for = _speakers(corpus, "speaker:test=ann,dev=sp0.9-ann")
    assert (asked_for["test"], asked_for["dev"]) == ({"ann", "rev1-sp0.9-ann"}, {"sp0.9-ann"})


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


@pytest.mark.parametrize("spec", [RANDOM_DEFAULT, "random:dev=0.2,test=0.2", "random:dev=0.5,test=0.49"])
def test_a_random_split_of_few_utterances_leads_to_one_that_works(spec: str) -> None:
    remedies = []
    for corpus in (_corpus(num, indexed=False) for num in (2, 3, 4, 5)):
        try:
            _split(corpus, spec)
        except ConfigError as error:
            found = re.search(r"or test alone: --split (random:test=[0-9.]+)$", str(error))
            assert found is not None, error
            remedies.append(found[1])
            assert set(_split(corpus, found[1])) == {"train", "test"}
    assert remedies
    with pytest.raises(ConfigError, match="it has too few utterances to be divided: add some"):
        _speakers(_spoken(1), "random:test=0.5")
    with pytest.raises(
        ConfigError, match=r"falls into dev .* give dev a larger share of the others, or choose"
    ):
        _speakers(_spoken(2), "random:dev=0.01", "spk1")


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
