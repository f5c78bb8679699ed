"""The parts that a trainer uses, the state of its training, and how both are saved and restored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from speechdp.checkpoint.state import RankState, join_state, split_state
from speechdp.comm.base import Communicator
from speechdp.errors import RunError
from speechdp.models.captured import Graphs
from speechdp.models.precision import Precision
from speechdp.options.schedule import Schedule
from speechdp.parallel.replica import Replica
from speechdp.parallel.run_files import Metrics
from speechdp.parallel.strategy import Strategy, part_of
from speechdp.parallel.untrained import load_untrained, untrained_tensors
from speechdp.tasks.base import Task
from speechdp.timing.timeline import Timeline
from speechdp.train.epoch_average import EpochAverage
from speechdp.train.evaluate import Evaluator
from speechdp.train.progress import Reporter
from speechdp.watchdog.progress_beats import Pulse


@dataclass
class Counters:
    """State of training: the same on every rank except `time_s` and `own_step`.

    With an asynchronous strategy they are the same at meetings; in between each rank counts what it knows of.

    Attributes:
        epoch: epochs done.
        step_in_epoch: steps done of the current epoch.
        epoch_steps: total number of steps of that epoch.
        step: total number of steps done.
        own_step: entries in this rank's timeline so far.
        frames: frames trained on by all ranks together.
        frames_per_rank: frames trained on, averaged over ranks.
        time_s: training time at the last checkpoint, s.
    """

    epoch: int = 0
    step_in_epoch: int = 0
    epoch_steps: int = 0
    step: int = 0
    own_step: int = 0
    frames: int = 0
    frames_per_rank: float = 0.0
    time_s: float = 0.0


@dataclass(frozen=True)
class TrainingParts:
    """The parts that a trainer uses."""

    task: Task
    model: nn.Module
    replica: Replica
    strategy: Strategy
    schedule: Schedule
    precision: Precision
    evaluator: Evaluator
    timeline: Timeline
    comm: Communicator
    device: torch.device
    reporter: Reporter
    on_metrics: Callable[[Metrics], None]
    """Called on rank 0 after each evaluation."""
    on_mean: Callable[[int, Mapping[str, float]], None]
    """Called on rank 0 with the last step and the scores of the mean of several epochs' models."""
    average: EpochAverage
    """Mean of the models after the last epochs."""
    slowness: float = 1.0
    """Factor by which this rank pretends to compute more slowly."""
    pulse: Pulse = field(default_factory=Pulse)
    """Receives beats of progress, which the watchdog reads."""
    graphs: Graphs = field(default_factory=lambda: Graphs([], torch.device("cpu")))
    """CUDA graphs for parts of the model."""


@dataclass
class TrainingState:
    """The state of training on this rank, besides replica and strategy.

    Attributes:
        counters: steps, frames and time.
        epoch_loss: this rank's sums over the current epoch: finite losses, their frames, and all frames
            trained on, (3,); on the device, so that no step waits.
        dealing: state of the dealing of an asynchronous run; on rank 0.
    """

    epoch_loss: Tensor
    counters: Counters = field(default_factory=Counters)
    dealing: dict[str, Any] = field(default_factory=dict)


def collect_state(parts: TrainingParts, training: TrainingState) -> RankState:
    """Return everything this rank needs to continue."""
    strategy = split_state("strategy", parts.strategy.state_dict())
    average = parts.average.state()
    tensors = {
        **strategy.tensors,
        **average.tensors,
        "random.cpu": torch.get_rng_state(),
        "epoch_loss": training.epoch_loss,
    }
    if parts.device.type == "cuda":
        tensors["random.cuda"] = torch.cuda.get_rng_state(parts.device)
    # Equal replicas are saved once, not on every rank.
    if parts.comm.rank == 0 or not parts.strategy.traits.replicas_equal:
        tensors["parameters"] = parts.replica.parameters.values
        for name, tensor in parts.replica.optimizer_tensors().items():
            tensors[f"optimizer.{name}"] = tensor
    tensors |= {f"untrained.{name}": x for name, x in untrained_tensors(parts.model).items()}
    values = {
        "counters": vars(training.counters),
        "strategy": strategy.values,
        "device": parts.device.type,
        "dealing": training.dealing,
        **average.values,
    }
    if parts.replica.scaler is not None:
        values["loss_scale"] = parts.replica.scaler.state_dict()
    return RankState(values, tensors)


def restore_state(parts: TrainingParts, state: RankState, run_dir: Path, seed: int) -> TrainingState:
    """Restore a checkpoint's state.  Collective: equal replicas get it from rank 0.

    Args:
        state: state of this rank, or of another rank if the checkpoint has fewer ranks.
        seed: seed of the run.

    Raises:
        RunError: the state was saved on another kind of device, whose flat vectors have another layout, or
            the model has a buffer or a frozen parameter of another shape.
    """
    tensors = state.tensors
    if state.values["device"] != parts.device.type:
        raise RunError(
            f"{run_dir}: was started on {state.values['device']} and cannot continue on "
            f"{parts.device.type}; resume it with --device {state.values['device']}"
        )
    counters = Counters(**state.values["counters"])
    parts.timeline.resume_at(counters.time_s)
    if "parameters" in tensors:
        parts.replica.parameters.values.copy_(tensors["parameters"])
        parts.replica.load_optimizer_tensors(part_of("optimizer.", tensors))
    if parts.strategy.traits.replicas_equal:
        _share_replica(parts.replica, parts.comm)
    # An earlier version saved only floating-point buffers, as `statistics`.
    saved = part_of("statistics.", tensors) | part_of("untrained.", tensors)
    load_untrained(parts.model, saved, str(run_dir))
    if parts.replica.scaler is not None:
        parts.replica.scaler.load_state_dict(state.values["loss_scale"])
    # Last, as a strategy may depend on what was restored above: parameters, optimizer, loss scale.
    parts.strategy.load_state_dict(join_state("strategy", state.values["strategy"], tensors))
    parts.average.load(state)
    epoch_loss = tensors["epoch_loss"].to(parts.device)
    if len(epoch_loss) == 2:  # from an earlier version, which counted only one kind of frames
        epoch_loss = torch.cat([epoch_loss, epoch_loss[1:]])
    if not state.is_copy:
        torch.set_rng_state(tensors["random.cpu"])
        if "random.cuda" in tensors:
            torch.cuda.set_rng_state(tensors["random.cuda"], parts.device)
    else:
        # The other rank's work counts there, and two ranks must not draw the same random numbers.
        parts.strategy.begin_as_copy()
        epoch_loss.zero_()
        drawn = np.random.SeedSequence([seed, counters.step, parts.comm.rank]).generate_state(1, np.uint64)
        torch.manual_seed(int(drawn[0]))
    return TrainingState(epoch_loss, counters, state.values["dealing"])


def _share_replica(replica: Replica, comm: Communicator) -> None:
    vectors: dict[str, Any] = {"parameters": replica.parameters.whole, **replica.optimizer_tensors()}
    for name, tensor in vectors.items():
        comm.broadcast(tensor, name=f"restore.{name}")
