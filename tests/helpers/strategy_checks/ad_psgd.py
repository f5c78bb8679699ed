"""What ad_psgd promises: identities where order does not matter, rates of convergence where it does.

Rates come from the expected second moment of one round in which every active rank begins at least one
exchange with a random partner (`rate`); checks allow twice the rounds that it takes, for chance and for
corrections that arrive a step late.
"""

from __future__ import annotations

import copy
import math
import threading
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from speechdp.comm.base import Communicator
from speechdp.parallel.replica import Replica
from speechdp.parallel.strategy import Progress
from speechdp.strategies.mechanisms import topology
from speechdp.testing import (
    Sgd,
    StrategyRun,
    assert_bitwise_equal_over_ranks,
    assert_close,
    batches_of_all,
    make_replica,
    plain_sgd,
)

NEEDS_PEERS = True
_SIZE = 24  # parameters of the quadratic problems
_REDUCTION = 1e-6  # of squared errors that is asked for


class Point(nn.Module):
    """A model whose parameters are one vector."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.zeros(_SIZE, dtype=torch.float64))


class Descent(StrategyRun):
    """A run on a quadratic: `descend` goes towards `goal` in the coordinates of `seen`, 1 or 0 each."""

    def __init__(self, comm: Communicator, options: str = "", learning_rate: float = 0.5) -> None:
        super().__init__(comm, f"ad_psgd{options}", Replica(Point(), Sgd(learning_rate=learning_rate)))
        self.comm = comm
        self.goal = torch.linspace(1, 2, _SIZE, dtype=torch.float64)
        self.seen = torch.ones(_SIZE, dtype=torch.float64)
        self.position: Tensor = self.replica.model.position  # type: ignore[assignment]

    def descend(
        self, num_steps: int, pause_s: float = 0.0, before_step: Callable[[], object] = lambda: None
    ) -> None:
        """Take steps; between gradient and update come a pause, s, and whatever `before_step` does."""
        for _ in range(num_steps):
            self.strategy.before_backward(1)
            loss = 0.5 * (self.seen * (self.position - self.goal) ** 2).sum()
            loss.backward()  # type: ignore[no-untyped-call]
            time.sleep(pause_s)
            before_step()
            self.steps += 1
            self.strategy.step(Progress(self.steps, float(self.steps), 0.0))

    def round(self, num_steps: int) -> None:
        """Take steps and end all exchanges; the strategy is paused before and after."""
        self.strategy.resume()
        self.descend(num_steps)
        self.strategy.pause()

    def scatter(self) -> None:
        """Give every rank its own parameters; only while paused."""
        generator = torch.Generator().manual_seed(self.comm.rank)
        self.replica.parameters.values.copy_(torch.randn(_SIZE, generator=generator, dtype=torch.float64))

    def mean(self) -> Tensor:
        """Return the mean of all ranks' parameters.  Collective."""
        return self.comm.allreduce(self.parameters(), name="mean") / self.comm.size

    def spread(self) -> float:
        """Return the sum over ranks of the squared distance to the mean.  Collective."""
        own = ((self.parameters() - self.mean()) ** 2).sum().reshape(1)
        return float(self.comm.allreduce(own, name="spread"))


def rate(shrink: Tensor, *, around_mean: bool = False) -> float:
    """Return by how much the expected square of the errors shrinks at least in a round.

    Args:
        shrink: factor by which each rank's own steps shrink its error.  (size,)
        around_mean: look at errors beside the mean only.
    """
    size = len(shrink)
    identity = torch.eye(size, dtype=torch.float64)
    project = identity - 1 / size if around_mean else identity
    start = project @ shrink.double().diag()
    moment = torch.kron(start, start)
    for active in filter(topology.is_active, range(size)):
        partners = topology.passive_partners(active, size, "all")
        differences = [identity[active] - identity[partner] for partner in partners]
        mixings = [identity - torch.outer(d, d) / 2 for d in differences]
        if mixings:
            moment = torch.stack([torch.kron(w, w) for w in mixings]).mean(0) @ moment
    return float(torch.linalg.eigvals(moment).abs().max())


def rounds_for(reduction: float, shrinking: float) -> int:
    """Return the rounds allowed to shrink a square by `reduction`: twice as many as expected, and 2."""
    if shrinking < 1e-12:
        return 2
    return 2 + 2 * math.ceil(math.log(reduction) / math.log(shrinking))


