"""Run a profile's job on a rank: build the training, take the steps, record every function."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import tempfile
import threading
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch

from speechdp.comm.startup.start_guard import StartGuard
from speechdp.data.loading.batch import Batch
from speechdp.data.loading.loader import Step, StepLoader
from speechdp.data.loading.source import SplitSource
from speechdp.data.plan.assignment import PlanPosition
from speechdp.data.plan.epoch_plan import plan_epoch
from speechdp.errors import ConfigError, RunError
from speechdp.experiments.profile.common_start import begin_together
from speechdp.experiments.profile.full_batches import FullBatches, no_whole_batch, whole_steps
from speechdp.experiments.profile.measured import WHOLE, StepRecord
from speechdp.experiments.profile.recording import write_facts, write_steps
from speechdp.experiments.profile.steps import SingleModule, StageClock, StagedStep
from speechdp.options.run import TrainOptions
from speechdp.parallel.strategy import Progress
from speechdp.parallel.training_step import TrainingStep
from speechdp.timing.timeline import Span, Timeline
from speechdp.train.build import (
    build_trainer,
    check_sources,
    epoch_planner,
    open_loader,
    plan_options_for,
    training_ranks,
)
from speechdp.train.models import check_precision
from speechdp.train.sampling import sampled
from speechdp.train.session import Session
from speechdp.train.trainer import Trainer
from speechdp.train.trainer_state import TrainingParts
from speechdp.train.watching import watched
from speechdp.watchdog.status import StatusFolder

#: Epochs are repeated until the steps are done, however small the data are.
_MANY_EPOCHS = 1_000_000
_FUNCTION_OF_SPAN = {Span.COMM: "exchange", Span.UPDATE: "update"}


@dataclass(frozen=True)
class JobRequest:
    """What a job measures.

    Attributes:
        folder: folder for the ranks' records.
        module: the stage to run alone; "": whole steps.
        steps: steps of each rank.
        sample_hz: samples of utilisation per second; 0: none.
    """

    folder: Path
    module: str
    steps: int
    sample_hz: float


def profile_rank(session: Session, options: TrainOptions, request: JobRequest) -> None:
    """Measure on this rank and write the job's files.  Collective.

    Raises:
        ConfigError: options that do not fit the data or a profile.
        RunError: NaN in the loss, a full disk, a signal to stop.
        ShardError: damaged data.
    """
    with StartGuard(options.faults.hang_timeout, "begin the profile") as start_guard:
        _profile(session, options, request, start_guard)


def _profile(session: Session, options: TrainOptions, request: JobRequest, start_guard: StartGuard) -> None:
    options = dataclasses.replace(options, epochs=_MANY_EPOCHS)
    resolved = options.resolve(training_ranks(options, session.comm.size))
    strategy = options.strategy.parsed
    if not strategy.traits.synchronous:
        raise ConfigError(f"profile: with {strategy.name} ranks have no step in common; choose another")
    strategy.check_ranks(session.comm)
    check_sources(session, resolved)
    check_precision(session, resolved)
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="speechdp-profile-")))
        clock = StageClock(session.device)
        timeline = FunctionTimeline(clock, session.comm.rank)
        trainer, sources = build_trainer(session, options, scratch, stack, timeline)
        parts = trainer.parts
        if session.comm.rank == 0:
            StatusFolder(request.folder).clear()
        stack.enter_context(watched(session, options, request.folder, trainer))
        start_guard.over()
        parts.model.train()
        runner: _ModuleAlone | _WholeSteps
        if request.module:
            batch = typical_batch(session, resolved, sources.training).to(session.device)
            runner = _ModuleAlone(parts, clock, request.module, batch)
        else:
            plan = epoch_planner(session, sources.training, resolved)
            whole = FullBatches(plan, resolved.batches().batch_size or 0, request.steps)
            loader, _ = open_loader(session, resolved, trainer, sources.training, stack)
            runner = _WholeSteps(parts, clock, loader, whole)
        start = begin_together(session.comm)
        clock.begin(start.origin_s)
        with sampled(session, request.sample_hz, request.folder, start.origin_s):
            records = _take_steps(session, runner, clock, request.steps, trainer)
        parts.strategy.pause()
        parts.strategy.finish()
        parts.strategy.close()
        write_steps(session, request.folder, start, records)
        write_facts(session, request.folder, parts)


class FunctionTimeline(Timeline):
    """Timeline for a strategy; records its exchange and its update as functions of the step.

    Exchanges in another thread are not part of the step and are not recorded.
    """

    def __init__(self, clock: StageClock, rank: int) -> None:
        super().__init__(None, rank=rank, device=torch.device("cpu"))
        self._clock = clock
        self._thread = threading.get_ident()

    def span(self, span: Span) -> AbstractContextManager[None]:
        name = _FUNCTION_OF_SPAN.get(span)
        if name is None or threading.get_ident() != self._thread:
            return contextlib.nullcontext()
        return self._clock.timed(name, WHOLE)


class _WholeSteps:
    """Complete training steps."""

    def __init__(
        self, parts: TrainingParts, clock: StageClock, loader: StepLoader, whole: FullBatches
    ) -> None:
        self._parts, self._clock, self._loader, self._whole = parts, clock, loader, whole
        self._staged = StagedStep(parts.task.stages(parts.model), clock, parts.precision)
        self._frames = 0.0
        parts.strategy.resume()

    def step(self, number: int) -> int:
        """Take a step; return this rank's frames.  Raises RunError: loss not finite, except in fp16."""
        parts = self._parts
        step = self._next()
        frames = step.batch.num_frames
        parts.replica.set_learning_rate(parts.schedule.at(_place(step)))
        work = TrainingStep(parts.strategy, parts.timeline, frames)
        work.begin()
        if frames:
            self._compute_gradients(step, number, work)
        self._frames += step.at.mean_frames
        time_s = parts.timeline.training_time_s
        progress = Progress(number, self._frames, time_s, _place(step), _MANY_EPOCHS)
        work.end(progress, number=number, epoch=step.epoch)
        return frames

    def _next(self) -> Step:
        """Wait for the next step with full batches; skipped steps are not recorded."""
        while True:
            self._clock.take()
            with self._clock.timed("trainloader", WHOLE):
                step = next(self._loader)
            if self._whole.holds(step):
                return step

    def _compute_gradients(self, step: Step, number: int, work: TrainingStep) -> None:
        with self._clock.timed("h2d", WHOLE):
            batch = step.batch.to(self._parts.device)
        loss = self._staged.forward(batch)
        # With a scaler an overflow is a normal step whose update is skipped; item() waits in either case.
        if not math.isfinite(value := loss.item()) and self._parts.replica.scaler is None:
            self._refuse(value, number)
        work.backward(loss, compute=self._staged.backward)

    def _refuse(self, value: float, number: int) -> NoReturn:
        raise RunError(
            f"the loss is {value} at step {number} on rank {self._parts.comm.rank}: lower --learning-rate or "
            "--max-gradient-norm, or inspect the data; times with such numbers would be of no use"
        )


