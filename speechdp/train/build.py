"""Build the parts of a run from its options: data, model, optimizer, strategy, trainer, loader."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from speechdp.data.loading.device_stream import DeviceStream
from speechdp.data.loading.loader import BlockingLoader, Loader, StepLoader
from speechdp.data.loading.source import SplitSource
from speechdp.data.loading.source_options import SourceOptions, make_preprocessor, open_local_source
from speechdp.data.loading.source_request import SourceRequest
from speechdp.data.loading.split_files import SplitFiles
from speechdp.data.plan.assignment import Assignment, planned
from speechdp.data.plan.epoch_plan import EpochPlan, PlanOptions, plan_epoch
from speechdp.data.plan.planner import Planner
from speechdp.data.shards.alignment_file import check_alignments
from speechdp.data.shards.dataset import Dataset
from speechdp.data.transforms.perturb import speed_of_utterances
from speechdp.data.transforms.preprocess import CACHE_BYTES
from speechdp.dealing.batch_client import Dealing
from speechdp.dealing.batch_server import BatchServer, DealingLimits
from speechdp.errors import ConfigError, ShardError
from speechdp.models.captured import CudaRecorder, Graphs
from speechdp.models.precision import Precision
from speechdp.options.optimizer import OptimizerOptions
from speechdp.options.run import TrainOptions
from speechdp.parallel.batch_statistics import refuse_unsynchronised
from speechdp.parallel.loss_scale import make_scaler
from speechdp.parallel.replica import Replica
from speechdp.parallel.run_files import Metrics, RunDirectory
from speechdp.process.notices import add_notice
from speechdp.tasks.base import Task
from speechdp.timing.timeline import Timeline
from speechdp.train.epoch_average import EpochAverage
from speechdp.train.evaluate import Evaluator
from speechdp.train.models import load_initial_weights, make_model
from speechdp.train.scalars import Scalars
from speechdp.train.session import Session
from speechdp.train.tolerance import loss_notice
from speechdp.train.trainer import Trainer
from speechdp.train.trainer_state import TrainingParts
from speechdp.watchdog.progress_beats import Pulse

#: Batches read ahead.  Asynchronous ranks hold only enough to hide the reading, since others may be faster.
_READ_AHEAD, _READ_AHEAD_APART = 4, 1


def training_ranks(options: TrainOptions, size: int) -> int:
    """Return how many of `size` ranks train; with some strategies the others only serve."""
    return options.strategy.parsed.roster(size).num_parts


@dataclass(frozen=True)
class Sources:
    """Where the batches of a run come from: the training split and the held-out split."""

    training: SplitSource
    held_out: SplitSource


def check_sources(session: Session, options: TrainOptions) -> None:
    """Refuse invalid data and invalid combinations of batch options.

    Raises:
        ConfigError: perturbation of stored features, a GPU that does not exist, ...
        ShardError: a split or an alignment does not exist.
    """
    for split, augmented in ((options.train_split, True), (options.held_out, False)):
        if split not in session.dataset.splits:
            raise ShardError(
                f"{session.dataset.path}: has no split {split!r}, only {', '.join(session.dataset.splits)}; "
                "choose with --train-split and --held-out, or prepare with another --split"
            )
        make_preprocessor(session.dataset, options.source(split, augmented=augmented))
    check_alignments(options.alignments)
    if options.loading.preprocess_on == "gpu" and session.device.type != "cuda":
        raise ConfigError("--preprocess-on gpu: this rank computes on the CPU; leave it out, or use a GPU")
    strategy = options.strategy.parsed
    if options.batch.order == "blocking-sort" and not strategy.traits.synchronous:
        raise ConfigError(
            f"--order blocking-sort: {strategy.name} reads batch by batch; choose another order or strategy"
        )


def check_shards(session: Session, options: TrainOptions) -> None:
    """Open the shards of both splits and check all targets, as training does at its start.  Collective.

    Call it before a folder is emptied, so that a missing shard does not cost the run that the folder holds.

    Raises:
        ShardError: a shard or its targets are missing, damaged or not those that data.json lists.
    """
    for split in dict.fromkeys((options.train_split, options.held_out)):
        files = SplitFiles(session.dataset, split, options.alignments)
        try:
            files.lengths(session.comm)
        finally:
            files.close()


def open_sources(session: Session, options: TrainOptions, stack: ExitStack) -> Sources:
    """Open both splits, on this rank or on the feeders.  Collective."""
    opened = []
    for split, augmented in ((options.train_split, True), (options.held_out, False)):
        source = _open_source(session, options, options.source(split, augmented=augmented))
        stack.callback(source.close)
        opened.append(source)
    return Sources(*opened)


def _open_source(session: Session, options: TrainOptions, request: SourceRequest) -> SplitSource:
    if session.feeders is not None:
        return session.feeders.open(request)
    loading = options.loading
    here = SourceOptions(session.device, loading.preprocess_on, loading.loader_threads, comm=session.comm)
    return open_local_source(session.dataset, request, here)


def plan_options_for(dataset: Dataset, options: TrainOptions) -> PlanOptions:
    """Return how this data set is cut into batches.

    The chunks of an utterance in an audio shard stay close together, so that its features are computed once
    and kept for all its chunks.
    """
    plan_options = options.plan()
    if dataset.stored != "audio" or not plan_options.chunk_frames or plan_options.order == "blocking-sort":
        return plan_options
    return dataclasses.replace(plan_options, window_frames=CACHE_BYTES // (4 * dataset.feature_dim))


def epoch_planner(session: Session, source: SplitSource, options: TrainOptions) -> Callable[[int], EpochPlan]:
    """Return the pure function that plans an epoch of this data over these ranks; `options` are resolved."""
    parts = training_ranks(options, session.comm.size)
    plan_options = plan_options_for(session.dataset, options)

    def plan(epoch: int) -> EpochPlan:
        index = source.index
        if options.augment.speed_perturb:
            index = index.at_speed(speed_of_utterances(options.seed, epoch, len(index.num_frames)))
        return plan_epoch(index, plan_options, epoch, parts)

    return plan


def open_loader(
    session: Session,
    options: TrainOptions,
    trainer: Trainer,
    source: SplitSource,
    stack: ExitStack,
    pass_on: Callable[[Iterator[Assignment]], Iterator[Assignment]] = iter,
) -> tuple[StepLoader, Dealing | None]:
    """Start reading this rank's next batches; in an asynchronous run, open the dealing too.  Collective.

    Args:
        options: resolved options.
        stack: closes the loader.  All ranks together must close the dealing once training has ended.
        pass_on: wraps the assignments on their way to the loader's thread, which may have to wait for them.
    """
    comm, strategy = session.comm, trainer.parts.strategy
    plan = Planner(epoch_planner(session, source, options), options.num_epochs)
    stack.callback(plan.close)
    dealing = None
    together = strategy.traits.synchronous
    if together:
        part = strategy.roster(comm.size).part_of_rank[comm.rank]
        assignments = planned(plan, part, options.num_epochs, trainer.position)
    else:
        dealing = _open_dealing(session, options, trainer, plan)
        assignments = dealing.assignments()
    loader = _make_loader(session, options, source, pass_on(assignments), together=together)
    stack.enter_context(loader)
    if dealing is not None:
        stack.callback(dealing.stop_asking)  # before joining the loader's thread, which asks for batches
    return loader, dealing


def _make_loader(
    session: Session,
    options: TrainOptions,
    source: SplitSource,
    assignments: Iterator[Assignment],
    *,
    together: bool,
) -> StepLoader:
    to_device = None
    if session.device.type == "cuda":
        to_device = DeviceStream(session.device, source.times).move
    if options.batch.order == "blocking-sort":
        return BlockingLoader(source, assignments, to_device=to_device)
    read_ahead = max(_READ_AHEAD, source.read_ahead) if together else _READ_AHEAD_APART
    return Loader(source, assignments, read_ahead=read_ahead, to_device=to_device)


def _open_dealing(
    session: Session, options: TrainOptions, trainer: Trainer, plan: Callable[[int], EpochPlan]
) -> Dealing:
    """Open the dealing of an asynchronous run.  Collective."""
    comm = session.comm
    roster = trainer.parts.strategy.roster(comm.size)
    server = None
    if comm.rank == 0:
        limits = DealingLimits(
            options.num_epochs, options.checkpoint_steps, options.max_steps, session.pause_at
        )
        server = BatchServer(plan, roster, limits, trainer.dealing_state)

    def notify_loss(rank: int) -> None:
        session.reporter.notice(loss_notice(session, rank))

    dealing = Dealing(comm.peers(), roster, plan, server, session.is_asked_to_stop, notify_loss)
    trainer.on_loss = dealing.lose
    return dealing


def make_replica(model: nn.Module, options: TrainOptions) -> Replica:
    """Make a replica of a model: flat parameters and gradients, and the optimizer of `options`."""
    make = _optimizer_maker(options.optimizing())
    device = next(model.parameters()).device
    scaler = make_scaler(device) if Precision(options.precision, device).scales_losses else None
    return Replica(model, make, max_gradient_norm=options.optimizer.max_gradient_norm, scaler=scaler)


def _optimizer_maker(
    options: OptimizerOptions,
) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
    momentum, decay, rate = options.momentum, options.weight_decay, options.schedule().learning_rate
    assert momentum is not None
    # fused: one pass over the flat vector; for Adam on a CPU 4 times as fast as the default.
    if options.optimizer == "sgd":
        return lambda p: torch.optim.SGD(p, rate, momentum=momentum, weight_decay=decay, fused=True)
    cls = torch.optim.Adam if options.optimizer == "adam" else torch.optim.AdamW
    return lambda p: cls(p, rate, betas=(momentum, 0.999), weight_decay=decay, fused=True)


def build_trainer(
    session: Session,
    options: TrainOptions,
    run_dir: Path,
    stack: ExitStack,
    timeline: Timeline | None = None,
    pulse: Pulse | None = None,
) -> tuple[Trainer, Sources]:
    """Build a trainer at step 0 and open the data.  Collective.

    Args:
        run_dir: folder for timeline, metrics and checkpoints.
        stack: closes what this function opens.
        timeline: records this rank's times; None: a timeline is opened in `run_dir`.
        pulse: receives beats of progress; None: a new pulse.
    """
    comm = session.comm
    options = options.resolve(training_ranks(options, comm.size))
    scoring = plan_options_for(session.dataset, options)
    sources = open_sources(session, options, stack)
    model = _network(session, options)
    replica = make_replica(model, options)
    if timeline is None:
        timeline = Timeline(
            run_dir / "timeline" / f"rank-{comm.rank:04d}.jsonl", rank=comm.rank, device=session.device
        )
    stack.callback(timeline.close)
    strategy = options.strategy.parsed.attach(replica, comm, timeline)
    # From here on each rank draws different random numbers (dropout).
    torch.manual_seed(options.seed * 65_537 + comm.rank)
    precision = Precision(options.precision, session.device)
    graphs = _graphs(model, session.device, options)
    stack.callback(graphs.close)  # the next training of this process needs the memory
    pulse, task = pulse or Pulse(), options.make_task().for_data(session.dataset)
    sources.training.beat = pulse.beat
    on_metrics, on_mean = _writers(session, task, run_dir, stack)
    parts = TrainingParts(
        task=task,
        model=model,
        replica=replica,
        strategy=strategy,
        schedule=options.schedule(),
        precision=precision,
        evaluator=Evaluator(sources.held_out, scoring, comm, session.device, precision, pulse),
        timeline=timeline,
        comm=comm,
        device=session.device,
        reporter=session.reporter,
        average=EpochAverage(options.average_epochs, options.num_epochs, comm),
        on_metrics=on_metrics,
        on_mean=on_mean,
        slowness=options.slowness(comm.rank),
        pulse=pulse,
        graphs=graphs,
    )
    return Trainer(parts, run_dir, options), sources


def _network(session: Session, options: TrainOptions) -> nn.Module:
    """Make the network with its initial weights, on this rank's device."""
    model = make_model(session.dataset, options)
    load_initial_weights(model, session.dataset, options)
    model = model.to(session.device)
    refuse_unsynchronised(model, session.comm, together=options.strategy.parsed.traits.synchronous)
    if session.device.type == "cuda":
        for module in model.modules():
            if isinstance(module, nn.RNNBase):
                module.flatten_parameters()  # before the weights become views, which keep their layout
    return model


def _graphs(model: nn.Module, device: torch.device, options: TrainOptions) -> Graphs:
    """Return the CUDA graphs for the parts of a model that can be captured; none on a CPU."""
    if device.type != "cuda" or options.cuda_graphs == "off":
        return Graphs([], device)
    return Graphs.of(model, device, lambda: CudaRecorder(device))


def _writers(
    session: Session, task: Task, run_dir: Path, stack: ExitStack
) -> tuple[Callable[[Metrics], None], Callable[[int, Mapping[str, float]], None]]:
    """Return two callbacks: one for evaluations, one for the score of the mean of several epochs' models."""
    if session.comm.rank != 0:
        return lambda metrics: None, lambda step, values: None
    run = RunDirectory(run_dir)

    def notice(text: str) -> None:
        session.reporter.notice(text)
        add_notice(run_dir, text)

    scalars = stack.enter_context(Scalars(run_dir / "tensorboard", run.evaluated_step, task.metrics, notice))

    def write(metrics: Metrics) -> None:
        run.add_metrics(metrics)
        scalars.add(metrics)

    return write, scalars.add_mean
