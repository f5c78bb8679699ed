"""All ranks of a periodic strategy simulated in one process, from the equations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from speechdp.comm.base import Communicator
from speechdp.data.loading.batch import Batch
from speechdp.testing import NUM_STEPS, Sgd, StrategyRun, flat, make_batch, make_model


def gone_on(mean: Tensor) -> Tensor:
    """Go on from the mean: model averaging."""
    return mean


@dataclass(frozen=True)
class Apart:
    """What is simulated.

    Attributes:
        size: ranks.
        period: steps between exchanges.
        exchange: where all ranks go on from, given the weighted mean of their parameters.
        sgd: the optimizer of every rank.
        momentum: what becomes of its state at an exchange: keep, average or reset.
        has_frames: whether a rank has frames in a step.
        steps: how many there are.
    """

    size: int
    period: int
    exchange: Callable[[Tensor], Tensor] = gone_on
    sgd: Sgd = field(default_factory=Sgd)
    momentum: str = "keep"
    has_frames: Callable[[int, int], bool] = lambda rank, step: True
    steps: int = NUM_STEPS

    def batches(self, rank: int, step: int) -> list[Batch]:
        """Return what a rank trains on in a step."""
        return [make_batch(rank, step)] if self.has_frames(rank, step) else []


def drive(run: StrategyRun, apart: Apart, first: int = 0) -> None:
    """Give a strategy's run the same batches as the simulation has."""
    for step in range(first, apart.steps):
        run.step(apart.batches(run.strategy.comm.rank, step))


def simulate(comm: Communicator, apart: Apart) -> Tensor:
    """Return the final parameters: the mean of the replicas, or where the last exchange left them.

    Collective; rank 0 does the work, so `apart.exchange` has been called there alone.
    """
    final = _simulate(apart) if comm.rank == 0 else flat(make_model())
    return comm.broadcast(final, name="simulated")


def _simulate(apart: Apart) -> Tensor:
    models = [make_model() for _ in range(apart.size)]
    optimizers = [apart.sgd(list(m.parameters())) for m in models]
    frames = torch.zeros(apart.size, dtype=torch.float64)
    for step in range(apart.steps):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            for batch in apart.batches(rank, step):
                _update(model, optimizer, batch)
                frames[rank] += batch.num_frames
        is_due, is_last = (step + 1) % apart.period == 0, step == apart.steps - 1
        if is_due or is_last:
            shares = frames / frames.sum() if frames.sum() > 0 else torch.full_like(frames, 1 / apart.size)
            mean = torch.einsum("r,rp->p", shares, torch.stack([vector(m) for m in models]))
            going_on = apart.exchange(mean) if is_due else mean
            for model in models:
                torch.nn.utils.vector_to_parameters(going_on.clone(), model.parameters())
            _settle(apart.momentum, optimizers, shares)
            frames.zero_()
    return flat(models[0])


def vector(model: torch.nn.Module) -> Tensor:
    """Return a copy of a model's parameters one after the other, without a replica's padding."""
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def _update(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
    optimizer.zero_grad()
    logits = model(batch.features, batch.lengths)
    loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), batch.targets.flatten(), ignore_index=-1, reduction="sum"
    )
    (loss / batch.num_frames).backward()
    optimizer.step()


def _settle(rule: str, optimizers: list[torch.optim.Optimizer], shares: Tensor) -> None:
    buffers = [
        [s["momentum_buffer"] for s in o.state.values() if s.get("momentum_buffer") is not None]
        for o in optimizers
    ]
    for same in zip(*buffers, strict=True) if rule != "keep" else ():
        mean = torch.stack([share * tensor for share, tensor in zip(shares, same, strict=True)]).sum(0)
        for tensor in same:
            tensor.copy_(mean if rule == "average" else torch.zeros_like(tensor))
