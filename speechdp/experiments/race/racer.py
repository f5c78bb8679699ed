"""One setting of a race on one rank: a training that takes some steps, stands still, and goes on."""

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
#: Turns expected to take longer, s, end early where a signal comes: whoever sends it waits some 30 s.  In
#: shorter ones, whose few steps are timed, nothing is exchanged for that.
_LONG_TURN_S = 10.0


@dataclass(frozen=True)
class RaceSession(Session):
    """A session whose asynchronous settings are told to end when the race is over."""

    over: threading.Event = field(default_factory=threading.Event)

    def is_asked_to_stop(self) -> bool:
        """Return whether the race is over, or this rank has been asked to stop."""
        return self.over.is_set() or super().is_asked_to_stop()

    @classmethod
    def of(cls, session: Session) -> RaceSession:
        """Return a session that shows no progress of steps."""
        given = {f.name: getattr(session, f.name) for f in dataclasses.fields(Session)}
        return cls(**{**given, "reporter": SilentReporter()})


@dataclass(frozen=True)
class RaceBase:
    """What the trainings of a race share on this rank.

    Attributes:
        scratch: an empty folder, for what trainers might write.
        pulse: is told of every step.
    """

    scratch: Path
    pulse: Pulse = field(default_factory=Pulse)


class Racer:
    """A setting's training on this rank: model, optimizer, strategy and data stay in memory between turns.

    Collective, but for a rank that trains alone.

    Args:
        session: of the ranks that train it.
        options: with its strategy.
        least_steps: of a turn.
        base: of all trainings of the race.
        stack: closes what was opened.

    Attributes:
        steps: of a turn; of an asynchronous setting, those that each rank would have at an even pace.

    Raises:
        ConfigError: options that do not fit the data.
    """

    def __init__(
        self, session: RaceSession, options: TrainOptions, least_steps: int, base: RaceBase, stack: ExitStack
    ) -> None:
        # A race that goes on for longer than the training would must not come to the training's end.
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
        self._step_s = math.inf  # until its first turn, which does not count
        self._turns: _Together | _Apart
        rations = Rations()
        if traits.synchronous:
            rationed = options.batch.order != "blocking-sort"  # which reads in no thread of its own
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
        stack.callback(rations.close)  # before the loader's thread, which waits for it, is joined
        self._random = _RandomState(session.device)
        self._pause: AbstractContextManager[None] | None = None

    def _turn_steps(self, step_s: float | None) -> int:
        return turn_steps(self._period, self._least_steps, frames_a_step=self._frames_a_step, step_s=step_s)

    @property
    def is_fit(self) -> bool:
        """Whether its turns are short enough for a race."""
        return self.steps <= MOST_STEPS

    def know_pace(self, step_s: float) -> None:
        """Let turns have whole periods, now that it is known how long a step takes, on all ranks alike."""
        self._step_s = step_s
        if self._counts_seconds:
            self.steps = self._turn_steps(step_s)

    def ready(self) -> None:
        """Let batches be read for the turn that begins once all ranks have come here."""
        if self._pause is None:  # else the time that graphs take is no training time anyway
            self.trainer.capture_graphs()
        else:
            self.trainer.parts.graphs.capture()
        self._turns.ready(self.steps)

    def run(self) -> int:
        """Take a turn's steps; return this rank's frames.  Ends once nothing is under way.  Collective.

        A long turn ends early where a rank was asked to stop, and then was the last.

        Raises:
            RunError: the loss is not finite.
        """
        self._go_on()
        with self._random:
            self.trainer.parts.strategy.resume()
            is_long = self.steps * self._step_s > _LONG_TURN_S
            timeline = self.trainer.parts.timeline
            stop = StopAgreement(self._session.stop, self._session.comm, timeline) if is_long else None
            frames = self._turns.run(self.steps, stop)
        if self._session.device.type == "cuda":
            torch.cuda.synchronize(self._session.device)
        self._stand_still()
        return frames

    def _stand_still(self) -> None:
        """Stop the clock of its training, by which periods in seconds go."""
        if self._counts_seconds:
            self._pause = self.trainer.parts.timeline.event(Span.EVAL)
            self._pause.__enter__()

    def _go_on(self) -> None:
        if self._pause is not None:
            self._pause.__exit__(None, None, None)
            self._pause = None

    @property
    def _counts_seconds(self) -> bool:
        return self._period is not None and self._period.unit is PeriodUnit.SECONDS

    def settle(self) -> None:
        """Wait until this rank reads nothing for it any more, after a turn."""
        self._turns.settle()

    def close(self) -> None:
        """End its training, where the race is over.  Collective."""
        self._go_on()
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
            assert step is not None  # there are epochs enough
            frames += step.batch.num_frames
            if stop is not None and stop.reached():
                self._is_stopped = True
                break
        if stop is not None:
            stop.drain()
        self._trainer.parts.strategy.pause()
        return frames

    def settle(self) -> None:
        # What is left of a turn that was stopped is not read.
        if isinstance(self._loader, RationedLoader) and not self._is_stopped:
            self._loader.settle()

    def close(self) -> None:
        return None


class _Apart:
    """Turns of an asynchronous setting: ranks take what rank 0 deals them, from one meeting to another."""

    def __init__(self, trainer: Trainer, loader: StepLoader, rations: Rations, dealing: Dealing) -> None:
        self._trainer, self._loader, self._rations, self._dealing = trainer, loader, rations, dealing
        self._has_ended = False

    def ready(self, steps: int) -> None:
        # Synchronous settings have batches ready when a turn begins.  Here none is waited for: rank 0
        # may deal a rank nothing until others have trained.  The turn loses the wait for its first
        # batch, as later ones are there in time: measured on 2 cores, 0.04 % of 32 steps of `--preset
        # tiny`; with a far smaller model (13 ms a step) some 3 ms, which is 0.1 % of 256 steps, and
        # would be 0.7 % of 32.
        self._rations.allow()

    def run(self, steps: int, stop: StopAgreement | None) -> int:
        """Train up to the first meeting after the next multiple of `steps`, which is where rank 0 calls one.

        It calls one as well where a rank was asked to stop, without `stop`.
        None is called while ranks come to the end of an epoch; then that is where they meet.
        """
        frames, until = 0, (self._trainer.counters.step // steps + 1) * steps
        while True:
            step = self._trainer.advance(self._loader)
            assert step is not None  # a meeting is the last there is
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
        return None  # the thread that reads has come to the meeting and waits

    def close(self) -> None:
        """Pass over what is dealt until rank 0 says that this was all: everybody asks for it."""
        while not self._has_ended:
            self._rations.allow()
            meeting = None
            while meeting is None:
                meeting = next(self._loader).at.meeting
            self._has_ended = meeting.kind in _LAST
        self._dealing.close()


class _RandomState:
    """Random numbers of a setting: what others draw meanwhile (dropout) leaves its own as they were."""

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
