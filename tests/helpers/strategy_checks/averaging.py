"""Identities of gradient_averaging and model_averaging, and of the machinery all strategies share."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch

from speechdp.comm.base import Communicator
from speechdp.testing import (
    NUM_STEPS,
    Sgd,
    StrategyRun,
    assert_bitwise_equal_over_ranks,
    assert_close,
    assert_resumes,
    batches_of_all,
    make_batch,
    make_replica,
    plain_sgd,
)
from tests.helpers.apart import Apart, drive, simulate


def gradient_averaging_equals_one_rank_on_all_batches(comm: Communicator) -> None:
    expected = plain_sgd(batches_of_all(comm.size), Sgd(momentum=0.9))
    for options in ("", ":overlap=false", ":bucket_mib=0.0005", ":bucket_mib=0.0005,overlap=false"):
        run = StrategyRun(comm, f"gradient_averaging{options}", make_replica(Sgd(momentum=0.9)))
        run.train(comm.rank)
        assert_close(run.finish(), expected, f"gradient_averaging{options}")


def accumulation_equals_larger_batches(comm: Communicator) -> None:
    run = StrategyRun(comm, "gradient_averaging:every=3,bucket_mib=0.0005")
    run.train(comm.rank)  # 7 passes: two updates, and a third from the incomplete round
    steps = batches_of_all(comm.size)
    joined = [list(itertools.chain(*steps[i : i + 3])) for i in range(0, NUM_STEPS, 3)]
    assert_close(run.finish(), plain_sgd(joined), "every=3")


def averaging_every_step_equals_gradient_averaging(comm: Communicator) -> None:
    run = StrategyRun(comm, "model_averaging:period=1")
    run.train(comm.rank)
    assert_close(run.finish(), plain_sgd(batches_of_all(comm.size)), "model_averaging:period=1")


def averaging_with_momentum_equals_gradient_averaging(comm: Communicator) -> None:
    run = StrategyRun(comm, "model_averaging:period=1,momentum=average", make_replica(Sgd(momentum=0.9)))
    run.train(comm.rank)
    expected = plain_sgd(batches_of_all(comm.size), Sgd(momentum=0.9))
    assert_close(run.finish(), expected, "momentum=average")


def averaging_every_three_steps_follows_the_equation(comm: Communicator) -> None:
    for momentum in ("keep", "average", "reset"):
        apart = Apart(comm.size, 3, sgd=Sgd(momentum=0.9), momentum=momentum)
        run = StrategyRun(comm, f"model_averaging:period=3,momentum={momentum}", make_replica(apart.sgd))
        drive(run, apart)
        assert_close(run.finish(), simulate(comm, apart), f"model_averaging:period=3,momentum={momentum}")


def ranks_without_frames_keep_joining(comm: Communicator) -> None:
    """Rank 0 has frames in every step, the others only in the first two."""
    batches = [[make_batch(r, s) for r in range(comm.size) if s < 2 or r == 0] for s in range(NUM_STEPS)]
    for strategy in ("gradient_averaging", "model_averaging:period=1"):
        run = StrategyRun(comm, strategy)
        for step in range(NUM_STEPS):
            run.step([make_batch(comm.rank, step)] if step < 2 or comm.rank == 0 else [])
        assert_close(run.finish(), plain_sgd(batches), f"{strategy} with ranks that ran out")


def a_step_without_any_frame_changes_nothing(comm: Communicator) -> None:
    for strategy in ("gradient_averaging", "model_averaging:period=1"):
        run = StrategyRun(comm, strategy)
        run.train(comm.rank, 0, 2)
        before = run.parameters()
        run.step([])
        assert_close(run.parameters(), before, f"{strategy}: step without frames")


def replicas_are_bitwise_equal_after_finish(comm: Communicator) -> None:
    for strategy in ("gradient_averaging", "model_averaging:period=3", "model_averaging:period=100"):
        run = StrategyRun(comm, strategy)
        run.train(comm.rank)
        assert_bitwise_equal_over_ranks(comm, run.finish(), strategy)


def different_initial_weights_become_rank_0s(comm: Communicator) -> None:
    replica = make_replica()
    replica.parameters.values.add_(comm.rank)
    run = StrategyRun(comm, "gradient_averaging", replica)
    assert_close(run.parameters(), make_replica().parameters.values, "parameters after attach")


def half_precision_is_close(comm: Communicator) -> None:
    for compression, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        if dtype not in comm.reducible:
            continue
        run = StrategyRun(comm, f"gradient_averaging:compression={compression},bucket_mib=0.0005")
        run.train(comm.rank)
        error = (run.finish() - plain_sgd(batches_of_all(comm.size))).abs().max()
        assert 0 < error < 2e-2, f"{compression}: differs by {float(error):g}"


def a_round_under_way_is_saved(comm: Communicator) -> None:
    assert_resumes(comm, "gradient_averaging:every=3", 4)


CHECKS: tuple[Callable[[Communicator], None], ...] = (
    gradient_averaging_equals_one_rank_on_all_batches,
    accumulation_equals_larger_batches,
    averaging_every_step_equals_gradient_averaging,
    averaging_with_momentum_equals_gradient_averaging,
    averaging_every_three_steps_follows_the_equation,
    ranks_without_frames_keep_joining,
    a_step_without_any_frame_changes_nothing,
    replicas_are_bitwise_equal_after_finish,
    different_initial_weights_become_rank_0s,
    half_precision_is_close,
    a_round_under_way_is_saved,
)