def _place(step: Step) -> float:
    return step.epoch + step.at.index / step.at.num_steps


class _ModuleAlone:
    """One module alone, forward and backward, with the same inputs at every step and no exchange."""

    def __init__(self, parts: TrainingParts, clock: StageClock, module: str, batch: Batch) -> None:
        stages = parts.task.stages(parts.model)
        if module not in [stage.name for stage in stages]:
            raise ConfigError(
                f"profile: a model of task {parts.task.name} has no {module}; it has: "
                + ", ".join(stage.name for stage in stages[:-1])
            )
        self._parts, self._frames = parts, batch.num_frames
        self._single = SingleModule(stages, module, batch, clock, parts.precision)
        parts.replica.clear_gradients()

    def step(self, number: int) -> int:
        """Run the module; return the frames of the batch."""
        self._single.step()
        return self._frames


def typical_batch(session: Session, options: TrainOptions, source: SplitSource) -> Batch:
    """Return the full batch of median size in the first epoch of one rank; independent of rank and size."""
    plan = plan_epoch(source.index, plan_options_for(session.dataset, options), 0, 1)
    batch_size = options.batches().batch_size or 0
    whole = set(whole_steps(plan, batch_size))
    if not whole:
        raise no_whole_batch(1, batch_size)
    order = [int(i) for i in plan.padded_frames[0].argsort(kind="stable") if int(i) in whole]
    index = order[len(order) // 2]
    return source.batch(plan.ranks[0].batch(index), PlanPosition(0, 0, index))


def _take_steps(
    session: Session,
    runner: _ModuleAlone | _WholeSteps,
    clock: StageClock,
    steps: int,
    trainer: Trainer,
) -> list[StepRecord]:
    records = []
    for number in range(1, steps + 1):
        stop = session.stop
        if stop is not None and stop.received is not None:
            raise RunError(f"stopped by {stop.received} at step {number} on rank {session.comm.rank}")
        frames = runner.step(number)
        end_s, functions = clock.now(), clock.take()
        trainer.counters.step = number
        trainer.parts.pulse.beat()
        start_s = functions[0].start_s
        records.append(StepRecord(number, start_s, end_s - start_s, frames, functions))
        trainer.parts.graphs.capture()  # training captures later, but a profile has too few steps for that
    return records
