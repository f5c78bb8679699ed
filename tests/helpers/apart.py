"""All ranks of a periodic strategy simulated in one process, from the equations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from speechdp.comm.base import Communicator
from speechdp.data.loading.batch import Batch
from speechdp.testing import NUM_STEPS, Sgd, StrategyRun, flat, make_batch, make_model


def keep_mean(mean: Tensor) -> Tensor:
    """Return the mean unchanged, as model averaging does."""
    return mean


@dataclass(frozen=True)
class Apart:
    """What is simulated.

    Attributes:
        size: ranks.
        period: steps between exchanges.
        exchange: what all ranks continue from, given the weighted mean of their parameters.
        sgd: the optimizer of every rank.
        momentum: what becomes of its state at an exchange: keep, average or reset.
        has_frames: whether a rank has frames in a step.
        steps: how many there are.
        node_size: ranks of a node, consecutive; 0: all are on one.
        rounds: every so many exchanges are over all ranks, the others means of the ranks of a node.
    """

    size: int
    period: int
    exchange: Callable[[Tensor], Tensor] = keep_mean
    sgd: Sgd = field(default_factory=Sgd)
    momentum: str = "keep"
    has_frames: Callable[[int, int], bool] = lambda rank, step: True
    steps: int = NUM_STEPS
    node_size: int = 0
    rounds: int = 1

    @property
    def nodes(self) -> list[list[int]]:
        """The ranks of each node."""
        size = self.node_size or self.size
        return [list(range(first, min(first + size, self.size))) for first in range(0, self.size, size)]

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
    earlier = torch.zeros(len(apart.nodes), dtype=torch.float64)  # frames of earlier windows of each node
    for step in range(apart.steps):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            for batch in apart.batches(rank, step):
                _update(model, optimizer, batch)
                frames[rank] += batch.num_frames
        is_due, is_last = (step + 1) % apart.period == 0, step == apart.steps - 1
        if not (is_due or is_last):
            continue
        sums = torch.stack([frames[node].sum() for node in apart.nodes])
        if is_due and (step + 1) // apart.period % apart.rounds != 0:
            for node in apart.nodes:
                ours, theirs = [models[r] for r in node], [optimizers[r] for r in node]
                _average(apart, ours, theirs, _shares(frames[node]))
            earlier += sums
            frames.zero_()
            if not is_last:
                continue
            sums.zero_()
        shares = _shares(earlier + sums)
        within = torch.cat([share * _shares(frames[n]) for share, n in zip(shares, apart.nodes, strict=True)])
        is_exchange = is_due and (step + 1) // apart.period % apart.rounds == 0
        _average(apart, models, optimizers, within, apart.exchange if is_exchange else keep_mean)
        frames.zero_()
        earlier.zero_()
    return flat(models[0])


def _shares(frames: Tensor) -> Tensor:
    return frames / frames.sum() if frames.sum() > 0 else torch.full_like(frames, 1 / len(frames))


def _average(
    apart: Apart,
    models: list[torch.nn.Module],
    optimizers: list[torch.optim.Optimizer],
    shares: Tensor,
    exchange: Callable[[Tensor], Tensor] = keep_mean,
) -> None:
    resuming = exchange(torch.einsum("r,rp->p", shares, torch.stack([vector(m) for m in models])))
    for model in models:
        torch.nn.utils.vector_to_parameters(resuming.clone(), model.parameters())
    _settle(apart.momentum, optimizers, shares)


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
