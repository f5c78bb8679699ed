"""Waiting between tests: what is called how often."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from speechdp.comm.environment import wait_until_read
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


_SAYS_AND_WAITS = """
import os
from speechdp.comm.environment import wait_until_read
os.write(2, b"why")
wait_until_read(3600)
os.write(1, b"heard")
"""


def test_a_rank_waits_until_its_launcher_has_read_what_it_said() -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", _SAYS_AND_WAITS], stdout=pipe, stderr=pipe) as rank:
        assert rank.stdout is not None and rank.stderr is not None
        with pytest.raises(subprocess.TimeoutExpired):
            rank.wait(5.0)  # in which it has come to wait, mostly
        assert os.read(rank.stderr.fileno(), 100) == b"why"
        assert rank.stdout.read() == b"heard"
    assert rank.returncode == 0


@pytest.mark.parametrize(("has_reader", "waited_s"), [(True, 1.0), (False, 0.0)])
def test_a_launcher_that_reads_nothing_is_not_waited_for(
    sleeps: list[float], has_reader: bool, waited_s: float
) -> None:
    reader, writer = os.pipe()
    stderr = os.dup(2)
    try:
        os.write(writer, b"why")
        if not has_reader:
            os.close(reader)
        os.dup2(writer, 2)
        wait_until_read(within_s=1.0)
    finally:
        os.dup2(stderr, 2)
        for descriptor in (*[reader] * has_reader, writer, stderr):
            os.close(descriptor)
    assert sum(sleeps) == pytest.approx(waited_s, abs=0.01)