def a_rank_alone_is_plain_sgd_and_a_single_group_gradient_averaging(comm: Communicator) -> None:
    optimizer = Sgd(momentum=0.9)
    run = StrategyRun(comm, f"ad_psgd:groups={comm.size}", make_replica(optimizer))
    run.train(comm.rank)
    together = StrategyRun(comm, "gradient_averaging", make_replica(optimizer))
    together.train(comm.rank)
    result = run.finish()
    expected = together.finish()
    if comm.backend == "horovod":  # whose groups are MPI's, which sums in another order
        assert_close(result, expected, "one group of all ranks and gradient averaging")
    else:
        assert torch.equal(result, expected), "one group of all ranks is no gradient averaging"
    assert_close(result, plain_sgd(batches_of_all(comm.size), optimizer), "one group of all ranks")


def mixing_keeps_the_mean_and_brings_replicas_together(comm: Communicator) -> None:
    run = Descent(comm, learning_rate=0.0)
    run.strategy.pause()
    run.scatter()
    mean, before = run.mean(), run.spread()
    shrinking = rate(torch.ones(comm.size), around_mean=True) if comm.size > 1 else 0.0
    for _ in range(rounds_for(_REDUCTION, shrinking)):
        run.round(2)
    drift = float((run.mean() - mean).abs().max())
    assert drift <= 1e-12, f"the mean moved by {drift:g}"
    after = run.spread()
    assert after <= _REDUCTION * before, f"replicas were {before:g} apart, now {after:g}"
    run.finish()


def reaches_what_no_rank_could_find_alone(comm: Communicator) -> None:
    """Each rank's data says something about its own coordinates only."""
    run = Descent(comm)
    run.strategy.pause()
    run.seen.zero_()[comm.rank :: comm.size] = 1.0
    shrink = torch.ones(comm.size)
    shrink[0] = 0.25  # two steps at a learning rate of 1/2
    shrinks = [shrink.roll(owner) for owner in range(comm.size)]
    shrinking = max(rate(s) for s in shrinks)
    for _ in range(rounds_for(_REDUCTION, shrinking)):
        run.round(2)
    error = float(((run.parameters() - run.goal) ** 2).sum() / (run.goal**2).sum())
    assert error <= _REDUCTION, f"squared error {error:g} of what it was"
    run.finish()


def ranks_may_take_very_different_numbers_of_steps(comm: Communicator) -> None:
    """One rank takes most of the steps; a passive one none, yet gets there."""
    run = Descent(comm, learning_rate=0.1)
    run.strategy.pause()
    last = comm.size - 1
    numbers = [0 if r == last and r % 2 == 1 else 24 >> r for r in range(comm.size)]
    shrinking = rate(torch.tensor([0.9**n for n in numbers], dtype=torch.float64))
    for _ in range(rounds_for(_REDUCTION, shrinking)):
        run.round(numbers[comm.rank])
    error = float(((run.parameters() - run.goal) ** 2).sum() / (run.goal**2).sum())
    assert error <= _REDUCTION, f"squared error {error:g} of what it was"
    staleness = run.strategy.statistics()["staleness"]
    assert sum(staleness) == run.steps, "not every gradient has its staleness"
    run.finish()


def a_paused_rank_goes_on_answering(comm: Communicator) -> None:
    run = Descent(comm)
    if topology.is_active(comm.rank):
        run.descend(3, pause_s=0.02)
    run.strategy.pause()
    exchanges = torch.tensor([run.strategy.statistics()["exchanges"]])
    assert exchanges.item() >= (1 if comm.size > 1 and topology.is_active(comm.rank) else 0)
    total = int(comm.allreduce(exchanges, name="exchanges"))
    assert total % 2 == 0, "an exchange has two sides"
    run.finish()


def nothing_is_left_after_a_pause(comm: Communicator) -> None:
    # Threads of ranks that vanished in another test of this process are nobody's to end, and named alike.
    before = set(threading.enumerate())
    run = Descent(comm)
    run.descend(3)
    for number in range(4):
        run.strategy.pause()
        name = f"gossip of learner {comm.rank}"
        begun = set(threading.enumerate()) - before
        left = [t.name for t in begun if t.name.split(",")[0] == name]
        assert not left, f"threads left: {left}"
        _assert_no_message_is_under_way(comm, run)
        assert run.strategy._effective.num_pending == 0  # type: ignore[attr-defined]
        run.strategy.resume()
        # Without a word between the ranks some are in the next session while others still end this one.
        run.descend(0 if (comm.rank + number) % 3 == 0 else number + 1)
    run.finish()


