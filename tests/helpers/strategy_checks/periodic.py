"""Checks of every strategy whose ranks train separately and exchange once a period."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

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

#: One of each, options that keep something between steps included; without a period.
STRATEGIES = (
    "model_averaging:momentum=average,combine=3",
    "model_averaging:first=best,leave_out=0.05,max_change=0.2",
    "adaptive_averaging:interval=2,learning_rate=scale",
    "bmuf:eta=0.5,momentum=average",
    "bmuf:eta=0.5,nesterov=true",
    "slowmo:beta=0.5,momentum=keep",
    "diloco:outer_learning_rate=0.7",
    "adaptive_averaging:rule=qsr,alpha=0.52",
    "adaptive_averaging:rule=stages,stages=2@4",
)


def periodic_runs_resume_bitwise(comm: Communicator) -> None:
    for strategy in STRATEGIES:
        assert_resumes(comm, f"{strategy},period=3", 4)
    assert_resumes(comm, f"{STRATEGIES[0]},period=3", 6)  # has kept a model for the final combine
    for saved_after in (1, 5):
        assert_resumes(comm, f"{STRATEGIES[0]},period=15f,begin=2", saved_after)
    assert_resumes(comm, f"{STRATEGIES[3]},period=15f,begin=2", 1)


def evaluation_leaves_no_trace(comm: Communicator) -> None:
    for strategy in STRATEGIES:
        seen, unseen = (
            StrategyRun(comm, f"{strategy},period=3", make_replica(Sgd(momentum=0.9))) for _ in range(2)
        )
        for step in range(NUM_STEPS):
            for run in (seen, unseen):
                run.step([make_batch(comm.rank, step)])
            with seen.strategy.evaluation_parameters():
                assert_bitwise_equal_over_ranks(comm, seen.parameters(), f"{strategy} under evaluation")
        final = seen.finish()
        assert torch.equal(final, unseen.finish()), f"{strategy}: evaluation changed training"
        assert_bitwise_equal_over_ranks(comm, final, f"{strategy} after finish")


def evaluation_at_the_end_shows_the_final_model(comm: Communicator) -> None:
    for strategy in STRATEGIES:
        for steps in (3, 4):
            run = StrategyRun(comm, f"{strategy},period=3")
            run.train(comm.rank, 0, steps)
            with run.strategy.evaluation_parameters():
                shown = run.parameters()
            assert_close(shown, run.finish(), f"{strategy} evaluated after {steps} steps")


def parameters_are_exchanged_once_a_period(comm: Communicator) -> None:
    """PyTorch's post-local SGD once averaged once a parameter group: count the exchanges."""
    for strategy in STRATEGIES:
        keeping = strategy.replace("momentum=average", "momentum=keep")
        period = "period=3,halve=false,growth=1" if "interval=" in keeping else "period=3"
        run = StrategyRun(comm, f"{keeping},{period}")
        sent = allreduced(comm, lambda run=run: run.train(comm.rank, 0, 6))
        large = [size for size in sent if size >= run.replica.parameters.values.numel()]
        # One rank has nobody to average with.
        assert len(large) == (0 if comm.size == 1 else 2), f"{keeping}: {len(large)} exchanges, not 2"
        assert all(size <= max(comm.size, 3) for size in sent if size not in large), sent


def allreduced(comm: Communicator, function: Callable[[], None]) -> list[int]:
    """Return the sizes of the tensors that are summed over ranks while `function` runs."""
    sizes: list[int] = []
    original = comm.allreduce_async

    def noting(x: Tensor, **options: Any) -> Any:
        sizes.append(x.numel())
        return original(x, **options)

    comm.allreduce_async = noting  # type: ignore[method-assign]
    try:
        function()
    finally:
        del comm.allreduce_async
    return sizes if comm.size > 1 else []


def ranks_without_frames_weigh_nothing(comm: Communicator) -> None:
    """All ranks have frames in the first window, in the others rank 0 alone."""
    apart = Apart(comm.size, 2, has_frames=lambda rank, step: rank == 0 or step < 2)
    expected = simulate(comm, apart)
    for strategy in (
        "model_averaging",
        "model_averaging:leave_out=9",
        "adaptive_averaging",
        "bmuf:eta=0",
        "slowmo:beta=0",
        "diloco:outer_learning_rate=1,outer_momentum=0",
    ):
        run = StrategyRun(comm, f"{strategy}{',' if ':' in strategy else ':'}period=2")
        drive(run, apart)
        assert_close(run.finish(), expected, f"{strategy} with ranks that ran out")


def a_window_without_any_frame_changes_nothing(comm: Communicator) -> None:
    for strategy in ("model_averaging:leave_out=1", "adaptive_averaging:interval=1", "slowmo:beta=0"):
        run = StrategyRun(comm, f"{strategy},period=2")
        run.train(comm.rank, 0, 2)
        before = run.parameters()
        run.step([])
        run.step([])
        assert_close(run.parameters(), before, f"{strategy}: window without frames")


