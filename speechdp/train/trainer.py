"""The training loop: every rank takes its batch, computes gradients, and calls the strategy."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from speechdp.checkpoint.state import RankState, last_checkpoint_note
from speechdp.checkpoint.writer import PATIENCE_S, CheckpointWriter
from speechdp.comm.base import ReduceOp
from speechdp.data.loading.loader import Step, StepLoader
from speechdp.data.plan.assignment import Meeting, MeetingKind, Position
from speechdp.errors import ConfigError, DivergedError
from speechdp.options.run import TrainOptions
from speechdp.parallel.run_files import AVERAGED_EPOCHS, RunDirectory
from speechdp.parallel.stop import StopAgreement
from speechdp.parallel.strategy import Progress
from speechdp.parallel.training_step import DivergenceWatch, TrainingStep
from speechdp.process.ending import Paused, Stopped
from speechdp.process.heap import HeapTrimmer
from speechdp.tasks.base import loss_mistake
from speechdp.timing.timeline import Span
from speechdp.train.epoch_end import measure_epoch, settle_final_model
from speechdp.train.evaluate import HeldOutScores
from speechdp.train.tolerance import lost_ranks
from speechdp.train.trainer_state import Counters, TrainingParts, TrainingState, collect_state, restore_state


class Trainer:
    """Trains a replica on a loader's batches, evaluates after each epoch, and saves checkpoints."""

    def __init__(self, parts: TrainingParts, run_dir: Path, options: TrainOptions) -> None:
        self.parts = parts
        self._run_dir = run_dir
        self._options = options
        self._watch = DivergenceWatch(parts.strategy, parts.comm)
        hang_s = options.faults.hang_timeout
        patience_s = max(PATIENCE_S, hang_s) if hang_s else math.inf
        self._heap = HeapTrimmer()
        self._writer = CheckpointWriter(run_dir, parts.comm, parts.pulse.beat, patience_s=patience_s)
        #: The place in training at which the last checkpoint was saved.
        self._saved_at: tuple[int, int, int] | None = None
        self._evaluated_at: tuple[int, int, int] | None = None
        self._state = TrainingState(torch.zeros(3, dtype=torch.float64, device=parts.device))
        self._sent_bytes = 0.0
        self._begun_s = 0.0
        self._measured_from = (0, 0.0)
        self._pause_at = 0
        self._shown_loss: float | None = None
        #: Called with the ranks that were lost.
        self.on_loss: Callable[[Collection[int]], None] = lambda ranks: None

    @property
    def counters(self) -> Counters:
        """How far training has come."""
        return self._state.counters

    @property
    def dealing_state(self) -> dict[str, Any]:
        """State of the dealing of an asynchronous run; on rank 0."""
        return self._state.dealing

    @property
    def position(self) -> Position:
        """The position at which the loader must begin."""
        return Position(self.counters.epoch, self.counters.step_in_epoch)

    def run(self, loader: StepLoader, stop: StopAgreement, pause_at: int = 0) -> None:
        """Train to the end.  Collective.

        Args:
            pause_at: step after which the run evaluates and stops as if asked to; 0: none.  Asynchronous
                ranks stop where rank 0 says (`dealing/batch_server.py`).

        Raises:
            Stopped: a signal asked to stop; a checkpoint holds everything.
            Paused: likewise, after `pause_at` steps, even if the run had already done them at the start.
            RunError: the loss or the final model is not finite, or a checkpoint cannot be written.
        """
        parts = self.parts
        self._pause_at = pause_at
        parts.model.train()
        parts.reporter.begin(self._options.num_epochs, self.counters.epoch)
        parts.pulse.beat("training")
        parts.strategy.resume()
        try:
            if parts.strategy.traits.synchronous:
                self._run_together(loader, stop)
            else:
                self._run_apart(loader)
        except Stopped:
            self.flush()
            parts.strategy.close()
            raise
        parts.pulse.beat("the end of training")
        parts.strategy.finish()
        settle_final_model(parts)
        self._average_epochs()
        parts.strategy.close()
        self.flush()
        self._check_final_model()

    def _run_together(self, loader: StepLoader, stop: StopAgreement) -> None:
        """Run every step at the same time as the other ranks."""
        self._pause_where_due(stop)
        while not self._is_over and (step := self.advance(loader)) is not None:
            if step.ends_epoch:
                self._paused(lambda: self._end_epoch(step.epoch + 1))
            elif self._options.checkpoint_steps and self.counters.step % self._options.checkpoint_steps == 0:
                self._paused(self.save)
            self._pause_where_due(stop)
            if not self._is_over and stop.reached():
                self._paused(self.save)
                self.parts.strategy.pause()
                raise Stopped
        stop.drain()
        self.parts.strategy.pause()

    def _pause_where_due(self, stop: StopAgreement) -> None:
        """Evaluate, save and raise Paused if a pause is due; a finished run does not pause."""
        if self._is_over or not 0 < self._pause_at <= self.counters.step:
            return
        stop.drain()
        self._paused(self._end_part)
        self.parts.strategy.pause()
        raise Paused

    def _run_apart(self, loader: StepLoader) -> None:
        """Run steps at this rank's own pace; meet the others where rank 0 says."""
        while (step := self.advance(loader)) is not None:
            if step.at.meeting is not None and self._meet(step.at.meeting):
                return

    def _meet(self, meeting: Meeting) -> bool:
        """Do, with all ranks, what the meeting is for; return whether training ends here.  Collective."""
        parts = self.parts
        self.come_together(meeting)
        if meeting.kind is MeetingKind.END:
            return True
        if meeting.kind is MeetingKind.EPOCH:
            self._end_epoch(meeting.epoch)
        elif meeting.kind is MeetingKind.STOP and 0 < self._pause_at <= meeting.step:
            self._end_part()
            raise Paused
        else:
            self.save()
        if meeting.kind is MeetingKind.STOP:
            raise Stopped
        parts.strategy.resume()
        return False

    def come_together(self, meeting: Meeting) -> None:
        """End the exchanges of an asynchronous strategy and wait for all ranks at a meeting.  Collective."""
        parts, counters = self.parts, self.counters
        with parts.timeline.span(Span.COMM):
            parts.strategy.pause()
            parts.comm.barrier()
        if lost := lost_ranks(parts.comm):
            self.on_loss(lost)  # before the state of dealing is saved
        counters.own_step += 1
        parts.timeline.end_step(counters.own_step, meeting.epoch, 0)
        parts.pulse.beat()
        counters.epoch, counters.step, counters.frames = meeting.epoch, meeting.step, meeting.frames
        counters.frames_per_rank = meeting.frames / parts.comm.size
        self._state.dealing = meeting.state

    def traffic(self) -> dict[str, Any]:
        """Return the bytes this rank has sent, the training time for them, and the strategy's statistics."""
        strategy = self.parts.strategy
        return {
            "sent_bytes": round(self._sent_bytes + strategy.peer_bytes),
            "trained_s": self.parts.timeline.training_time_s - self._begun_s,
            "statistics": strategy.statistics(),
        }

    def _paused(self, function: Callable[[], object]) -> None:
        self.parts.strategy.pause()
        function()
        self.parts.strategy.resume()

    def _average_epochs(self) -> None:
        """Make the mean of the last epochs' models the final model, if requested, and score it.

        Collective.  Raises RunError: its score is not finite, or writing fails.
        """
        parts = self.parts
        number = parts.average.conclude(parts.replica, parts.model)
        if number == 1:
            return
        with parts.timeline.event(Span.EVAL):
            held_out = parts.evaluator.evaluate(parts.model, parts.task)
            parts.replica.bind_parameters()
            main = parts.task.metrics[0]
            mean = held_out.values[main.key]
            if not math.isfinite(mean):
                self._refuse(f"the {main.name} of the mean of the last {number} epochs' models is {mean}")
            if parts.comm.rank == 0:
                self._record_mean(number, held_out)

    def _record_mean(self, number: int, held_out: HeldOutScores) -> None:
        """Record and report the scores of the mean of the last `number` epochs' models; on rank 0."""
        parts, counters = self.parts, self.counters
        run, main = RunDirectory(self._run_dir), parts.task.metrics[0]
        lasts = run.values(main.recorded_as)[-1:]  # none: metrics.jsonl was deleted
        run.add_values(
            {
                "epoch": counters.epoch,
                "step": counters.step,
                "frames": counters.frames,
                "time_s": parts.timeline.training_time_s,
                AVERAGED_EPOCHS: number,
                **{f"heldout_{key}": value for key, value in held_out.values.items()},
                "heldout_frames": held_out.num_frames,
            }
        )
        run.sync_metrics()
        parts.on_mean(counters.step, held_out.values)
        mean = held_out.values[main.key]
        line = f"final model: the mean of the last {number} epochs, {main.with_unit(mean)}"
        for _, last in lasts:
            line += f"; the last alone: {main.with_unit(last)}"
            if main.is_past(main.score(last), main.score(mean)):
                line += ", which is better: average fewer epochs, or train for longer"
        parts.reporter.notice(line)

    def _check_final_model(self) -> None:
        """Refuse a final model that is not finite; with --max-steps it may be unevaluated.  Collective."""
        if not self._watch.all_finite():
            self._refuse(f"a parameter of the final model is not finite after step {self.counters.step}")

    @property
    def _is_over(self) -> bool:
        """Whether --max-steps are done, which may be so before the first step of a resumed run."""
        return 0 < self._options.max_steps <= self.counters.step

    def advance(self, loader: StepLoader) -> Step | None:
        """Train on the next batch; return its step, or None if there is no more.  Collective.

        Raises:
            RunError: the loss is not finite, or a checkpoint begun earlier cannot be written.
        """
        self._writer.check()
        with self.parts.timeline.span(Span.DATA_WAIT):
            step = next(loader, None)
        if step is not None and step.at.meeting is None:
            sent = self.parts.comm.sent_bytes
            self._train(step)
            self._sent_bytes += self.parts.comm.sent_bytes - sent
        return step

    def _train(self, step: Step) -> None:
        parts, counters = self.parts, self.counters
        before, after = (step.epoch + (step.at.index + i) / step.at.num_steps for i in (0, 1))
        parts.replica.set_learning_rate(parts.schedule.at(before))
        work = TrainingStep(parts.strategy, parts.timeline, step.batch.num_frames)
        work.begin()
        if step.batch.num_frames > 0:
            self._compute_gradients(step, work)
        counters.step += 1
        counters.own_step += 1
        counters.step_in_epoch, counters.epoch_steps = step.at.index + 1, step.at.num_steps
        counters.frames += step.at.total_frames
        counters.frames_per_rank += step.at.mean_frames
        time_s = parts.timeline.training_time_s
        work.end(
            Progress(counters.step, counters.frames_per_rank, time_s, after, self._options.num_epochs),
            number=counters.own_step,
            epoch=step.epoch,
        )
        self._check_loss_scale(ends_epoch=step.ends_epoch)
        if parts.graphs.is_due():
            self.capture_graphs()
        parts.pulse.beat()
        parts.reporter.step(after, step.at.total_frames, self._shown_loss)

    def _compute_gradients(self, step: Step, work: TrainingStep) -> None:
        parts = self.parts
        span = parts.timeline.span
        with span(Span.H2D):
            batch = step.batch.to(parts.device)
        begun_s = time.perf_counter()
        with span(Span.FORWARD):
            with parts.precision.computing():
                loss = parts.task.loss(parts.model, batch)
                if mistake := loss_mistake(parts.task, loss):
                    raise ConfigError(mistake)
            self._note_loss(loss.total.detach(), loss.num_frames, step)
        self._heap.before_backward()
        work.backward(loss.total)
        if parts.slowness > 1:
            with span(Span.BACKWARD):
                if parts.device.type == "cuda":
                    torch.cuda.synchronize(parts.device)
                time.sleep((parts.slowness - 1) * (time.perf_counter() - begun_s))

    def capture_graphs(self) -> None:
        """Capture graphs for kinds of inputs that have recurred, if any, outside the timing of steps."""
        if self.parts.graphs.has_new:
            with self.parts.timeline.event(Span.CAPTURE):
                self.parts.graphs.capture()

    def _note_loss(self, total: Tensor, num_frames: int, step: Step) -> None:
        sums = self._state.epoch_loss
        counted, count = self._watch.counted(total, num_frames)
        sums[0] += counted
        sums[1] += count
        sums[2] += num_frames
        if not (step.ends_epoch or self._watch.is_due(self.counters.step)):
            return
        value = sums[0].item() if total.is_cuda else counted.item()
        # A loss that is not counted has 0 in the sum; that 0 must not be shown.
        known = not total.is_cuda and math.isfinite(total.item())
        self._shown_loss = value / num_frames if known else None
        if not math.isfinite(value):
            self._refuse(f"the loss is {value} at step {self.counters.step + 1}")

    def _check_loss_scale(self, *, ends_epoch: bool) -> None:
        is_due = ends_epoch or self._watch.is_due(self.counters.step)
        if is_due and (scale := self._watch.fallen_scale()) is not None:
            self._refuse(
                f"--precision fp16: non-finite gradients have reduced the loss scale to {scale:g} at step "
                f"{self.counters.step}",
                "train with --precision bf16 or fp32, ",
            )

    def _refuse(self, what: str, first: str = "") -> NoReturn:
        self._writer.close()  # the message names the last checkpoint
        raise DivergedError(
            f"{what} (epoch {self.counters.epoch + 1}) on rank {self.parts.comm.rank}: {first}"
            "lower --learning-rate or --max-gradient-norm, or inspect the data; "
            f"{last_checkpoint_note(self._run_dir)}"
        )

    def _end_epoch(self, epochs_done: int) -> None:
        self._evaluate(epochs_done)
        self.counters.epoch, self.counters.step_in_epoch = epochs_done, 0
        self._evaluated_at = self._place
        self._state.epoch_loss.zero_()
        self.save()
        if epochs_done < self._options.num_epochs and not self._is_over:
            self.capture_graphs()

    def _end_part(self) -> None:
        """Evaluate and save, unless that was just done.  Collective."""
        if self._evaluated_at != self._place:
            counters, comm = self.counters, self.parts.comm
            share = counters.step_in_epoch / max(counters.epoch_steps, 1)
            # The maximum, as a rank that only serves takes no steps.
            done = comm.allreduce(torch.tensor([share], dtype=torch.float64), name="pause", op=ReduceOp.MAX)
            self._evaluate(counters.epoch + done.item())
        self.save()

    def _evaluate(self, epochs_done: float) -> None:
        """Score the model and report it.  Collective.  Raises RunError: a score or the loss is not finite."""
        parts, counters = self.parts, self.counters
        with parts.timeline.event(Span.MEETING):
            parts.comm.barrier()
        time_s = parts.timeline.training_time_s
        with parts.timeline.event(Span.EVAL):
            before_frames, before_s = self._measured_from
            # If nothing was trained since, use the mean over the run.
            if counters.frames == before_frames:
                before_frames, before_s = 0, 0.0
            speed = (counters.frames - before_frames) / max(time_s - before_s, 1e-9)
            metrics = measure_epoch(parts, self._state, epochs_done, time_s, speed)
            self._measured_from = counters.frames, time_s
            main = parts.task.metrics[0]
            if not math.isfinite(metrics.train_loss + metrics.held_out[main.key]):
                self._refuse(
                    f"after step {counters.step} the training loss is {metrics.train_loss} "
                    f"and the {main.name} {metrics.held_out[main.key]}"
                )
            if parts.comm.rank == 0:
                parts.on_metrics(metrics)
            parts.reporter.evaluated(metrics, parts.task.metrics)
            # Rank 0 writes; without this barrier the others' wait would count as communication of their next
            # step.
            parts.comm.barrier()

    def save(self) -> None:
        """Begin to write a checkpoint in the background, unless this place already has one.  Collective.

        Raises:
            RunError: the previous checkpoint cannot be written, or the parameters are not finite and no other
                rank would repair them.
        """
        if not (self.parts.replica.is_finite or self._watch.others_mend):
            self._refuse(f"a parameter is not finite after step {self.counters.step}")
        if self._saved_at == self._place:
            return
        self.counters.time_s = self.parts.timeline.training_time_s
        with self.parts.timeline.event(Span.CHECKPOINT):
            self._writer.start(self.counters.step, collect_state(self.parts, self._state))
        self.parts.pulse.beat()
        self._saved_at = self._place

    @property
    def _place(self) -> tuple[int, int, int]:
        # Asynchronous ranks may meet twice at the same step, with other batches done.
        return self.counters.step, self.counters.frames, self.counters.epoch

    def flush(self) -> None:
        """Wait until all requested checkpoints are complete on disk.  Collective.

        Raises:
            RunError: a checkpoint cannot be written.
        """
        with self.parts.timeline.event(Span.CHECKPOINT):
            self._writer.flush()
        self.parts.pulse.beat()

    def open_checkpoints(self) -> None:
        """Check that checkpoints can be written, before training begins.  Collective.  Raises RunError."""
        self._writer.open()

    def close(self) -> None:
        """Give a pending checkpoint some seconds to complete, then abandon it.  Safe to call twice."""
        self._writer.close()

    def restore(self, state: RankState) -> None:
        """Restore a checkpoint's state.  Collective.  Raises as `restore_state`."""
        self._state = restore_state(self.parts, state, self._run_dir, self._options.seed)
        self._begun_s = self.counters.time_s
        self._measured_from = self.counters.frames, self.counters.time_s
        self._writer.resume_from(self.counters.step)
        self._saved_at = self._place
        if self._was_evaluated():
            self._evaluated_at = self._place

    def _was_evaluated(self) -> bool:
        """Return whether the run was evaluated at this place before it was stopped here.  Collective."""
        comm, counters = self.parts.comm, self.counters
        found = None
        if comm.rank == 0:
            found = RunDirectory(self._run_dir).has_evaluation(counters.step, counters.frames)
        return bool(comm.broadcast_object(found))
