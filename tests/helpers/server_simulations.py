"""parameter_server and easgd from their equations, in one process, one turn of one rank after another."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from speechdp.parallel.replica import Replica
from speechdp.testing import Sgd, make_batch, make_replica

MOMENTUM = Sgd(momentum=0.9)


def turns(size: int, num_turns: int = 12) -> list[int]:
    """Return which rank steps when: every rank, at unequal paces, none in a regular order."""
    return [(3 * i + i * i // 5) % size if i >= size else size - 1 - i for i in range(num_turns)]


def momentum_replica() -> Replica:
    return make_replica(MOMENTUM)


@dataclass
class SimulatedMaster:
    """Asynchronous SGD turn by turn in one process, from the equation."""

    size: int
    staleness_aware: bool = False
    worker: Replica = field(default_factory=make_replica)
    master: Replica = field(default_factory=momentum_replica)
    ages: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        self.seen = [self.master.parameters.values.clone() for _ in range(self.size)]
        self.versions = [0] * self.size
        self.version = 0
        self.ages = [[] for _ in range(self.size)]

    def step(self, rank: int, turn: int) -> None:
        """Let `rank` compute on what it has last seen and the master move."""
        batch = make_batch(rank, turn)
        self.worker.parameters.values.copy_(self.seen[rank])
        self.worker.clear_gradients()
        loss_gradient(self.worker, rank, turn)
        age = self.version - self.versions[rank]
        self.ages[rank].append(age)
        self.master.gradients.values.copy_(self.worker.gradients.values)
        rate = MOMENTUM.learning_rate / max(1, age) if self.staleness_aware else MOMENTUM.learning_rate
        self.master.set_learning_rate(rate)
        self.master.apply_gradients(batch.num_frames)
        self.version += 1
        self.fetch(rank)

    def fetch(self, rank: int) -> None:
        self.seen[rank].copy_(self.master.parameters.values)
        self.versions[rank] = self.version


def loss_gradient(replica: Replica, rank: int, turn: int) -> None:
    """Add the summed gradient of batch (rank, turn) to the replica's."""
    batch = make_batch(rank, turn)
    logits = replica.model(batch.features, batch.lengths)
    nn.functional.cross_entropy(
        logits.flatten(0, 1), batch.targets.flatten(), ignore_index=-1, reduction="sum"
    ).backward()


def rounded(x: Tensor, levels: int, block: int = 256) -> Tensor:
    """Return `x` in whole multiples of a scale, one for each block."""
    result = x.clone()
    for part in result.split(block):
        scale = (part.abs().max() / levels).float().to(x.dtype).clamp(min=1e-37)
        part.copy_(torch.round(part * scale.reciprocal()) * scale)
    return result


@dataclass
class SimulatedCentre:
    """Elastic averaging turn by turn in one process, from the equation.

    Attributes:
        levels: of what travels between the server and workers on other ranks; 0: it is not rounded.
        dedicated: no worker is beside the server.
    """

    size: int
    period: int
    alpha: float
    levels: int = 0
    dedicated: bool = False

    def __post_init__(self) -> None:
        self.workers = [momentum_replica() for _ in range(self.size)]
        self.centre = self.workers[0].parameters.values.clone()
        self.known = [self.centre.clone() for _ in range(self.size)]
        self.owed = torch.zeros_like(self.centre)
        self.steps = [0] * self.size

    def step(self, rank: int, turn: int) -> None:
        """Let `rank` do a step of its own, and exchange when its period is over."""
        self.local_step(rank, turn)
        if self.steps[rank] % self.period == 0:
            x = self.workers[rank].parameters.values
            levels = self.levels if rank > 0 or self.dedicated else 0
            known = self.known[rank]
            known += rounded(x - known, levels) if levels else x - known
            move = self.alpha * (known - self.centre)
            if levels:
                wanted = move + self.owed
                move = rounded(wanted, levels)
                self.owed = wanted - move
            x -= move
            self.centre += move

    def local_step(self, rank: int, turn: int) -> None:
        loss_gradient(self.workers[rank], rank, turn)
        self.workers[rank].apply_gradients(make_batch(rank, turn).num_frames)
        self.steps[rank] += 1

    def exchange_together(self) -> None:
        """Let all exchange at once."""
        differences = [w.parameters.values - self.centre for w in self.workers]
        for worker, difference in zip(self.workers, differences, strict=True):
            worker.parameters.values.sub_(self.alpha * difference)
        for difference in differences:
            self.centre += self.alpha * difference
