"""Identities of dpsgd: its equation with every topology, W written down by hand, simulated in one process."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable

import torch
from torch import Tensor

from speechdp.comm.base import Communicator
from speechdp.strategies.mechanisms.topology import random_matching
from speechdp.testing import (
    NUM_STEPS,
    Sgd,
    StrategyRun,
    assert_begins_with_gradient_averaging,
    assert_bitwise_equal_over_ranks,
    assert_close,
    make_batch,
    make_replica,
)
from tests.helpers.simulated_ranks import SimulatedRanks, simulated_once

NEEDS_PEERS = True

TOPOLOGIES = ("ring", "random", "exponential", "complete")
_SEED = 5


def mixing_matrix(topology: str, size: int, number: int) -> Tensor:
    """Return W of exchange `number`."""
    eye = torch.eye(size, dtype=torch.float64)
    if topology == "complete" or (topology == "ring" and size < 3):
        return torch.full_like(eye, 1 / size)
    if topology == "ring":
        return (eye + eye.roll(1, 0) + eye.roll(-1, 0)) / 3
    if topology == "exponential":
        offset = {1: [0], 2: [1], 3: [1, 2], 4: [1, 2]}[size]
        return (eye + eye.roll(offset[number % len(offset)], 0)) / 2
    partners = [p if p >= 0 else r for r, p in enumerate(random_matching(size, _SEED, number))]
    return (eye + eye[partners]) / 2


def simulate(
    topology: str,
    comm: Communicator,
    *,
    period: int = 1,
    has_frames: Callable[[int, int], bool] | None = None,
) -> Tensor:
    """Return the parameters of all ranks after a run, a row a rank: x <- W x - lr g(x).  Collective."""
    return simulated_once(comm, lambda: _simulate(topology, comm.size, period, has_frames))


def _simulate(topology: str, size: int, period: int, has_frames: Callable[[int, int], bool] | None) -> Tensor:
    ranks = SimulatedRanks(size, momentum=0.9)
    number = 0
    for step in range(NUM_STEPS):
        moved = ranks.updates(step, has_frames or (lambda rank, step: True))
        if step > 0 and step % period == 0:
            ranks.x = mixing_matrix(topology, size, number) @ ranks.x
            number += 1
        ranks.x = ranks.x - moved
    return ranks.x


def begin(comm: Communicator, options: str) -> StrategyRun:
    return StrategyRun(comm, f"dpsgd:seed={_SEED},{options}", make_replica(Sgd(momentum=0.9)))


def dpsgd_follows_the_equation(comm: Communicator) -> None:
    for topology in TOPOLOGIES:
        expected = simulate(topology, comm)
        run = begin(comm, f"topology={topology}")
        run.train(comm.rank)
        assert_close(run.parameters(), expected[comm.rank], f"{topology}: rank {comm.rank}")
        assert_close(run.finish(), expected.mean(0), f"{topology}: after finish")


def dpsgd_with_a_longer_period_follows_the_equation(comm: Communicator) -> None:
    for topology in TOPOLOGIES:
        expected = simulate(topology, comm, period=2)
        run = begin(comm, f"topology={topology},period=2")
        run.train(comm.rank)
        assert_close(run.parameters(), expected[comm.rank], f"{topology}: rank {comm.rank}")
        run.finish()


def without_overlap_the_result_is_the_same(comm: Communicator) -> None:
    for topology in TOPOLOGIES:
        assert_same_without_overlap(comm, f"topology={topology}")


def assert_same_without_overlap(comm: Communicator, options: str) -> None:
    """Assert that `overlap` changes no bit of what dpsgd with these options gives."""
    results = []
    for overlap in ("true", "false"):
        run = begin(comm, f"{options},overlap={overlap}")
        run.train(comm.rank)
        results.append(run.parameters())
        run.finish()
    assert torch.equal(*results), f"{options}: overlap changes the result"


def ranks_without_frames_keep_mixing(comm: Communicator) -> None:
    """Rank 0 has frames in every step, the others only in the first two."""

    def has_frames(rank: int, step: int) -> bool:
        return rank == 0 or step < 2

    for topology in TOPOLOGIES:
        expected = simulate(topology, comm, has_frames=has_frames)
        run = begin(comm, f"topology={topology}")
        for step in range(NUM_STEPS):
            run.step([make_batch(comm.rank, step)] if has_frames(comm.rank, step) else [])
        assert_close(run.parameters(), expected[comm.rank], f"{topology}: rank {comm.rank}")
        run.finish()


def dpsgd_replicas_differ_in_training_and_are_bitwise_equal_after_finish(comm: Communicator) -> None:
    for topology in TOPOLOGIES:
        run = begin(comm, f"topology={topology}")
        run.train(comm.rank)
        seen = set(comm.allgather_object(run.parameters().numpy().tobytes().hex()))
        assert len(seen) == comm.size, f"{topology}: {len(seen)} different replicas"
        assert_bitwise_equal_over_ranks(comm, run.finish(), topology)


def dpsgd_saved_and_loaded_equals_uninterrupted(comm: Communicator) -> None:
    for options in (
        *(f"topology={t}" for t in TOPOLOGIES),
        "topology=exponential,period=2",
        "compression=int8",
        "compression=int4,period=2",
    ):
        whole = begin(comm, options)
        whole.train(comm.rank)
        first = begin(comm, options)
        first.train(comm.rank, 0, 4)
        first.strategy.pause()
        state = copy.deepcopy(first.strategy.state_dict())
        second = begin(comm, options)
        second.replica.parameters.values.copy_(first.parameters())
        second.replica.load_optimizer_tensors(first.replica.optimizer_tensors())
        second.strategy.load_state_dict(state)
        second.steps, second.frames = first.steps, first.frames
        second.train(comm.rank, 4)
        assert torch.equal(second.finish(), whole.finish()), f"{options}: resumed differs from uninterrupted"
        first.strategy.close()


def dpsgd_evaluation_shows_the_mean_and_leaves_no_trace(comm: Communicator) -> None:
    seen, unseen = begin(comm, "topology=ring"), begin(comm, "topology=ring")
    for step in range(NUM_STEPS):
        seen.step([make_batch(comm.rank, step)])
        unseen.step([make_batch(comm.rank, step)])
        mean = comm.allreduce(seen.parameters(), name="mean") / comm.size
        seen.strategy.pause()
        with seen.strategy.evaluation_parameters():
            assert_close(seen.parameters(), mean, "parameters under evaluation")
        seen.strategy.resume()
    assert torch.equal(seen.finish(), unseen.finish())


def no_thread_of_dpsgd_is_left_while_paused(comm: Communicator) -> None:
    own = [f"dpsgd-receive-{comm.rank}", f"dpsgd-send-{comm.rank}"] if comm.size > 1 else []
    # Threads of ranks that vanished in another test of this process are named alike, and end when they like.
    before = set(threading.enumerate())

    def begun() -> list[str]:
        return sorted(t.name for t in set(threading.enumerate()) - before if t.name in own)

    run = begin(comm, "topology=ring")
    assert begun() == own
    run.train(comm.rank, 0, 3)
    run.strategy.pause()
    assert begun() == []
    run.strategy.resume()
    run.train(comm.rank, 3)
    run.finish()
    assert begun() == []


def dpsgd_sends_what_it_says(comm: Communicator) -> None:
    """The first step has nothing to average: all ranks begin with the same parameters."""
    vectors = {"ring": min(comm.size - 1, 2), "exponential": min(comm.size - 1, 1), "complete": 0}
    for topology, per_step in vectors.items():
        run = begin(comm, f"topology={topology}")
        run.train(comm.rank)
        expected = per_step * (NUM_STEPS - 1) * run.replica.parameters.values.nbytes
        assert run.strategy.peer_bytes == expected, f"{topology}: {run.strategy.peer_bytes} bytes"
        run.finish()


def dpsgd_in_int8_is_near_full_precision(comm: Communicator) -> None:
    """Only near it: its equation is in tests/contract/test_compressed_neighbours.py."""
    expected = simulate("ring", comm)
    run = begin(comm, "compression=int8")
    begun = run.parameters()
    run.train(comm.rank)
    for found, exact in ((run.parameters(), expected[comm.rank]), (run.finish(), expected.mean(0))):
        error = float((found - exact).abs().max())
        limit = 0.03 * float((exact - begun).abs().max()) if comm.size > 1 else 1e-9
        assert error < limit and (error > 1e-9) == (comm.size > 1), f"int8: differs by {error:g}"


def dpsgd_that_has_not_begun_is_gradient_averaging(comm: Communicator) -> None:
    for options in ("topology=ring", "compression=int8"):
        assert_begins_with_gradient_averaging(comm, f"dpsgd:{options},begin=100")


CHECKS = (
    dpsgd_that_has_not_begun_is_gradient_averaging,
    dpsgd_follows_the_equation,
    dpsgd_with_a_longer_period_follows_the_equation,
    without_overlap_the_result_is_the_same,
    ranks_without_frames_keep_mixing,
    dpsgd_replicas_differ_in_training_and_are_bitwise_equal_after_finish,
    dpsgd_saved_and_loaded_equals_uninterrupted,
    dpsgd_evaluation_shows_the_mean_and_leaves_no_trace,
    no_thread_of_dpsgd_is_left_while_paused,
    dpsgd_sends_what_it_says,
    dpsgd_in_int8_is_near_full_precision,
)
