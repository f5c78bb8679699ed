"""parameter_server and easgd at full speed: an optimum is reached as fast as can be proved, nothing is lost.

Every rank steps at its own pace here; nothing is made to happen in turns.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

import torch
from torch import Tensor, nn

from speechdp.comm.base import Communicator
from speechdp.parallel.replica import Replica
from speechdp.parallel.strategy import Progress
from speechdp.testing import TOLERANCE, Sgd, StrategyRun, assert_bitwise_equal_over_ranks

NEEDS_PEERS = True

#: Cycles of resume and pause, which must neither hang nor leave anything behind.
NUM_CYCLES = 50


class Valley:
    """The loss |w|^2 / 2 a frame, from w = 1, at work under a strategy: every step knows how far it is.

    Args:
        comm: this rank's communicator.
        strategy: with options.
        learning_rate: of plain SGD; a step of one worker by itself shrinks the distance by 1 - this.
    """

    def __init__(self, comm: Communicator, strategy: str, learning_rate: float) -> None:
        model = nn.Linear(3, 2).double()
        nn.init.ones_(model.weight)
        nn.init.ones_(model.bias)
        replica = Replica(model, Sgd(learning_rate=learning_rate))
        self.comm = comm
        self.run = StrategyRun(comm, strategy, replica)

    def distances(self) -> Tensor:
        """Return how far each parameter is from the optimum; 1 at the start."""
        return torch.cat([v.flatten() for v in self.run.replica.parameters.views]).clone()

    def step(self, frames: int) -> None:
        """Do a step; the gradient is a sum over `frames`."""
        self.run.strategy.before_backward(frames)
        gradients, parameters = self.run.replica.gradients, self.run.replica.parameters
        for gradient, value in zip(gradients.views, parameters.views, strict=True):
            gradient.add_(frames * value)
        self.run.steps += 1
        self.run.strategy.step(Progress(self.run.steps, float(self.run.steps), 0.0))

    def cycle(self) -> Tensor:
        """Step at this rank's own pace (rank + 1 steps), pause, evaluate; return the distances evaluated."""
        for _ in range(self.comm.rank + 1):
            self.step(frames=3 + self.comm.rank)
        self.run.strategy.pause()
        with self.run.strategy.evaluation_parameters():
            distances = self.distances()
        return distances


def the_optimum_is_reached(
    comm: Communicator, strategy: str, rate: float, bound: Callable[[int], float]
) -> None:
    """Run cycles of unequal numbers of steps; after each, every distance is positive and below the bound."""
    valley = Valley(comm, strategy, rate)
    for cycle in range(1, NUM_CYCLES + 1):
        distances = valley.cycle()
        no_thread_is_left(comm)
        nearest, farthest = float(distances.min()), float(distances.max())
        assert nearest >= 0 and farthest <= bound(cycle) + TOLERANCE, (
            f"{strategy}: after {cycle} cycles {nearest:g} to {farthest:g} are left, not {bound(cycle):g}"
        )
        valley.run.strategy.resume()
    assert bound(NUM_CYCLES) < 0.02, f"{strategy}: a bound that shows nothing"
    assert_bitwise_equal_over_ranks(comm, valley.run.finish(), strategy)


def no_thread_is_left(comm: Communicator) -> None:
    comm.barrier()
    names = [thread.name for thread in threading.enumerate() if thread.name == "server"]
    assert not names, f"{names} after pause"
    comm.barrier()


def asynchronous_server_reaches_the_optimum(comm: Communicator) -> None:
    """With delayed gradients the distance is x_(k+1) = x_k - h x_(k-d_k), where d_k <= D.

    Let h <= 1/(e (D+1)), which is at most q^D (1-q) for q = D/(D+1).  If no step so far has shrunk x by more
    than q, then x_(k-d_k) <= x_k / q^D, so this step does not either: x stays positive and falls, hence
    x_(k-d_k) >= x_k and x_(k+1) <= (1-h) x_k.  Every worker fetches at the start of a cycle, so D is at most
    the other updates of the cycle.  With staleness_aware h_k >= h / max(1, D).
    """
    updates = comm.size * (comm.size + 1) // 2
    delay = updates - 1
    rate = 1 / (math.e * (delay + 1))
    the_optimum_is_reached(comm, "parameter_server", rate, lambda c: (1 - rate) ** (c * updates))
    if comm.size > 2:
        return  # the bound falls too slowly to show anything
    slowest = rate / max(1, delay)
    strategy = "parameter_server:staleness_aware=true"
    the_optimum_is_reached(comm, strategy, rate, lambda c: (1 - slowest) ** (c * updates))


def elastic_averaging_reaches_the_optimum(comm: Communicator) -> None:
    """Let all distances be at most M when a cycle begins; h is the learning rate.

    A worker steps before it exchanges, so what it brings is at most (1-h) M and what it takes away at most
    (1-a)(1-h) M + a M = (1 - h (1-a)) M.  The centre becomes at most (1-a) M + a (1-h) M = (1 - a h) M at
    the first exchange and stays below that, since what is brought is.  With period 1 every worker exchanges
    in every cycle: M shrinks by 1 - h min(a, 1-a).  Everything stays a mean of positive numbers.
    """
    alpha, rate = 0.4, 0.5
    shrinks = 1 - rate * min(alpha, 1 - alpha)
    the_optimum_is_reached(comm, f"easgd:period=1,alpha={alpha}", rate, lambda c: shrinks**c)


def large_run(comm: Communicator, strategy: str) -> StrategyRun:
    """Return a run over 200,000 parameters, all 0: exchanges that take long enough to meet."""
    replica = Replica(nn.Linear(400, 500, bias=False).double(), Sgd(learning_rate=0.125))
    replica.parameters.values.zero_()
    return StrategyRun(comm, strategy, replica)


def step_with_gradient(run: StrategyRun, gradient: float) -> None:
    """Do a step of one frame whose gradient is the same for every parameter."""
    run.strategy.before_backward(1)
    run.replica.gradients.views[0].add_(gradient)
    run.steps += 1
    run.strategy.step(Progress(run.steps, float(run.steps), 0.0))


def answers_are_whole_and_no_gradient_is_lost(comm: Communicator) -> None:
    """All parameters move alike: an answer with two different ones was changed while it was copied."""
    run = large_run(comm, "parameter_server")
    for _ in range(NUM_CYCLES):
        step_with_gradient(run, -1.0)
        weights = run.replica.parameters.views[0]
        assert weights.min() == weights.max(), "an answer made of two states of the master"
    moved = run.finish().max()
    assert moved == 0.125 * NUM_CYCLES * comm.size, f"{float(moved)}: a gradient was lost"


def elastic_exchanges_conserve_the_sum(comm: Communicator) -> None:
    """Workers and centre only trade: their sum is what the gradients alone have added, in powers of two."""
    if comm.size == 1:
        return
    run = large_run(comm, "easgd:period=1,alpha=0.25")
    for _ in range(NUM_CYCLES):
        step_with_gradient(run, -1.0)
    total = run.parameters()
    comm.allreduce(total, name="sum")
    total += run.finish()
    difference = (total - 0.125 * NUM_CYCLES * comm.size).abs().max()
    assert difference <= TOLERANCE, f"the sum is off by {float(difference):g}"


CHECKS: tuple[Callable[[Communicator], None], ...] = (
    asynchronous_server_reaches_the_optimum,
    elastic_averaging_reaches_the_optimum,
    answers_are_whole_and_no_gradient_is_lost,
    elastic_exchanges_conserve_the_sum,
)
