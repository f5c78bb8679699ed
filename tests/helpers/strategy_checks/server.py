"""Identities of parameter_server and easgd: each against its equation, simulated in one process."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from speechdp.comm.base import Communicator
from speechdp.errors import ConfigError
from speechdp.parallel.registry import parse_strategy
from speechdp.strategies.easgd import Easgd
from speechdp.testing import (
    NUM_STEPS,
    StrategyRun,
    assert_bitwise_equal_over_ranks,
    assert_close,
    batches_of_all,
    make_batch,
    plain_sgd,
)
from tests.helpers.server_simulations import (
    MOMENTUM,
    SimulatedCentre,
    SimulatedMaster,
    momentum_replica,
    turns,
)

NEEDS_PEERS = True


def _part(comm: Communicator, run: StrategyRun) -> tuple[int | None, int]:
    """Return this rank's part of the data, None for a server's, and the number of parts."""
    roster = run.strategy.roster(comm.size)
    return roster.part_of_rank[comm.rank], roster.num_parts


def in_turns(comm: Communicator, run: StrategyRun, workers: Iterable[int], first: int = 0) -> None:
    """Let the workers step one after another; turn t has batch (worker, t)."""
    mine, _ = _part(comm, run)
    for turn, worker in enumerate(workers, first):
        if worker == mine:
            run.step([make_batch(worker, turn)])
        comm.barrier()


def synchronous_server_equals_gradient_averaging(comm: Communicator) -> None:
    for max_norm in (0.0, 0.05):
        results = []
        for strategy in ("gradient_averaging", "parameter_server:mode=sync"):
            replica = momentum_replica()
            replica.max_gradient_norm = max_norm
            run = StrategyRun(comm, strategy, replica)
            run.train(comm.rank)
            results.append(run.finish())
            assert_bitwise_equal_over_ranks(comm, results[-1], strategy)
        assert_close(results[1], results[0], f"mode=sync, clipped to {max_norm}")
        if max_norm == 0:
            assert_close(results[1], plain_sgd(batches_of_all(comm.size), MOMENTUM), "mode=sync")


def synchronous_server_with_ranks_without_frames(comm: Communicator) -> None:
    """The last rank alone has frames from step 2 on; in the last step nobody has."""
    last = comm.size - 1
    batches = [[make_batch(r, s) for r in range(comm.size) if s < 2 or r == last] for s in range(NUM_STEPS)]
    run = StrategyRun(comm, "parameter_server:mode=sync", momentum_replica())
    for step in range(NUM_STEPS):
        run.step([make_batch(comm.rank, step)] if step < 2 or comm.rank == last else [])
    run.step([])
    assert_close(run.finish(), plain_sgd(batches, MOMENTUM), "mode=sync with ranks that ran out")


def dedicated_synchronous_server_equals_one_rank(comm: Communicator) -> None:
    if comm.size == 1:
        return
    run = StrategyRun(comm, "parameter_server:mode=sync,dedicated=true", momentum_replica())
    index, num_parts = _part(comm, run)
    assert num_parts == comm.size - 1
    for step in range(NUM_STEPS):
        run.step([] if index is None else [make_batch(index, step)])
    assert_close(run.finish(), plain_sgd(batches_of_all(num_parts), MOMENTUM), "dedicated, mode=sync")


def one_worker_of_a_dedicated_server_is_plain_sgd(comm: Communicator) -> None:
    if comm.size != 2:
        return
    run = StrategyRun(comm, "parameter_server:dedicated=true", momentum_replica())
    if comm.rank == 1:
        run.train(0)
    assert_close(run.finish(), plain_sgd(batches_of_all(1), MOMENTUM), "one worker, dedicated server")


def a_server_without_enough_workers_is_refused(comm: Communicator) -> None:
    for strategy, needed in (("parameter_server", 2), ("easgd", 3)):
        if comm.size >= needed:
            continue
        try:
            StrategyRun(comm, f"{strategy}:dedicated=true")
        except ConfigError as error:
            assert f"at least {needed} ranks" in str(error), error
        else:
            raise AssertionError(f"{strategy}:dedicated=true was taken with {comm.size} ranks")


def asynchronous_server_follows_the_equation(comm: Communicator) -> None:
    for options in ("", "staleness_aware=true", "dedicated=true", "staleness_aware=true,dedicated=true"):
        if "dedicated" in options and comm.size == 1:
            continue
        run = StrategyRun(comm, f"parameter_server:{options}", momentum_replica())
        worker, num_workers = _part(comm, run)
        expected = SimulatedMaster(num_workers, "staleness_aware" in options)
        order = turns(num_workers)
        comm.barrier()  # every rank has fetched before the first moves the master
        in_turns(comm, run, order)
        for turn, mover in enumerate(order):
            expected.step(mover, turn)
        if worker is not None:
            assert_close(run.parameters(), expected.seen[worker], f"{options}: what the worker sees")
            ages, seen = run.strategy.statistics()["staleness"], expected.ages[worker]
            assert ages == [seen.count(age) for age in range(max(seen) + 1)], (ages, seen)
        final = run.finish()
        assert_close(final, expected.master.parameters.values, f"parameter_server:{options}")
        assert_bitwise_equal_over_ranks(comm, final, options)


def the_worker_next_to_the_server_keeps_to_itself(comm: Communicator) -> None:
    """Rank 0's model stands still while the others move the master, by their learning rate and not by its."""
    run = StrategyRun(comm, "parameter_server", momentum_replica())
    expected = SimulatedMaster(comm.size)
    before = run.parameters()
    if comm.rank == 0:
        run.replica.set_learning_rate(1e6)
    comm.barrier()
    order = [rank for rank in turns(comm.size) if rank > 0]
    in_turns(comm, run, order)
    for turn, rank in enumerate(order):
        expected.step(rank, turn)
    if comm.rank == 0:
        assert torch.equal(run.parameters(), before)
    assert_close(
        run.finish(), expected.master.parameters.values, "parameter_server while rank 0 stands still"
    )


