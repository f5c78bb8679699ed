"""Estimate how far means of a few values differ by chance alone, by Student's t."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from statistics import fmean

#: Confidence level of intervals and of differences.
CONFIDENCE = 0.95


def missed_among(number: int) -> float:
    """Return the probability with which an interval may miss when the best of several settings is sought.

    Each of the other settings may by chance seem better than the truly best one; together they may do so in
    at most 5 % of cases.  With two or three settings each interval may miss in 5 % of cases, half of that to
    each side.

    Source: Bonferroni's bound for comparisons with the best (Hsu, Multiple Comparisons, 1996, section 4.2;
    recalled).

    Args:
        number: number of settings, including the best.

    Example:
        >>> missed_among(2), missed_among(11)
        (0.05, 0.01)
    """
    return round(1 - CONFIDENCE, 9) * min(1.0, 2 / max(number - 1, 1))


@lru_cache
def t_quantile(freedom: int, outside: float = 1 - CONFIDENCE) -> float:
    """Return the value that Student's t exceeds, to either side, with a given probability.

    Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3 and 26.7.4 (finite sums for the
    probability); recalled.

    Args:
        freedom: degrees of freedom, from 1.
        outside: the probability of both sides together, above 0 and below 1.

    Example:
        >>> round(t_quantile(2), 2), round(t_quantile(4), 2)
        (4.3, 2.78)
    """
    low, high = 0.0, 1.0
    while _outside(high, freedom) > outside:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _outside(middle, freedom) > outside else (low, middle)
    return high


def least_detectable(groups: Sequence[Sequence[float]]) -> float | None:
    """Return the least difference between means of groups that chance is unlikely to explain.

    Among equal groups, however many, the means of any two differ by as much in at most 5 % of cases.  The
    standard deviation is assumed to be common to all groups, as a single group has too few values to estimate
    it.

    Source: Tukey's honestly significant difference, with Bonferroni's bound in place of the studentised
    range (Miller, Simultaneous Statistical Inference, 1981, sections 2.1 and 2.2; recalled).

    Returns:
        The difference, in the unit of the values, for the two groups with the fewest values; None if no group
        has two values, or the values within every group are equal: then nothing is known about chance.

    Example:
        >>> round(least_detectable([[1.0, 3.0], [2.0, 4.0]]), 2)
        6.08
    """
    filled = [group for group in groups if group]
    freedom = sum(len(group) - 1 for group in filled)
    if freedom == 0 or len(filled) < 2:
        return None
    squares = sum((value - fmean(group)) ** 2 for group in filled for value in group)
    if squares == 0:  # e.g. values of a script that ignores the seed
        return None
    fewest = sorted(len(group) for group in filled)[:2]
    error = math.sqrt(squares / freedom * sum(1 / number for number in fewest))
    return t_quantile(freedom, (1 - CONFIDENCE) / math.comb(len(filled), 2)) * error


def _outside(value: float, freedom: int) -> float:
    """Return the probability that Student's t is further from 0 than a value."""
    angle = math.atan(value / math.sqrt(freedom))
    odd = freedom % 2
    term = math.cos(angle) if odd else 1.0
    total = term if freedom > 1 else 0.0
    for number in range(2 + odd, freedom - 1, 2):
        term *= math.cos(angle) ** 2 * (number - 1) / number
        total += term
    inside = 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total
    return 1 - inside
