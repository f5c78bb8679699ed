"""One run from options to finished model: build the parts, train, time, save."""

from __future__ import annotations

import functools
import socket
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from speechdp.comm.base import Communicator
from speechdp.config import OptimizerOptions, TrainOptions
from speechdp.data.assignment import Place, augmentation_seed, planned
from speechdp.data.augment import SpecAugment
from speechdp.data.batch import Batch
from speechdp.data.dataset import Dataset
from speechdp.data.loader import Context, Loader, SplitReader
from speechdp.data.plan import EpochPlan, plan_epoch
from speechdp.decode.hmm import StateInventory, count_frames_and_runs
from speechdp.errors import ConfigError
from speechdp.models.lstm_am import LstmAcousticModel
from speechdp.strategies.registry import describe, parse_strategy
from speechdp.tasks.acoustic import AcousticTask
from speechdp.timing.summary import gather_timing, write_timing
from speechdp.timing.timeline import Timeline
from speechdp.train.checkpoint import RankState, load_checkpoint
from speechdp.train.dealing import Dealing
from speechdp.train.desk import DealingLimits, Desk, Roster
from speechdp.train.evaluate import Evaluator
from speechdp.train.model_file import ClassCounts, save_model
from speechdp.train.parts import TrainingParts
from speechdp.train.progress import Reporter, Scalars, SilentReporter
from speechdp.train.replica import Replica
from speechdp.train.run_files import Metrics, RunDirectory
from speechdp.train.stop import StopAgreement, StopRequest
from speechdp.train.trainer import Stopped, Trainer

#: Batches read ahead; asynchronous ranks hold as few as hide the reading, since others may be faster.
_READ_AHEAD = 4


@dataclass(frozen=True)
class Session:
    """What all runs of a process share.

    Attributes:
        dataset: the data.
        comm: the ranks.
        device: where this rank computes.
        reporter: where news go.
        stop: the signal that asks to stop, or None.
        facts: recorded in run.json (command, versions, hosts).
    """

    dataset: Dataset
    comm: Communicator
    device: torch.device
    reporter: Reporter = field(default_factory=SilentReporter)
    stop: StopRequest | None = None
    facts: dict[str, Any] = field(default_factory=dict)


def train_run(session: Session, options: TrainOptions, run_dir: Path, *, resume: bool = False) -> None:
    """Train one run to its end and leave model, metrics, timing and completion marker in `run_dir`.

    Collective.

    Raises:
        ConfigError: options that do not fit the data, or a folder that already holds a run.
        RunError: NaN in the loss, a full disk, no whole checkpoint.
        ShardError: damaged data.
        Stopped: a signal asked for it; a checkpoint holds everything.
    """
    # Refuses a batch that cannot be shared out before a run is begun.
    resolved = options.resolve(training_ranks(options, session.comm.size))
    origin = _origin(session.dataset)
    for split in (options.train_split, options.held_out):
        session.dataset.shard_paths(split)  # refuses a split there is none of, before a run is begun
    run = RunDirectory(run_dir)
    if resume and session.comm.broadcast_object(run.is_complete):
        _keep_complete(session, options, run)
        return
    state = _prepare_folder(session, options, run, resume=resume)
    with ExitStack() as stack:
        stack.callback(session.reporter.end)  # also after a failure: a live bar hides the cursor
        trainer, reader = build_trainer(session, options, run_dir, stack)
        if state is not None:
            trainer.restore(state)
        plan = _planner(reader, resolved, session.comm.size)
        strategy = trainer.parts.strategy
        dealing = None
        if strategy.synchronous:
            part = strategy.shard(session.comm.rank, session.comm.size)[0]
            assignments = planned(plan, part, resolved.num_epochs, trainer.position)
        else:
            dealing = _open_dealing(session, resolved, trainer, plan)
            assignments = dealing.assignments()
        loader = Loader(
            reader,
            assignments,
            pin=session.device.type == "cuda",
            read_ahead=_READ_AHEAD if strategy.synchronous else 1,
            augment=_augmenter(options),
        )
        stack.enter_context(loader)
        if dealing is not None:
            stack.callback(dealing.stop_asking)  # before the loader's thread, which asks, is joined
        try:
            trainer.run(loader, StopAgreement(session.stop, session.comm))
        except Stopped:
            _close(dealing)
            raise
        _close(dealing)
        _conclude(session, run, trainer, count_classes(reader, session), origin)


