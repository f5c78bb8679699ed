"""A user's script: its own model, optimizer in two groups, scheduler and loop; the same in torch alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from speechdp import DataParallel
from speechdp.comm.base import Communicator
from speechdp.parallel.registry import StrategyChoice, own_strategy_names
from speechdp.parallel.strategy import Traits

NUM_STEPS = 8
_SEED = threading.Lock()

#: Options with which a strategy equals plain training on one rank, for those that do not by default.
PLAIN_ON_ONE_RANK = {"bmuf": "momentum=keep", "diloco": "outer_learning_rate=1,outer_momentum=0"}


def named_nowhere(cases: Sequence[str], wanted: Callable[[Traits], bool] = lambda traits: True) -> list[str]:
    """Return our strategies that no entry of `cases` names, with periods short enough for a test.

    Args:
        wanted: whether to include strategies with these traits.
    """
    named = {case.partition(":")[0] for case in cases}
    others = (StrategyChoice(name) for name in own_strategy_names() if name not in named)
    return [
        choice.text if choice.parsed.traits.period == "1" else choice.with_default("period", "3").text
        for choice in others
        if wanted(choice.parsed.traits)
    ]


_SYNCHRONOUS = [
    "adaptive_averaging:period=2,interval=4",
    "bmuf:period=3,eta=0.3",
    "delayed_averaging:period=3,delay=1",
    "dpsgd",
    "model_averaging:period=3,momentum=average",
    "slowmo:period=3,beta=0.4",
    "gradient_averaging",
    "gradient_averaging:every=3",
    "model_averaging:period=2,begin=3,momentum=reset",
    "model_averaging:period=10f",
    "slowmo:period=3,beta=0.4,compression=int8",
    "dpsgd:compression=int8",
    "model_averaging:period=2,between_nodes=4,node_size=1",
    "gradient_averaging:between_nodes=3,node_size=1",
    "parameter_server:mode=sync",
    "easgd:mode=sync,period=2",
]
SYNCHRONOUS = [*_SYNCHRONOUS, *named_nowhere(_SYNCHRONOUS, lambda traits: traits.synchronous)]


def plain_on_one_rank(name: str) -> str:
    """Return a strategy with options that make it plain training on one rank."""
    return f"{name}:period=3,{PLAIN_ON_ONE_RANK[name]}" if name in PLAIN_ON_ONE_RANK else name


MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
Batch = tuple[Tensor, Tensor]
#: Summed over a batch.
Loss = Callable[[nn.Module, Batch], Tensor]


class Net(nn.Module):
    """Two layers, the second with another learning rate, and a layer that is frozen."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 6), norm, nn.Linear(6, 3)
        self.frozen = nn.Linear(3, 3)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.frozen(self.last(torch.tanh(self.norm(self.first(x)))))
        return out


def make_model(*, batch_norm: bool = True) -> Net:
    # All threads share torch's generator, and here each thread is a rank.
    with _SEED, torch.random.fork_rng():
        torch.manual_seed(3)
        return Net(nn.BatchNorm1d(6) if batch_norm else nn.LayerNorm(6)).double()


def groups(model: nn.Module) -> list[dict[str, Any]]:
    slow = [p for name, p in model.named_parameters() if name.startswith("last")]
    fast = [p for name, p in model.named_parameters() if not name.startswith("last")]
    return [{"params": fast, "lr": 0.02}, {"params": slow, "lr": 0.005, "weight_decay": 0.0}]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups(model), weight_decay=0.1)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups(model))


def first_group_stands(model: nn.Module) -> torch.optim.Optimizer:
    fast, slow = groups(model)
    return torch.optim.SGD([{**fast, "lr": 0.0}, slow])


def make_scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)


def make_batch(rank: int, step: int) -> Batch:
    """Return a batch that depends on rank and step only; ranks have unequal numbers of examples."""
    generator = torch.Generator().manual_seed(100 * rank + step)
    size = 3 + (2 * rank + step) % 4
    return (
        torch.randn(size, 4, generator=generator, dtype=torch.float64),
        torch.randint(3, (size,), generator=generator),
    )


def loss_sum(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")


def constant_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return a loss of 1 an example, with the gradients of `loss_sum`."""
    loss = loss_sum(model, batch)
    return loss - loss.detach() + len(batch[0])


def values(model: nn.Module) -> Tensor:
    """Return parameters and running statistics in one vector."""
    tensors = [*model.parameters(), *(b for b in model.buffers() if b.is_floating_point())]
    return torch.cat([t.detach().flatten() for t in tensors])


@dataclass
class Script:
    """A script with its own loop, as in docs/api.md."""

    comm: Communicator
    strategy: str
    make_optimizer: MakeOptimizer = adamw
    batch_norm: bool = True
    options: dict[str, Any] = field(default_factory=dict)
    loss: Loss = loss_sum

    def __post_init__(self) -> None:
        self.model = make_model(batch_norm=self.batch_norm)
        self.optimizer = self.make_optimizer(self.model)
        self.scheduler = make_scheduler(self.optimizer)
        self.run = DataParallel(self.model, self.optimizer, self.comm, self.strategy, **self.options)

    def step(self, batch: Batch) -> None:
        with self.run.step(weight=len(batch[0])) as step:
            step.backward(self.loss(self.model, batch))
        self.scheduler.step()

    def train(self, first: int = 0, last: int = NUM_STEPS) -> None:
        for number in range(first, last):
            self.step(make_batch(self.comm.rank, number))

    def trained(self) -> Tensor:
        with self.run:
            self.train()
        return values(self.model)


def plain(
    batches_of_step: list[list[Batch]],
    *,
    make_optimizer: MakeOptimizer = adamw,
    batch_norm: bool = True,
    max_norm: float = 0.0,
) -> Tensor:
    """Train with torch alone: the mean loss over all examples of a step, one update a step."""
    model = make_model(batch_norm=batch_norm)
    optimizer = make_optimizer(model)
    scheduler = make_scheduler(optimizer)
    for batches in batches_of_step:
        optimizer.zero_grad()
        for batch in batches:
            (loss_sum(model, batch) / sum(len(x) for x, _ in batches)).backward()  # type: ignore[no-untyped-call]
        if max_norm:
            nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], max_norm)
        optimizer.step()
        scheduler.step()
    return values(model)


def batches_of(size: int) -> list[list[Batch]]:
    return [[make_batch(rank, step) for rank in range(size)] for step in range(NUM_STEPS)]
