"""Identities of the strategies that move a global model: bmuf, slowmo, diloco."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from speechdp.comm.base import Communicator
from speechdp.testing import (
    NUM_STEPS,
    Sgd,
    StrategyRun,
    assert_bitwise_equal_over_ranks,
    assert_close,
    flat,
    make_batch,
    make_model,
    make_replica,
)
from tests.helpers.apart import Apart, drive, simulate, vector

SGD = Sgd(momentum=0.9)


class Outer:
    """A global model that moves by the mean of the ranks: `rule(start, mean)` once a period."""

    def __init__(self) -> None:
        self.start = vector(make_model())
        self.velocity = torch.zeros_like(self.start)


class Cbm(Outer):
    """Classical block momentum."""

    eta, zeta = 0.6, 0.8

    def __call__(self, mean: Tensor) -> Tensor:
        self.velocity = self.eta * self.velocity + self.zeta * (mean - self.start)
        self.start = self.start + self.velocity
        return self.start


class Nbm(Outer):
    """Nesterov block momentum, in two steps: the global model, then the look-ahead from it."""

    eta, zeta = 0.6, 0.8

    def __init__(self) -> None:
        super().__init__()
        self.model = self.start

    def __call__(self, mean: Tensor) -> Tensor:
        self.velocity = self.eta * self.velocity + self.zeta * (mean - self.start)
        self.model = self.model + self.velocity
        self.start = self.model + self.eta * self.velocity
        return self.start


class Slow(Outer):
    """SlowMo with the learning rate of the tests."""

    beta, alpha, rate = 0.6, 0.8, SGD.learning_rate

    def __call__(self, mean: Tensor) -> Tensor:
        self.velocity = self.beta * self.velocity + (self.start - mean) / self.rate
        self.start = self.start - self.alpha * self.rate * self.velocity
        return self.start


class TorchNesterov(Outer):
    """DiLoCo with torch's own SGD as the outer optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.parameter = torch.nn.Parameter(self.start.clone())
        self.sgd = torch.optim.SGD([self.parameter], 0.7, momentum=0.9, nesterov=True)

    def __call__(self, mean: Tensor) -> Tensor:
        self.parameter.grad = self.parameter.detach() - mean
        self.sgd.step()
        return self.parameter.detach().clone()


def outer_strategies_follow_their_equations(comm: Communicator) -> None:
    for options, exchange, momentum in (
        ("bmuf:eta=0.6,zeta=0.8", Cbm(), "reset"),
        ("bmuf:eta=0.6,zeta=0.8,momentum=keep", Cbm(), "keep"),
        ("bmuf:eta=0.6,zeta=0.8,nesterov=true,momentum=average", Nbm(), "average"),
        ("slowmo:beta=0.6,alpha=0.8", Slow(), "keep"),
        ("slowmo:beta=0.6,alpha=0.8,momentum=reset", Slow(), "reset"),
        ("diloco", TorchNesterov(), "keep"),
    ):
        apart = Apart(comm.size, 3, exchange, SGD, momentum)
        name = f"{options}{',' if ':' in options else ':'}period=3"
        run = StrategyRun(comm, name, make_replica(SGD))
        drive(run, apart)
        assert_close(run.finish(), simulate(comm, apart), name)


def neutral_constants_are_model_averaging(comm: Communicator) -> None:
    for name, momentum in (
        ("bmuf:eta=0,zeta=1", "reset"),
        ("bmuf:eta=0,zeta=1,momentum=average", "average"),
        ("slowmo:alpha=1,beta=0", "keep"),
        ("diloco:outer_learning_rate=1,outer_momentum=0", "keep"),
    ):
        finals = []
        for strategy in (f"{name},period=2", f"model_averaging:period=2,momentum={momentum}"):
            run = StrategyRun(comm, strategy, make_replica(SGD))
            run.train(comm.rank)
            finals.append(run.finish())
        assert_close(*finals, f"{name} and model averaging")


def relations_between_outer_strategies(comm: Communicator) -> None:
    """Compare the parameters after each exchange, which the methods have in common."""
    for one, other in (
        ("slowmo:beta=0.6,alpha=0.8", "bmuf:eta=0.6,zeta=0.8,momentum=keep"),
        (
            "diloco:outer_learning_rate=0.8,outer_momentum=0.6",
            "bmuf:eta=0.6,zeta=0.8,nesterov=true,momentum=keep",
        ),
    ):
        runs = [StrategyRun(comm, f"{name},period=2", make_replica(SGD)) for name in (one, other)]
        for step in range(NUM_STEPS):
            for run in runs:
                run.step([make_batch(comm.rank, step)])
            assert_close(*(run.parameters() for run in runs), f"{one} and {other} after step {step + 1}")


