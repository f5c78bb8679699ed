"""How fast a setting is by a race: its ratio to the baseline of the same round, and how sure that is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from statistics import median

#: Of the intervals.
_CONFIDENCE = 0.95


@dataclass(frozen=True)
class RacedSpeed:
    """A setting's frames/s over the baseline's in the same round: the median over rounds.

    Attributes:
        ratio: the median.
        low, high: its 95 % interval; None where there were too few rounds for one.
        rounds: that counted.
        baseline: name of the setting that it is a ratio to.
    """

    ratio: float
    low: float | None
    high: float | None
    rounds: int
    baseline: str

    @classmethod
    def of(cls, ratios: Sequence[float], baseline: str) -> RacedSpeed:
        """Return the speed of ratios, one a round."""
        interval = median_interval(ratios)
        low, high = (None, None) if interval is None else interval
        return cls(median(ratios), low, high, len(ratios), baseline)

    def is_apart_from(self, other: RacedSpeed) -> bool:
        """Return whether the intervals do not overlap."""
        if self.low is None or self.high is None or other.low is None or other.high is None:
            return False
        return self.low > other.high or other.low > self.high


def median_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return an interval that holds the median with 95 % confidence, whatever the distribution.

    The k-th smallest and k-th largest of n independent values enclose the median unless fewer than k of them
    lie on one side of it: k is the largest for which that has a probability of 5 % at most.  Fewer than 6
    values have no such k.

    Source: the order statistics' interval of the sign test (Hollander, Wolfe and Chicken, Nonparametric
    Statistical Methods, section 3.6; recalled).

    Example::

        median_interval([1.1, 1.2, 1.3, 1.4, 1.5, 1.6])  # (1.1, 1.6)
    """
    n = len(values)
    outside, k = 0.0, 0
    while k < n // 2 and (outside := outside + 2 * comb(n, k) / 2**n) <= 1 - _CONFIDENCE:
        k += 1
    if k == 0:
        return None
    ordered = sorted(values)
    return ordered[k - 1], ordered[n - k]


#: Rounds from which on there is an interval.
LEAST_ROUNDS = 6
