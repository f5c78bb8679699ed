"""Checks for authors of strategies: the requirements that every strategy must meet (docs/api.md).

`strategy_contract` is the complete check.  The rest are parts for checks of a strategy's own equations: a
small model in double precision, batches of unequal length, a run of steps, plain SGD to compare with.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from speechdp.comm.base import Communicator
from speechdp.comm.threads.communicator import run_threads
from speechdp.data.loading.batch import Batch
from speechdp.errors import ConfigError
from speechdp.extensions import split_options
from speechdp.models.lstm_am import LstmAcousticModel, LstmConfig
from speechdp.parallel.declared import Model
from speechdp.parallel.registry import describe, parse_strategy
from speechdp.parallel.replica import Replica
from speechdp.parallel.strategy import Progress, final_models, predicted_exchange
from speechdp.parallel.training_step import TrainingStep
from speechdp.strategies.mechanisms.periodic import PeriodicStrategy
from speechdp.timing.timeline import Timeline

TOLERANCE = 1e-9
NUM_STEPS = 7
_FEATURES, _CLASSES, _SEGMENTS = 5, 4, 3
_GENERATOR = threading.Lock()
_TRAINING_ALONE = threading.Lock()


def strategy_contract(strategy: str, *, neutral: str | None = "", sizes: Sequence[int] = (1, 2, 3)) -> None:
    """Check that a strategy meets what training relies on, with 1, 2 and 3 ranks as threads; takes seconds.

    - its options are read and described without loss;
    - one rank alone is plain SGD;
    - all ranks start with rank 0's parameters, and hold the same bits after `finish`;
    - evaluation shows the same model on all ranks, and training continues as if there had been none;
    - `finish` ends with the model that an evaluation just before it shows, unless it still applies gradients;
    - a rank without frames keeps joining;
    - after saving and loading it continues; a synchronous strategy ends with the same bits as an
      uninterrupted run;
    - training lowers the loss over all ranks' batches;
    - a period that changes is declared: `traits.period_changes`;
    - what it says of its exchanges, if anything, can be used: `predicted_exchange`;
    - nothing still runs after `close`.

    Example::

        def test_growing_averaging():
            strategy_contract("growing_averaging:period=2,stay=1,longest=8")

    Args:
        strategy: name and options, as on the command line.
        neutral: options that replace those given to make the strategy plain SGD on one rank, if it is not by
            nature (an outer optimizer): "outer_learning_rate=1,outer_momentum=0"; None: no options do.
        sizes: numbers of ranks.

    Raises:
        AssertionError: the strategy breaks a requirement, which the message names.
        ConfigError: there is no such strategy, or an option is wrong.
    """
    text = describe(parse_strategy(strategy))
    assert describe(parse_strategy(text)) == text, f"{strategy}: options are not read as described: {text}"
    _exchange_can_be_used(strategy)
    if neutral is not None:
        name, _, given = strategy.partition(":")
        options = split_options(given) | split_options(neutral)
        plain = ":".join(filter(None, (name, ",".join(f"{key}={value}" for key, value in options.items()))))
        run_threads(1, lambda comm: _one_rank_is_plain_sgd(comm, plain))
    run_threads(1, lambda comm: _period_is_declared(comm, strategy))
    checks = [_ranks_agree, _evaluation_leaves_no_trace, _empty_ranks_join, _state_is_whole, _loss_falls]
    # This differs, even on one rank, if `finish` still applies the gradients of an incomplete round.
    if run_threads(1, partial(_moved_by_finish, strategy=strategy))[0] <= TOLERANCE:
        checks.append(_ends_as_evaluated)
    for size in sizes:
        for check in checks:
            before = set(threading.enumerate())
            run_threads(size, partial(check, strategy=strategy))
            left = [thread.name for thread in threading.enumerate() if thread not in before]
            assert not left, f"{strategy}: after close its threads {left} still run"


def _exchange_can_be_used(strategy: str) -> None:
    """Check that speed can be predicted from what a strategy says of its exchanges, if it says anything."""
    try:
        predicted_exchange(parse_strategy(strategy), Model(4.0, 0, frames_per_step=1.0, step_s=1.0))
    except ConfigError as error:
        raise AssertionError(f"{strategy}: {error}") from error


def _one_rank_is_plain_sgd(comm: Communicator, strategy: str) -> None:
    optimizer = Sgd(momentum=0.9)
    run = StrategyRun(comm, strategy, make_replica(optimizer))
    run.train(0)
    assert_close(run.finish(), plain_sgd(batches_of_all(1), optimizer), f"{strategy}: on one rank, plain SGD")


def _period_is_declared(comm: Communicator, strategy: str) -> None:
    """Check that a strategy whose period differs between windows says so in its traits."""
    run = StrategyRun(comm, strategy)
    seen = [_period_of(run)]
    for step in range(6 * NUM_STEPS):
        run.step([make_batch(comm.rank, step % NUM_STEPS)])
        seen.append(_period_of(run))
    run.finish()
    changed = [period for period in dict.fromkeys(seen) if period != seen[0]]
    assert run.strategy.traits.period_changes or not changed, (
        f"{strategy}: its period changes from {seen[0]} to {changed[0]} during training; declare that in "
        "traits: return replace(super().traits, period_changes=True)"
    )


def _period_of(run: StrategyRun) -> str:
    """Return the period in use; "": the strategy has none."""
    strategy = run.strategy
    if isinstance(strategy, PeriodicStrategy):
        return str(strategy.current_period)
    return str(strategy.statistics().get("period", ""))


def _ranks_agree(comm: Communicator, strategy: str) -> None:
    replica = make_replica()
    replica.parameters.values.add_(comm.rank)
    run = StrategyRun(comm, strategy, replica)
    comm.barrier()
    assert_close(run.parameters(), make_replica().parameters.values, f"{strategy}: rank 0's start")
    comm.barrier()  # otherwise an asynchronous strategy could already train on another rank
    run.train(comm.rank)
    assert_bitwise_equal_over_ranks(comm, run.finish(), f"{strategy} after finish")


def _evaluation_leaves_no_trace(comm: Communicator, strategy: str) -> None:
    seen = StrategyRun(comm, strategy, make_replica(Sgd(momentum=0.9)))
    for step in range(NUM_STEPS):
        seen.step([make_batch(comm.rank, step)])
        seen.strategy.pause()
        own = seen.parameters()
        with seen.strategy.evaluation_parameters():
            assert_bitwise_equal_over_ranks(comm, seen.parameters(), f"{strategy} under evaluation")
        if seen.strategy.traits.synchronous:  # asynchronous ones may continue from the average of all ranks
            assert torch.equal(seen.parameters(), own), f"{strategy}: evaluation changed the parameters"
        seen.strategy.resume()
    final = seen.finish()
    if seen.strategy.traits.synchronous:
        unseen = StrategyRun(comm, strategy, make_replica(Sgd(momentum=0.9)))
        unseen.train(comm.rank)
        assert torch.equal(final, unseen.finish()), f"{strategy}: evaluation changed training"


def _moved_by_finish(comm: Communicator, strategy: str) -> float:
    """Return the largest difference of a parameter between an evaluation and the `finish` just after it."""
    run = StrategyRun(comm, strategy, make_replica(Sgd(momentum=0.9)))
    run.train(comm.rank)
    run.strategy.pause()
    with run.strategy.evaluation_parameters():
        shown = run.parameters()
    run.strategy.resume()
    return float((run.finish() - shown).abs().max())


def _ends_as_evaluated(comm: Communicator, strategy: str) -> None:
    moved = _moved_by_finish(comm, strategy)
    assert moved <= TOLERANCE, f"{strategy}: finish ends {moved:g} from the model that was evaluated last"


def _empty_ranks_join(comm: Communicator, strategy: str) -> None:
    """Check that rank 0 can have frames in every step, and the others only in the first two."""
    run = StrategyRun(comm, strategy)
    for step in range(NUM_STEPS):
        run.step([make_batch(comm.rank, step)] if step < 2 or comm.rank == 0 else [])
    assert bool(run.finish().isfinite().all()), f"{strategy}: not finite, with ranks that ran out of batches"


def _state_is_whole(comm: Communicator, strategy: str) -> None:
    if parse_strategy(strategy).traits.synchronous:
        for saved_after in (1, 4):
            assert_resumes(comm, strategy, saved_after)
        return
    first = StrategyRun(comm, strategy, make_replica(Sgd(momentum=0.9)))
    first.train(comm.rank, 0, 4)
    second = resumed_run(comm, strategy, first)
    second.train(comm.rank, 4)
    assert_bitwise_equal_over_ranks(comm, second.finish(), f"{strategy} resumed, after finish")


def _loss_falls(comm: Communicator, strategy: str) -> None:
    run = StrategyRun(comm, strategy)
    for _ in range(6):
        run.train(comm.rank)
    run.finish()
    batches = [batch for step in batches_of_all(comm.size) for batch in step]
    losses = [
        torch.stack([summed_loss(model, batch) for batch in batches]).sum().item()
        for model in (make_model(), run.replica.model)
    ]
    assert losses[1] < losses[0], f"{strategy}: the loss went from {losses[0]:g} to {losses[1]:g}"


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
    # torch has one generator for all threads, and here each thread is a rank.
    with _GENERATOR:
        return copy.deepcopy(_initial_model())


@functools.cache
def _initial_model() -> LstmAcousticModel:
    """Return the model that all others copy: seeding torch takes longer than a training step."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return LstmAcousticModel(_FEATURES, _CLASSES, LstmConfig(1, 8, False, bottleneck=3)).double()


