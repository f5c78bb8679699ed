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
    """A setting's frames/s over the baseline's in the same round.

    Two settings are compared directly, round by round, not by whether their intervals overlap: what disturbed
    the baseline's turns cancels in the ratio of the two.

    Attributes:
        ratios: one a round, in the order of the rounds; as many for all settings of a race.
        baseline: name of the setting that they are ratios to.
    """

    ratios: tuple[float, ...]
    baseline: str

    @property
    def ratio(self) -> float:
        """Median over the rounds."""
        return median(self.ratios)

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 % interval of the median; None where there were too few rounds for one."""
        return median_interval(self.ratios)

    def over(self, other: RacedSpeed) -> RacedSpeed:
        """Return it as ratios to another setting of the same race, of whose name nothing is known here."""
        return RacedSpeed(tuple(own / its for own, its in zip(self.ratios, other.ratios, strict=True)), "")

    def is_faster_than(self, other: RacedSpeed) -> bool:
        """Return whether the race tells that it is faster: the ratio's interval lies above 1."""
        interval = self.over(other).interval
        return interval is not None and interval[0] > 1

    def is_apart_from(self, other: RacedSpeed) -> bool:
        """Return whether the race tells which of the two is faster: the ratio's interval does not hold 1."""
        return self.is_faster_than(other) or other.is_faster_than(self)


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
