"""Check model_averaging with Kaldi's averaging rules: first, leave_out, max_change, combine."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from speechdp.comm.base import Communicator
from speechdp.parallel.strategy import final_models
from speechdp.testing import (
    Sgd,
    StrategyRun,
    assert_bitwise_equal_over_ranks,
    assert_close,
    make_batch,
    make_replica,
    summed_loss,
)


def the_first_round_goes_to_the_best_rank(comm: Communicator) -> None:
    run, alone = StrategyRun(comm, "model_averaging:first=best,period=3"), make_replica()
    total, frames = 0.0, 0
    for step in range(3):
        batch = make_batch(comm.rank, step)
        loss = summed_loss(alone.model, batch)
        total, frames = total + loss.item(), frames + batch.num_frames
        loss.backward()  # type: ignore[no-untyped-call]
        alone.apply_gradients(batch.num_frames)
        run.step([batch])
    objectives = comm.allgather_object(total / frames)
    best = objectives.index(min(objectives))
    expected = comm.broadcast(alone.parameters.values, name="best", root=best)
    assert torch.equal(run.parameters(), expected), f"not the parameters of rank {best}"
    _second_round_is_an_average(comm, run, expected)


def _second_round_is_an_average(comm: Communicator, run: StrategyRun, start: Tensor) -> None:
    usual = StrategyRun(comm, "model_averaging:period=3")
    usual.replica.parameters.values.copy_(start)
    for each in (run, usual):
        each.train(comm.rank, 3, 6)
    assert_close(run.parameters(), usual.parameters(), "second round")


def a_rank_gone_astray_is_left_out(comm: Communicator) -> None:
    """The last rank's objective is bad or no number, and so are its parameters and its momentum."""
    astray = comm.size > 1 and comm.rank == comm.size - 1
    for worse in (5.0, math.inf, math.nan):
        run = StrategyRun(comm, "model_averaging:leave_out=1,period=2", make_replica(Sgd(momentum=0.9)))
        _report_worse(run, worse if astray else 0.0)
        run.train(comm.rank, 0, 1)
        if astray:
            run.replica.parameters.values.fill_(math.nan)
            run.replica.optimizer_tensors()["momentum_buffer"].fill_(math.nan)
        expected = _average_without_last(comm)
        run.train(comm.rank, 1, 2)
        assert_close(run.parameters(), expected, f"average without a rank that is {worse} worse")
        momentum = run.replica.optimizer_tensors()["momentum_buffer"]
        assert bool((momentum == 0).all()) == astray, (
            "fresh momentum for who was left out, and for no one else"
        )
        assert run.strategy.statistics() == {"times_left_out": int(astray)}
        run.train(comm.rank, 2, 4)
        assert run.strategy.statistics() == {"times_left_out": int(astray)}, "left out for an earlier window"
        assert_bitwise_equal_over_ranks(comm, run.finish(), "leave_out after finish")


def _report_worse(run: StrategyRun, worse: float) -> None:
    """Lower a rank's reported objective, nats per frame, in the first two steps."""
    observer = run.strategy.observer
    assert observer is not None
    observe = observer.observe_loss

    def report(total: Tensor, frames: int) -> None:
        observe(total + worse * frames if run.steps < 2 else total, frames)

    observer.observe_loss = report  # type: ignore[method-assign]


def _average_without_last(comm: Communicator) -> Tensor:
    """Return the mean of two steps of momentum SGD over all ranks but the last (of more than one)."""
    replica, frames = make_replica(Sgd(momentum=0.9)), 0
    for step in range(2):
        batch = make_batch(comm.rank, step)
        summed_loss(replica.model, batch).backward()  # type: ignore[no-untyped-call]
        replica.apply_gradients(batch.num_frames)
        frames += batch.num_frames
    share = 0 if comm.size > 1 and comm.rank == comm.size - 1 else frames
    sums = torch.cat([replica.parameters.values * share, torch.tensor([float(share)], dtype=torch.float64)])
    comm.allreduce(sums, name="expected")
    return sums[:-1] / sums[-1]


def a_rank_within_the_margin_is_not_left_out(comm: Communicator) -> None:
    finals = []
    for strategy in ("model_averaging:leave_out=9,period=2", "model_averaging:period=2"):
        run = StrategyRun(comm, strategy)
        run.train(comm.rank)
        finals.append(run.finish())
    assert torch.equal(*finals), "a margin of 9 nats left somebody out"


def an_objective_survives_a_checkpoint(comm: Communicator) -> None:
    strategy = "model_averaging:leave_out=5,period=2"
    astray = comm.size > 1 and comm.rank == comm.size - 1
    run, other = StrategyRun(comm, strategy), StrategyRun(comm, strategy)
    _report_worse(run, 20.0 if astray else 0.0)
    run.train(comm.rank, 0, 1)
    other.strategy.load_state_dict(run.strategy.state_dict())
    other.train(comm.rank, 1, 2)
    assert other.strategy.statistics() == {"times_left_out": int(astray)}


def no_minibatch_changes_the_model_by_more_than_the_limit(comm: Communicator) -> None:
    fast, strategy = Sgd(learning_rate=3.0), "model_averaging:period=100"
    free = StrategyRun(comm, strategy, make_replica(fast))
    held = StrategyRun(comm, f"{strategy},max_change=0.05", make_replica(fast))
    start = free.parameters()
    for run in (free, held):
        run.train(comm.rank, 0, 1)
    wanted, made = free.parameters() - start, held.parameters() - start
    assert float(wanted.norm()) > 0.05, "the limit is not tested"
    assert_close(made, wanted * (0.05 / wanted.norm()), "a change beyond the limit")
    wide = StrategyRun(comm, "model_averaging:period=3,max_change=1e6")
    usual = StrategyRun(comm, "model_averaging:period=3")
    for run in (wide, usual):
        run.train(comm.rank)
    assert torch.equal(wide.finish(), usual.finish()), "a limit never reached changed training"


def combining_gives_the_means_of_the_last_models(comm: Communicator) -> None:
    # One epoch of 7 steps; its last quarter in 3 parts: averages 6 and 7 are kept.
    run = StrategyRun(comm, "model_averaging:combine=3,period=1")
    run.train(comm.rank, 0, 6)
    sixth = run.parameters()
    run.train(comm.rank, 6, 7)
    final = run.finish()
    models = final_models(run.strategy)
    assert len(models) == 1, f"{len(models)} models"
    assert_close(models[0], (sixth + final) / 2, "mean of the last two models")
    assert_bitwise_equal_over_ranks(comm, models[0], "mean of the last two models")
    assert final_models(StrategyRun(comm, "model_averaging").strategy) == []


CHECKS: tuple[Callable[[Communicator], None], ...] = (
    the_first_round_goes_to_the_best_rank,
    a_rank_gone_astray_is_left_out,
    a_rank_within_the_margin_is_not_left_out,
    an_objective_survives_a_checkpoint,
    no_minibatch_changes_the_model_by_more_than_the_limit,
    combining_gives_the_means_of_the_last_models,
)
