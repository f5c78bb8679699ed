from __future__ import annotations

import numpy as np
import pytest

from speechdp.decode.wer import (
    WerResult,
    align_words,
    count_errors,
    errors_by_group,
    interval_of_new_speakers,
    word_error_rate,
)


def test_errors_are_counted_by_kind_and_utterance() -> None:
    references = ["a b c", "a b", "a", "", ""]
    hypotheses = ["a x c d", "", "a", "x y", ""]
    assert count_errors(references, hypotheses).tolist() == [
        [1, 0, 1, 3],
        [0, 2, 0, 2],
        [0, 0, 0, 1],
        [2, 0, 0, 0],
        [0, 0, 0, 0],
    ]
    result = word_error_rate(references, hypotheses)
    assert (result.insertions, result.deletions, result.substitutions, result.words) == (3, 2, 1, 6)
    assert result.wer == 1.0 and result.utterances == 5


def test_runs_of_errors_count_every_word() -> None:
    assert count_errors(["a b c d"], ["x y"]).tolist() == [[0, 2, 2, 4]]


def test_interval_is_that_of_the_binomial_for_isolated_words() -> None:
    num, wrong = 300, 15
    hypotheses = ["x"] * wrong + ["a"] * (num - wrong)
    result = word_error_rate(["a"] * num, hypotheses)
    spread = 1.96 * np.sqrt(0.05 * 0.95 / num)
    assert result.wer == pytest.approx(0.05)
    assert result.wer_low == pytest.approx(0.05 - spread, abs=0.004)
    assert result.wer_high == pytest.approx(0.05 + spread, abs=0.004)
    assert result == word_error_rate(["a"] * num, hypotheses)  # seeded


def test_interval_is_over_utterances_not_words() -> None:
    # All errors in one utterance of two: the interval must span everything.
    result = word_error_rate(["a b c d e", "a b c d e"], ["", "a b c d e"])
    assert (result.wer, result.wer_low, result.wer_high) == (0.5, 0.0, 1.0)


def test_no_error_among_few_utterances_is_not_sure_to_be_none() -> None:
    """Each draw of them has none, too: 1 in 16 words may be wrong all the same, at 95 %."""
    result = word_error_rate(["a"] * 60, ["a"] * 60)
    assert (result.wer, result.wer_low, result.wer_high) == (0, 0, pytest.approx(1 - 0.025 ** (1 / 60)))
    assert (result.ser_low, result.ser_high) == (0, pytest.approx(0.0596, abs=1e-4))
    wrong = word_error_rate(["a b"] * 60, ["c d"] * 60)
    assert (wrong.wer_low, wrong.wer_high) == (pytest.approx(0.9404, abs=1e-4), 1)
    assert (wrong.ser_low, wrong.ser_high) == (wrong.wer_low, 1)


def test_the_same_rate_in_all_of_few_utterances_is_not_sure_to_be_that_of_all() -> None:
    share = 0.025 ** (1 / 8)  # of utterances with this rate, at least
    half = word_error_rate(["a b", "a b c d"] * 4, ["a x", "a b x y"] * 4)
    assert (half.wer, half.wer_low, half.wer_high) == (0.5, share / 2, pytest.approx(1 - share / 2))
    double = word_error_rate(["a"] * 8, ["x y"] * 8)
    assert (double.wer, double.wer_low, double.wer_high) == (2.0, share * 2, 2.0)


def test_a_single_utterance_that_is_wrong_in_part_tells_nothing() -> None:
    """Each draw is the utterance itself: such speakers would have intervals without any width."""
    result = word_error_rate(["a b c d"], ["a b c x"])
    assert (result.wer, result.wer_low, result.wer_high) == (0.25, 0.0, 1.0)
    assert word_error_rate(["a b"], ["x y z w"]).wer_high == 2.0


def test_the_interval_of_a_low_rate_of_few_utterances_holds_it() -> None:
    random, held = np.random.default_rng(1), 0
    for _ in range(300):
        right = random.random(60) > 0.02
        result = word_error_rate(["a"] * 60, ["a" if is_right else "b" for is_right in right])
        held += result.wer_low <= 0.02 <= result.wer_high
    assert held >= 270  # draws alone hold it in 244


def speakers_with(*wrong: int, words: int = 20) -> list[WerResult]:
    """Speakers that said as many words each, some of them not recognised."""
    return [word_error_rate(["a"] * words, ["b"] * number + ["a"] * (words - number)) for number in wrong]


