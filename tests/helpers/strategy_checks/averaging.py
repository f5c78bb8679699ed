"""Identities of gradient_averaging and model_averaging, and of the machinery all strategies share."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from speechdp.comm.base import Communicator
from speechdp.tasks.acoustic import AcousticTask
from tests.helpers.strategy_runs import (
    NUM_STEPS,
    Run,
    Sgd,
    assert_bitwise_equal_over_ranks,
    assert_close,
    batches_of_all,
    flat,
    make_batch,
    make_model,
    make_replica,
    plain_sgd,
)


def gradient_averaging_equals_one_rank_on_all_batches(comm: Communicator) -> None:
    for options in ("", ":overlap=false", ":bucket_mib=0.0005", ":bucket_mib=0.0005,overlap=false"):
        run = Run(comm, f"gradient_averaging{options}", make_replica(Sgd(momentum=0.9)))
        run.train(comm.rank)
        expected = plain_sgd(batches_of_all(comm.size), Sgd(momentum=0.9))
        assert_close(run.finish(), expected, f"gradient_averaging{options}")


def accumulation_equals_larger_batches(comm: Communicator) -> None:
    run = Run(comm, "gradient_averaging:every=3,bucket_mib=0.0005")
    run.train(comm.rank)  # 7 passes: two updates, and a third from the incomplete round
    steps = batches_of_all(comm.size)
    joined = [list(itertools.chain(*steps[i : i + 3])) for i in range(0, NUM_STEPS, 3)]
    assert_close(run.finish(), plain_sgd(joined), "every=3")


def averaging_every_step_equals_gradient_averaging(comm: Communicator) -> None:
    run = Run(comm, "model_averaging:period=1")
    run.train(comm.rank)
    assert_close(run.finish(), plain_sgd(batches_of_all(comm.size)), "model_averaging:period=1")


def averaging_with_momentum_equals_gradient_averaging(comm: Communicator) -> None:
    run = Run(comm, "model_averaging:period=1,momentum=average", make_replica(Sgd(momentum=0.9)))
    run.train(comm.rank)
    expected = plain_sgd(batches_of_all(comm.size), Sgd(momentum=0.9))
    assert_close(run.finish(), expected, "momentum=average")


def averaging_every_three_steps_follows_the_equation(comm: Communicator) -> None:
    for momentum in ("keep", "average", "reset"):
        run = Run(comm, f"model_averaging:period=3,momentum={momentum}", make_replica(Sgd(momentum=0.9)))
        run.train(comm.rank)
        expected = k_step_averaging(comm.size, 3, momentum)
        assert_close(run.finish(), expected, f"model_averaging:period=3,momentum={momentum}")


def k_step_averaging(size: int, period: int, momentum: str) -> Tensor:
    """Simulate K-step averaging of all ranks in one process, from the equation."""
    models = [make_model() for _ in range(size)]
    optimizers = [Sgd(momentum=0.9)(list(m.parameters())) for m in models]
    weights = torch.zeros(size, dtype=torch.float64)
    for step in range(NUM_STEPS):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            batch = make_batch(rank, step)
            optimizer.zero_grad()
            (AcousticTask().loss(model, batch).total / batch.num_frames).backward()
            optimizer.step()
            weights[rank] += batch.num_frames
        if (step + 1) % period == 0 or step == NUM_STEPS - 1:
            shares = weights / weights.sum()
            with torch.no_grad():
                _mix([list(m.parameters()) for m in models], shares)
                states = [
                    [optimizer.state[p]["momentum_buffer"] for p in model.parameters()]
                    for optimizer, model in zip(optimizers, models, strict=True)
                ]
                if momentum == "average":
                    _mix(states, shares)
                if momentum == "reset":
                    for buffers in states:
                        for buffer in buffers:
                            buffer.zero_()
            weights.zero_()
    return flat(models[0])


def _mix(tensors_of_rank: list[list[Any]], shares: Tensor) -> None:
    for same in zip(*tensors_of_rank, strict=True):
        mean = sum(share * tensor for share, tensor in zip(shares.tolist(), same, strict=True))
        for tensor in same:
            tensor.copy_(mean)


def ranks_without_frames_keep_joining(comm: Communicator) -> None:
    """Rank 0 has frames in every step, the others only in the first two."""
    batches = [[make_batch(r, s) for r in range(comm.size) if s < 2 or r == 0] for s in range(NUM_STEPS)]
    for strategy in ("gradient_averaging", "model_averaging:period=1"):
        run = Run(comm, strategy)
        for step in range(NUM_STEPS):
            run.step([make_batch(comm.rank, step)] if step < 2 or comm.rank == 0 else [])
        assert_close(run.finish(), plain_sgd(batches), f"{strategy} with ranks that ran out")


def a_step_without_any_frame_changes_nothing(comm: Communicator) -> None:
    for strategy in ("gradient_averaging", "model_averaging:period=1"):
        run = Run(comm, strategy)
        run.train(comm.rank, 0, 2)
        before = run.parameters()
        run.step([])
        assert_close(run.parameters(), before, f"{strategy}: step without frames")


def replicas_are_bitwise_equal_after_finish(comm: Communicator) -> None:
    for strategy in ("gradient_averaging", "model_averaging:period=3", "model_averaging:period=100"):
        run = Run(comm, strategy)
        run.train(comm.rank)
        assert_bitwise_equal_over_ranks(comm, run.finish(), strategy)


def different_initial_weights_become_rank_0s(comm: Communicator) -> None:
    replica = make_replica()
    replica.parameters.values.add_(comm.rank)
    run = Run(comm, "gradient_averaging", replica)
    assert_close(run.parameters(), make_replica().parameters.values, "parameters after attach")


def one_exchange_a_period(comm: Communicator) -> None:
    """PyTorch's post-local SGD once averaged once a parameter group: count the exchanges."""
    run = Run(comm, "model_averaging:period=3")
    names: list[str] = []
    original = comm.allreduce_async

    def counting(x: Tensor, **options: Any) -> Any:
        names.append(options["name"])
        return original(x, **options)

    comm.allreduce_async = counting  # type: ignore[method-assign]
    try:
        run.train(comm.rank, 0, 6)
        # One rank has nobody to average with.
        assert names == ([] if comm.size == 1 else ["parameters", "parameters"]), names
    finally:
        del comm.allreduce_async