def elastic_averaging_follows_the_equation(comm: Communicator) -> None:
    for period, alpha, dedicated in ((1, 0.0, False), (2, 0.3, False), (2, 0.0, True)):
        options = f"easgd:period={period},alpha={alpha},dedicated={dedicated}"
        _elastic_averaging_follows(comm, options, levels=0)


def compressed_elastic_averaging_follows_the_equation(comm: Communicator) -> None:
    for compression, levels, dedicated in (("int8", 127, False), ("int4", 7, False), ("int4", 7, True)):
        options = f"easgd:period=2,alpha=0.3,dedicated={dedicated},compression={compression}"
        _elastic_averaging_follows(comm, options, levels)


def _elastic_averaging_follows(comm: Communicator, options: str, levels: int) -> None:
    """Let workers step in turn, where there are as many as the options need."""
    given = parse_strategy(options)
    assert isinstance(given, Easgd)
    if comm.size < (3 if given.dedicated else 2):
        return
    run = StrategyRun(comm, options, momentum_replica())
    worker, num_workers = _part(comm, run)
    alpha = given.alpha or 0.9 / num_workers
    expected = SimulatedCentre(num_workers, int(given.period.value), alpha, levels, given.dedicated)
    order = turns(num_workers)
    in_turns(comm, run, order)
    for turn, mover in enumerate(order):
        expected.step(mover, turn)
    if worker is not None:
        own = expected.workers[worker].parameters.values
        assert_close(run.parameters(), own, f"{options}: worker")
    final = run.finish()
    assert_close(final, expected.centre, f"{options}: centre")
    assert_bitwise_equal_over_ranks(comm, final, options)


def synchronous_elastic_averaging_follows_the_equation(comm: Communicator) -> None:
    run = StrategyRun(comm, "easgd:mode=sync,period=2", momentum_replica())
    expected = SimulatedCentre(comm.size, 2, 0.9 / comm.size)
    for step in range(NUM_STEPS):
        run.step([make_batch(comm.rank, step)])
        for rank in range(comm.size):
            expected.local_step(rank, step)
        if comm.size > 1 and step % 2 == 1:
            expected.exchange_together()
    own = expected.workers[comm.rank].parameters.values
    assert_close(run.parameters(), own, "easgd:mode=sync: worker")
    assert_close(run.finish(), own if comm.size == 1 else expected.centre, "easgd:mode=sync: centre")


def elastic_age_counts_the_others_exchanges(comm: Communicator) -> None:
    run = StrategyRun(comm, "easgd:period=1")
    order = turns(comm.size)
    in_turns(comm, run, order)
    own = [turn for turn, rank in enumerate(order) if rank == comm.rank]
    expected = [later - earlier - 1 for earlier, later in itertools.pairwise([-1, *own])]
    ages = run.strategy.statistics().get("staleness", [])
    if comm.size > 1:
        assert ages == [expected.count(age) for age in range(max(expected) + 1)], (ages, expected)
    run.finish()


