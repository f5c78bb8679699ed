"""Check adaptive_averaging: the rule for its period, and that all ranks agree on it."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from contextlib import nullcontext, redirect_stderr

import torch

from speechdp.comm.base import Communicator
from speechdp.errors import ConfigError
from speechdp.parallel.period import Period
from speechdp.parallel.strategy import Progress
from speechdp.testing import (
    Sgd,
    StrategyRun,
    assert_close,
    assert_resumes,
    make_batch,
    make_replica,
    plain_sgd,
)
from tests.helpers.strategy_checks.periodic import allreduced


def a_constant_schedule_is_model_averaging(comm: Communicator) -> None:
    adaptive = StrategyRun(comm, "adaptive_averaging:period=3,interval=1,halve=false")
    _report(adaptive, lambda step: 2.0)
    usual = StrategyRun(comm, "model_averaging:period=3")
    for run in (adaptive, usual):
        run.train(comm.rank)
    assert torch.equal(adaptive.finish(), usual.finish()), "constant loss and rate, yet not model averaging"


def _report(run: StrategyRun, loss_of_step: Callable[[int], float]) -> None:
    """Replace a rank's reported mean loss."""
    observer = run.strategy.observer
    assert observer is not None
    observe = observer.observe_loss

    def report(total: torch.Tensor, frames: int) -> None:
        observe(torch.full_like(total, loss_of_step(run.steps) * frames), frames)

    observer.observe_loss = report  # type: ignore[method-assign]


def _ends_of_windows(run: StrategyRun, rank: int, steps: int) -> list[int]:
    """Train; return the steps after which there was an exchange."""
    ends = []
    for step in range(steps):
        run.step([make_batch(rank, step)])
        if run.strategy.state_dict()["window_steps"] == 0:
            ends.append(run.steps)
    return ends


def the_period_follows_the_loss(comm: Communicator) -> None:
    """F falls to a quarter after the first window: ceil(5 sqrt(1/4)) = 3; to a 25th: 1."""
    run = StrategyRun(comm, "adaptive_averaging:period=5,interval=1,halve=false")
    # The mean over ranks with unequal frames, whatever each sees: rank 0's own differs.
    _report(run, lambda step: 4.0 if step < 5 else 1.0 if step < 13 else 0.16)
    ends = _ends_of_windows(run, comm.rank, 18)
    # 5..10 still with the period of 5, at whose end the rule gives 3.
    assert ends == [5, 10, 13, 16, 17, 18], ends


def the_period_follows_the_mean_of_all_ranks(comm: Communicator) -> None:
    run = StrategyRun(comm, "adaptive_averaging:period=4,interval=1,halve=false")
    # In the second window rank 0 sees no progress, the others perfect fit.
    _report(run, lambda step: 4.0 if step < 4 or comm.rank == 0 else 0.0)
    frames = [sum(make_batch(rank, step).num_frames for step in range(4, 8)) for rank in range(comm.size)]
    _ends_of_windows(run, comm.rank, 8)
    expected = math.ceil(4 * math.sqrt(frames[0] / sum(frames)))
    assert run.strategy.statistics()["period"] == str(expected), (run.strategy.statistics(), expected)
    assert len(set(comm.allgather_object(run.strategy.statistics()["period"]))) == 1


def a_loss_that_is_negative_at_first_is_refused(comm: Communicator) -> None:
    """Before, the period silently never changed."""
    run = StrategyRun(comm, "adaptive_averaging:period=5,interval=1")
    _report(run, lambda step: -1.5)
    try:
        _ends_of_windows(run, comm.rank, 5)
    except ConfigError as error:
        assert "loss is -1.5 a frame in the first window" in str(error), error
    else:
        raise AssertionError("a negative loss, and nothing is said")


def a_loss_that_becomes_negative_counts_as_none(comm: Communicator) -> None:
    run = StrategyRun(comm, "adaptive_averaging:period=5,interval=1,halve=false")
    _report(run, lambda step: 4.0 if step < 5 else -1.0)
    said = io.StringIO()
    # Ranks that are threads share their output.
    with redirect_stderr(said) if comm.size == 1 else nullcontext():
        ends = _ends_of_windows(run, comm.rank, 13)
    assert ends == [5, 10, 11, 12, 13], ends
    assert said.getvalue().count("has fallen below 0") == (comm.size == 1), said.getvalue()


