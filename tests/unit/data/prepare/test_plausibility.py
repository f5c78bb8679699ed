"""Warnings of transcripts that do not fit the length of their audio."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from speechdp.data.prepare.pipeline import prepare
from speechdp.data.prepare.plausibility import SpokenLength, warn_of_lengths, warn_of_undivided
from speechdp.options.prepare import GRAPHEMES, PrepareOptions
from tests.helpers.corpora import digit_folder, kaldi_folder, no_progress, shared_data, write_tone

#: Sentences, as they are written.
CHINESE = "\u6211\u4eca\u5929\u665a\u4e0a\u4e0d\u60f3\u5403\u996d"
THAI = "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35\u0e04\u0e23\u0e31\u0e1a\u0e17\u0e38\u0e01\u0e04\u0e19"


def lengths(num: int, phone_s: float = 0.1) -> list[SpokenLength]:
    """Make utterances of 1 to 8 words of three phones each, spoken evenly with short pauses."""
    return [
        SpokenLength(
            f"u{n}", 0.3 + phone_s * 3 * words, 30 + round(300 * phone_s) * words, words, 3 * words, 9 * words
        )
        for n in range(num)
        for words in [1 + n % 8]
    ]


def with_seconds(length: SpokenLength, seconds: float) -> SpokenLength:
    return dataclasses.replace(length, utterance_id="odd", seconds=seconds, num_frames=round(100 * seconds))


def test_an_even_corpus_gives_no_warning() -> None:
    assert warn_of_lengths(lengths(40)) == ()
    assert warn_of_lengths([]) == ()


def test_utterances_that_are_too_long_and_too_short_are_counted_and_the_worst_is_named() -> None:
    usual = lengths(40)
    odd = [with_seconds(usual[1], 9.0), with_seconds(usual[0], 8.0), with_seconds(usual[7], 0.6)]
    assert warn_of_lengths([*usual, *odd]) == (
        "warning: 1 utterance has fewer frames than the transcript has states, worst odd (60 frames, 72 "
        "states); their flat alignment skips states",
        "warning: 2 utterances are implausibly long for the text, worst odd (8.00 s for 1 word); check "
        "the transcripts",
        "warning: 1 utterance is implausibly short for the text, worst odd (0.60 s for 8 words); check "
        "the transcripts",
    )


def test_few_utterances_and_those_without_words_are_not_judged() -> None:
    assert warn_of_lengths([*lengths(8), with_seconds(lengths(1)[0], 60.0)]) == ()
    silent = dataclasses.replace(lengths(1)[0], num_words=0, num_phones=0, num_states=0, seconds=60.0)
    assert warn_of_lengths([*lengths(20), silent]) == ()


@pytest.mark.parametrize(
    ("texts", "warns"),
    [
        ((CHINESE, CHINESE), True),
        (("\u6211 \u4eca\u5929 \u665a\u4e0a \u4e0d\u60f3 \u5403\u996d", "\u4f60\u597d"), False),
        ((THAI,), True),
        (("donaudampfschifffahrt", "rindfleischetikettierung"), False),  # long, but words
        (("",), False),
    ],
)
def test_sentences_without_blanks_are_warned_of(texts: tuple[str, ...], warns: bool) -> None:
    warnings = warn_of_undivided(word for text in texts for word in text.split())
    assert len(warnings) == warns
    about = r"warning: words have [0-9.]+ letters on average, first .* divide"
    assert all(re.match(about, each) for each in warnings)


def test_prepare_warns_of_sentences_without_blanks(tmp_path: Path) -> None:
    source = kaldi_folder(tmp_path / "in", 4)
    (source / "text").write_text("".join(f"utt{n} {CHINESE}\n" for n in range(4)))
    options = PrepareOptions(
        (source, tmp_path / "data"), lexicon=GRAPHEMES, split="speaker:test=spk1", workers=1
    )
    notices = prepare(options, no_progress).notices
    assert any("divide texts that are written without blanks" in notice for notice in notices)


def test_prepare_prints_them(tmp_path: Path) -> None:
    source = digit_folder(tmp_path / "in")
    write_tone(source / "1_bob_11.wav", 9.0)
    prepared = prepare(PrepareOptions((source, tmp_path / "data"), workers=1), no_progress)
    of_dev, warning = prepared.notices[1:]
    assert of_dev == "warning: dev holds 20 utterances, train only 8; if that is not meant, see --split"
    assert "1 utterance is implausibly long for the text, worst 1_bob_11 (9.00 s for 1 word)" in warning


@pytest.mark.parametrize("corpus", ["an4"])
def test_a_real_corpus_has_few(tmp_path: Path, corpus: str) -> None:
    source = shared_data(corpus)
    options = PrepareOptions(
        (source, tmp_path / "data"), lexicon=source / "lexicon.txt", store="audio", split="speakers:test=0.1"
    )
    notices = prepare(options, no_progress).notices
    counts = [int(line.split()[1]) for line in notices if "implausibly" in line]
    assert sum(counts) < 5
