"""Models whose parameters are of odd kinds; what asynchronous ranks determine whoever is fast."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from speechdp import DataParallel
from speechdp.comm.base import Communicator
from speechdp.comm.threads.communicator import run_threads
from speechdp.testing import assert_bitwise_equal_over_ranks
from tests.contract.references.independent_ranks import (
    NUM_STEPS,
    Training,
    assert_same_course,
    batches_of,
    course_of,
    flat,
    put,
    script_course,
)
from tests.contract.references.test_periodic_references import Options, Periodic
from tests.contract.references.test_step_references import Delayed, Gradients, Neighbours, ring
from tests.helpers.waiting import no_thread_left

_SEED = threading.Lock()


class Odd(nn.Module):
    """Parameters that are frozen, tied, empty, scalar, transposed, of no use, and parts of one storage."""

    def __init__(self) -> None:
        super().__init__()
        storage = torch.randn(7 * 8 + 5 * 8, dtype=torch.float64) / 3
        self.gain = nn.Parameter(torch.tensor(1.1, dtype=torch.float64))
        self.transposed = nn.Parameter(torch.randn(8, 7, dtype=torch.float64).t())
        self.nothing = nn.Parameter(torch.empty(0, dtype=torch.float64))
        self.first_part = nn.Parameter(storage[:56].view(7, 8))
        self.second_part = nn.Parameter(storage[56:].view(5, 8))
        self.no_columns = nn.Parameter(torch.empty(3, 0, dtype=torch.float64))
        self.base = nn.Linear(8, 8).bfloat16()  # frozen, as the base of low-rank adapters is
        self.base.requires_grad_(False)
        self.adapter = nn.Parameter(torch.randn(8, 2, dtype=torch.float64))
        self.unused = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.inner = nn.Linear(7, 40).double()
        self.head = nn.Linear(7, 40).double()
        self.head.weight = self.inner.weight

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            base = self.base(x.bfloat16()).double()
        hidden = (self.transposed @ (x + base + x @ self.adapter @ self.adapter.t() / 8).t()).t()
        hidden = hidden + self.gain * torch.tanh(x @ self.first_part.t())
        hidden = hidden + (x @ self.second_part.t()).sum(1, keepdim=True) + self.nothing.sum()
        out: Tensor = self.head(torch.tanh(hidden)) + self.inner(hidden) + self.no_columns.sum()
        return out


def make_odd() -> nn.Module:
    with _SEED, torch.random.fork_rng():
        torch.manual_seed(3)
        return Odd()


SGD, ADAMW = Training(make_model=make_odd, max_norm=0.4), Training("adamw", make_model=make_odd)
ODD: dict[str, Callable[[int, Training], Periodic | Delayed | Gradients | Neighbours]] = {
    "gradient_averaging": Gradients,
    "gradient_averaging:bucket_mib=0.0001,every=3": lambda size, training: Gradients(size, training, every=3),
    "model_averaging:period=2": lambda size, training: Periodic(size, training, Options(2)),
    "slowmo:period=3,begin=4,beta=0.4,alpha=0.8": lambda size, training: Periodic(
        size, training, Options(outer="slowmo", eta=0.4, zeta=0.8, begin=4)
    ),
    "bmuf:period=3,eta=0.4,zeta=0.9": lambda size, training: Periodic(
        size, training, Options(outer="bmuf", eta=0.4, zeta=0.9, momentum="reset")
    ),
    "delayed_averaging:period=4,delay=2,mix=0.7": Delayed,
    "dpsgd": lambda size, training: Neighbours(size, training, ring),
    "parameter_server:mode=sync": Gradients,
}


@pytest.mark.parametrize("training", [SGD, ADAMW], ids=["sgd", "adamw"])
@pytest.mark.parametrize("strategy", ODD)
def test_odd_parameters_are_trained_as_others_are(strategy: str, training: Training) -> None:
    for size in (1, 2, 3):
        expected = course_of(ODD[strategy](size, training))
        assert_same_course(script_course(size, strategy, training), expected, f"{strategy} on {size} ranks")


@pytest.mark.parametrize(
    "strategy",
    [
        "gradient_averaging:compression=fp16,bucket_mib=0.0001",
        "gradient_averaging:compression=powersgd,rank=2",
        "model_averaging:period=2,compression=int8,momentum=reset",
        "model_averaging:period=2,momentum=average",
        "adaptive_averaging:period=2,interval=4,compression=int4",
        "diloco:period=2,compression=int8",
        "delayed_averaging:period=4,delay=1,fragments=4,compression=int8",
        "dpsgd:topology=random",
        "dpsgd:compression=int4",
        "easgd:mode=sync,period=2,compression=int8",
        "easgd:period=2",
        "parameter_server",
        "ad_psgd",
    ],
)
def test_odd_parameters_are_exchanged_and_saved(strategy: str) -> None:
    """Tied ones stay tied, frozen ones as they are; a state that is loaded is the one that was saved."""

    def check(comm: Communicator) -> None:
        def make() -> tuple[Odd, DataParallel]:
            model = make_odd()
            assert isinstance(model, Odd)
            return model, DataParallel(model, ADAMW.make_optimizer(model), comm, strategy)

        def train(run: DataParallel, model: Odd, steps: slice) -> None:
            for batch in batches_of(comm.rank, comm.size)[steps]:
                with run.step(weight=len(batch[1])) as step:
                    step.backward(ADAMW.losses(model, batch)[0])

        before = make_odd()
        model, run = make()
        with run:
            train(run, model, slice(0, 5))
            state = run.state_dict()
            train(run, model, slice(5, 8))
        assert model.head.weight is model.inner.weight and not torch.equal(flat(model), flat(before))
        assert torch.equal(model.base.weight, before.get_submodule("base").weight)  # type: ignore[arg-type]
        assert flat(model).isfinite().all()
        assert_bitwise_equal_over_ranks(comm, flat(model), strategy)
        again, other = make()
        other.load_state_dict(state)
        saved = make_odd()
        saved.load_state_dict(state["model"])
        assert torch.equal(flat(again), flat(saved))
        with other:
            train(other, again, slice(5, 8))
        if run.strategy.traits.synchronous:
            assert torch.equal(flat(again), flat(model)), f"{strategy}: resumed differs from uninterrupted"

    with no_thread_left():
        run_threads(3, check)


# -- whoever is fast ------------------------------------------------------------------------------------


class Slope(nn.Module):
    """Its loss is linear in its parameters, so that gradients do not depend on where exchanges bring them."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.linspace(-1, 1, 30, dtype=torch.float64))
        self.b = nn.Parameter(torch.zeros(5, dtype=torch.float64))

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, targets = batch
        return (inputs.sum(1) * self.w[targets % 30]).sum() + (inputs[:, :5] @ self.b).sum()