def training_ranks(options: TrainOptions, size: int) -> int:
    """Return how many of `size` ranks train; with some strategies others only serve."""
    return parse_strategy(options.strategy).shard(0, size)[1]


def _keep_complete(session: Session, options: TrainOptions, run: RunDirectory) -> None:
    """Leave a run that has ended well as it is: training no step would still replace its timing."""
    run.check_same(options.fingerprint(), session.dataset.checksum)
    if session.comm.rank == 0:
        run.complete_again()
    session.comm.barrier()
    session.reporter.notice(f"{run.path}: is complete already")


def _prepare_folder(
    session: Session, options: TrainOptions, run: RunDirectory, *, resume: bool
) -> RankState | None:
    comm = session.comm
    if comm.rank == 0:
        if not resume and run.is_begun:
            raise ConfigError(f"{run.path}: already holds a run; go on with --resume, or --overwrite it")
        if run.is_begun:
            run.check_same(options.fingerprint(), session.dataset.checksum)
    comm.barrier()
    notices: list[str] = []
    state = load_checkpoint(run.path, comm, notices) if resume else None
    for notice in notices:
        session.reporter.notice(notice)
    if comm.rank == 0 and not run.is_begun:
        run.begin(_facts(session, options))
    if comm.rank == 0:
        run.truncate_metrics(0 if state is None else state.values["counters"]["step"])
    comm.barrier()
    if resume:
        done = "the beginning" if state is None else f"step {state.values['counters']['step']}"
        session.reporter.notice(f"{run.path}: going on from {done}")
    return state


def _facts(session: Session, options: TrainOptions) -> dict[str, Any]:
    strategy = parse_strategy(options.strategy)
    workers = training_ranks(options, session.comm.size)
    with torch.device("meta"):  # only to count: the weights themselves are made when training is built
        num_parameters = sum(p.numel() for p in make_model(session.dataset, options).parameters())
    name = describe(strategy).partition(":")[0]
    period = getattr(strategy, "period", getattr(strategy, "every", None))
    return {
        "strategy": describe(strategy),
        "strategy_name": name,
        "period": None if period is None else str(period),
        "backend": session.comm.backend,
        "size": session.comm.size,
        "device": str(session.device.type),
        "seed": options.seed,
        "preset": options.model.preset,
        "batch_size": options.resolve(workers).batches().batch_size,
        "num_parameters": num_parameters,
        "options": options.to_json(workers),
        "fingerprint": options.fingerprint(),
        "data": {"path": str(session.dataset.path), "checksum": session.dataset.checksum},
        **session.facts,
    }


def _origin(dataset: Dataset) -> dict[str, Any]:
    """Return what the model file says of the data; before training, lest a missing file be found after it."""
    return {
        "feature_dim": dataset.feature_dim,
        "num_classes": dataset.num_classes,
        "classes_sha256": StateInventory.load(dataset.classes_path).sha256,
        "data_checksum": dataset.checksum,
        "features": dataset.features.to_dict(),
        "sampling_rate": dataset.sampling_rate,
    }


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


def _close(dealing: Dealing | None) -> None:
    if dealing is not None:
        dealing.close()


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


def count_classes(reader: SplitReader, session: Session) -> ClassCounts:
    """Count frames and runs of each class over a split.  Collective: each rank counts some shards."""
    num_classes = session.dataset.num_classes
    counts = np.zeros((2, num_classes), dtype=np.int64)
    for shard_index in range(session.comm.rank, len(reader.shards), session.comm.size):
        for utterance in range(reader.shards[shard_index].num_utterances):
            targets = reader.whole(shard_index, utterance).targets
            counts += np.stack(count_frames_and_runs(targets, num_classes))
    session.comm.allreduce(torch.from_numpy(counts), name="class_counts")
    return ClassCounts(counts[0], counts[1])


def _conclude(
    session: Session, run: RunDirectory, trainer: Trainer, counts: ClassCounts, origin: dict[str, Any]
) -> None:
    parts, comm = trainer.parts, session.comm
    timing = gather_timing(parts.timeline, comm, trainer.traffic())
    # A run resumed at its very end has timed nothing; its timeline still holds all steps.
    if timing is not None and all(entry["steps"] > 0 for entry in timing["ranks"]):
        write_timing(run.path, timing)
    parts.reporter.end()
    if comm.rank == 0:
        save_model(run.path, parts.model, counts, origin)
        counters = trainer.counters
        run.complete({"step": counters.step, "epochs": counters.epoch, "host": socket.gethostname()})
    comm.barrier()
