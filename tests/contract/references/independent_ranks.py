"""Ranks in one process and torch alone: what strategies are compared with, written from docs/strategies.md.

Nothing of `speechdp.strategies` is used.  A reference moves all ranks' models by its equations; a script
trains the same models with `DataParallel`, and is compared with it after every step.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from speechdp import DataParallel
from speechdp.comm.base import Communicator
from speechdp.comm.threads.communicator import run_threads

NUM_STEPS = 14
#: After these steps models are evaluated, too: within a window of most strategies, and at its end.
EVALUATED = (5, 8, 9)
BLOCK = 256
LEVELS = {"int8": 127, "int4": 7}
_SEED = threading.Lock()

MakeModel = Callable[[], nn.Module]
Vectors = list[Tensor]


def make_model() -> nn.Module:
    """Return 824 parameters; tensors fill whole cache lines, so that a vector of them has no gaps."""
    with _SEED, torch.random.fork_rng():
        torch.manual_seed(7)
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 40)).double()


def batches_of(rank: int, size: int) -> list[tuple[Tensor, Tensor]]:
    """Return a rank's batches, each of another length; the last of several ranks ends early."""
    generator = torch.Generator().manual_seed(1000 + rank)
    count = NUM_STEPS - 4 if rank == size - 1 and size > 1 else NUM_STEPS
    found = []
    for step in range(count):
        length = 1 + (3 * rank + 2 * step) % 5
        inputs = torch.randn(length, 8, generator=generator, dtype=torch.float64)
        found.append((inputs, torch.randint(40, (length,), generator=generator)))
    return found