def slope_losses(model: nn.Module, batch: tuple[Tensor, Tensor], passes: int) -> list[Tensor]:
    parts = [part for part in torch.arange(len(batch[1])).tensor_split(passes) if len(part)]
    return [model((batch[0][part], batch[1][part])) for part in parts]


class SlopeTraining(Training):
    def losses(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> list[Tensor]:
        return slope_losses(model, batch, self.passes)


SLOPES = {
    "sgd": SlopeTraining(make_model=Slope, max_norm=0.3, passes=2),
    "adamw": SlopeTraining("adamw", make_model=Slope),
}


class Apart(Gradients):
    """Every node trains by itself: exchanges that keep the mean over ranks leave the mean of this."""

    def __init__(self, size: int, training: Training, node_size: int = 1) -> None:
        super().__init__(size, training, node_size=node_size)

    def shown(self) -> Tensor:
        return torch.stack(self.vectors).mean(0)


def without_decay(training: Training) -> Training:
    """Weight decay would make updates depend on the parameters."""

    class WithoutDecay(SlopeTraining):
        def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
            optimizer = super().make_optimizer(model)
            for group in optimizer.param_groups:
                group["weight_decay"] = 0.0
            return optimizer

    return WithoutDecay(training.optimizer, training.max_norm, training.passes, training.make_model)


@pytest.mark.parametrize("kind", SLOPES)
@pytest.mark.parametrize(
    ("strategy", "node_size", "sizes"),
    [
        ("ad_psgd", 1, (1, 2, 3, 5)),
        ("ad_psgd:topology=ring,period=2", 1, (2, 3, 5)),
        ("ad_psgd:topology=exponential", 1, (3, 5)),
        ("ad_psgd:groups=2", 2, (2, 4, 6)),
        ("dpsgd:topology=random,seed=3", 1, (2, 3, 5)),
        ("dpsgd:compression=int4", 1, (2, 3, 5)),
    ],
)
def test_mixings_keep_the_mean_of_what_ranks_have_trained(
    strategy: str, node_size: int, sizes: tuple[int, ...], kind: str
) -> None:
    """In evaluations and in the end, whatever was exchanged when; a rank ends early, lengths differ."""
    training = without_decay(SLOPES[kind])
    for size in sizes:
        expected = course_of(Apart(size, training, node_size))
        found = script_course(size, strategy, training)
        # In between replicas are where exchanges have brought them.
        assert_same_course(replace(found, steps=expected.steps), expected, f"{strategy} on {size} ranks")


@pytest.mark.parametrize("topology", ["all", "ring", "exponential"])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_ranks_that_have_stopped_learning_come_together(topology: str, size: int) -> None:
    """No mixing takes them apart, staleness counts every gradient, and exchanges have two sides."""

    def check(comm: Communicator) -> None:
        model = Slope()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        run = DataParallel(model, optimizer, comm, f"ad_psgd:topology={topology}")
        generator = torch.Generator().manual_seed(comm.rank)
        with run:
            own = torch.randn(35, generator=generator, dtype=torch.float64)
            put(model, own)
            ranks = comm.allreduce(own.clone(), name="own") / comm.size
            spreads = []
            # The threads that exchange may wait for a core meanwhile, so no number of steps is surely enough.
            while len(spreads) < 12 or (spreads[-1] >= 1e-2 * spreads[0] + 1e-24 and len(spreads) < 300):
                for number in range(10):
                    with run.step(weight=1) as step:
                        step.backward(model(batches_of(0, 1)[number % NUM_STEPS]))
                run.state_dict()  # a meeting: nothing is under way
                apart = ((flat(model) - ranks) ** 2).sum().reshape(1)
                spreads.append(comm.allreduce(apart, name="spread").item())
            assert all(b <= a * (1 + 1e-9) + 1e-24 for a, b in itertools.pairwise(spreads)), spreads
            assert spreads[-1] < 1e-2 * spreads[0] + 1e-24, spreads
            facts = comm.allgather_object(run.strategy.statistics())
        assert all(sum(fact["staleness"]) == 10 * len(spreads) for fact in facts), facts
        sides = [sum(f["exchanges"] for f in facts[first::2]) for first in (0, 1)]
        assert sides[0] == sides[1] > 0, facts
        mixings = [sum(age * n for age, n in enumerate(f["staleness"])) for f in facts]
        assert all(seen <= f["exchanges"] for seen, f in zip(mixings, facts, strict=True)), facts
        assert torch.allclose(flat(model), ranks, atol=1e-9)

    run_threads(size, check)
