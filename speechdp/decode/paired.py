"""Read and write word errors by utterance, and test whether models differ on the same utterances."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from speechdp.chance import missed_among

Counts = NDArray[np.int64]

#: Percentiles that bound a 95 % interval.
INTERVAL = (50 * missed_among(2), 100 - 50 * missed_among(2))
_NUM_RESAMPLES = 2000
_TIMES_T = 20
_DRAWN_AT_ONCE = 2**20  # numbers: 8 MiB, however many utterances there are
_MOST = 2**31  # no utterance has as many words or errors


class Difference(NamedTuple):
    """The difference of two word error rates, as a fraction, and its 95 % interval.

    Attributes:
        has_seeds: whether the interval includes the variance of training; that of two single models does not.
    """

    mean: float
    low: float
    high: float
    has_seeds: bool

    @property
    def is_sure(self) -> bool:
        """Whether chance alone is an unlikely reason for the first rate to be higher."""
        return self.has_seeds and self.low > 0


class OtherDecodingError(ValueError):
    """A file of errors by utterance belongs to a different decoding than the record that names it."""


@dataclass(frozen=True, eq=False)
class UtteranceErrors:
    """Word errors of models in the utterances of one split.

    Attributes:
        names: ids of the utterances, in order.  (U)
        words: reference words of each.  (U,)
        errors: word errors of each model in each utterance: one model, or one for each seed.  (M, U)
    """

    names: tuple[str, ...]
    words: Counts
    errors: Counts

    @classmethod
    def parse(cls, text: str) -> UtteranceErrors:
        """Parse the result of `errors_text`.

        Raises:
            ValueError: the text is something else.
        """
        names: list[str] = []
        counts: list[tuple[int, ...]] = []
        for line in text.splitlines():
            name, *numbers = line.split(" ")
            insertions, deletions, substitutions, words = map(int, numbers)
            names.append(name)
            counts.append((insertions, deletions, substitutions, words))
        is_count = all(0 <= number < _MOST for row in counts for number in row)
        if not is_count or len(set(names)) < len(names):
            raise ValueError("no counts of different utterances")
        table = np.array(counts, dtype=np.int64).reshape(-1, 4)
        return cls(tuple(names), table[:, 3], table[None, :, :3].sum(axis=2))

    @classmethod
    def read(cls, run_dir: Path, record: Mapping[str, Any]) -> UtteranceErrors | None:
        """Read the errors that belong to a decoding of a run; None for older decodings, which have none.

        Args:
            run_dir: the run.
            record: contents of its RUN/wer-NAME.json.

        Raises:
            OSError: the file cannot be read.
            OtherDecodingError: the file belongs to another decoding.
            ValueError: the file is damaged.
        """
        name = record.get("errors")
        if not isinstance(name, str):
            return None
        # Use only the file name: it stays within the run's folder, whatever the record says.
        path = run_dir / "hypotheses" / Path(name).name
        found = cls.parse(path.read_text(encoding="utf-8"))
        recorded = [record.get(kind, 0) for kind in ("insertions", "deletions", "substitutions", "words")]
        counts = [one if isinstance(one, int | float) else 0 for one in recorded]
        if (sum(counts[:3]), counts[3]) != (found.errors.sum(), found.words.sum()):
            raise OtherDecodingError(path)
        return found

    @classmethod
    def join(cls, models: Sequence[UtteranceErrors | None]) -> UtteranceErrors | None:
        """Join the errors of several models on the same utterances; None if those of one are unknown."""
        known = [model for model in models if model is not None]
        if not known or len(known) < len(models) or not all(known[0].is_beside(model) for model in known):
            return None
        return cls(known[0].names, known[0].words, np.concatenate([model.errors for model in known]))

    def is_beside(self, other: UtteranceErrors) -> bool:
        """Return whether both are of the same utterances with the same reference words."""
        return self.names == other.names and np.array_equal(self.words, other.words)

    @property
    def rates(self) -> NDArray[np.float64]:
        """Word error rate of each model, 0 to 1.  (M,)"""
        rates: NDArray[np.float64] = self.errors.sum(axis=1) / max(int(self.words.sum()), 1)
        return rates


def errors_text(names: Sequence[str], counts: Counts) -> str:
    """Return the text of errors by utterance, one line each: ID INSERTIONS DELETIONS SUBSTITUTIONS WORDS.

    Args:
        names: ids of the utterances, in order.
        counts: (U, 4) as returned by `count_errors`.
    """
    return "".join(f"{name} {' '.join(map(str, row))}\n" for name, row in zip(names, counts, strict=True))


@lru_cache(maxsize=512)
def rate_difference(one: UtteranceErrors, other: UtteranceErrors, among: int = 2) -> Difference | None:
    """Return the mean word error rate of some models minus that of others, on the same utterances.

    The interval is a percentile bootstrap over utterances.  Each utterance is drawn for all models at once,
    so that what is hard for all of them cancels out.  With several seeds it also includes the variance of
    training: a draw from Student's t distribution is added to each draw of utterances, with the standard
    error of the difference of the means (from the seeds' common standard deviation, as in the two-sample
    t-test).  With a single model on both sides the variance of training is left out.  Models minus themselves
    are 0, without variance.

    Args:
        one, other: errors on the same utterances.
        among: number of settings among which the lowest rate is sought; with more than three the interval is
            wider (`missed_among`).

    Source: Bisani & Ney, "Bootstrap estimates for confidence intervals in ASR performance evaluation", ICASSP
    2004, section 4.  Its draws are the matched pairs of Gillick & Cox, ICASSP 1989.

    Returns:
        None if the utterances differ or have no reference words.

    Example:
        >>> def model(*errors):
        ...     return UtteranceErrors(tuple("abcd"), np.array([5, 5, 5, 5]), np.array([errors]))
        >>> rate_difference(model(2, 1, 3, 2), model(1, 0, 2, 1))
        Difference(mean=0.2, low=0.2, high=0.2, has_seeds=False)
    """
    total = int(one.words.sum())
    if total == 0 or not one.is_beside(other):
        return None
    if one is other:  # no chance makes it differ from itself
        return Difference(0.0, 0.0, 0.0, len(one.errors) > 1)
    more: NDArray[np.float64] = one.errors.mean(axis=0) - other.errors.mean(axis=0)
    random = np.random.default_rng(1)
    draws = drawn_rates(more, one.words, _NUM_RESAMPLES, random)
    freedom = len(one.errors) + len(other.errors) - 2
    if freedom > 0:
        squares = sum(float(((side.rates - side.rates.mean()) ** 2).sum()) for side in (one, other))
        scale = math.sqrt(squares / freedom * (1 / len(one.errors) + 1 / len(other.errors)))
        # The tails of t with few degrees of freedom need more draws than utterances do.
        draws = np.repeat(draws, _TIMES_T)
        draws += scale * random.standard_t(freedom, size=len(draws))
    end = 50 * missed_among(among)
    low, high = np.percentile(draws, (end, 100 - end))
    return Difference(float(more.sum() / total), float(low), float(high), freedom > 0)


def drawn_rates(
    errors: NDArray[np.integer | np.floating], words: Counts, num_resamples: int, random: np.random.Generator
) -> NDArray[np.float64]:
    """Return the error rates of several bootstrap draws of utterances with replacement.  (R,)

    Args:
        errors: errors of each utterance.  (U,)
        words: reference words of each.  (U,)
        num_resamples: R.
        random: the generator.
    """
    num_utterances = len(errors)
    step = max(_DRAWN_AT_ONCE // num_utterances, 1)
    rates = []
    for start in range(0, num_resamples, step):
        drawn = random.integers(num_utterances, size=(min(step, num_resamples - start), num_utterances))
        rates.append(errors[drawn].sum(axis=1) / np.maximum(words[drawn].sum(axis=1), 1))
    return np.concatenate(rates)
