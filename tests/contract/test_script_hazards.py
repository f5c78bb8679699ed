"""What scripts do to models, optimizers and steps: it works as in torch, or a line says what is wrong."""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from speechdp import DataParallel
from speechdp.comm.base import Communicator
from speechdp.comm.serial import SerialCommunicator
from speechdp.comm.threads.communicator import run_threads
from speechdp.errors import ConfigError, RunError
from speechdp.parallel.replica import Replica
from speechdp.testing import StrategyRun, assert_bitwise_equal_over_ranks, assert_close, make_replica
from tests.helpers.own_script import SYNCHRONOUS, Script, loss_sum, make_batch, sgd, values


@contextmanager
def refused(words: str, kind: type[Exception] = RunError) -> Iterator[None]:
    with pytest.raises(kind, match=re.escape(words)) as error:
        yield
    assert "\n" not in str(error.value)


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def filled(model: nn.Module) -> nn.Module:
    """Return a model in double precision whose parameters are the same on every rank and each time."""
    with torch.no_grad():
        for number, parameter in enumerate(model.double().parameters()):
            parameter.copy_(drawn(number, *parameter.shape) / 2)
    return model


# -- steps ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_norm", [0.0, 0.1])
def test_a_step_of_no_weight_leaves_the_model_alone_also_where_a_gpu_has_the_count(
    max_norm: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[type] = []
    apply = Replica.apply_gradients

    def noting(replica: Replica, frames: float | Tensor) -> None:
        given.append(type(frames))
        apply(replica, frames)

    monkeypatch.setattr(Replica, "apply_gradients", noting)
    monkeypatch.setattr(Tensor, "is_cuda", True)

    def check(comm: Communicator) -> None:
        script = Script(comm, "gradient_averaging", options={"max_gradient_norm": max_norm})
        with script.run:
            script.train(0, 2)
            before = values(script.model)
            with script.run.step(weight=0):
                pass
            assert torch.equal(values(script.model), before)
            with script.run.step(weight=3 - 3 * comm.rank) as step:
                if comm.rank == 0:
                    step.backward(loss_sum(script.model, make_batch(0, 0)))
            assert not torch.equal(values(script.model), before)
        assert_bitwise_equal_over_ranks(comm, values(script.model), "gradient_averaging")

    run_threads(2, check)
    # The host has waited for the count only where it may have been 0.
    assert Counter(given) == {Tensor: 6, float: 2}


# -- checkpointing --------------------------------------------------------------------------------------


class Shared(nn.Module):
    """A layer that is used twice between two others, its activations computed again on the way back."""

    def __init__(self, run: Callable[..., Tensor]) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)
        self._run = run

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(2):
            x = torch.tanh(self._run(self.middle, x))
        out: Tensor = self.last(x)
        return out


def reentrant(module: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = checkpoint(module, x, use_reentrant=True)
    return out


def afresh(module: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = checkpoint(module, x, use_reentrant=False)
    return out


def shared_trained(comm: Communicator, run: Callable[..., Tensor], strategy: str) -> Tensor:
    model = filled(Shared(run))
    parallel = DataParallel(model, torch.optim.SGD(model.parameters(), 0.1), comm, strategy)
    with parallel:
        for number in range(3):
            x = drawn(10 * comm.rank + number, 3, 4)
            with parallel.step(weight=3) as step:
                step.backward(model(x).square().sum())
    return values(model)


@pytest.mark.parametrize(
    ("run", "strategy"),
    [
        (afresh, "gradient_averaging:bucket_mib=1e-6"),
        (reentrant, "gradient_averaging:bucket_mib=1e-6,overlap=false"),
        (reentrant, "gradient_averaging"),  # one bucket, which goes with the first layer's gradients
        (reentrant, "gradient_averaging:every=2"),
    ],
)
def test_a_shared_layer_under_checkpointing_is_trained_whole(
    run: Callable[..., Tensor], strategy: str
) -> None:
    def check(comm: Communicator) -> None:
        plainly = "gradient_averaging:every=2" if "every" in strategy else "gradient_averaging"
        expected = shared_trained(comm, lambda module, x: module(x), plainly)
        assert_close(shared_trained(comm, run, strategy), expected, strategy)

    run_threads(2, check)


def test_a_gradient_that_grows_after_it_has_gone_is_refused() -> None:
    def check(comm: Communicator) -> None:
        with refused("checkpoint with use_reentrant=False and call step.backward(loss) alone, or train with"):
            shared_trained(comm, reentrant, "gradient_averaging:bucket_mib=1e-6")
        script = Script(comm, "gradient_averaging", sgd)
        with refused("a gradient has grown after its exchange had begun"), script.run:
            for number in range(2):
                with script.run.step(weight=3) as step:
                    loss_sum(script.model, make_batch(0, number)).backward()  # type: ignore[no-untyped-call]
                    step.backward(loss_sum(script.model, make_batch(0, number)))

    run_threads(2, check)