def periods_in_frames_and_seconds_are_agreed(comm: Communicator) -> None:
    for strategy in ("adaptive_averaging", "slowmo"):
        run = StrategyRun(comm, f"{strategy}:period=25f")
        for step in range(6):
            run.step([make_batch(comm.rank, step)], mean_frames=10.0)
            is_due = run.strategy.state_dict()["window_steps"] == 0
            assert is_due == (step % 3 == 2), f"{strategy}:period=25f after step {step + 1}"
        run = StrategyRun(comm, f"{strategy}:period=10f")
        for step in range(9):  # three means of 10 / 3 are less than 10, where many have come before
            run.step([make_batch(comm.rank, step)], mean_frames=10 / 3)
            is_due = run.strategy.state_dict()["window_steps"] == 0
            assert is_due == (step % 3 == 2), f"{strategy}:period=10f after step {step + 1}"
        run = StrategyRun(comm, f"{strategy}:period=5s")
        for step in range(11):
            # Rank 0 needs 1 s a step, the others believe in other times: rank 0's count.
            run.step([make_batch(comm.rank, step)], time_s=float((step + 1) * (1 + 3 * comm.rank)))
            is_due = run.strategy.state_dict()["window_steps"] == 0
            assert is_due == (step in (0, 5, 10)), f"{strategy}:period=5s after step {step + 1}"


def a_period_in_seconds_may_be_longer_than_any_training(comm: Communicator) -> None:
    run = StrategyRun(comm, f"model_averaging:period={10**20}s")
    run.train(comm.rank, 0, 3)
    assert run.strategy.state_dict()["window_steps"] == 2  # the first step has ended one, for its pace


def an_interval_in_frames_is_as_long_as_it_says(comm: Communicator) -> None:
    run = StrategyRun(comm, "adaptive_averaging:period=10f,interval=10f")
    for step in range(9):
        run.step([make_batch(comm.rank, step)], mean_frames=10 / 3)
        if step % 3 == 2:
            assert run.strategy.state_dict()["last_use"] == run.frames, f"after step {step + 1}"


def until_it_begins_it_is_gradient_averaging(comm: Communicator) -> None:
    sgd = Sgd(momentum=0.9)
    expected = plain_sgd(batches_of_all(comm.size, 3), sgd)
    for strategy in STRATEGIES:
        if "max_change" in strategy:  # limits every update
            continue
        for begin in (3, 4):  # just over, or still under way
            run = StrategyRun(comm, f"{strategy},begin={begin}", make_replica(sgd))
            run.train(comm.rank, 0, 3)
            assert run.strategy.state_dict()["together"] is (begin == 4)
            assert_close(run.parameters(), expected, f"{strategy},begin={begin}")
            assert_bitwise_equal_over_ranks(comm, run.parameters(), f"{strategy},begin={begin}")
            assert_close(run.finish(), expected, f"{strategy},begin={begin} after finish")
    run = StrategyRun(comm, "model_averaging:begin=4,period=1")
    run.train(comm.rank)
    assert_close(run.finish(), plain_sgd(batches_of_all(comm.size)), "begin=4,period=1")


def what_begins_later_begins_a_window_then(comm: Communicator) -> None:
    run = StrategyRun(comm, "bmuf:begin=2,period=2,eta=0.5")
    run.train(comm.rank, 0, 2)
    start = run.parameters()
    run.train(comm.rank, 2, 3)
    with run.strategy.evaluation_parameters():
        mean = run.parameters()
    run.train(comm.rank, 3, 4)
    assert run.strategy.state_dict()["window_steps"] == 0
    assert float((mean - start).abs().max()) > 0
    velocity = run.strategy.state_dict()["velocity"]
    assert_close(run.parameters(), start + velocity, "first block from the end of the beginning")


def beginnings_in_frames_and_seconds_are_agreed(comm: Communicator) -> None:
    for begin, over in (("35f", 4), ("4s", 4), ("0.5s", 1)):
        run = StrategyRun(comm, f"model_averaging:begin={begin}")
        together = []
        for step in range(NUM_STEPS):
            run.step([make_batch(comm.rank, step)], 10.0, float((step + 1) * (1 + 3 * comm.rank)))
            together.append(run.strategy.state_dict()["together"])
        assert together == [step + 1 < over for step in range(NUM_STEPS)], f"begin={begin}: {together}"
    run = StrategyRun(comm, "model_averaging:begin=8s")
    together = []
    for step in range(NUM_STEPS):  # a first step so fast that 79 more of it would be left
        run.step([make_batch(comm.rank, step)], time_s=0.1 + 2 * step)
        together.append(run.strategy.state_dict()["together"])
    assert together == [True] * 4 + [False] * 3, together


CHECKS: tuple[Callable[[Communicator], None], ...] = (
    periodic_runs_resume_bitwise,
    evaluation_leaves_no_trace,
    evaluation_at_the_end_shows_the_final_model,
    parameters_are_exchanged_once_a_period,
    ranks_without_frames_weigh_nothing,
    a_window_without_any_frame_changes_nothing,
    periods_in_frames_and_seconds_are_agreed,
    a_period_in_seconds_may_be_longer_than_any_training,
    an_interval_in_frames_is_as_long_as_it_says,
    until_it_begins_it_is_gradient_averaging,
    what_begins_later_begins_a_window_then,
    beginnings_in_frames_and_seconds_are_agreed,
)