def a_period_in_frames_never_becomes_0(comm: Communicator) -> None:
    run = StrategyRun(comm, "adaptive_averaging:period=20f,interval=1,halve=false")
    _report(run, lambda step: 4.0 if step < 3 else 0.0)
    ends = _ends_of_windows(run, comm.rank, 20)
    assert Period.parse(str(run.strategy.statistics()["period"])).value > 0
    assert ends[-4:] == [17, 18, 19, 20], ends


def a_period_that_does_not_shrink_is_halved(comm: Communicator) -> None:
    run = StrategyRun(comm, "adaptive_averaging:period=5,interval=1")
    _report(run, lambda step: 2.0 + step)
    ends = _ends_of_windows(run, comm.rank, 16)
    assert ends == [5, 10, 13, 15, 16], ends


def a_falling_rate_lengthens_the_period_up_to_the_limit(comm: Communicator) -> None:
    for rate, expected in ((0.3 / 4, 4), (0.3 / 64, 6), (0.3 * 4, 1)):
        run = StrategyRun(comm, "adaptive_averaging:period=2,interval=2,growth=3")
        _report(run, lambda step: 2.0)
        run.train(comm.rank, 0, 2)
        run.replica.set_learning_rate(rate)
        run.train(comm.rank, 2, 4)
        assert run.strategy.statistics()["period"] == str(expected), (
            f"rate {rate}: {run.strategy.statistics()}"
        )


def the_interval_is_kept(comm: Communicator) -> None:
    """Periods of 2; the loss falls to a quarter at once, but is looked at once an interval."""
    for interval, looked_at in (("5", 8), ("45f", 8), ("2.5s", 8), ("1f", 4)):
        run = StrategyRun(comm, f"adaptive_averaging:period=2,interval={interval},halve=false")
        _report(run, lambda step: 4.0 if step < 2 else 1.0)
        for step in range(10):
            # Rank 0's clock: half a second a step; the others' run at another pace.
            run.step([make_batch(comm.rank, step)], 10.0, 0.5 * (step + 1) * (1 + 2 * comm.rank))
            expected = 1 if step + 1 >= looked_at else 2
            assert run.strategy.statistics()["period"] == str(expected), f"{interval}: step {step + 1}"


def the_rate_rises_with_the_ranks_and_the_period_falls(comm: Communicator) -> None:
    """4 ranks and K0 = 4: f = 16/4 = 4, reached after a quarter of training, when K is 1."""
    run = StrategyRun(comm, "adaptive_averaging:period=4,interval=4,halve=false,learning_rate=scale")
    _report(run, lambda step: 2.0)
    full = min(max(comm.size**2 / 4, 1), comm.size)
    for _ in range(16):
        run.replica.set_learning_rate(0.3)
        run.strategy.before_backward(0)
        assert run.strategy.observer is not None
        run.strategy.observer.observe_loss(torch.tensor(1.0), 1)
        run.steps += 1
        run.strategy.step(Progress(run.steps, 0.0, 0.0, run.steps / 8, 4))
        expected = 1 + (full - 1) * min(1, run.steps / 8)
        assert abs(run.replica.learning_rate - 0.3 * expected) < 1e-12, f"rate after step {run.steps}"
    period = run.strategy.statistics()["period"]
    assert period == str(math.ceil(4 / full)), f"period {period}, factor {full}"


def with_one_exchange_a_step_the_rate_counts_once(comm: Communicator) -> None:
    """A schedule that takes back what the strategy multiplies it by is a constant one."""
    run = StrategyRun(comm, "adaptive_averaging:period=1,learning_rate=scale")
    for step in range(7):
        run.replica.set_learning_rate(0.3)
        run.replica.set_learning_rate(0.3 * 0.3 / run.replica.learning_rate)
        run.train(comm.rank, step, step + 1)
    batches = [[make_batch(rank, step) for rank in range(comm.size)] for step in range(7)]
    assert_close(run.finish(), plain_sgd(batches), "adaptive_averaging:period=1")


