"""Gradients as factors of low rank on any back-end; equations are in tests/contract/test_low_rank.py."""

from __future__ import annotations

from speechdp.comm.base import Communicator
from speechdp.testing import (
    NUM_STEPS,
    Sgd,
    StrategyRun,
    assert_bitwise_equal_over_ranks,
    assert_resumes,
    make_batch,
    make_replica,
)
from tests.helpers.strategy_checks.compressed import assert_near_full_precision

_STRATEGY = "gradient_averaging:compression=powersgd,rank=1"


def factors_leave_the_same_on_all_ranks(comm: Communicator) -> None:
    run = StrategyRun(comm, _STRATEGY, make_replica(Sgd(momentum=0.9)))
    for step in range(NUM_STEPS):
        run.step([make_batch(comm.rank, step)])
        assert_bitwise_equal_over_ranks(comm, run.parameters(), "an update by factors")
    assert_near_full_precision(comm, run, "gradient_averaging", 0.5)


def factors_resume_bitwise(comm: Communicator) -> None:
    assert_resumes(comm, _STRATEGY, 4)


CHECKS = (factors_leave_the_same_on_all_ranks, factors_resume_bitwise)
