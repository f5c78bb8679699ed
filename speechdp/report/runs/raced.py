"""The speed of a setting in a race: its ratio to the baseline in the same round, and its confidence."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from speechdp.chance import missed_among


@dataclass(frozen=True)
class RacedSpeed:
    """A setting's frames/s over the baseline's in the same round.

    Two settings are compared directly, round by round, not by whether their intervals overlap: disturbances
    of the baseline's turns cancel in the ratio of the two.

    Attributes:
        ratios: one per round, in the order of the rounds; the same number for all settings of a race.
        baseline: name of the setting whose speed is 1.
    """

    ratios: tuple[float, ...]
    baseline: str

    @property
    def ratio(self) -> float:
        """Centre of the rounds' ratios: the median of the geometric means of all pairs.

        If the logarithms are normally distributed, its standard error is 2 % above that of their mean; that
        of their median is 25 % above.  It withstands outliers in up to 29 % of the rounds.

        Source: Hodges and Lehmann (1963); Hollander, Wolfe and Chicken, Nonparametric Statistical Methods,
        section 3.2; recalled.

        Example:
            >>> RacedSpeed((1.0, 1.1, 1.2, 1.3, 1.4, 9.0), "gradient_averaging").ratio
            1.2489...
        """
        return float(np.median(self._pairs))

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 % confidence interval of the ratio; None: there were fewer than 6 rounds.

        It assumes that the logarithms of the ratios are distributed symmetrically, as they are if machine
        disturbances hit one turn as often as the other.  One outlier in 12 rounds, or three in 24 on the same
        side, do not move it.

        Source: Tukey's interval of Wilcoxon's signed-rank test (the same book, section 3.3; recalled).
        """
        rank = _signed_rank(len(self.ratios), missed_among(2))
        return None if rank == 0 else (float(self._pairs[rank - 1]), float(self._pairs[-rank]))

    @cached_property
    def _pairs(self) -> npt.NDArray[np.float64]:
        """Geometric means of all pairs of ratios, including each ratio with itself, ascending."""
        ratios = np.array(self.ratios)
        one, other = np.triu_indices(len(ratios))
        return np.sort(np.sqrt(ratios[one] * ratios[other]))

    def over(self, other: RacedSpeed) -> RacedSpeed:
        """Return the speed relative to another setting of the same race, without that setting's name."""
        return RacedSpeed(tuple(own / its for own, its in zip(self.ratios, other.ratios, strict=True)), "")

    def is_faster_than(self, other: RacedSpeed, among: int = 2) -> bool:
        """Return whether the race shows that it is faster: the ratio's interval lies above 1.

        Among more than three settings the interval is wider (`missed_among`).  If there are too few rounds
        for that width, it must be faster in all of them.

        Args:
            among: number of settings of which the fastest is sought, including these two.
        """
        ratio = self.over(other)
        rank = _signed_rank(len(ratio.ratios), missed_among(among))
        return rank > 0 and bool(ratio._pairs[rank - 1] > 1)

    def is_apart_from(self, other: RacedSpeed) -> bool:
        """Return whether the race shows which one is faster: the ratio's interval does not contain 1."""
        return self.is_faster_than(other) or other.is_faster_than(self)


@lru_cache
def _signed_rank(rounds: int, outside: float) -> int:
    """Return k such that the interval ends at the k-th pair mean from either end; 0: no interval.

    With few rounds the interval is the widest possible one, whatever `outside` is.

    For n differences distributed symmetrically around 0, the sum of the ranks of the negative ones is below k
    with a probability found by counting: the subsets of 1, 2, ..., n with such a sum, over 2^n.  The returned
    k is the largest for which this probability, for both ends together, is at most `outside`.

    Args:
        rounds: number of rounds, n.
        outside: largest probability that the interval misses the ratio.
    """
    if rounds < LEAST_ROUNDS:
        return 0
    if rounds > _MANY:
        mean, variance = rounds * (rounds + 1) / 4, rounds * (rounds + 1) * (2 * rounds + 1) / 24
        return math.floor(mean - NormalDist().inv_cdf(1 - outside / 2) * math.sqrt(variance))
    ways = [1]
    for rank in range(1, rounds + 1):
        without, with_it = ways + [0] * rank, [0] * rank + ways
        ways = [one + other for one, other in zip(without, with_it, strict=True)]
    missed, k = 0, 0
    while k < len(ways) // 2 and (missed := missed + 2 * ways[k]) <= outside * 2**rounds:
        k += 1
    return max(k, 1)


#: Number of rounds above which the rank sums are practically normally distributed.
_MANY = 60
#: Fewest rounds for an interval.
LEAST_ROUNDS = 6
