"""What checks of strategies are made of: a small model in double precision, batches, and a run of steps."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from speechdp.comm.base import Communicator
from speechdp.data.loading.batch import Batch
from speechdp.models.lstm_am import LstmAcousticModel, LstmConfig
from speechdp.parallel.replica import Replica
from speechdp.parallel.strategy import Progress, Strategy
from speechdp.parallel.training_step import TrainingStep
from speechdp.strategies import parse_strategy
from speechdp.tasks.acoustic import AcousticTask
from speechdp.timing.timeline import Timeline

TOLERANCE = 1e-9
NUM_STEPS = 7
_FEATURES, _CLASSES = 5, 4
_GENERATOR = threading.Lock()


@dataclass(frozen=True)
class Sgd:
    """Settings of the optimizer under test."""

    momentum: float = 0.0
    learning_rate: float = 0.3

    def __call__(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, self.learning_rate, momentum=self.momentum)


PLAIN = Sgd()


def make_model() -> LstmAcousticModel:
    """Return the same small model on every rank, in double precision."""
    # torch's generator is one for all threads, and here each thread is a rank.
    with _GENERATOR, torch.random.fork_rng():
        torch.manual_seed(7)
        return LstmAcousticModel(_FEATURES, _CLASSES, LstmConfig(2, 6, True, bottleneck=3)).double()


def make_batch(rank: int, step: int, *, segments: int = 3) -> Batch:
    """Return a batch that depends on rank and step only; ranks have unequal numbers of frames."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    longest = 4 + rank + step % 3
    lengths = torch.randint(2, longest + 1, (segments,), generator=generator)
    lengths[0] = longest
    features = torch.randn(segments, longest, _FEATURES, generator=generator, dtype=torch.float64)
    targets = torch.randint(_CLASSES, (segments, longest), generator=generator)
    padding = torch.arange(longest) >= lengths.unsqueeze(1)
    return Batch(
        features.masked_fill(padding.unsqueeze(2), 0),
        targets.masked_fill(padding, -1),
        lengths,
        int(lengths.sum()),
    )


def make_replica(optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] = PLAIN) -> Replica:
    """Return a fresh replica."""
    return Replica(make_model(), optimizer)


class Run:
    """A strategy at work on batches given one by one."""

    def __init__(self, comm: Communicator, strategy: str, replica: Replica | None = None) -> None:
        self.replica = make_replica() if replica is None else replica
        self.strategy: Strategy = parse_strategy(strategy)
        self.timeline = Timeline(None, rank=comm.rank, device=torch.device("cpu"))
        self.strategy.attach(self.replica, comm, self.timeline)
        self.strategy.resume()
        self.steps = 0
        self.frames = 0.0

    def step(self, batches: list[Batch], mean_frames: float = 10.0, time_s: float = 0.0) -> None:
        """Do one step with the frames of all `batches`; none is a step this rank only joins."""
        frames = sum(batch.num_frames for batch in batches)
        step = TrainingStep(self.strategy, self.timeline, frames)
        step.begin()
        if batches:
            losses = [AcousticTask().loss(self.replica.model, batch).total for batch in batches]
            step.backward(torch.stack(losses).sum())
        self.steps += 1
        self.frames += mean_frames
        progress = Progress(self.steps, self.frames, time_s, self.steps / NUM_STEPS)
        step.end(progress, number=self.steps)

    def train(self, rank: int, first: int = 0, last: int = NUM_STEPS) -> None:
        """Train on this rank's batches of steps first to last."""
        for step in range(first, last):
            self.step([make_batch(rank, step)])

    def finish(self) -> Tensor:
        """Pause, finish and close; return a copy of the parameters.  Collective."""
        self.strategy.pause()
        self.strategy.finish()
        self.strategy.close()
        return self.parameters()

    def parameters(self) -> Tensor:
        """Return a copy of the parameters."""
        return self.replica.parameters.values.clone()


def assert_resumes(comm: Communicator, strategy: str, saved_after: int) -> None:
    """Check that a run saved after so many steps and loaded elsewhere ends as one that was left alone."""
    optimizer = Sgd(momentum=0.9)
    whole = Run(comm, strategy, make_replica(optimizer))
    whole.train(comm.rank)
    first = Run(comm, strategy, make_replica(optimizer))
    first.train(comm.rank, 0, saved_after)
    state = copy.deepcopy(first.strategy.state_dict())
    parameters = first.parameters()
    tensors = {k: v.clone() for k, v in first.replica.optimizer_tensors().items()}
    second = Run(comm, strategy, make_replica(optimizer))
    second.replica.parameters.values.copy_(parameters)
    second.replica.load_optimizer_tensors(tensors)
    second.strategy.load_state_dict(state)
    second.steps, second.frames = first.steps, first.frames
    second.train(comm.rank, saved_after)
    what = f"{strategy} saved after {saved_after} steps"
    assert torch.equal(second.finish(), whole.finish()), f"{what}: resumed differs from uninterrupted"
    for one, other in zip(second.strategy.final_models(), whole.strategy.final_models(), strict=True):
        assert torch.equal(one, other), f"{what}: another final model"


def assert_begins_with_gradient_averaging(comm: Communicator, strategy: str) -> None:
    """Check that a strategy which never comes to its beginning is gradient averaging, bit by bit."""
    run = Run(comm, strategy, make_replica(Sgd(momentum=0.9)))
    run.train(comm.rank)
    together = Run(comm, "gradient_averaging", make_replica(Sgd(momentum=0.9)))
    together.train(comm.rank)
    assert torch.equal(run.finish(), together.finish()), f"{strategy}: not gradient averaging, bit by bit"


def plain_sgd(batches_of_step: list[list[Batch]], optimizer: Sgd = PLAIN) -> Tensor:
    """Train with torch alone: the mean loss over all frames of a step, one update a step."""
    model = make_model()
    moving = optimizer(list(model.parameters()))
    for batches in batches_of_step:
        frames = sum(batch.num_frames for batch in batches)
        moving.zero_grad()
        for batch in batches:
            logits = model(batch.features, batch.lengths)
            loss = nn.functional.cross_entropy(
                logits.flatten(0, 1), batch.targets.flatten(), ignore_index=-1, reduction="sum"
            )
            (loss / frames).backward()
        moving.step()
    return flat(model)


def flat(model: nn.Module) -> Tensor:
    """Return a model's parameters in the layout of a replica's flat vector."""
    layout = make_replica()
    for view, parameter in zip(layout.parameters.views, model.parameters(), strict=True):
        view.copy_(parameter.detach())
    return layout.parameters.values


def assert_close(actual: Tensor, expected: Tensor, what: str) -> None:
    """Compare to 1e-9."""
    error = float((actual - expected).abs().max())
    assert error <= TOLERANCE, f"{what}: differs by {error:g}"


def assert_bitwise_equal_over_ranks(comm: Communicator, values: Tensor, what: str) -> None:
    """Compare every rank's bytes."""
    parts = comm.allgather_object(values.numpy().tobytes().hex())
    assert len(set(parts)) == 1, f"{what}: ranks hold different bits"


def batches_of_all(size: int, num_steps: int = NUM_STEPS) -> list[list[Batch]]:
    """Return what all ranks together train on, step by step."""
    return [[make_batch(rank, step) for rank in range(size)] for step in range(num_steps)]
