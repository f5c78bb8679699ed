"""Waiting between tests: what is called how often."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from speechdp.comm.waiting import sleep_until


@pytest.fixture
def sleeps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Replace the clock by one that moves when somebody sleeps, and list the sleeps."""
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setattr(time, "monotonic", lambda: sum(slept) + 1e-3 * slept.count(0))
    return slept


def _true_after(calls: int) -> Callable[[], bool]:
    answers = iter([False] * calls + [True])
    return lambda: next(answers)


def test_what_is_there_already_costs_no_sleep(sleeps: list[float]) -> None:
    sleep_until(_true_after(3))
    assert sleeps == []


def test_sleeps_double_up_to_the_longest(sleeps: list[float]) -> None:
    sleep_until(_true_after(16), longest_sleep_s=1e-4)
    assert sleeps == pytest.approx([20e-6, 40e-6, 80e-6, 100e-6, 100e-6, 100e-6])


def test_while_it_may_be_busy_it_only_yields(sleeps: list[float]) -> None:
    sleep_until(_true_after(16), busy_s=3e-3)
    assert sleeps == pytest.approx([0, 0, 0, 20e-6, 40e-6, 80e-6])