def loss_sum(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def flat(model: nn.Module) -> Tensor:
    """Return a copy of the trainable parameters as one vector."""
    return torch.cat([p.detach().reshape(-1) for p in trainable(model)]).clone()


def put(model: nn.Module, vector: Tensor) -> None:
    with torch.no_grad():
        for parameter, part in zip(
            trainable(model), vector.split([p.numel() for p in trainable(model)]), strict=True
        ):
            parameter.copy_(part.view(parameter.shape))


@dataclass(frozen=True)
class Training:
    """What a script decides: its model, optimizer, clipping and backward passes a step."""

    optimizer: str = "sgd"
    max_norm: float = 0.0
    passes: int = 1
    make_model: MakeModel = make_model
    steps_a_rate: int = 4

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        first, *others = trainable(model)
        groups: list[dict[str, Any]] = [{"params": [first], "lr": 0.3}, {"params": others}]
        if self.optimizer == "sgd":
            return torch.optim.SGD(groups, lr=0.2, momentum=0.9, weight_decay=0.01)
        groups[0]["lr"] = 0.03
        return torch.optim.AdamW(groups, lr=0.02, weight_decay=0.1)

    def make_scheduler(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.StepLR(optimizer, self.steps_a_rate, 0.7)

    def losses(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> list[Tensor]:
        """Return the loss in so many parts as there are passes; empty parts are left out."""
        parts = [part for part in torch.arange(len(batch[1])).tensor_split(self.passes) if len(part)]
        return [loss_sum(model, (batch[0][part], batch[1][part])) for part in parts]


#: What strategies are compared in, unless a test says more.
SGD, CLIPPED, ADAMW = Training(), Training(max_norm=0.4, passes=2), Training("adamw")


class Ranks:
    """All ranks of a run, one after another; subclasses say what follows a step.

    Attributes:
        models: of each rank.
        frames: of each rank since it was last averaged, as most equations count them.
        step: of the steps so far.
    """

    def __init__(self, size: int, training: Training) -> None:
        self.size, self.training = size, training
        self.models = [training.make_model() for _ in range(size)]
        self.optimizers = [training.make_optimizer(model) for model in self.models]
        self.schedulers = [training.make_scheduler(optimizer) for optimizer in self.optimizers]
        self.batches = [batches_of(rank, size) for rank in range(size)]
        self.frames = [0] * size
        self.step = 0
        self.all_frames = 0  # of all ranks so far
        self.loss = 0.0  # summed over all ranks since somebody has set it to 0

    @property
    def vectors(self) -> Vectors:
        return [flat(model) for model in self.models]

    @property
    def rate(self) -> float:
        """Learning rate of the first group."""
        return float(self.optimizers[0].param_groups[0]["lr"])

    def put_all(self, vector: Tensor) -> None:
        for model in self.models:
            put(model, vector)

    def train(self) -> None:
        """Take one step on every rank, and what follows it."""
        self.step += 1
        taken = [self.take_gradient(rank) for rank in range(self.size)]
        self.all_frames += sum(taken)
        self.move(taken)
        self.after_step(taken)
        for scheduler in self.schedulers:
            scheduler.step()

    def take_gradient(self, rank: int) -> int:
        """Put a rank's summed gradient into its model; return its frames, 0 where it has run out."""
        model = self.models[rank]
        for parameter in trainable(model):
            parameter.grad = torch.zeros_like(parameter)
        if self.step > len(self.batches[rank]):
            return 0
        batch = self.batches[rank][self.step - 1]
        for loss in self.training.losses(model, batch):
            loss.backward()  # type: ignore[no-untyped-call]
            self.loss += loss.item()
        return len(batch[1])

    def gradient(self, rank: int) -> Tensor:
        return torch.cat([p.grad.reshape(-1) for p in trainable(self.models[rank]) if p.grad is not None])

    def update(self, rank: int, gradient: Tensor, frames: float) -> None:
        """Let a rank's optimizer step with the mean of a gradient that is summed over frames."""
        if frames == 0:
            return
        parameters = trainable(self.models[rank])
        parts = (gradient / frames).split([p.numel() for p in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.grad = part.view(parameter.shape).clone()
        if self.training.max_norm:
            nn.utils.clip_grad_norm_(parameters, self.training.max_norm)
        self.optimizers[rank].step()

    def move(self, taken: list[int]) -> None:
        """Move the models by their own gradients, or as a subclass does."""
        for rank, frames in enumerate(taken):
            self.update(rank, self.gradient(rank), frames)
            self.frames[rank] += frames

    def move_together(self, taken: list[int], ranks: list[int]) -> None:
        """Move some ranks by the mean gradient of all frames of theirs."""
        total = torch.stack([self.gradient(rank) for rank in ranks]).sum(0)
        for rank in ranks:
            self.update(rank, total, sum(taken[r] for r in ranks))

    def after_step(self, taken: list[int]) -> None:
        raise NotImplementedError

    def shown(self) -> Tensor:
        """Return the model that an evaluation shows."""
        return weighted(self.vectors, self.frames)

    def final(self) -> Tensor:
        return self.shown()

    def forget_momentum(self) -> None:
        for optimizer in self.optimizers:
            optimizer.state.clear()


def weighted(vectors: Vectors, weights: list[int] | list[float]) -> Tensor:
    """Return the weighted mean; the plain one where nobody has a weight."""
    shares = torch.tensor(weights, dtype=torch.float64)
    if shares.sum() == 0:
        shares = torch.ones_like(shares)
    return torch.einsum("i,in->n", shares / shares.sum(), torch.stack(vectors))


def rounded(x: Tensor, levels: int) -> Tensor:
    """Return Q(x): whole multiples of a block's scale, which travels in single precision."""
    blocks = [
        (block, (block.abs().max() / levels).float().double().clamp(min=1e-37)) for block in x.split(BLOCK)
    ]
    return torch.cat([(block / scale).round() * scale for block, scale in blocks])


class QuantisedMean:
    """The mean of differences of several parties, each of which owns a piece of the vector."""

    def __init__(self, length: int, num_parties: int, compression: str) -> None:
        self.levels, self.num_parties = LEVELS[compression], num_parties
        self.errors = [torch.zeros(length, dtype=torch.float64) for _ in range(num_parties)]
        self.owed = torch.zeros(length, dtype=torch.float64)
        self.largest = [1 / num_parties] * num_parties
        blocks = math.ceil(length / BLOCK)
        piece = math.ceil(blocks / num_parties) * BLOCK
        self.owner = torch.arange(length) // piece

    def of(self, vectors: Vectors, weights: list[float], a: Tensor) -> Tensor:
        if self.num_parties == 1:
            return vectors[0]
        shares = [w / sum(weights) for w in weights]
        m = self.owed.clone()
        for party, (w, p) in enumerate(zip(vectors, shares, strict=True)):
            d = (w - a) + self.errors[party] / self.largest[party]
            q = torch.where(self.owner == party, d, rounded(d, self.levels))
            m += p * q
            own_error = self.errors[party] + p * ((w - a) - q)
            self.errors[party] = torch.where(self.owner == party, self.errors[party], own_error)
            self.largest[party] = max(self.largest[party], p)
        self.owed = m - rounded(m, self.levels)
        return a + rounded(m, self.levels)


@dataclass
class Course:
    """Where a run has been: models of each rank after each step, as evaluated, and in the end."""

    steps: list[Vectors]
    evaluated: dict[int, Tensor]
    final: Vectors


def course_of(reference: Ranks) -> Course:
    steps, evaluated = [], {}
    for step in range(1, NUM_STEPS + 1):
        reference.train()
        steps.append(reference.vectors)
        if step in EVALUATED:
            evaluated[step] = reference.shown()
    return Course(steps, evaluated, [reference.final()] * reference.size)


def script_course(size: int, strategy: str, training: Training) -> Course:
    """Train by a script on ranks that are threads."""

    def script(comm: Communicator) -> tuple[Vectors, dict[int, Tensor], Tensor]:
        model = training.make_model()
        optimizer = training.make_optimizer(model)
        scheduler = training.make_scheduler(optimizer)
        run = DataParallel(
            model, optimizer, comm, strategy, max_gradient_norm=training.max_norm, num_steps=NUM_STEPS
        )
        steps, evaluated = [], {}
        with run:
            for batch in run.batches(batches_of(comm.rank, size)):
                with run.step(weight=len(batch[1])) as step:
                    *others, last = training.losses(model, batch)
                    for loss in others:
                        step.backward(loss, last=False)
                    step.backward(last)
                scheduler.step()
                steps.append(flat(model))
                if run.steps in EVALUATED:
                    with run.evaluating():
                        evaluated[run.steps] = flat(model)
        return steps, evaluated, flat(model)

    ranks = run_threads(size, script)
    return Course(
        [list(vectors) for vectors in zip(*(steps for steps, _, _ in ranks), strict=True)],
        ranks[0][1],
        [final for _, _, final in ranks],
    )


def assert_same_course(found: Course, expected: Course, what: str, tolerance: float = 1e-9) -> None:
    for number, (vectors, others) in enumerate(zip(found.steps, expected.steps, strict=True), 1):
        for rank, (vector, other) in enumerate(zip(vectors, others, strict=True)):
            _assert_near(vector, other, f"{what}: rank {rank} after step {number}", tolerance)
    assert found.evaluated.keys() == expected.evaluated.keys()
    for number, vector in found.evaluated.items():
        _assert_near(vector, expected.evaluated[number], f"{what}: evaluated after step {number}", tolerance)
    for rank, (vector, other) in enumerate(zip(found.final, expected.final, strict=True)):
        _assert_near(vector, other, f"{what}: rank {rank} in the end", tolerance)


def _assert_near(found: Tensor, expected: Tensor, what: str, tolerance: float) -> None:
    error = float((found - expected).abs().max())
    assert error < tolerance, f"{what} differs by {error:.2g}"
