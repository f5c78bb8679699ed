"""Delays at random in every exchange, message and operation on files change nothing: some of many."""

from __future__ import annotations

from speechdp.strategies.registry import strategy_names
from tests.faults.schedules import STRATEGIES, fuzz_schedules

#: For some 20 s of a core; benchmarks/io_faults.py runs thousands.
NUM_SCHEDULES = 36


def test_every_strategy_ends_the_same_however_late_anything_is() -> None:
    assert {strategy.partition(":")[0] for strategy in STRATEGIES} == set(strategy_names())
    assert fuzz_schedules(NUM_SCHEDULES, seed=0) == (NUM_SCHEDULES, [])
