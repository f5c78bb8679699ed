"""Averages in int8 on any back-end; their equations are in tests/contract/test_compressed_averages.py."""

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

NEEDS_PEERS = True


def assert_near_full_precision(comm: Communicator, run: StrategyRun, in_full: str, most: float) -> None:
    """Assert that NUM_STEPS steps with momentum 0.9 end near what a strategy in full precision gives.

    One rank alone compresses nothing.

    Args:
        most: the largest difference of a parameter.
    """
    final = run.finish()
    other = StrategyRun(comm, in_full, make_replica(Sgd(momentum=0.9)))
    other.train(comm.rank)
    error = float((other.finish() - final).abs().max())
    assert error < most and (error > 0) == (comm.size > 1), f"beside {in_full}: differs by {error:g}"


def int8_averages_are_the_same_on_all_ranks(comm: Communicator) -> None:
    run = StrategyRun(comm, "model_averaging:period=3,compression=int8", make_replica(Sgd(momentum=0.9)))
    before = comm.sent_bytes
    for step in range(NUM_STEPS):
        run.step([make_batch(comm.rank, step)])
        if step % 3 == 2:
            assert_bitwise_equal_over_ranks(comm, run.parameters(), "int8 average")
    assert comm.sent_bytes == before, "parameters went by an allreduce"
    assert (run.strategy.peer_bytes > 0) == (comm.size > 1)
    assert_near_full_precision(comm, run, "model_averaging:period=3", 0.02)


def int8_averages_beside_training_resume_bitwise(comm: Communicator) -> None:
    for saved_after in (3, 4):
        assert_resumes(comm, "delayed_averaging:period=3,delay=2,compression=int8", saved_after)


CHECKS = (int8_averages_are_the_same_on_all_ranks, int8_averages_beside_training_resume_bitwise)
