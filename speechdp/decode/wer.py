"""Word error rate with its parts (jiwer) and a bootstrap confidence interval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jiwer
import numpy as np
from numpy.typing import NDArray

_LOW_PERCENT, _HIGH_PERCENT = 2.5, 97.5


@dataclass(frozen=True)
class WerResult:
    """Word errors of a set of utterances.

    Attributes:
        utterances: number of utterances.
        words: number of reference words.
        wer: (insertions + deletions + substitutions) / words, a fraction.
        wer_low, wer_high: 95 % bootstrap interval of `wer`.
        insertions, deletions, substitutions: counts.
    """

    utterances: int
    words: int
    wer: float
    wer_low: float
    wer_high: float
    insertions: int
    deletions: int
    substitutions: int

    def summary(self) -> str:
        """Say it in one line, as Kaldi's compute-wer does, with the interval."""
        errors = self.insertions + self.deletions + self.substitutions
        return (
            f"WER {100 * self.wer:.2f} % [95 % interval {100 * self.wer_low:.2f}, {100 * self.wer_high:.2f}] "
            f"({errors} / {self.words} words, {self.insertions} ins, {self.deletions} del, "
            f"{self.substitutions} sub, {self.utterances} utterances)"
        )


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


def word_error_rate(
    references: Sequence[str], hypotheses: Sequence[str], *, num_resamples: int = 1000, seed: int = 1
) -> WerResult:
    """Compute the WER and its 95 % interval over utterances.

    The interval is the percentile bootstrap: utterances are drawn with replacement, and errors and
    reference words are summed before dividing.  It covers the chance in the choice of utterances, not the
    chance in training.  Without reference words the WER is 0, or infinite if anything was inserted.

    Source: Bisani & Ney, "Bootstrap estimates for confidence intervals in ASR performance evaluation",
    ICASSP 2004, section 3.

    Args:
        references, hypotheses: one string of words an utterance, in the same order; both may be empty.
        num_resamples: bootstrap samples.
        seed: of the bootstrap.
    """
    counts = count_errors(references, hypotheses)
    insertions, deletions, substitutions, words = (int(n) for n in counts.sum(axis=0))
    errors = insertions + deletions + substitutions
    low, high = _interval(counts[:, :3].sum(axis=1), counts[:, 3], num_resamples, seed)
    wer = _ratio(errors, words)
    return WerResult(len(counts), words, wer, low, high, insertions, deletions, substitutions)


def _interval(
    errors: NDArray[np.int64], words: NDArray[np.int64], num_resamples: int, seed: int
) -> tuple[float, float]:
    num_utterances, total = len(errors), int(words.sum())
    if num_utterances == 0 or total == 0:
        wer = _ratio(int(errors.sum()), total)
        return wer, wer
    random = np.random.default_rng(seed)
    rates = np.empty(num_resamples)
    for i in range(num_resamples):
        drawn = random.integers(num_utterances, size=num_utterances)
        rates[i] = errors[drawn].sum() / max(int(words[drawn].sum()), 1)
    low, high = np.percentile(rates, [_LOW_PERCENT, _HIGH_PERCENT])
    return float(low), float(high)


def _ratio(errors: int, words: int) -> float:
    if words == 0:
        return 0.0 if errors == 0 else float("inf")
    return errors / words
