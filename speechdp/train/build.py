"""Build the parts of a run from its options: data, model, optimizer, strategy, trainer, loader."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import nn

from speechdp.config import OptimizerOptions, TrainOptions
from speechdp.data.assignment import Place, augmentation_seed, planned
from speechdp.data.augment import SpecAugment
from speechdp.data.batch import Batch
from speechdp.data.dataset import Dataset
from speechdp.data.loader import Context, Loader, SplitReader
from speechdp.data.plan import EpochPlan, plan_epoch
from speechdp.models.lstm_am import LstmAcousticModel
from speechdp.strategies.registry import parse_strategy
from speechdp.tasks.acoustic import AcousticTask
from speechdp.timing.timeline import Timeline
from speechdp.train.dealing import Dealing
from speechdp.train.desk import DealingLimits, Desk, Roster
from speechdp.train.evaluate import Evaluator
from speechdp.train.parts import TrainingParts
from speechdp.train.progress import Scalars
from speechdp.train.replica import Replica
from speechdp.train.run_files import Metrics, RunDirectory
from speechdp.train.session import Session
from speechdp.train.trainer import Trainer

#: Batches read ahead; asynchronous ranks hold as few as hide the reading, since others may be faster.
_READ_AHEAD, _READ_AHEAD_APART = 4, 1


def training_ranks(options: TrainOptions, size: int) -> int:
    """Return how many of `size` ranks train; with some strategies others only serve."""
    return parse_strategy(options.strategy).shard(0, size)[1]


def _readers(session: Session, options: TrainOptions, stack: ExitStack) -> tuple[SplitReader, SplitReader]:
    batches = options.batches()
    context = Context(batches.left_context or 0, batches.right_context)
    readers = []
    for split in (options.train_split, options.held_out):
        reader = SplitReader(session.dataset, split, options.alignments, context)
        stack.callback(reader.close)
        readers.append(reader)
    return readers[0], readers[1]


def _planner(reader: SplitReader, options: TrainOptions, size: int) -> Callable[[int], EpochPlan]:
    parts = training_ranks(options, size)

    @functools.lru_cache(maxsize=2)
    def plan(epoch: int) -> EpochPlan:
        return plan_epoch(reader.index, options.plan(), epoch, parts)

    return plan


def open_loader(
    session: Session, options: TrainOptions, trainer: Trainer, reader: SplitReader, stack: ExitStack
) -> tuple[Loader, Dealing | None]:
    """Begin reading what this rank trains on next; of an asynchronous run, open the dealing too.  Collective.

    Args:
        options: resolved.
        stack: closes the loader; the dealing is to be closed by all ranks together when training has ended.
    """
    comm, strategy = session.comm, trainer.parts.strategy
    plan = _planner(reader, options, comm.size)
    dealing = None
    if strategy.synchronous:
        part = strategy.shard(comm.rank, comm.size)[0]
        assignments = planned(plan, part, options.num_epochs, trainer.position)
    else:
        dealing = _open_dealing(session, options, trainer, plan)
        assignments = dealing.assignments()
    loader = Loader(
        reader,
        assignments,
        pin=session.device.type == "cuda",
        read_ahead=_READ_AHEAD if strategy.synchronous else _READ_AHEAD_APART,
        augment=_augmenter(options),
    )
    stack.enter_context(loader)
    if dealing is not None:
        stack.callback(dealing.stop_asking)  # before the loader's thread, which asks, is joined
    return loader, dealing


def _open_dealing(
    session: Session, options: TrainOptions, trainer: Trainer, plan: Callable[[int], EpochPlan]
) -> Dealing:
    """Open the dealing of an asynchronous run.  Collective."""
    comm, strategy = session.comm, trainer.parts.strategy
    parts = [strategy.shard(rank, comm.size)[0] for rank in range(comm.size)]
    roster = Roster(parts, strategy.teams(comm.size))
    desk = None
    if comm.rank == 0:
        limits = DealingLimits(options.num_epochs, options.checkpoint_steps, options.max_steps)
        desk = Desk(plan, roster, limits, trainer.dealing_state)
    stop = session.stop
    return Dealing(comm.peers(), roster, plan, desk, lambda: stop is not None and stop.received is not None)


def _augmenter(options: TrainOptions) -> Callable[[Batch, Place], None] | None:
    if not options.batch.spec_augment:
        return None
    masks = SpecAugment()
    # Drawn from the place in training alone, so a resumed run sees the same masks.
    return lambda batch, place: masks.apply(batch, augmentation_seed(options.seed, place))


def make_model(dataset: Dataset, options: TrainOptions) -> LstmAcousticModel:
    """Build the model with weights that depend on the seed alone."""
    torch.manual_seed(options.seed)
    return LstmAcousticModel(dataset.feature_dim, dataset.num_classes, options.model.lstm())


def make_replica(model: LstmAcousticModel, options: TrainOptions) -> Replica:
    """Put a model's parameters into flat vectors with the optimizer of `options`."""
    make = _optimizer_maker(options.optimizing())
    return Replica(model, make, max_gradient_norm=options.optimizer.max_gradient_norm)


def _optimizer_maker(
    options: OptimizerOptions,
) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
    momentum, decay, rate = options.momentum, options.weight_decay, options.schedule().learning_rate
    assert momentum is not None
    # fused: one pass over the flat vector; on a CPU 4 times as fast as the default for Adam.
    if options.optimizer == "sgd":
        return lambda p: torch.optim.SGD(p, rate, momentum=momentum, weight_decay=decay, fused=True)
    cls = torch.optim.Adam if options.optimizer == "adam" else torch.optim.AdamW
    return lambda p: cls(p, rate, betas=(momentum, 0.999), weight_decay=decay, fused=True)


def build_trainer(
    session: Session, options: TrainOptions, run_dir: Path, stack: ExitStack
) -> tuple[Trainer, SplitReader]:
    """Build a trainer at step 0 and the reader of its training split.  Collective.

    Args:
        run_dir: where timeline, metrics and checkpoints go.
        stack: closes what was opened.
    """
    comm = session.comm
    options = options.resolve(training_ranks(options, comm.size))
    reader, held_out = _readers(session, options, stack)
    model = make_model(session.dataset, options).to(session.device)
    if session.device.type == "cuda":
        model.lstm.flatten_parameters()  # before the weights become views: their layout is kept
    replica = make_replica(model, options)
    timeline = Timeline(
        run_dir / "timeline" / f"rank-{comm.rank:04d}.jsonl", rank=comm.rank, device=session.device
    )
    stack.callback(timeline.close)
    strategy = parse_strategy(options.strategy)
    strategy.attach(replica, comm, timeline)
    # From here on ranks draw different random numbers (dropout).
    torch.manual_seed(options.seed * 65_537 + comm.rank)
    parts = TrainingParts(
        task=AcousticTask(),
        model=model,
        replica=replica,
        strategy=strategy,
        schedule=options.schedule(),
        evaluator=Evaluator(held_out, options.plan(), comm, session.device),
        timeline=timeline,
        comm=comm,
        device=session.device,
        reporter=session.reporter,
        on_metrics=_metrics_writer(RunDirectory(run_dir), stack) if comm.rank == 0 else lambda metrics: None,
        slowness=options.slowness(comm.rank),
    )
    return Trainer(parts, run_dir, options), reader


def _metrics_writer(run: RunDirectory, stack: ExitStack) -> Callable[[Metrics], None]:
    scalars = stack.enter_context(Scalars(run.path / "tensorboard"))

    def write(metrics: Metrics) -> None:
        run.add_metrics(metrics)
        scalars.add(metrics)

    return write