def _assert_no_message_is_under_way(comm: Communicator, run: StrategyRun) -> None:
    """Send a message between all ranks: any message left over from the session would arrive before it."""
    comm.barrier()  # ranks that have not paused yet still receive
    peers, word = run.strategy.peers, torch.tensor([12345])
    for tag in (run.strategy._gossip._session, 500):  # type: ignore[attr-defined]
        for source in range(comm.size):
            for dest in range(comm.size):
                if comm.rank == source != dest:
                    peers.send(word, dest, tag=tag)
                if comm.rank == dest != source:
                    heard = torch.zeros(1, dtype=torch.int64)
                    assert peers.recv(heard, source, tag=tag) == source
                    assert heard.item() == 12345, f"message left from rank {source}"


def finish_and_evaluation_show_the_mean(comm: Communicator) -> None:
    run = Descent(comm)
    run.descend(2 + comm.rank)
    run.strategy.pause()
    run.scatter()
    mean, own = run.mean(), run.parameters()
    with run.strategy.evaluation_parameters():
        assert_close(run.parameters(), mean, "parameters under evaluation")
        assert_bitwise_equal_over_ranks(comm, run.parameters(), "parameters under evaluation")
    assert torch.equal(run.parameters(), own), "evaluation left a trace"
    result = run.finish()
    assert_close(result, mean, "after finish")
    assert_bitwise_equal_over_ranks(comm, result, "after finish")


def saved_and_loaded_goes_on_from_the_same_state(comm: Communicator) -> None:
    first = Descent(comm, ":period=3")
    first.descend(7)
    first.strategy.pause()
    state, position = copy.deepcopy(first.strategy.state_dict()), first.parameters()
    partner = _next_partner(first)
    first.finish()
    second = Descent(comm, ":period=3")
    second.strategy.pause()
    second.replica.parameters.values.copy_(position)
    second.strategy.load_state_dict(copy.deepcopy(state))
    assert second.strategy.state_dict() == state
    assert _next_partner(second) == partner
    assert state["steps"] == 1, "7 steps are two periods of 3 and one step"
    second.round(3)
    begun = second.strategy.state_dict()["begun"] - state["begun"]
    assert begun == (1 if comm.size > 1 and topology.is_active(comm.rank) else 0), begun
    assert sum(second.strategy.statistics()["staleness"]) == 10
    second.finish()


def _next_partner(run: StrategyRun) -> int | None:
    gossip = run.strategy._gossip  # type: ignore[attr-defined]
    return gossip.next_partner() if gossip._role.partners else None


def groups_step_as_one(comm: Communicator) -> None:
    """Two ranks a group: members bitwise equal after every pause, groups find what neither knows alone."""
    if comm.size % 2:
        return
    run = Descent(comm, ":groups=2")
    run.strategy.pause()
    group, num_groups = comm.rank // 2, comm.size // 2
    run.seen.zero_()[group::num_groups] = 1.0
    shrink = torch.ones(num_groups)
    shrink[0] = 0.25
    for _ in range(rounds_for(_REDUCTION, max(rate(shrink.roll(owner)) for owner in range(num_groups)))):
        run.round(2)
        replicas = comm.allgather_object(run.parameters().tolist())
        assert replicas[::2] == replicas[1::2], "members of a group differ"
    error = float(((run.parameters() - run.goal) ** 2).sum() / (run.goal**2).sum())
    assert error <= _REDUCTION, f"squared error {error:g} of what it was"
    exchanges = comm.allgather_object(run.strategy.statistics()["exchanges"])
    assert (min(exchanges[::2]) > 0) == (num_groups > 1), exchanges
    assert not any(exchanges[1::2]), "only leaders exchange"
    run.finish()


CHECKS: tuple[Callable[[Communicator], None], ...] = (
    a_rank_alone_is_plain_sgd_and_a_single_group_gradient_averaging,
    mixing_keeps_the_mean_and_brings_replicas_together,
    reaches_what_no_rank_could_find_alone,
    ranks_may_take_very_different_numbers_of_steps,
    a_paused_rank_goes_on_answering,
    nothing_is_left_after_a_pause,
    finish_and_evaluation_show_the_mean,
    saved_and_loaded_goes_on_from_the_same_state,
    groups_step_as_one,
)
