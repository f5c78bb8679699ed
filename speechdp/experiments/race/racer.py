"""One setting of a race on one rank: a training that takes some steps, pauses, and continues."""

from __future__ import annotations

import dataclasses
import math
import threading
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch

from speechdp.data.loading.loader import StepLoader
from speechdp.data.plan.assignment import MeetingKind
from speechdp.dealing.batch_client import Dealing
from speechdp.experiments.race.plan import MOST_STEPS, turn_steps
from speechdp.experiments.race.rations import AHEAD, RationedLoader, Rations
from speechdp.options.run import TrainOptions
from speechdp.parallel.period import Period, PeriodUnit
from speechdp.parallel.stop import StopAgreement
from speechdp.timing.timeline import Span, Timeline
from speechdp.train.build import build_trainer, epoch_planner, open_loader, training_ranks
from speechdp.train.progress import SilentReporter
from speechdp.train.session import Session
from speechdp.train.trainer import Trainer
from speechdp.watchdog.progress_beats import Pulse

#: Epochs are repeated until the race is over, however small the data are.
_MANY_EPOCHS = 1_000_000
_LAST = (MeetingKind.STOP, MeetingKind.END)
#: Turns expected to take longer than this, s, end early on a signal, whose sender waits only about 30 s.  In
#: shorter turns the ranks do not exchange stop requests, which would disturb the timing of the few steps.
_LONG_TURN_S = 10.0


@dataclass(frozen=True)
class RaceSession(Session):
    """A session that asks asynchronous settings to stop when the race is over."""

    over: threading.Event = field(default_factory=threading.Event)

    def is_asked_to_stop(self) -> bool:
        """Return whether the race is over or this rank has been asked to stop."""
        return self.over.is_set() or super().is_asked_to_stop()

    @classmethod
    def of(cls, session: Session) -> RaceSession:
        """Return a session that shows no progress of steps."""
        given = {f.name: getattr(session, f.name) for f in dataclasses.fields(Session)}
        return cls(**{**given, "reporter": SilentReporter()})


@dataclass(frozen=True)
class RaceBase:
    """State that the trainings of a race share on this rank.

    Attributes:
        scratch: empty folder for files that trainers might write.
        pulse: notified of every step.
    """

    scratch: Path
    pulse: Pulse = field(default_factory=Pulse)


class Racer:
    """A setting's training on this rank: model, optimizer, strategy and data stay in memory between turns.

    Collective, except for a rank that trains alone.

    Args:
        session: session of the ranks that train the setting.
        options: options, with the setting's strategy.
        least_steps: minimum steps of a turn.
        base: state shared by all trainings of the race.
        stack: closes what was opened.

    Attributes:
        steps: steps of a turn; for an asynchronous setting, those of each rank if all were equally fast.

    Raises:
        ConfigError: options that do not fit the data.
    """

    def __init__(
        self, session: RaceSession, options: TrainOptions, least_steps: int, base: RaceBase, stack: ExitStack
    ) -> None:
        # A race may last longer than the training would, and must not reach the training's end.
        options = dataclasses.replace(options, epochs=_MANY_EPOCHS, max_steps=0)
        self._session, self._least_steps = session, least_steps
        timeline = Timeline(None, rank=session.comm.rank, device=session.device)
        self.trainer, sources = build_trainer(session, options, base.scratch, stack, timeline, base.pulse)
        stack.callback(self.trainer.close)
        self.trainer.parts.model.train()
        self.trainer.parts.graphs.wait_for_pauses()
        resolved = options.resolve(training_ranks(options, session.comm.size))
        traits = self.trainer.parts.strategy.traits
        self._period = None if traits.whole_period is None else Period.parse(traits.whole_period)
        self._frames_a_step = 1.0
        if self._period is not None and self._period.unit is PeriodUnit.FRAMES:
            self._frames_a_step = float(epoch_planner(session, sources.training, resolved)(0).frames.mean())
        self.steps = self._turn_steps(None)
        self._step_s = math.inf  # until its first turn, the warm-up
        self._turns: _Together | _Apart
        rations = Rations()
        if traits.synchronous:
            rationed = options.batch.order != "blocking-sort"  # which does not read in a separate thread
            pass_on = rations.pass_on if rationed else iter
            loader, _ = open_loader(session, resolved, self.trainer, sources.training, stack, pass_on)
            if rationed:
                loader = RationedLoader(loader, rations)
            self._turns = _Together(self.trainer, loader)
        else:
            meeting = dataclasses.replace(resolved, checkpoint_steps=self.steps)
            loader, dealing = open_loader(
                session, meeting, self.trainer, sources.training, stack, rations.pass_on
            )
            assert dealing is not None
            self._turns = _Apart(self.trainer, loader, rations, dealing)
        stack.callback(rations.close)  # runs before the loader's thread is joined, which waits for it
        self._random = _RandomState(session.device)
        self._pause: AbstractContextManager[None] | None = None

    def _turn_steps(self, step_s: float | None) -> int:
        return turn_steps(self._period, self._least_steps, frames_a_step=self._frames_a_step, step_s=step_s)

    @property
    def is_fit(self) -> bool:
        """Whether the setting's turns are short enough for a race."""
        return self.steps <= MOST_STEPS

    def know_pace(self, step_s: float) -> None:
        """Set the turn to whole periods, from the time of a step, which is the same on all ranks."""
        self._step_s = step_s
        if self._counts_seconds:
            self.steps = self._turn_steps(step_s)

    def ready(self) -> None:
        """Start reading batches for the turn, which begins once all ranks have called this."""
        if self._pause is None:  # otherwise capturing graphs does not count as training time anyway
            self.trainer.capture_graphs()
        else:
            self.trainer.parts.graphs.capture()
        self._turns.ready(self.steps)

    def run(self) -> int:
        """Take a turn's steps; return this rank's frames, once nothing is in progress.  Collective.

        If a rank is asked to stop, a long turn ends early, and no further turn follows.

        Raises:
            RunError: the loss is not finite.
        """
        self._resume_clock()
        with self._random:
            self.trainer.parts.strategy.resume()
            is_long = self.steps * self._step_s > _LONG_TURN_S
            timeline = self.trainer.parts.timeline
            stop = StopAgreement(self._session.stop, self._session.comm, timeline) if is_long else None
            frames = self._turns.run(self.steps, stop)
        if self._session.device.type == "cuda":
            torch.cuda.synchronize(self._session.device)
        self._pause_clock()
        return frames

    def _pause_clock(self) -> None:
        """Stop the training's clock, which determines periods in seconds."""
        if self._counts_seconds:
            self._pause = self.trainer.parts.timeline.event(Span.EVAL)
            self._pause.__enter__()

    def _resume_clock(self) -> None:
        if self._pause is not None:
            self._pause.__exit__(None, None, None)
            self._pause = None

    @property
    def _counts_seconds(self) -> bool:
        return self._period is not None and self._period.unit is PeriodUnit.SECONDS

    def settle(self) -> None:
        """After a turn, wait until this rank has stopped reading batches for the setting."""
        self._turns.settle()

    def close(self) -> None:
        """End the training after the race.  Collective."""
        self._resume_clock()
        self._turns.close()
        self.trainer.parts.strategy.close()