def saved_and_loaded_equals_uninterrupted(comm: Communicator) -> None:
    for strategy in (
        "gradient_averaging:every=3",
        "model_averaging:period=3,momentum=average",
        "model_averaging:period=25f",
    ):
        whole = Run(comm, strategy, make_replica(Sgd(momentum=0.9)))
        whole.train(comm.rank)
        first = Run(comm, strategy, make_replica(Sgd(momentum=0.9)))
        first.train(comm.rank, 0, 4)
        state = copy.deepcopy(first.strategy.state_dict())
        parameters = first.parameters()
        optimizer = {k: v.clone() for k, v in first.replica.optimizer_tensors().items()}
        second = Run(comm, strategy, make_replica(Sgd(momentum=0.9)))
        second.replica.parameters.values.copy_(parameters)
        second.replica.load_optimizer_tensors(optimizer)
        second.strategy.load_state_dict(state)
        second.steps, second.frames = first.steps, first.frames
        second.train(comm.rank, 4)
        assert torch.equal(second.finish(), whole.finish()), f"{strategy}: resumed differs from uninterrupted"


def evaluation_leaves_no_trace(comm: Communicator) -> None:
    seen = Run(comm, "model_averaging:period=3")
    unseen = Run(comm, "model_averaging:period=3")
    for step in range(NUM_STEPS):
        seen.step([make_batch(comm.rank, step)])
        unseen.step([make_batch(comm.rank, step)])
        with seen.strategy.evaluation_parameters():
            assert_bitwise_equal_over_ranks(comm, seen.parameters(), "parameters under evaluation")
    assert torch.equal(seen.finish(), unseen.finish())


def periods_in_frames_and_seconds_are_agreed(comm: Communicator) -> None:
    run = Run(comm, "model_averaging:period=25f")
    averaged = []
    for step in range(9):
        run.step([make_batch(comm.rank, step)], mean_frames=10.0)
        averaged.append(run.strategy.state_dict()["window_steps"] == 0)
    assert averaged == [False, False, True] * 3, averaged
    run = Run(comm, "model_averaging:period=5s")
    averaged = []
    for step in range(13):
        # Rank 0 needs 1 s a step, the others believe in other times: rank 0's count.
        run.step([make_batch(comm.rank, step)], time_s=float((step + 1) * (1 + 3 * comm.rank)))
        averaged.append(run.strategy.state_dict()["window_steps"] == 0)
    assert [i for i, due in enumerate(averaged) if due] == [0, 5, 10], averaged


def half_precision_is_close(comm: Communicator) -> None:
    for compression, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        if dtype not in comm.reducible:
            continue
        run = Run(comm, f"gradient_averaging:compression={compression},bucket_mib=0.0005")
        run.train(comm.rank)
        error = (run.finish() - plain_sgd(batches_of_all(comm.size))).abs().max()
        assert 0 < error < 2e-2, f"{compression}: differs by {float(error):g}"


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
    one_exchange_a_period,
    saved_and_loaded_equals_uninterrupted,
    evaluation_leaves_no_trace,
    periods_in_frames_and_seconds_are_agreed,
    half_precision_is_close,
)