@functools.cache
def make_batch(rank: int, step: int) -> Batch:
    """Return a batch that depends only on rank and step; ranks have unequal numbers of frames.

    Every call returns the same object; do not change it.
    """
    generator = torch.Generator().manual_seed(1000 * rank + step)
    longest = 4 + rank + step % 3
    lengths = torch.randint(2, longest + 1, (_SEGMENTS,), generator=generator)
    lengths[0] = longest
    features = torch.randn(_SEGMENTS, longest, _FEATURES, generator=generator, dtype=torch.float64)
    targets = torch.randint(_CLASSES, (_SEGMENTS, longest), generator=generator)
    padding = torch.arange(longest) >= lengths.unsqueeze(1)
    return Batch(
        features.masked_fill(padding.unsqueeze(2), 0),
        targets.masked_fill(padding, -1),
        lengths,
        int(lengths.sum()),
    )


def summed_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the cross-entropy of a batch, summed over its frames."""
    logits = model(batch.features, batch.lengths)
    return nn.functional.cross_entropy(
        logits.flatten(0, 1), batch.targets.flatten(), ignore_index=-1, reduction="sum"
    )


def make_replica(optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] = PLAIN) -> Replica:
    """Return a fresh replica."""
    return Replica(make_model(), optimizer)


class StrategyRun:
    """A strategy that trains on batches given one by one."""

    def __init__(self, comm: Communicator, strategy: str, replica: Replica | None = None) -> None:
        self.replica = make_replica() if replica is None else replica
        self.timeline = Timeline(None, rank=comm.rank, device=torch.device("cpu"))
        self.strategy = parse_strategy(strategy).attach(self.replica, comm, self.timeline)
        self.strategy.resume()
        self.steps = 0
        self.frames = 0.0

    def step(self, batches: list[Batch], mean_frames: float = 10.0, time_s: float = 0.0) -> None:
        """Run one step with the frames of all `batches`; with none, this rank only joins."""
        frames = sum(batch.num_frames for batch in batches)
        step = TrainingStep(self.strategy, self.timeline, frames)
        step.begin()
        if batches:
            step.backward(torch.stack([summed_loss(self.replica.model, b) for b in batches]).sum())
        self.steps += 1
        self.frames += mean_frames
        progress = Progress(self.steps, self.frames, time_s, self.steps / NUM_STEPS)
        step.end(progress, number=self.steps)

    def train(self, rank: int, first: int = 0, last: int = NUM_STEPS) -> None:
        """Train on this rank's batches of steps `first` to `last` - 1."""
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


