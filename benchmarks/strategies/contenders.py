"""What the benchmarks run on their ranks: the same data, our training loops, the clock around them."""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from speechdp.comm.base import Communicator
from speechdp.data.loading.batch import Batch
from speechdp.data.loading.loader import Loader
from speechdp.data.loading.source import SplitSource
from speechdp.data.plan.assignment import Assignment, planned
from speechdp.data.plan.epoch_plan import plan_epoch
from speechdp.data.shards.dataset import Dataset, Manifest, ShardEntry, SplitEntry
from speechdp.data.shards.shard import ShardHeader, ShardWriter, Utterance
from speechdp.data.signal.features import FeatureConfig
from speechdp.errors import ConfigError
from speechdp.labels.hmm import STATES_PER_PHONE, StateInventory
from speechdp.models.lstm_am import LstmAcousticModel
from speechdp.options.optimizer import OptimizerOptions
from speechdp.options.run import ModelOptions, TrainOptions
from speechdp.parallel.period import Period
from speechdp.parallel.registry import StrategyChoice, parse_strategy
from speechdp.parallel.stop import StopAgreement, StopRequest
from speechdp.parallel.strategy import Progress
from speechdp.parallel.training_step import TrainingStep
from speechdp.tasks.acoustic import AcousticTask
from speechdp.timing.timeline import Timeline
from speechdp.train.build import build_trainer, make_replica
from speechdp.train.session import Session

NUM_CLASSES = 60
#: Steps before the clock starts; connections are made and memory is allocated in them.
WARMUP_STEPS = 10
_EPOCHS = 1000
# The model of the comparisons with DDP and other peers: 4 x 320 LSTM; of that with a bare loop: tiny.
LSTM_4X320 = ModelOptions(layers=4, cells=320, bidirectional=False, dropout=0.0)
TINY = ModelOptions(dropout=0.0)

#: Trains on the next batch and returns its frames.
Advance = Callable[[], int]


class Meeting(Protocol):
    """What the clock needs of the ranks: a Communicator, or a peer's own."""

    rank: int
    size: int

    def barrier(self) -> None: ...

    def allgather_object(self, value: Any) -> list[Any]: ...