def test_the_interval_of_new_speakers_holds_the_rate_of_all_of_them() -> None:
    """Five speakers, of whom rates differ by 0.8 of their mean: draws of utterances are too sure."""
    random, held, held_by_utterances = np.random.default_rng(1), 0, 0
    for _ in range(200):
        rates = np.minimum(random.gamma(1 / 0.8**2, 0.1 * 0.8**2, size=5), 1.0)
        speakers = speakers_with(*random.binomial(60, rates), words=60)
        if (interval := interval_of_new_speakers(speakers)) is not None:
            held += interval[0] <= 0.1 <= interval[1]
        errors = sum(one.errors for one in speakers)
        result = word_error_rate(["a"] * 300, ["b"] * errors + ["a"] * (300 - errors))
        held_by_utterances += result.wer_low <= 0.1 <= result.wer_high
    assert held >= 182 and held_by_utterances <= 130


def test_the_interval_of_new_speakers_in_numbers() -> None:
    """Of 20 words 1, 2 and 3 are wrong: a standard error of 0.0289 about 0.1, and t of 2 degrees is 4.303."""
    factor = np.exp(4.303 * (0.05 / np.sqrt(3)) / 0.1)
    interval = interval_of_new_speakers(speakers_with(3, 1, 2))
    assert interval == pytest.approx((0.1 / factor, 0.1 * factor), rel=1e-3)
    all_of_one = interval_of_new_speakers(speakers_with(20, 0, 0))
    assert all_of_one == pytest.approx((1 / 3 / 73.9, 1.0), rel=1e-2)


@pytest.mark.parametrize("wrong", [(), (4,), (4, 5), (0, 0, 0), (4, 4, 4)])
def test_nothing_is_said_of_new_speakers_where_nothing_is_known_of_them(wrong: tuple[int, ...]) -> None:
    assert interval_of_new_speakers(speakers_with(*wrong)) is None


def test_no_utterances_and_no_reference_words() -> None:
    assert word_error_rate([], []).wer == 0.0
    assert word_error_rate([""], [""]).wer_high == 0.0
    assert word_error_rate([""], ["x"]).wer == float("inf")


def test_summary_is_one_line_with_everything() -> None:
    summary = word_error_rate(["a b", "c"], ["a", "c d"]).summary()
    assert summary.startswith("WER 66.67 % [95 % interval ")
    assert "(2 / 3 words, 1 ins, 1 del, 0 sub, 2 utterances)" in summary


def test_sentence_errors_are_utterances_with_any_error() -> None:
    result = word_error_rate(["a b", "c", "d", ""], ["a", "c", "x y z", ""])
    assert (result.sentence_errors, result.utterances, result.ser) == (2, 4, 0.5)
    assert 0 <= result.ser_low < 0.5 < result.ser_high <= 1
    assert result.sentence_summary().startswith("SER 50.00 % [95 % interval ")
    assert "(2 / 4 utterances have an error)" in result.sentence_summary()
    assert word_error_rate([], []).ser == 0.0


def test_alignment_has_every_word_once_and_the_errors_that_are_counted() -> None:
    references = ["a b c", "a b", "a", "", "", "a b c d"]
    hypotheses = ["a x c d", "", "a", "x y", "", "x y"]
    aligned = align_words(references, hypotheses)
    for reference, hypothesis, words in zip(references, hypotheses, aligned, strict=True):
        assert " ".join(word.reference for word in words if word.reference) == reference
        assert " ".join(word.hypothesis for word in words if word.hypothesis) == hypothesis
    kinds = ("insertion", "deletion", "substitution")
    counts = [[sum(word.error == kind for word in words) for kind in kinds] for words in aligned]
    assert counts == count_errors(references, hypotheses)[:, :3].tolist()
    assert align_words([], []) == []


def test_errors_of_groups_are_those_of_their_utterances_the_worst_first() -> None:
    references, hypotheses = ["a b", "c", "d e", ""], ["a b", "x", "d", "y"]
    groups = errors_by_group(["ann", "bob", "ann", "eve"], references, hypotheses)
    assert list(groups) == ["bob", "ann"]  # nothing is known of one who said no word
    assert groups["ann"] == word_error_rate(["a b", "d e"], ["a b", "d"])
    assert groups["bob"].wer == 1.0