def resumed_run(comm: Communicator, strategy: str, first: StrategyRun) -> StrategyRun:
    """Return a run that continues from the state of `first`, and finish `first`.  Collective."""
    first.strategy.pause()
    second = StrategyRun(comm, strategy, make_replica(Sgd(momentum=0.9)))
    second.strategy.pause()
    second.replica.parameters.values.copy_(first.parameters())
    second.replica.load_optimizer_tensors(
        {k: v.clone() for k, v in first.replica.optimizer_tensors().items()}
    )
    second.strategy.load_state_dict(copy.deepcopy(first.strategy.state_dict()))
    second.steps, second.frames = first.steps, first.frames
    first.finish()
    second.strategy.resume()
    return second


def assert_resumes(comm: Communicator, strategy: str, saved_after: int) -> None:
    """Check that a run saved after `saved_after` steps and loaded again ends like an uninterrupted one."""
    optimizer = Sgd(momentum=0.9)
    whole = StrategyRun(comm, strategy, make_replica(optimizer))
    whole.train(comm.rank)
    first = StrategyRun(comm, strategy, make_replica(optimizer))
    first.train(comm.rank, 0, saved_after)
    second = resumed_run(comm, strategy, first)
    second.train(comm.rank, saved_after)
    what = f"{strategy} saved after {saved_after} steps"
    assert torch.equal(second.finish(), whole.finish()), f"{what}: resumed differs from uninterrupted"
    for one, other in zip(final_models(second.strategy), final_models(whole.strategy), strict=True):
        assert torch.equal(one, other), f"{what}: another final model"


