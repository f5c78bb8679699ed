"""Compute word and sentence error rates (jiwer) and their bootstrap confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

import jiwer
import numpy as np
from numpy.typing import NDArray

from speechdp.chance import missed_among, t_quantile
from speechdp.decode.paired import INTERVAL, drawn_rates

#: Number of bootstrap samples for an interval, and the seed.
_RESAMPLES, _SEED = 1000, 1
#: Two speakers say nothing about others: the factor of Student's t is 12.7.
_FEWEST_SPEAKERS = 3
ErrorKind = Literal["substitution", "deletion", "insertion"]


@dataclass(frozen=True)
class WerResult:
    """Word errors of a set of utterances.

    Attributes:
        utterances: number of utterances.
        words: number of reference words.
        wer: (insertions + deletions + substitutions) / words, a fraction.
        wer_low, wer_high: 95 % bootstrap interval of `wer`.
        insertions, deletions, substitutions: counts.
        sentence_errors: utterances with at least one error.
        ser: sentence_errors / utterances, a fraction.
        ser_low, ser_high: 95 % bootstrap interval of `ser`.
    """

    utterances: int
    words: int
    wer: float
    wer_low: float
    wer_high: float
    insertions: int
    deletions: int
    substitutions: int
    sentence_errors: int
    ser: float
    ser_low: float
    ser_high: float

    @property
    def errors(self) -> int:
        """Word errors of all kinds."""
        return self.insertions + self.deletions + self.substitutions

    def summary(self) -> str:
        """Return one line in the style of Kaldi's compute-wer, with the interval."""
        return (
            f"WER {100 * self.wer:.2f} % [95 % interval {100 * self.wer_low:.2f}, {100 * self.wer_high:.2f}] "
            f"({self.errors} / {self.words} words, {self.insertions} ins, {self.deletions} del, "
            f"{self.substitutions} sub, {self.utterances} utterances)"
        )

    def sentence_summary(self) -> str:
        """Return one line on how many utterances have an error."""
        return (
            f"SER {100 * self.ser:.2f} % [95 % interval {100 * self.ser_low:.2f}, {100 * self.ser_high:.2f}] "
            f"({self.sentence_errors} / {self.utterances} utterances have an error)"
        )


@dataclass(frozen=True)
class AlignedWord:
    """A reference word and the word recognised in its place; "" where there is none."""

    reference: str
    hypothesis: str

    @property
    def error(self) -> ErrorKind | None:
        """The kind of error; None if the word is correct."""
        if self.reference == self.hypothesis:
            return None
        if not self.reference:
            return "insertion"
        return "substitution" if self.hypothesis else "deletion"


def align_words(references: Sequence[str], hypotheses: Sequence[str]) -> list[tuple[AlignedWord, ...]]:
    """Align each hypothesis with its reference, as `count_errors` does.

    Returns:
        The words of each utterance, in order.
    """
    assert len(references) == len(hypotheses)
    if not references:
        return []
    output = jiwer.process_words(list(references), list(hypotheses))
    aligned = []
    for reference, hypothesis, chunks in zip(
        output.references, output.hypotheses, output.alignments, strict=True
    ):
        pairs = (
            AlignedWord(*pair)
            for chunk in chunks
            for pair in zip_longest(
                reference[chunk.ref_start_idx : chunk.ref_end_idx],
                hypothesis[chunk.hyp_start_idx : chunk.hyp_end_idx],
                fillvalue="",
            )
        )
        aligned.append(tuple(pair for pair in pairs if pair.reference or pair.hypothesis))
    return aligned


def count_errors(references: Sequence[str], hypotheses: Sequence[str]) -> NDArray[np.int64]:
    """Align each hypothesis with its reference and count the errors.

    Returns:
        Insertions, deletions, substitutions and reference words of each utterance, (U, 4).
    """
    assert len(references) == len(hypotheses)
    counts = np.zeros((len(references), 4), dtype=np.int64)
    if not references:
        return counts
    output = jiwer.process_words(list(references), list(hypotheses))
    columns = {"insert": 0, "delete": 1, "substitute": 2}
    for row, reference, chunks in zip(counts, output.references, output.alignments, strict=True):
        row[3] = len([word for word in reference if word])
        for chunk in chunks:
            if chunk.type in columns:
                length = max(chunk.ref_end_idx - chunk.ref_start_idx, chunk.hyp_end_idx - chunk.hyp_start_idx)
                row[columns[chunk.type]] += length
    return counts


def oracle_of(reference: str, candidates: Sequence[str]) -> str:
    """Return the candidate with the fewest word errors, the first of equals; "" without candidates."""
    if not candidates:
        return ""
    errors = count_errors([reference] * len(candidates), candidates)[:, :3].sum(axis=1)
    return candidates[int(errors.argmin())]


def word_error_rate(references: Sequence[str], hypotheses: Sequence[str]) -> WerResult:
    """Compute word and sentence error rate and their 95 % intervals over utterances.

    An interval is the percentile bootstrap: utterances are drawn with replacement, and errors and reference
    words are summed before dividing.  It covers the chance in the choice of utterances, but not the chance in
    training, and not other speakers (`interval_of_new_speakers`).  If the rate is the same in each utterance,
    e.g. 0 or 1, all draws would be alike and suggest that there is no chance.  Then the interval is that of
    the proportion of such utterances; the others may have any rate up to 1, or to the WER if that is higher.
    A single utterance that is partly wrong says nothing: the interval is 0 to 1, or to the WER if that is
    higher.  Without reference words the WER is 0, or infinite if anything was inserted.

    Source: Bisani & Ney, "Bootstrap estimates for confidence intervals in ASR performance evaluation",
    ICASSP 2004, section 3; Clopper & Pearson, Biometrika 26, 1934 (recalled).

    Args:
        references, hypotheses: one string of words per utterance, in the same order; strings may be empty.
    """
    return _result(count_errors(references, hypotheses))


