"""The identities of strategies, through the public API: to 1e-9 in double precision.

A user's AdamW in two groups, a scheduler, batch norm, ranks with unequal batches.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from speechdp import DataParallel
from speechdp.comm.base import Communicator
from speechdp.comm.threads.communicator import run_threads
from speechdp.parallel.registry import strategy_names
from speechdp.testing import assert_bitwise_equal_over_ranks, assert_close
from tests.helpers import own_script
from tests.helpers.own_script import (
    SYNCHRONOUS,
    Batch,
    Loss,
    MakeOptimizer,
    Script,
    adamw,
    batches_of,
    constant_loss,
    first_group_stands,
    loss_sum,
    plain,
    plain_on_one_rank,
    sgd,
    values,
)
from tests.helpers.waiting import no_thread_left

ASYNCHRONOUS = ["ad_psgd", "parameter_server", "easgd:period=2"]


@dataclass(frozen=True)
class Identity:
    """A strategy trains as something else does.

    Attributes:
        other: another strategy on the same ranks; None: torch alone, on all their batches.
        sizes: numbers of ranks.
        batch_norm: as opposed to layer norm.  Ranks normalise by their own batches, and torch alone by each
            of them, one after another: its parameters are the same, its running statistics another mean.
        in_one_batch: torch alone takes all ranks' examples as one batch.
    """

    strategy: str
    other: str | None = None
    sizes: tuple[int, ...] = (2, 3)
    make_optimizer: MakeOptimizer = adamw
    batch_norm: bool = True
    in_one_batch: bool = False
    loss: Loss = loss_sum
    max_norm: float = 0.1

    def expected(self, comm: Communicator) -> Tensor:
        """Return what the strategy must come to."""
        if self.other is not None:
            return self._script(comm, self.other).trained()
        batches = batches_of(comm.size)
        if self.in_one_batch:
            batches = [[_joined(step)] for step in batches]
        return plain(
            batches,
            make_optimizer=self.make_optimizer,
            batch_norm=self.batch_norm,
            max_norm=self.max_norm,
        )

    def hold(self, comm: Communicator) -> None:
        """Assert it on a rank."""
        script = self._script(comm, self.strategy)
        trained, expected = script.trained(), self.expected(comm)
        if self.batch_norm and self.other is None and comm.size > 1:
            num_parameters = sum(p.numel() for p in script.model.parameters())
            trained, expected = trained[:num_parameters], expected[:num_parameters]
        assert_close(trained, expected, str(self))

    def _script(self, comm: Communicator, strategy: str) -> Script:
        options = {"max_gradient_norm": self.max_norm}
        return Script(comm, strategy, self.make_optimizer, self.batch_norm, options, self.loss)

    def __str__(self) -> str:
        other = self.other or "torch alone"
        return f"{self.strategy} = {other} ({self.make_optimizer.__name__}, {self.loss.__name__})"


def _joined(batches: list[Batch]) -> Batch:
    inputs, targets = zip(*batches, strict=True)
    return torch.cat(inputs), torch.cat(targets)


IDENTITIES = [
    # One rank is plain training.
    *(Identity(plain_on_one_rank(name), sizes=(1,)) for name in strategy_names()),
    Identity("parameter_server:mode=sync", sizes=(1,), make_optimizer=sgd),
    # N ranks with unequal batches are one rank with all of them.
    *(
        Identity(strategy, batch_norm=not in_one_batch, in_one_batch=in_one_batch)
        for strategy in ("gradient_averaging", "parameter_server:mode=sync", "slowmo:begin=99")
        for in_one_batch in (False, True)
    ),
    # Clipping is left out where it comes before the average instead of after it.
    Identity("model_averaging:period=1", "gradient_averaging", make_optimizer=sgd, max_norm=0.0),
    Identity("model_averaging:period=1", make_optimizer=sgd, max_norm=0.0),
    Identity("bmuf:period=3,eta=0,zeta=1,momentum=keep", "model_averaging:period=3"),
    Identity("bmuf:period=3,eta=0,zeta=1,momentum=average", "model_averaging:period=3,momentum=average"),
    # The rate of the group that stands still is no unit for the movement of the others.
    Identity("slowmo:period=3,beta=0.4", "model_averaging:period=3", make_optimizer=first_group_stands),
    # At a constant loss; its learning rate falls, which may not make the period longer.
    Identity(
        "adaptive_averaging:period=2,interval=2,halve=false,growth=1",
        "model_averaging:period=2",
        loss=constant_loss,
    ),
]


@pytest.mark.parametrize("identity", IDENTITIES, ids=str)
def test_a_strategy_is_what_it_is_said_to_be(identity: Identity) -> None:
    for size in identity.sizes:
        run_threads(size, identity.hold)


def test_the_table_fails_for_what_is_not_the_same() -> None:
    for identity in (
        Identity("model_averaging:period=2", "gradient_averaging", make_optimizer=sgd, max_norm=0.0),
        Identity("adaptive_averaging:period=2,interval=2", "model_averaging:period=2"),
        Identity("bmuf:period=3,eta=0.01,zeta=1,momentum=keep", "model_averaging:period=3"),
    ):
        with pytest.raises(AssertionError, match="differs by"):
            run_threads(2, identity.hold)


@pytest.mark.parametrize("strategy", [*SYNCHRONOUS, *ASYNCHRONOUS])
@pytest.mark.parametrize("size", [2, 3])
def test_replicas_are_bitwise_equal_in_the_end(strategy: str, size: int) -> None:
    def check(comm: Communicator) -> None:
        before = values(own_script.make_model())
        trained = Script(comm, strategy).trained()
        assert_bitwise_equal_over_ranks(comm, trained, strategy)
        assert trained.isfinite().all() and not torch.equal(trained, before)

    run_threads(size, check)


@pytest.mark.parametrize("strategy", SYNCHRONOUS)
def test_a_run_saved_and_loaded_goes_on_as_one_left_alone(strategy: str) -> None:
    def check(comm: Communicator) -> None:
        whole = Script(comm, strategy).trained()
        for saved_after in (0, 4, 5):
            first, second = Script(comm, strategy), Script(comm, strategy)
            with first.run:
                first.train(0, saved_after)
                state = {"run": first.run.state_dict(), "scheduler": first.scheduler.state_dict()}
                first.train(saved_after)  # what was saved is a copy
            second.run.load_state_dict(state["run"])
            second.scheduler.load_state_dict(state["scheduler"])
            with second.run:
                assert second.run.steps == saved_after
                second.train(saved_after)
            what = f"{strategy} saved after {saved_after} steps"
            assert torch.equal(values(second.model), whole), f"{what}: resumed differs from uninterrupted"

    run_threads(2, check)


@pytest.mark.parametrize("strategy", ASYNCHRONOUS)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_asynchronous_ranks_reach_a_known_optimum_and_leave_nothing(strategy: str, size: int) -> None:
    """The best model gives the target whatever comes in: batch norm's weight is 0, its bias the target."""
    target = torch.tensor([0.5, -0.3, 0.8], dtype=torch.float64)

    def check(comm: Communicator) -> None:
        model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double()
        groups = [{"params": model[1].parameters(), "lr": 0.05}, {"params": model[0].parameters()}]
        optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 40, 0.5)
        run = DataParallel(model, optimizer, comm, strategy)
        distances = []
        with run:
            for number in range(200):
                x, _ = own_script.make_batch(comm.rank, number)
                with run.step(weight=len(x)) as step:
                    step.backward((model(x) - target).square().sum())
                scheduler.step()
                if number % 50 == 0:
                    with run.evaluating():
                        distances.append(_distance(model[1], target))
        assert distances[0] > 0.5 and _distance(model[1], target) < 0.02

    with no_thread_left():
        run_threads(size, check)


def _distance(norm: nn.BatchNorm1d, target: Tensor) -> float:
    """Return how far the model is from its optimum."""
    weight, bias = norm.weight.detach(), norm.bias.detach()
    return max(float(weight.abs().max()), float((bias - target).abs().max()))