ASYNCHRONOUS = ("parameter_server", "easgd:period=2", "easgd:period=20f", "easgd:period=2,compression=int4")
SYNCHRONOUS = (
    "parameter_server:mode=sync",
    "easgd:mode=sync,period=2",
    "easgd:mode=sync,period=2,compression=int8",
)


def saved_and_loaded_goes_on_the_same(comm: Communicator) -> None:
    order = turns(comm.size, 16)
    for strategy in (*ASYNCHRONOUS, *SYNCHRONOUS):
        first = StrategyRun(comm, strategy, momentum_replica())
        train = step_together if first.strategy.traits.synchronous else in_turns
        comm.barrier()
        train(comm, first, order[:9], 0)
        first.strategy.pause()
        state = copy.deepcopy(first.strategy.state_dict())
        parameters = first.parameters()
        optimizer = {k: v.clone() for k, v in first.replica.optimizer_tensors().items()}
        second = StrategyRun(comm, strategy, momentum_replica())
        second.strategy.pause()
        restore(comm, second, state, parameters, optimizer)
        assert same(second.strategy.state_dict(), state), f"{strategy}: another state after loading it"
        for run in (first, second):
            run.strategy.resume()
            comm.barrier()
            train(comm, run, order[9:], 9)
        mine, theirs = first.strategy.statistics(), second.strategy.statistics()
        assert mine == theirs, f"{strategy}: {mine} uninterrupted, {theirs} resumed"
        assert torch.equal(first.finish(), second.finish()), f"{strategy}: resumed differs"


def step_together(comm: Communicator, run: StrategyRun, ranks: Iterable[int], first: int) -> None:
    for turn, _ in enumerate(ranks, first):
        run.step([make_batch(comm.rank, turn)])


def restore(
    comm: Communicator,
    run: StrategyRun,
    state: dict[str, Any],
    parameters: Tensor,
    optimizer: dict[str, Tensor],
) -> None:
    """Load a state as the trainer does."""
    run.strategy.load_state_dict(state)
    run.replica.parameters.values.copy_(parameters)
    run.replica.load_optimizer_tensors(optimizer)
    if run.strategy.traits.replicas_equal:
        for name, tensor in run.replica.optimizer_tensors().items():
            comm.broadcast(tensor, name=name)


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(a[k], b[k]) if isinstance(a[k], Tensor) else a[k] == b[k] for k in a
    )


def evaluation_shows_the_common_model_and_leaves_no_trace(comm: Communicator) -> None:
    order = turns(comm.size, 12)
    for strategy in (*ASYNCHRONOUS, *SYNCHRONOUS):
        results = []
        for look in (False, True):
            run = StrategyRun(comm, strategy, momentum_replica())
            train = step_together if run.strategy.traits.synchronous else in_turns
            comm.barrier()
            for start in (0, 6):
                train(comm, run, order[start : start + 6], start)
                run.strategy.pause()
                if look:
                    with run.strategy.evaluation_parameters():
                        assert_bitwise_equal_over_ranks(comm, run.parameters(), f"{strategy}: evaluated")
                        evaluated = run.parameters()
                run.strategy.resume()
                comm.barrier()
            results.append(run.finish())
        assert torch.equal(*results), f"{strategy}: evaluation left a trace"
        assert torch.equal(evaluated, results[1]), f"{strategy}: the final model is not the evaluated one"


CHECKS: tuple[Callable[[Communicator], None], ...] = (
    synchronous_server_equals_gradient_averaging,
    synchronous_server_with_ranks_without_frames,
    dedicated_synchronous_server_equals_one_rank,
    one_worker_of_a_dedicated_server_is_plain_sgd,
    a_server_without_enough_workers_is_refused,
    asynchronous_server_follows_the_equation,
    the_worker_next_to_the_server_keeps_to_itself,
    elastic_averaging_follows_the_equation,
    compressed_elastic_averaging_follows_the_equation,
    synchronous_elastic_averaging_follows_the_equation,
    elastic_age_counts_the_others_exchanges,
    saved_and_loaded_goes_on_the_same,
    evaluation_shows_the_common_model_and_leaves_no_trace,
)
