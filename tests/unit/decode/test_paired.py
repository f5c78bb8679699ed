"""Whether models that heard the same utterances differ in their word errors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from speechdp.decode.paired import UtteranceErrors, errors_text, rate_difference


def models(words: Sequence[int], *errors: Sequence[int]) -> UtteranceErrors:
    return UtteranceErrors(tuple(f"u{i}" for i in range(len(words))), np.array(words), np.array(errors))


def drawn_models(
    random: np.random.Generator, num_seeds: int, spread: float, hard: Sequence[float]
) -> UtteranceErrors:
    """Return models whose words are wrong by chance: by the utterance, and by how good the seed is."""
    words = [2 + place % 9 for place in range(len(hard))]
    odds = np.log(np.array(hard) / (1 - np.array(hard)))
    shares = [1 / (1 + np.exp(-odds - spread * random.standard_normal())) for _ in range(num_seeds)]
    return models(words, *(random.binomial(words, share) for share in shares))


def test_what_is_written_is_read() -> None:
    counts = np.array([[1, 0, 2, 5], [0, 0, 0, 3]])
    text = errors_text(["a-1", "b"], counts)
    assert text == "a-1 1 0 2 5\nb 0 0 0 3\n"
    found = UtteranceErrors.parse(text)
    assert found.names == ("a-1", "b")
    assert found.words.tolist() == [5, 3] and found.errors.tolist() == [[3, 0]]
    assert UtteranceErrors.parse("").names == ()


@pytest.mark.parametrize(
    "text",
    ["a 1 2 3\n", "a 1 2 x 4\n", "a 1 -2 3 4\n", "a 0 0 0 1\na 0 0 0 1\n", "\n", f"a 0 0 0 {10**20}\n"],
)
def test_what_is_no_count_of_errors_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        UtteranceErrors.parse(text)


def test_seeds_are_joined_where_they_heard_the_same() -> None:
    one, other = models([5, 3], [1, 0]), models([5, 3], [2, 1])
    joined = UtteranceErrors.join([one, other])
    assert joined is not None and joined.errors.tolist() == [[1, 0], [2, 1]]
    assert joined.rates.tolist() == [1 / 8, 3 / 8]
    assert UtteranceErrors.join([one, None]) is None
    assert UtteranceErrors.join([one, models([5, 4], [2, 1])]) is None
    assert UtteranceErrors.join([]) is None


def test_the_interval_is_that_of_matched_pairs() -> None:
    random = np.random.default_rng(3)
    words = random.integers(3, 15, size=400)
    one, other = random.binomial(words, 0.2), random.binomial(words, 0.16)
    found = rate_difference(models(words, one), models(words, other))
    assert found is not None
    # Gillick & Cox: the mean of the utterances' differences, here a word, is normal with their variance.
    total, more = words.sum(), one - other
    mean = more.sum() / total
    deviation = np.sqrt(((more - mean * words) ** 2).sum()) / total
    assert found.mean == pytest.approx(mean)
    assert (found.low, found.high) == pytest.approx(
        (mean - 1.96 * deviation, mean + 1.96 * deviation), abs=0.002
    )
    # Of two single models nobody knows what their seeds did.
    assert found.low > 0 and not found.is_sure


def test_what_is_hard_for_both_cancels_out() -> None:
    errors = [9, 0, 0, 8, 0, 7, 0, 0, 9, 0] * 3
    one, other = models([10] * 30, [number + 1 for number in errors]), models([10] * 30, errors)
    assert rate_difference(one, other) == pytest.approx((0.1, 0.1, 0.1, False))
    assert rate_difference(other, one) == pytest.approx((-0.1, -0.1, -0.1, False))
    seeds = models([10] * 2, [0, 1], [3, 4])
    assert rate_difference(seeds, seeds) == (0, 0, 0, True)
    assert rate_difference(one, one) == pytest.approx((0, 0, 0, False))


def test_seeds_widen_the_interval() -> None:
    words = [10] * 100
    close, apart = ([[1] * 100] * 3, [[0] * 100, [1] * 100, [2] * 100])
    other = models(words, *[[0] * 100] * 3)
    sure, unsure = (rate_difference(models(words, *errors), other) for errors in (close, apart))
    assert sure is not None and unsure is not None
    assert sure == pytest.approx((0.1, 0.1, 0.1, True)) and sure.is_sure
    # The t-test's: 0.1 +- 2.776 * sqrt((0.1^2 + 0^2) / 2) * sqrt(2 / 3), of 4 degrees of freedom.
    assert (unsure.low, unsure.high) == pytest.approx((0.1 - 0.1603, 0.1 + 0.1603), abs=0.015)
    assert not unsure.is_sure
    spread = models(words, *apart)
    assert rate_difference(spread, spread) == (0, 0, 0, True)


def test_other_utterances_are_not_compared() -> None:
    one = models([5, 3], [1, 0])
    assert rate_difference(one, models([5, 3, 2], [1, 0, 0])) is None
    assert rate_difference(one, models([5, 4], [1, 0])) is None
    assert rate_difference(models([0, 0], [1, 0]), models([0, 0], [0, 0])) is None


@pytest.mark.parametrize(("num_seeds", "spread"), [(1, 0.0), (3, 0.3)])
def test_models_that_are_as_good_are_seldom_told_apart(num_seeds: int, spread: float) -> None:
    random = np.random.default_rng(0)
    hard = random.beta(1, 8, size=120).clip(0.01, 0.9).tolist()
    found = [
        rate_difference(*(drawn_models(random, num_seeds, spread, hard) for _ in range(2)))
        for _ in range(120)
    ]
    # 2.5 % are expected; 9 of 120 and more would be so once in 500 times.
    assert sum(difference is not None and difference.low > 0 for difference in found) < 9


def test_the_lowest_of_many_is_seldom_called_worse() -> None:
    """Twelve that are as good as one another, with three seeds: by pairs some would be in 40 of 100 cases."""
    random, some = np.random.default_rng(0), 0
    hard = random.beta(1, 8, size=100).clip(0.01, 0.9).tolist()
    for _ in range(60):
        found = [drawn_models(random, 3, 0.1, hard) for _ in range(12)]
        lowest = min(found, key=lambda one: float(one.rates.mean()))
        above = [rate_difference(one, lowest, among=12) for one in found if one is not lowest]
        some += any(difference is not None and difference.is_sure for difference in above)
    assert some <= 12
