"""How far means of few values differ by chance."""

from __future__ import annotations

import random

import pytest

from speechdp.chance import least_detectable, missed_among, t_quantile


def test_quantiles_are_those_of_tables() -> None:
    table = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 10: 2.228, 24: 2.064, 30: 2.042}
    assert {freedom: round(t_quantile(freedom), 3) for freedom in table} == table
    assert (round(t_quantile(4, 0.01), 3), round(t_quantile(24, 0.001), 3)) == (4.604, 3.745)


def test_intervals_are_wider_where_more_than_three_are_compared() -> None:
    assert missed_among(2) == missed_among(3) == 0.05
    assert missed_among(5) == pytest.approx(0.025) and missed_among(12) == pytest.approx(0.1 / 11)


@pytest.mark.parametrize(("groups", "values"), [(2, 2), (2, 3), (4, 3), (12, 3)])
def test_of_groups_that_are_alike_any_two_are_apart_in_5_of_100_cases(groups: int, values: int) -> None:
    drawn, apart = random.Random(groups), 0
    for _ in range(1_000):
        found = [[drawn.gauss(-0.4, 0.02) for _ in range(values)] for _ in range(groups)]
        least = least_detectable(found)
        assert least is not None
        means = [sum(group) / values for group in found]
        apart += max(means) - min(means) > least
    assert 10 <= apart <= 71  # the level is 50, of which 3 standard deviations are 21


def test_single_values_say_nothing_of_chance() -> None:
    assert least_detectable([[1.0], [2.0]]) is None
    assert least_detectable([[1.0, 2.0]]) is None
    assert least_detectable([[1.0, 2.0], [], [1.5]]) == pytest.approx(12.706 * (0.5 * 1.5) ** 0.5, rel=1e-4)
    assert least_detectable([[10.0, 10.0], [10.5, 10.5]]) is None  # of a script that takes no seed, say