def slowmo_with_a_falling_rate_follows_the_equation(comm: Communicator) -> None:
    run = StrategyRun(comm, "slowmo:beta=0.5,period=1")
    start, velocity = run.parameters(), torch.zeros_like(run.parameters())
    for step in range(4):
        rate = 0.3 / 2**step
        run.replica.set_learning_rate(rate)
        mean = _mean_after_a_step(comm, start, rate, step)
        run.step([make_batch(comm.rank, step)])
        velocity = 0.5 * velocity + (start - mean) / rate
        start = start - rate * velocity
        assert_close(run.parameters(), start, f"slowmo after step {step + 1}")
    run.replica.set_learning_rate(0.0)
    run.step([make_batch(comm.rank, 4)])
    assert_close(run.parameters(), start, "slowmo with learning rate 0")


def slowmo_with_rate_0_at_the_exchange_keeps_what_the_window_has_moved(comm: Communicator) -> None:
    run = StrategyRun(comm, "slowmo:beta=0.5,alpha=0.8,period=2", make_replica(SGD))
    run.train(comm.rank, 0, 2)
    start, velocity = run.parameters(), run.strategy.state_dict()["velocity"].clone()
    run.step([make_batch(comm.rank, 2)])
    frames = sum(make_batch(comm.rank, step).num_frames for step in (2, 3))
    sums = torch.cat([frames * run.parameters(), torch.tensor([float(frames)], dtype=torch.float64)])
    comm.allreduce(sums, name="mean")
    movement = sums[:-1] / sums[-1] - start
    assert float(movement.abs().max()) > 1e-3
    run.replica.set_learning_rate(0.0)
    run.step([make_batch(comm.rank, 3)])
    assert_close(run.parameters(), start + 0.8 * movement, "slowmo with learning rate 0 at the exchange")
    assert torch.equal(run.strategy.state_dict()["velocity"], velocity)


def _mean_after_a_step(comm: Communicator, start: Tensor, rate: float, step: int) -> Tensor:
    run = StrategyRun(comm, "model_averaging:period=1", make_replica(Sgd(learning_rate=rate)))
    run.replica.parameters.values.copy_(start)
    run.step([make_batch(comm.rank, step)])
    return run.parameters()


def the_global_model_does_not_look_ahead(comm: Communicator) -> None:
    rule = Nbm()
    apart = Apart(comm.size, 3, rule, SGD, "keep", steps=6)
    run = StrategyRun(comm, "bmuf:eta=0.6,zeta=0.8,nesterov=true,momentum=keep,period=3", make_replica(SGD))
    drive(run, apart)
    assert_close(run.parameters(), simulate(comm, apart), "where ranks go on from")
    model = make_model()
    torch.nn.utils.vector_to_parameters(comm.broadcast(rule.model, name="model"), model.parameters())
    with run.strategy.evaluation_parameters():
        assert_close(run.parameters(), flat(model), "global model under evaluation")
    assert_close(run.finish(), flat(model), "global model after finish")


def outer_state_is_the_same_on_all_ranks(comm: Communicator) -> None:
    for strategy in ("bmuf:eta=0.5,nesterov=true", "slowmo:beta=0.5", "diloco:outer_momentum=0.5"):
        run = StrategyRun(comm, f"{strategy},period=3", make_replica(SGD))
        run.train(comm.rank)
        for name in ("start", "velocity"):
            assert_bitwise_equal_over_ranks(comm, run.strategy.state_dict()[name], f"{strategy}: {name}")


def defaults_go_by_the_number_of_ranks(comm: Communicator) -> None:
    finals = []
    for strategy in ("bmuf:period=2", f"bmuf:period=2,eta={1 - 1 / comm.size}"):
        run = StrategyRun(comm, strategy)
        run.train(comm.rank)
        finals.append(run.finish())
    beta = 0.2 if comm.size >= 4 else 0.0
    for strategy in ("slowmo:period=2", f"slowmo:period=2,beta={beta}"):
        run = StrategyRun(comm, strategy)
        run.train(comm.rank)
        finals.append(run.finish())
    assert_close(finals[0], finals[1], "bmuf's default eta")
    assert_close(finals[2], finals[3], "slowmo's default beta")


CHECKS: tuple[Callable[[Communicator], None], ...] = (
    outer_strategies_follow_their_equations,
    neutral_constants_are_model_averaging,
    relations_between_outer_strategies,
    slowmo_with_a_falling_rate_follows_the_equation,
    slowmo_with_rate_0_at_the_exchange_keeps_what_the_window_has_moved,
    the_global_model_does_not_look_ahead,
    outer_state_is_the_same_on_all_ranks,
    defaults_go_by_the_number_of_ranks,
)