def what_was_adapted_is_saved(comm: Communicator) -> None:
    strategy = "adaptive_averaging:period=3,interval=3,learning_rate=scale"
    run = StrategyRun(comm, strategy, make_replica(Sgd()))
    run.train(comm.rank, 0, 6)
    other = StrategyRun(comm, strategy, make_replica(Sgd()))
    other.strategy.load_state_dict(run.strategy.state_dict())
    assert other.strategy.statistics()["period"] == run.strategy.statistics()["period"] != "3"
    assert other.replica.learning_rate == run.replica.learning_rate
    assert comm.size == 1 or other.replica.learning_rate > 0.3


def the_loss_of_an_interval_survives_a_checkpoint(comm: Communicator) -> None:
    """F0 = 4; then no loss until the checkpoint and 4 after it: about 2, with which the period is 3."""
    strategy = "adaptive_averaging:period=4,interval=1,halve=false"
    run, other = StrategyRun(comm, strategy), StrategyRun(comm, strategy)
    _report(run, lambda step: 4.0 if step < 4 else 0.0)
    _report(other, lambda step: 4.0)
    run.train(0, 0, 6)
    other.strategy.load_state_dict(run.strategy.state_dict())
    other.steps = run.steps
    other.train(0, 6, 8)
    assert other.strategy.statistics() == {"period": "3"}, other.strategy.statistics()


def the_loss_before_training_apart_does_not_count(comm: Communicator) -> None:
    run = StrategyRun(comm, "adaptive_averaging:begin=3,period=2,interval=1,halve=false")
    _report(run, lambda step: 100.0 if step < 3 else 4.0)
    run.train(comm.rank)
    assert run.strategy.statistics() == {"period": "2"}, run.strategy.statistics()


def _ends_at_rates(run: StrategyRun, rank: int, rates: list[float]) -> list[int]:
    """Train a step with each learning rate; return the steps after which there was an exchange."""
    ends = []
    for step, rate in enumerate(rates):
        run.replica.set_learning_rate(rate)
        run.step([make_batch(rank, step)])
        if run.strategy.state_dict()["window_steps"] == 0:
            ends.append(run.steps)
    return ends


def the_quadratic_rule_follows_the_rate_of_a_window_s_first_step(comm: Communicator) -> None:
    """(0.6/0.3)^2 = 4, (0.6/0.2)^2 = 9; the rate falls with the first step of the third window."""
    run = StrategyRun(comm, "adaptive_averaging:rule=qsr,alpha=0.6,period=2")
    ends = _ends_at_rates(run, comm.rank, [0.3] * 6 + [0.2] * 9 + [0.3] * 6)
    assert ends[:3] == [2, 6, 15], ends
    assert ends[3:] == [17, 21], "a rate that rises again gives the first period, then its own"
    assert run.strategy.statistics() == {"period": "4"}


def the_quadratic_rule_keeps_the_first_period_in_a_warm_up(comm: Communicator) -> None:
    """A rate near 0 would ask for a period without end, at the start and at the end of training."""
    run = StrategyRun(comm, "adaptive_averaging:rule=qsr,alpha=0.6,period=2")
    warm_up = [0.0, 1e-9, 0.1, 0.2, 0.25, 0.28]
    ends = _ends_at_rates(run, comm.rank, warm_up + [0.3] * 6 + [0.0] * 4)
    assert ends == [2, 4, 6, 8, 12, 16], ends
    _ends_at_rates(run, comm.rank, [1e-300])
    assert run.strategy.statistics()["period"] == "2", "from a rate of 0 it rises"
    run = StrategyRun(comm, "adaptive_averaging:rule=qsr,alpha=0.6,period=2")
    _ends_at_rates(run, comm.rank, [0.3, 0.3, 1e-300])
    assert int(run.strategy.statistics()["period"]) > 10**9