def errors_by_group(
    groups: Sequence[str], references: Sequence[str], hypotheses: Sequence[str]
) -> Mapping[str, WerResult]:
    """Compute the error rates of each group of utterances that has reference words, worst first.

    Args:
        groups: the group of each utterance, e.g. its speaker.
        references, hypotheses: as `word_error_rate`.
    """
    counts, names = count_errors(references, hypotheses), np.array(groups, dtype=object)
    results = {name: _result(counts[names == name]) for name in sorted(set(groups))}
    spoken = {name: result for name, result in results.items() if result.words}
    return dict(sorted(spoken.items(), key=lambda item: -item[1].wer))


def interval_of_new_speakers(speakers: Iterable[WerResult]) -> tuple[float, float] | None:
    """Return the 95 % interval of the WER for speakers like these, which are a sample of them.

    The error rates of speakers differ by more than the choice of their sentences explains, so the interval
    of `word_error_rate` is too narrow for other speakers.  Here each speaker is one observation: the variance
    of a ratio of sums over clusters, and Student's t on the logarithm of the rate.  A bootstrap that draws
    whole speakers gives intervals that are too narrow with few speakers: for 5 speakers whose rates have a
    standard deviation of 0.8 of their mean, it covers the rate in 81 % of cases, this interval in 95 %.

    Source: Cochran, Sampling Techniques, 1977, section 6.4 (recalled).

    Args:
        speakers: errors of each speaker, from all of their decoded utterances.

    Returns:
        Fractions, the upper one at most 1, or the WER if that is higher; None: fewer than 3 speakers, no
        errors, or the same rate for all of them, which says nothing about chance.

    Example:
        >>> one, two, three = (
        ...     word_error_rate(["a b c d"] * 5, ["a b c d"] * (5 - wrong) + ["a b c x"] * wrong)
        ...     for wrong in (1, 2, 3)
        ... )
        >>> [round(rate, 3) for rate in interval_of_new_speakers([one, two, three])]
        [0.029, 0.346]
    """
    counts = np.array([(one.errors, one.words) for one in speakers], dtype=np.int64).reshape(-1, 2)
    errors, words = (int(n) for n in counts.sum(axis=0))
    apart = counts[:, 0] * words - errors * counts[:, 1]  # scaled by all words, so that equality is exact
    if len(counts) < _FEWEST_SPEAKERS or not errors or not apart.any():
        return None
    spread = math.sqrt(len(counts) / (len(counts) - 1)) * float(np.linalg.norm(apart)) / (errors * words)
    factor, wer = math.exp(t_quantile(len(counts) - 1) * spread), errors / words
    return wer / factor, min(wer * factor, max(1.0, wer))


def _result(counts: NDArray[np.int64]) -> WerResult:
    """Sum up the errors of utterances, (U, 4) as returned by `count_errors`."""
    insertions, deletions, substitutions, words = (int(n) for n in counts.sum(axis=0))
    errors = counts[:, :3].sum(axis=1)
    wrong = (errors > 0).astype(np.int64)
    low, high = _rate_interval(errors, counts[:, 3])
    ser_low, ser_high = _rate_interval(wrong, np.ones_like(wrong))
    return WerResult(
        utterances=len(counts),
        words=words,
        wer=_ratio(int(errors.sum()), words),
        wer_low=low,
        wer_high=high,
        insertions=insertions,
        deletions=deletions,
        substitutions=substitutions,
        sentence_errors=int(wrong.sum()),
        ser=_ratio(int(wrong.sum()), len(counts)),
        ser_low=ser_low,
        ser_high=ser_high,
    )


def _rate_interval(errors: NDArray[np.int64], words: NDArray[np.int64]) -> tuple[float, float]:
    total = int(words.sum())
    if total == 0:
        wer = _ratio(int(errors.sum()), total)
        return wer, wer
    rate = int(errors.sum()) / total
    most = max(1.0, rate)
    if len(errors) == 1 and 0 < rate != 1:
        return 0.0, most
    if (errors * total == errors.sum() * words).all():
        rarest = (missed_among(2) / 2) ** (1 / len(errors))
        return rarest * rate, most - rarest * (most - rate)
    return ratio_interval(errors, words)


def ratio_interval(
    values: NDArray[np.integer | np.floating], weights: NDArray[np.int64]
) -> tuple[float, float]:
    """Return the 95 % bootstrap interval over utterances of the sum of values over the sum of weights.

    Args:
        values: of each utterance, e.g. errors.  (U,)
        weights: of each utterance, e.g. words; with ones it is the interval of the mean of `values`.  (U,)
    """
    ratios = drawn_rates(values, weights, _RESAMPLES, np.random.default_rng(_SEED))
    low, high = np.percentile(ratios, INTERVAL)
    return float(low), float(high)


def _ratio(errors: int, words: int) -> float:
    if words == 0:
        return 0.0 if errors == 0 else float("inf")
    return errors / words
