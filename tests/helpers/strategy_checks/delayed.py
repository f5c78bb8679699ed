"""Identities of delayed_averaging: its equations, simulated in one process; nothing stays under way."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from speechdp.comm.base import Communicator, Work
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

_MOMENTUM = 0.9


def begin(comm: Communicator, options: str, strategy: str = "delayed_averaging") -> StrategyRun:
    return StrategyRun(comm, f"{strategy}:{options}", make_replica(Sgd(momentum=_MOMENTUM)))


@dataclass(frozen=True)
class Delayed:
    """Options of a simulated run."""

    period: int
    delay: int
    fragments: int = 1
    mix: float = 1.0

    def __str__(self) -> str:
        return f"period={self.period},delay={self.delay},fragments={self.fragments},mix={self.mix}"


CASES = (
    Delayed(3, 0),
    Delayed(3, 1),
    Delayed(3, 2, mix=0.5),
    Delayed(2, 2),
    Delayed(4, 1, fragments=2),
    Delayed(4, 2, fragments=2, mix=0.25),
    Delayed(3, 1, fragments=3),
)


def borders_of(fragments: int, num_values: int) -> list[int]:
    """Return where fragments begin and end: even parts, rounded down to 64 bytes (8 doubles)."""
    return [8 * (num_values * f // fragments // 8) for f in range(fragments)] + [num_values]


def simulate(
    case: Delayed, comm: Communicator, has_frames: Callable[[int, int], bool] = lambda rank, step: True
) -> Tensor:
    """Return the parameters of all ranks before `finish`, a row a rank.  Collective."""
    return simulated_once(comm, lambda: _simulate(case, comm.size, has_frames))


def _simulate(case: Delayed, size: int, has_frames: Callable[[int, int], bool]) -> Tensor:
    ranks = SimulatedRanks(size, _MOMENTUM)
    borders = borders_of(case.fragments, ranks.x.shape[1])
    frames = torch.zeros(case.fragments, size, dtype=torch.float64)  # since each fragment's last average
    arrivals: dict[int, tuple[slice, Tensor]] = {}  # step after whose update a correction is due
    due = 0
    for step in range(1, NUM_STEPS + 1):
        ranks.x = ranks.x - ranks.updates(step - 1, has_frames)
        frames += ranks.frames
        if step in arrivals:
            part, correction = arrivals.pop(step)
            ranks.x[:, part] += correction
        if step % (case.period // case.fragments) != 0:
            continue
        part = slice(borders[due], borders[due + 1])
        weights = frames[due] if frames[due].sum() > 0 else torch.ones_like(frames[due])
        snapshot = ranks.x[:, part].clone()
        correction = case.mix * (weights @ snapshot / weights.sum() - snapshot)
        if case.delay == 0:
            ranks.x[:, part] += correction
        else:
            arrivals[step + case.delay] = (part, correction)
        frames[due] = 0
        due = (due + 1) % case.fragments
    return ranks.x


def delayed_averaging_follows_the_equation(comm: Communicator) -> None:
    for case in CASES:
        expected = simulate(case, comm)
        run = begin(comm, str(case))
        run.train(comm.rank)
        assert_close(run.parameters(), expected[comm.rank], f"{case}: rank {comm.rank}")
        run.finish()


def delay_by_one_follows_its_equation(comm: Communicator) -> None:
    """w_i(k+1) = mean_j w_j(k) - lr * g_i(w_i(k)), the mean weighted by the frames of step k."""
    ranks = SimulatedRanks(comm.size, _MOMENTUM)
    mean = ranks.x
    for step in range(NUM_STEPS):
        ranks.x = mean - ranks.updates(step)
        mean = (ranks.frames.unsqueeze(1) * ranks.x).sum(0) / ranks.frames.sum()
    run = begin(comm, "period=1,delay=1")
    run.train(comm.rank)
    assert_close(run.parameters(), ranks.x[comm.rank], f"rank {comm.rank}")
    # What is under way at the end arrives: after it all replicas are the last mean.
    assert_close(run.finish(), mean, "after finish")


def without_delay_it_is_model_averaging(comm: Communicator) -> None:
    for period in ("1", "3", "25f"):
        delayed = begin(comm, f"period={period},delay=0")
        delayed.train(comm.rank)
        result = delayed.finish()
        averaged = begin(comm, f"period={period}", "model_averaging")
        averaged.train(comm.rank)
        assert_close(result, averaged.finish(), f"period={period}")


def ranks_without_frames_keep_joining_delayed_averages(comm: Communicator) -> None:
    """Rank 0 has frames in every step but the third, the others only in the first two."""

    def has_frames(rank: int, step: int) -> bool:
        return step < 2 or (rank == 0 and step != 2)

    for case in (Delayed(1, 1), Delayed(2, 1), Delayed(4, 2, fragments=2)):
        expected = simulate(case, comm, has_frames)
        run = begin(comm, str(case))
        for step in range(NUM_STEPS):
            run.step([make_batch(comm.rank, step)] if has_frames(comm.rank, step) else [])
        assert_close(run.parameters(), expected[comm.rank], f"{case}: rank {comm.rank}")
        run.finish()


def delayed_replicas_are_bitwise_equal_after_finish(comm: Communicator) -> None:
    for options in ("period=3,delay=2", "period=100", "period=6,fragments=3", "period=7,delay=3,mix=0.5"):
        run = begin(comm, options)
        run.train(comm.rank)
        seen = set(comm.allgather_object(run.parameters().numpy().tobytes().hex()))
        assert len(seen) == comm.size, f"{options}: {len(seen)} different replicas in training"
        assert_bitwise_equal_over_ranks(comm, run.finish(), options)


def delayed_saved_and_loaded_equals_uninterrupted(comm: Communicator) -> None:
    """After 4 steps an exchange is under way in all of these."""
    for options in (
        "period=4,delay=2",
        "period=3,delay=3",
        "period=6,delay=1,fragments=3",
        "period=25f,delay=2",
    ):
        whole = begin(comm, options)
        whole.train(comm.rank)
        expected = whole.finish()
        first = begin(comm, options)
        first.train(comm.rank, 0, 4)
        state = copy.deepcopy(first.strategy.state_dict())
        assert (state["flight"] is not None) == (comm.size > 1), f"{options}: nothing is under way"
        second = begin(comm, options)
        second.replica.parameters.values.copy_(first.parameters())
        second.replica.load_optimizer_tensors(first.replica.optimizer_tensors())
        second.strategy.load_state_dict(state)
        second.steps, second.frames = first.steps, first.frames
        second.train(comm.rank, 4)
        assert torch.equal(second.finish(), expected), f"{options}: resumed differs from uninterrupted"


def delayed_evaluation_shows_what_finish_would_make_and_leaves_no_trace(comm: Communicator) -> None:
    for options in ("period=3,delay=2", "period=4,delay=2,fragments=2"):
        unseen = begin(comm, options)
        unseen.train(comm.rank)
        expected = unseen.finish()
        seen = begin(comm, options)
        for step in range(NUM_STEPS):
            seen.step([make_batch(comm.rank, step)])
            with seen.strategy.evaluation_parameters():
                assert_bitwise_equal_over_ranks(comm, seen.parameters(), "parameters under evaluation")
                shown = seen.parameters()
        final = seen.finish()
        assert_close(shown, final, f"{options}: last evaluation and final parameters")
        assert torch.equal(final, expected), f"{options}: evaluation left a trace"


@contextlib.contextmanager
def watched(comm: Communicator) -> Iterator[list[tuple[str, int, bool]]]:
    """Note name, elements and completion of the allreduces inside the block."""
    noted: list[tuple[str, int, bool]] = []
    original = comm.allreduce_async

    def watching(x: Tensor, **options: Any) -> Work:
        work = original(x, **options)
        index = len(noted)
        noted.append((options["name"], x.numel(), False))
        wait = work.wait

        def noting() -> None:
            wait()
            noted[index] = (*noted[index][:2], True)

        work.wait = noting  # type: ignore[method-assign]
        return work

    comm.allreduce_async = watching  # type: ignore[method-assign]
    try:
        yield noted
    finally:
        del comm.allreduce_async


def one_delayed_exchange_a_period(comm: Communicator) -> None:
    run = begin(comm, "period=3,delay=2")
    num_values = run.replica.parameters.values.numel()
    with watched(comm) as noted:
        run.train(comm.rank, 0, 4)
        # Started at the third step and used at the fifth: it is under way now.
        assert noted == ([("fragment.0", num_values + 1, False)] if comm.size > 1 else []), noted
        run.train(comm.rank, 4)
        expected = [("fragment.0", num_values + 1, True), ("fragment.0", num_values + 1, False)]
        assert noted == (expected if comm.size > 1 else []), noted
        run.finish()
        assert all(done for _, _, done in noted), "an exchange was left under way"


def fragments_take_turns(comm: Communicator) -> None:
    run = begin(comm, "period=3,fragments=3")
    num_values = run.replica.parameters.values.numel()
    with watched(comm) as noted:
        run.train(comm.rank, 0, 6)
        if comm.size > 1:
            assert [name for name, _, _ in noted] == [f"fragment.{f}" for f in (0, 1, 2, 0, 1, 2)], noted
            # A weight rides with each.
            assert sum(numel for _, numel, _ in noted) == 2 * (num_values + 3), noted
            assert [done for _, _, done in noted] == [True] * 5 + [False], "more than one under way"
        run.finish()


def pausing_leaves_nothing_under_way(comm: Communicator) -> None:
    undisturbed = begin(comm, "period=2,delay=2")
    undisturbed.train(comm.rank)
    expected = undisturbed.finish()
    run = begin(comm, "period=2,delay=2")
    with watched(comm) as noted:
        run.train(comm.rank, 0, 3)
        assert any(not done for _, _, done in noted) == (comm.size > 1)
        run.strategy.pause()
        assert all(done for _, _, done in noted), "an exchange is under way while paused"
        run.strategy.resume()
    run.train(comm.rank, 3)
    assert torch.equal(run.finish(), expected), "a pause changes the result"


def delayed_that_has_not_begun_is_gradient_averaging(comm: Communicator) -> None:
    assert_begins_with_gradient_averaging(comm, "delayed_averaging:period=2,begin=100")


CHECKS = (
    delayed_that_has_not_begun_is_gradient_averaging,
    delayed_averaging_follows_the_equation,
    delay_by_one_follows_its_equation,
    without_delay_it_is_model_averaging,
    ranks_without_frames_keep_joining_delayed_averages,
    delayed_replicas_are_bitwise_equal_after_finish,
    delayed_saved_and_loaded_equals_uninterrupted,
    delayed_evaluation_shows_what_finish_would_make_and_leaves_no_trace,
    one_delayed_exchange_a_period,
    fragments_take_turns,
    pausing_leaves_nothing_under_way,
)