class _Together:
    """Turns of a synchronous setting: every rank takes the same steps."""

    def __init__(self, trainer: Trainer, loader: StepLoader) -> None:
        self._trainer, self._loader = trainer, loader
        if isinstance(loader, RationedLoader):
            loader.allow(AHEAD)
            loader.settle()
        self._is_stopped = False

    def ready(self, steps: int) -> None:
        if isinstance(self._loader, RationedLoader):
            self._loader.allow(steps)

    def run(self, steps: int, stop: StopAgreement | None) -> int:
        frames = 0
        for _ in range(steps):
            step = self._trainer.advance(self._loader)
            assert step is not None  # there are enough epochs
            frames += step.batch.num_frames
            if stop is not None and stop.reached():
                self._is_stopped = True
                break
        if stop is not None:
            stop.drain()
        self._trainer.parts.strategy.pause()
        return frames

    def settle(self) -> None:
        # The rest of a stopped turn is not read.
        if isinstance(self._loader, RationedLoader) and not self._is_stopped:
            self._loader.settle()

    def close(self) -> None:
        return None


class _Apart:
    """Turns of an asynchronous setting: ranks take the batches that rank 0 deals, from meeting to meeting."""

    def __init__(self, trainer: Trainer, loader: StepLoader, rations: Rations, dealing: Dealing) -> None:
        self._trainer, self._loader, self._rations, self._dealing = trainer, loader, rations, dealing
        self._has_ended = False

    def ready(self, steps: int) -> None:
        # Synchronous settings have batches ready when a turn begins.  Here no rank waits for one: rank 0
        # may deal a rank nothing until others have trained.  The turn loses the wait for its first
        # batch, as later ones are there in time: measured on 2 cores, 0.04 % of 32 steps of `--preset
        # tiny`; with a far smaller model (13 ms a step) some 3 ms, which is 0.1 % of 256 steps, and
        # would be 0.7 % of 32.
        self._rations.allow()

    def run(self, steps: int, stop: StopAgreement | None) -> int:
        """Train up to the first meeting after the next multiple of `steps`, where rank 0 calls one.

        Rank 0 also calls a meeting if a rank was asked to stop, without `stop`.  It calls none while ranks
        approach the end of an epoch, because they meet there anyway.
        """
        frames, until = 0, (self._trainer.counters.step // steps + 1) * steps
        while True:
            step = self._trainer.advance(self._loader)
            assert step is not None  # a meeting always comes last
            meeting = step.at.meeting
            if meeting is None:
                frames += step.batch.num_frames
                continue
            self._trainer.come_together(meeting)
            self._has_ended = meeting.kind in _LAST
            if self._has_ended or meeting.step >= until:
                return frames
            self._rations.allow()
            self._trainer.parts.strategy.resume()

    def settle(self) -> None:
        return None  # the reading thread has reached the meeting and waits

    def close(self) -> None:
        """Discard dealt batches until rank 0 says that there are no more; every rank has to ask for that."""
        while not self._has_ended:
            self._rations.allow()
            meeting = None
            while meeting is None:
                meeting = next(self._loader).at.meeting
            self._has_ended = meeting.kind in _LAST
        self._dealing.close()


class _RandomState:
    """Random number state of a setting, unaffected by other settings' draws between its turns (dropout)."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._keep()

    def __enter__(self) -> None:
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)

    def __exit__(self, *_: object) -> None:
        self._keep()

    def _keep(self) -> None:
        self._cpu = torch.get_rng_state()
        is_cuda = self._device.type == "cuda"
        self._cuda = torch.cuda.get_rng_state(self._device) if is_cuda else None
