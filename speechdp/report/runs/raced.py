"""How fast a setting is by a race: its ratio to the baseline of the same round, and how sure that is."""

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
        """What the rounds' ratios scatter around: the median of the geometric means of all pairs of them.

        Where logarithms of ratios scatter normally, its standard error is 2 % above that of their mean, while
        that of their median is 25 % above.  Up to 29 % of the rounds may be far off before it goes with them.

        Source: Hodges and Lehmann (1963); Hollander, Wolfe and Chicken, Nonparametric Statistical Methods,
        section 3.2; recalled.

        Example:
            >>> RacedSpeed((1.0, 1.1, 1.2, 1.3, 1.4, 9.0), "gradient_averaging").ratio
            1.2489...
        """
        return float(np.median(self._pairs))

    @property
    def interval(self) -> tuple[float, float] | None:
        """Interval that holds the ratio with 95 % confidence; None: there were fewer than 6 rounds.

        Logarithms of ratios are taken to scatter alike to both sides, as they do where what disturbs the
        machine hits one turn as often as the other.  One round of 12, or three of 24, that are far off to the
        same side leave it where it is.

        Source: Tukey's interval of Wilcoxon's signed-rank test (the same book, section 3.3; recalled).
        """
        rank = _signed_rank(len(self.ratios), missed_among(2))
        return None if rank == 0 else (float(self._pairs[rank - 1]), float(self._pairs[-rank]))

    @cached_property
    def _pairs(self) -> npt.NDArray[np.float64]:
        """Geometric means of all pairs of ratios, each with itself among them, by size."""
        ratios = np.array(self.ratios)
        one, other = np.triu_indices(len(ratios))
        return np.sort(np.sqrt(ratios[one] * ratios[other]))

    def over(self, other: RacedSpeed) -> RacedSpeed:
        """Return it as ratios to another setting of the same race, of whose name nothing is known here."""
        return RacedSpeed(tuple(own / its for own, its in zip(self.ratios, other.ratios, strict=True)), "")

    def is_faster_than(self, other: RacedSpeed, among: int = 2) -> bool:
        """Return whether the race tells that it is faster: the ratio's interval lies above 1.

        Of more than three settings that interval is wider (`missed_among`).  Where rounds are too few for
        that, all of them must say the same.

        Args:
            among: number of settings of which the fastest is sought, these two among them.
        """
        ratio = self.over(other)
        rank = _signed_rank(len(ratio.ratios), missed_among(among))
        return rank > 0 and bool(ratio._pairs[rank - 1] > 1)

    def is_apart_from(self, other: RacedSpeed) -> bool:
        """Return whether the race tells which of the two is faster: the ratio's interval does not hold 1."""
        return self.is_faster_than(other) or other.is_faster_than(self)


@lru_cache
def _signed_rank(rounds: int, outside: float) -> int:
    """Return which of the means of pairs, from both ends, are those of the interval; 0: there is none.

    With few rounds the interval is the widest that there is, however rarely it is to be missed.

    Of n differences that scatter around 0, the ranks of the negative ones add up to less than k with a
    probability that is counted here: the ways in which some of 1, 2, ..., n make a sum, of 2^n.  It is the
    largest k for which that, for both ends together, has a probability of `outside` at most.
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


#: Rounds of more than which the sums of ranks are as good as normally distributed.
_MANY = 60
#: Rounds from which on there is an interval.
LEAST_ROUNDS = 6