def the_quadratic_rule_never_shortens_the_period(comm: Communicator) -> None:
    quadratic = StrategyRun(comm, "adaptive_averaging:rule=qsr,alpha=0.3,period=3")
    usual = StrategyRun(comm, "model_averaging:period=3")
    for run in (quadratic, usual):
        run.train(comm.rank)
    assert torch.equal(quadratic.finish(), usual.finish()), "a high rate, yet not the first period"


def the_quadratic_rule_and_stages_add_no_exchange(comm: Communicator) -> None:
    for rule in ("rule=qsr,alpha=0.6", "rule=stages,stages=4@2"):
        run = StrategyRun(comm, f"adaptive_averaging:{rule},period=2")
        sent = allreduced(comm, lambda run=run: run.train(comm.rank, 0, 6))
        num_averages = 0 if comm.size == 1 else 2
        assert sent == [run.replica.parameters.whole.numel()] * num_averages, (rule, sent)


def the_quadratic_rule_resumes_bitwise(comm: Communicator) -> None:
    for saved_after in (1, 2, 3, 6):
        assert_resumes(comm, "adaptive_averaging:rule=qsr,alpha=0.6,period=2", saved_after)


def stages_begin_with_the_average_after_their_points(comm: Communicator) -> None:
    half = [1, 2, 3, 4, 7, 10, 13]  # of 7 steps, each of 10 frames: the fourth is the first beyond it
    for options, expected in (
        ("period=1,stages=2@3+4@8", [1, 2, 3, 5, 7, 9, 13]),
        ("period=4,stages=1@6", [4, 8, 9, 10, 11, 12, 13]),  # a window is not cut short
        ("period=1,stages=3@50%", half),
        ("period=1,stages=3@0.5ep", half),
        ("period=1,stages=3@35f", half),
        ("period=1,stages=4@2+3@4", [1, 2, 6, 9, 12]),
        ("period=10f,stages=30f@50%", half),
        ("begin=5,period=1,stages=3@2", [8, 11]),  # points count from the start of training
    ):
        run = StrategyRun(comm, f"adaptive_averaging:rule=stages,{options}")
        ends = []
        for step in range(13):
            run.step([make_batch(comm.rank, step)])
            has_begun = "begin=5" not in options or run.steps > 5
            if has_begun and run.strategy.state_dict()["window_steps"] == 0:
                ends.append(run.steps)
        assert ends == expected, (options, ends)


def stages_in_seconds_are_agreed(comm: Communicator) -> None:
    run = StrategyRun(comm, "adaptive_averaging:rule=stages,period=2s,stages=4s@5")
    ends = []
    for step in range(13):  # rank 0 needs 1 s a step, the others believe in other times
        run.step([make_batch(comm.rank, step)], time_s=float((step + 1) * (1 + 3 * comm.rank)))
        if run.strategy.state_dict()["window_steps"] == 0:
            ends.append(run.steps)
    assert ends == [1, 3, 5, 9, 13], ends


CHECKS: tuple[Callable[[Communicator], None], ...] = (
    a_constant_schedule_is_model_averaging,
    the_period_follows_the_loss,
    the_period_follows_the_mean_of_all_ranks,
    a_loss_that_is_negative_at_first_is_refused,
    a_loss_that_becomes_negative_counts_as_none,
    a_period_in_frames_never_becomes_0,
    a_period_that_does_not_shrink_is_halved,
    a_falling_rate_lengthens_the_period_up_to_the_limit,
    the_interval_is_kept,
    the_rate_rises_with_the_ranks_and_the_period_falls,
    with_one_exchange_a_step_the_rate_counts_once,
    what_was_adapted_is_saved,
    the_loss_of_an_interval_survives_a_checkpoint,
    the_loss_before_training_apart_does_not_count,
    the_quadratic_rule_follows_the_rate_of_a_window_s_first_step,
    the_quadratic_rule_keeps_the_first_period_in_a_warm_up,
    the_quadratic_rule_never_shortens_the_period,
    the_quadratic_rule_and_stages_add_no_exchange,
    the_quadratic_rule_resumes_bitwise,
    stages_begin_with_the_average_after_their_points,
    stages_in_seconds_are_agreed,
)
