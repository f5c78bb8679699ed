"""The training loop: every rank takes its batch, computes gradients, and hands over to the strategy."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from speechdp.comm.base import Communicator
from speechdp.config import TrainOptions
from speechdp.data.loader import Loader, Position, Step
from speechdp.errors import RunError
from speechdp.models.lstm_am import LstmAcousticModel
from speechdp.strategies.base import Progress, Strategy
from speechdp.tasks.acoustic import AcousticTask
from speechdp.timing.timeline import Span, Timeline
from speechdp.train.checkpoint import (
    RankState,
    join_state,
    last_checkpoint_note,
    save_checkpoint,
    split_state,
)
from speechdp.train.evaluate import Evaluator
from speechdp.train.progress import Reporter
from speechdp.train.replica import Replica
from speechdp.train.run_files import Metrics
from speechdp.train.schedule import Schedule
from speechdp.train.stop import StopAgreement

#: On a GPU the loss is looked at once in so many steps: each look makes the host wait for the device.
_GPU_LOSS_STEPS = 20


@dataclass
class Counters:
    """Where training stands; the same on every rank except `time_s`.

    Attributes:
        epoch: epochs done.
        step_in_epoch: steps done of the epoch under way.
        step: steps done in all.
        frames: frames trained on, all ranks together.
        frames_per_rank: the same, averaged over ranks.
        time_s: training time at the last checkpoint, s.
    """

    epoch: int = 0
    step_in_epoch: int = 0
    step: int = 0
    frames: int = 0
    frames_per_rank: float = 0.0
    time_s: float = 0.0


@dataclass(frozen=True)
class TrainingParts:
    """What a trainer drives."""

    task: AcousticTask
    model: LstmAcousticModel
    replica: Replica
    strategy: Strategy
    schedule: Schedule
    evaluator: Evaluator
    timeline: Timeline
    comm: Communicator
    device: torch.device
    reporter: Reporter
    on_metrics: Callable[[Metrics], None]
    """Called on rank 0 after each evaluation."""


class Stopped(Exception):  # noqa: N818 (not an error)
    """Training was asked to stop and has saved a checkpoint."""


class Trainer:
    """Trains a replica on what a loader yields, evaluates after each epoch, saves checkpoints."""

    def __init__(self, parts: TrainingParts, run_dir: Path, options: TrainOptions) -> None:
        self.parts = parts
        self.counters = Counters()
        self._run_dir = run_dir
        self._options = options
        self._last_saved: tuple[int, Path] | None = None
        # Loss and frames of this rank in the epoch under way; on the device, so that no step waits.
        self._epoch_loss = torch.zeros(2, dtype=torch.float64, device=parts.device)

    @property
    def position(self) -> Position:
        """Where the loader is to begin."""
        return Position(self.counters.epoch, self.counters.step_in_epoch)

    def run(self, loader: Loader, stop: StopAgreement) -> None:
        """Train to the end.  Collective.

        Raises:
            Stopped: a signal asked for it; a checkpoint holds everything.
            RunError: the loss is not finite, or a checkpoint cannot be written.
        """
        parts = self.parts
        parts.model.train()
        parts.reporter.begin(self._options.epochs, self.counters.epoch)
        while not self._is_over and (step := self.advance(loader)) is not None:
            if step.ends_epoch:
                self._end_epoch(step.epoch + 1)
            elif self._options.checkpoint_steps and self.counters.step % self._options.checkpoint_steps == 0:
                self.save()
            if not self._is_over and stop.reached():
                self.save()
                raise Stopped
        stop.drain()
        parts.strategy.finish()

    @property
    def _is_over(self) -> bool:
        """Whether --max-steps are done; a run resumed at its end may stand there before the first step."""
        return 0 < self._options.max_steps <= self.counters.step

    def advance(self, loader: Loader) -> Step | None:
        """Train on the next batch; return its step, None when there is no more.  Collective."""
        with self.parts.timeline.span(Span.DATA_WAIT):
            step = next(loader, None)
        if step is not None:
            self._train(step)
        return step

    def _train(self, step: Step) -> None:
        parts, counters = self.parts, self.counters
        span = parts.timeline.span
        parts.replica.set_learning_rate(parts.schedule.at(step.epoch + step.index / step.num_steps))
        parts.strategy.before_backward(step.batch.num_frames)
        if step.batch.num_frames > 0:
            with span(Span.H2D):
                batch = step.batch.to(parts.device)
            with span(Span.FORWARD):
                loss = parts.task.loss(parts.model, batch)
                self._note_loss(loss.total.detach(), loss.num_frames, step)
            with span(Span.BACKWARD):
                loss.total.backward()  # type: ignore[no-untyped-call]
        counters.step += 1
        counters.step_in_epoch = step.index + 1
        counters.frames += step.total_frames
        counters.frames_per_rank += step.mean_frames
        parts.strategy.step(Progress(counters.step, counters.frames_per_rank, parts.timeline.training_time_s))
        parts.timeline.end_step(counters.step, step.epoch, step.batch.num_frames)
        parts.reporter.step(
            step.epoch + (step.index + 1) / step.num_steps, step.total_frames, self._shown_loss
        )

    def _note_loss(self, total: Tensor, num_frames: int, step: Step) -> None:
        self._epoch_loss[0] += total
        self._epoch_loss[1] += num_frames
        if total.is_cuda and self.counters.step % _GPU_LOSS_STEPS and not step.ends_epoch:
            return
        value = total.item() if not total.is_cuda else self._epoch_loss[0].item()
        self._shown_loss = None if total.is_cuda else value / num_frames
        if not math.isfinite(value):
            self._refuse(f"the loss is {value} at step {self.counters.step + 1}")

    def _refuse(self, what: str) -> NoReturn:
        raise RunError(
            f"{what} (epoch {self.counters.epoch + 1}) on rank {self.parts.comm.rank}: "
            "lower --learning-rate or --max-gradient-norm, or inspect the data; "
            f"{last_checkpoint_note(self._run_dir)}"
        )

    _shown_loss: float | None = None

    def _end_epoch(self, epochs_done: int) -> None:
        parts, counters = self.parts, self.counters
        time_s = parts.timeline.training_time_s
        with parts.timeline.event(Span.EVAL):
            loss, frames = parts.comm.allreduce(self._epoch_loss.clone(), name="epoch_loss").tolist()
            with parts.strategy.evaluation_parameters():
                held_out = parts.evaluator.evaluate(parts.model, parts.task)
            if not math.isfinite(loss + held_out.log_prob):
                self._refuse(
                    f"after step {counters.step} the training loss is {loss / frames} "
                    f"and the held-out log-probability {held_out.log_prob}"
                )
            counters.epoch, counters.step_in_epoch = epochs_done, 0
            metrics = Metrics(
                epoch=float(epochs_done),
                step=counters.step,
                frames=counters.frames,
                time_s=time_s,
                train_loss=loss / frames,
                learning_rate=parts.schedule.at(epochs_done - 1e-9),
                heldout_log_prob=held_out.log_prob,
                heldout_frame_accuracy=held_out.frame_accuracy,
                heldout_frames=held_out.num_frames,
            )
            if parts.comm.rank == 0:
                parts.on_metrics(metrics)
            parts.reporter.evaluated(metrics)
        self._epoch_loss.zero_()
        self.save()

    def save(self) -> Path:
        """Write a checkpoint, unless this step has one.  Collective.

        Raises:
            RunError: it cannot be written, or would hold parameters nobody can go on from.
        """
        if not bool(self.parts.replica.parameters.values.isfinite().all()):
            self._refuse(f"a parameter is not finite after step {self.counters.step}")
        if self._last_saved is not None and self._last_saved[0] == self.counters.step:
            return self._last_saved[1]
        self.counters.time_s = self.parts.timeline.training_time_s
        with self.parts.timeline.event(Span.CHECKPOINT):
            path = save_checkpoint(self._run_dir, self.counters.step, self._state(), self.parts.comm)
        self._last_saved = (self.counters.step, path)
        return path

    def _state(self) -> RankState:
        parts = self.parts
        strategy = split_state("strategy", parts.strategy.state_dict())
        tensors = {**strategy.tensors, "random.cpu": torch.get_rng_state(), "epoch_loss": self._epoch_loss}
        if parts.device.type == "cuda":
            tensors["random.cuda"] = torch.cuda.get_rng_state(parts.device)
        # Equal replicas are saved once, not once a rank.
        if parts.comm.rank == 0 or not parts.strategy.replicas_equal:
            tensors["parameters"] = parts.replica.parameters.values
            for name, tensor in parts.replica.optimizer_tensors().items():
                tensors[f"optimizer.{name}"] = tensor
        values = {"counters": vars(self.counters), "strategy": strategy.values, "device": parts.device.type}
        return RankState(values, tensors)

    def restore(self, state: RankState) -> None:
        """Take up a checkpoint's state.  Collective: equal replicas get it from rank 0.

        Raises:
            RunError: it was saved on another kind of device, whose flat vectors have another layout.
        """
        parts, tensors = self.parts, state.tensors
        if state.values["device"] != parts.device.type:
            raise RunError(
                f"{self._run_dir}: was begun on {state.values['device']} and cannot go on on "
                f"{parts.device.type}; resume it with --device {state.values['device']}"
            )
        self.counters = Counters(**state.values["counters"])
        parts.timeline.resume_at(self.counters.time_s)
        parts.strategy.load_state_dict(join_state("strategy", state.values["strategy"], tensors))
        if "parameters" in tensors:
            parts.replica.parameters.values.copy_(tensors["parameters"])
            optimizer = {k: v for k, v in tensors.items() if k.startswith("optimizer.")}
            parts.replica.load_optimizer_tensors(
                {k.removeprefix("optimizer."): v for k, v in optimizer.items()}
            )
        if parts.strategy.replicas_equal:
            self._share_replica()
        self._epoch_loss.copy_(tensors["epoch_loss"])
        torch.set_rng_state(tensors["random.cpu"])
        if "random.cuda" in tensors:
            torch.cuda.set_rng_state(tensors["random.cuda"], parts.device)

    def _share_replica(self) -> None:
        replica, comm = self.parts.replica, self.parts.comm
        vectors: dict[str, Any] = {"parameters": replica.parameters.whole, **replica.optimizer_tensors()}
        for name, tensor in vectors.items():
            comm.broadcast(tensor, name=f"restore.{name}")