def make_data(folder: Path) -> None:
    """Write shards of random features, lengths as of spoken digits (0.2 to 0.8 s)."""
    rng = np.random.default_rng(1)
    features = FeatureConfig()
    splits = {}
    for split, num_shards, num_utterances in (("train", 2, 1000), ("dev", 1, 20)):
        header = ShardHeader(features, 8000, NUM_CLASSES, "exact", split)
        entries = []
        for shard in range(num_shards):
            with ShardWriter(folder / f"{split}-{shard:05d}.h5", header) as writer:
                for number in range(num_utterances):
                    length = int(rng.integers(20, 80))
                    writer.add(
                        Utterance(
                            f"{split}-{shard}-{number}",
                            "random",
                            "zero",
                            rng.standard_normal((length, features.feature_dim), dtype=np.float32),
                            rng.integers(0, NUM_CLASSES, length, dtype=np.int32),
                        )
                    )
            entries.append(ShardEntry.of(writer))
        splits[split] = SplitEntry.of(entries, ["random"])
    StateInventory(tuple(f"phone{number}" for number in range(NUM_CLASSES // STATES_PER_PHONE - 1))).save(
        folder / "classes.txt"
    )
    Manifest(8000, features, NUM_CLASSES, "exact", "index:", splits).write(folder)


def options_with(
    strategy: str, model: ModelOptions, optimizer: OptimizerOptions | None = None
) -> TrainOptions:
    """Return the options of a run that does not end by itself."""
    return TrainOptions(
        model=model,
        optimizer=optimizer or OptimizerOptions(),
        strategy=StrategyChoice(strategy),
        epochs=_EPOCHS,
    )


def full_steps(source: SplitSource, options: TrainOptions, rank: int, size: int) -> Iterator[Assignment]:
    """Yield the steps of a rank, without those in which some rank has no frames: peers cannot join these."""
    plan = lru_cache(maxsize=1)(lambda epoch: plan_epoch(source.index, options.plan(), epoch, size))
    for step in planned(plan, rank, _EPOCHS):
        if (plan(step.place.epoch).frames[:, step.index] > 0).all():
            yield step


def open_loader(source: SplitSource, options: TrainOptions, rank: int, size: int) -> Loader:
    """Read the batches of `full_steps` in a thread."""
    return Loader(source, full_steps(source, options, rank, size))


@contextlib.contextmanager
def trainer_loop(comm: Communicator, dataset: Dataset, options: TrainOptions) -> Iterator[Advance]:
    """Give our training loop, everything switched on.  Collective; for synchronous strategies."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        session = Session(dataset, comm, torch.device("cpu"), stop=stack.enter_context(StopRequest()))
        trainer, sources = build_trainer(session, options, folder, stack)
        loader = stack.enter_context(open_loader(sources.training, options, comm.rank, comm.size))
        trainer.parts.model.train()
        parts = trainer.parts
        stop, strategy = StopAgreement(session.stop, comm, parts.timeline), parts.strategy

        def advance() -> int:
            step = trainer.advance(loader)
            stop.reached()
            assert step is not None
            return step.batch.num_frames

        strategy.resume()
        yield advance
        stop.drain()
        strategy.pause()
        strategy.finish()
        strategy.close()


@contextlib.contextmanager
def strategy_loop(
    comm: Communicator,
    model: LstmAcousticModel,
    options: TrainOptions,
    batches: Iterator[Batch],
    *,
    finish: bool = True,
) -> Iterator[Advance]:
    """Give a bare loop around a strategy, each rank at its own pace if the strategy lets it.  Collective.

    Args:
        finish: bring the replicas together at the end; without, only its threads are ended.
    """
    replica = make_replica(model, options)
    timeline = Timeline(None, rank=comm.rank, device=torch.device("cpu"))
    task, strategy = AcousticTask(), options.strategy.parsed.attach(replica, comm, timeline)
    replica.set_learning_rate(options.schedule().learning_rate)
    number, frames = 0, 0

    def advance() -> int:
        nonlocal number, frames
        batch = next(batches)
        number, frames = number + 1, frames + batch.num_frames
        step = TrainingStep(strategy, timeline, batch.num_frames)
        step.begin()
        step.backward(task.loss(model, batch).total)
        step.end(Progress(number, frames, timeline.training_time_s), number=number)
        return batch.num_frames

    model.train()
    strategy.resume()
    yield advance
    strategy.pause()
    if finish:
        strategy.finish()
    strategy.close()
    timeline.close()


def timed(meeting: Meeting, advance: Advance, seconds: float, *, whole: int = 1) -> tuple[int, float]:
    """Warm up, then time as many steps as fill `seconds`, the same number on every rank.

    Args:
        whole: the steps timed are a multiple of this: whole periods.
    """
    for _ in range(WARMUP_STEPS):
        advance()
    meeting.barrier()
    start = time.perf_counter()
    probe = max(WARMUP_STEPS, whole)
    for _ in range(probe):
        advance()
    pace_s = meeting.allgather_object((time.perf_counter() - start) / probe)[0]
    steps = whole * max(-(-WARMUP_STEPS // whole), round(seconds / pace_s / whole))
    return timed_steps(meeting, advance, steps)


def timed_steps(meeting: Meeting, advance: Advance, steps: int) -> tuple[int, float]:
    """Return the frames of this rank and the seconds of `steps` steps."""
    meeting.barrier()
    start = time.perf_counter()
    frames = sum(advance() for _ in range(steps))
    return frames, time.perf_counter() - start


def print_rate(meeting: Meeting, frames: int, wall_s: float) -> None:
    """Let rank 0 print the rate of the job, for `paired.launch_ranks`."""
    parts = meeting.allgather_object([frames, wall_s])
    if meeting.rank == 0:
        print(json.dumps({"rate": sum(f for f, _ in parts) / max(w for _, w in parts)}), flush=True)


def period_of(strategy: str) -> int | None:
    """Return the period of a strategy in steps; None where it has none."""
    period = getattr(parse_strategy(strategy), "period", None)
    return int(period.value if isinstance(period, Period) else period) if period else None


def missing_strategy(strategy: str) -> str | None:
    """Say why a strategy cannot be run here, None where it can."""
    try:
        parse_strategy(strategy)
    except ConfigError as error:
        return str(error)
    return None


def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the mean loss of a batch, computed as our task does."""
    loss = AcousticTask().loss(model, batch)  # type: ignore[arg-type]
    return loss.total / loss.num_frames