def assert_begins_with_gradient_averaging(comm: Communicator, strategy: str) -> None:
    """Check that a strategy whose `begin` is never reached is gradient averaging, bit by bit."""
    run = StrategyRun(comm, strategy, make_replica(Sgd(momentum=0.9)))
    run.train(comm.rank)
    together = StrategyRun(comm, "gradient_averaging", make_replica(Sgd(momentum=0.9)))
    together.train(comm.rank)
    assert torch.equal(run.finish(), together.finish()), f"{strategy}: not gradient averaging, bit by bit"


def plain_sgd(batches_of_step: list[list[Batch]], optimizer: Sgd = PLAIN) -> Tensor:
    """Train with torch alone: the mean loss over all frames of a step, one update per step."""
    # Ranks that are threads ask for the same result at once: one computes it, the others wait.
    with _TRAINING_ALONE:
        return _plain_sgd(tuple(tuple(batches) for batches in batches_of_step), optimizer).clone()


@functools.lru_cache(maxsize=64)
def _plain_sgd(batches_of_step: tuple[tuple[Batch, ...], ...], optimizer: Sgd) -> Tensor:
    """Train once and cache the result: all ranks and several checks compare with it."""
    model = make_model()
    moving = optimizer(list(model.parameters()))
    for batches in batches_of_step:
        frames = sum(batch.num_frames for batch in batches)
        moving.zero_grad()
        for batch in batches:
            (summed_loss(model, batch) / frames).backward()  # type: ignore[no-untyped-call]
        moving.step()
    return flat(model)


def flat(model: nn.Module) -> Tensor:
    """Return a model's parameters in the layout of a replica's flat vector."""
    layout = make_replica()
    for view, parameter in zip(layout.parameters.views, model.parameters(), strict=True):
        view.copy_(parameter.detach())
    return layout.parameters.values


def assert_close(actual: Tensor, expected: Tensor, what: str) -> None:
    """Check that two vectors differ by at most 1e-9."""
    error = float((actual - expected).abs().max())
    assert error <= TOLERANCE, f"{what}: differs by {error:g}"


def assert_bitwise_equal_over_ranks(comm: Communicator, values: Tensor, what: str) -> None:
    """Check that all ranks hold the same bytes."""
    parts = comm.allgather_object(values.numpy().tobytes().hex())
    assert len(set(parts)) == 1, f"{what}: ranks hold different bits"


def batches_of_all(size: int, num_steps: int = NUM_STEPS) -> list[list[Batch]]:
    """Return the batches of all ranks, step by step."""
    return [[make_batch(rank, step) for rank in range(size)] for step in range(num_steps)]
