"""The base class of strategies that train locally and exchange parameters once per period."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from speechdp.comm.base import Communicator
from speechdp.parallel.period import Beginning, Period, PeriodUnit, frames_reach
from speechdp.parallel.strategy import Progress, Strategy, Traits
from speechdp.strategies.mechanisms.bucketed_gradients import BucketedGradients
from speechdp.timing.timeline import Span

#: Weight of a rank without frames since the last average: negligible beside one frame (weight 1), but if no
#: rank had frames, the average is still their mean.  A power of two scales without rounding.
NO_FRAMES = 2.0**-64
#: More steps than any training has, but small enough for a message.
_MOST_STEPS = 2**62
#: What happens to the optimizer's state at an exchange: each rank's own, the ranks' mean, or zero.
MomentumRule = Literal["keep", "average", "reset"]


def weighted_mean(
    comm: Communicator, whole: Tensor, weight: float, name: str, result: Tensor | None = None
) -> None:
    """Replace `whole[:-1]`, or `result`, by the weighted mean over ranks, `whole[-1]` by the sum of weights.

    Collective; one exchange.
    """
    if weight == 0:
        whole.zero_()  # not multiplied by 0: the values of an excluded rank may be infinite
    else:
        whole[-1] = 1.0
        whole.mul_(weight)
    comm.allreduce(whole, name=name)
    torch.div(whole[:-1], whole[-1], out=whole[:-1] if result is None else result)


@dataclass(eq=False)
class PeriodicStrategy(Strategy):
    """Train locally for a period, then `exchange`; a window is the time since the last exchange.

    Before `begin`, ranks average gradients at every step, and replicas stay bitwise equal (post-local SGD:
    Lin et al., which switches at the first decay of the learning rate, recalled).

    Subclasses write `exchange`, and extend `state_dict` by their own state.  One whose period changes also
    overrides `current_period` and declares `period_changes` in its traits; each period is then recorded.
    """

    #: Time between exchanges: steps (16), frames per rank (600kf) or seconds (5s).
    period: Period = field(default_factory=lambda: Period(16))
    #: Average gradients at every step until this point; 0: train locally from the start.
    begin: Beginning = field(default_factory=Beginning)

    @property
    def traits(self) -> Traits:
        return replace(
            super().traits,
            period=str(self.period),
            exchanges_every_step=self.period == Period(1),
            counts_frames=PeriodUnit.FRAMES in (self.period.unit, self.begin.unit),
            changes_over_time=self.begin.value > 0,
        )

    @property
    def current_period(self) -> Period:
        """The period in use; the same on every rank."""
        return self.period

    def set_up(self) -> None:
        super().set_up()
        self._window_frames = 0  # of this rank since the last exchange
        self._window_steps = 0
        self._last_frames = 0.0
        self._last_time_s = 0.0
        #: Steps between exchanges if the period is in seconds: 1 until a step has been timed.
        self._steps_a_period = 1
        #: Step at which ranks next agree whether a beginning in seconds is over.
        self._next_look = 0
        #: Averages gradients until local training starts; then None.
        self._together: BucketedGradients | None = None
        self._records_periods = self.traits.period_changes
        self._recorded_period = ""  # the last one that this process recorded
        if self.begin.value > 0:
            self._together = BucketedGradients().attach(self.replica, self.comm, self.timeline)

    def before_backward(self, frames: int) -> None:
        if self._together is None:
            super().before_backward(frames)
        else:
            self._together.before_backward(frames)

    def step(self, progress: Progress) -> None:
        if self._records_periods and self._window_steps == 0 and self._together is None:
            self._record_period(progress)
        self._window_frames += self.replica.frames
        self._window_steps += 1
        self.update(progress)
        if self._together is not None:
            if self._beginning_is_over(progress):
                self._together = None
                self.start_apart()
                self._start_window(progress)
        elif self.is_due(progress):
            self.end_window()
            self._start_window(progress)

    def _record_period(self, progress: Progress) -> None:
        """Record the period of the window that this step begins, if it is another than before."""
        period = str(self.current_period)
        if period != self._recorded_period:
            self.timeline.note_period(progress.step - 1, period)
            self._recorded_period = period

    def update(self, progress: Progress) -> None:
        """Apply this step's gradients: those of all ranks until `begin`, then those of this rank alone."""
        if self._together is not None:
            self._together.step(progress)
            return
        with self.timeline.span(Span.UPDATE):
            self.replica.apply_gradients(self.replica.frames)

    def _beginning_is_over(self, progress: Progress) -> bool:
        if self.begin.unit is PeriodUnit.STEPS:
            return progress.step >= self.begin.value
        if self.begin.unit is PeriodUnit.FRAMES:
            return frames_reach(progress.frames_per_rank, self.begin.value)
        if progress.step < self._next_look:
            return False
        # By rank 0's clock, checked at steps 1, 2, 4, ..., and then at the step at which it should be over.
        left = round((self.begin.value - progress.time_s) * progress.step / max(progress.time_s, 1e-9))
        over = progress.time_s >= self.begin.value
        left = self._agree(0 if over else min(max(1, left), progress.step), "begin")
        self._next_look = progress.step + left
        return left == 0

    def start_apart(self) -> None:
        """Prepare for local training when it starts; not called if that is at step 1."""
        return None

    def is_due(self, progress: Progress) -> bool:
        """Return whether this step ends a window; the same on every rank."""
        period = self.current_period
        if period.unit is PeriodUnit.STEPS:
            return self._window_steps >= period.value
        if period.unit is PeriodUnit.FRAMES:
            return frames_reach(progress.frames_per_rank - self._last_frames, period.value)
        return self._window_steps >= self._steps_a_period

    @property
    def trains_together(self) -> bool:
        """Whether gradients are still averaged, before `begin`."""
        return self._together is not None

    def end_window(self) -> None:
        """Exchange at the end of a window.  Collective."""
        self.exchange()

    @abstractmethod
    def exchange(self) -> None:
        """Combine the ranks' parameters at the end of a window.  Collective."""

    def weight(self) -> float:
        """Return this rank's weight in an average: its frames in the window."""
        return float(self._window_frames) or NO_FRAMES

    def average_parameters(self) -> None:
        """Replace the replica's parameters by the weighted mean over ranks.  Collective; one exchange."""
        self.average_tensor(self.replica.parameters.whole, "parameters")

    def average_tensor(self, whole: Tensor, name: str, result: Tensor | None = None) -> None:
        """Average `whole[:-1]` over ranks by weight; `whole[-1]` carries the weight in the same exchange."""
        if self.comm.size == 1:
            return
        weighted_mean(self.comm, whole, self.weight(), name, result)

    def settle_momentum(self, rule: MomentumRule) -> None:
        """Adjust the optimizer's state at an exchange according to `rule`.  Collective."""
        if rule == "reset":
            self.replica.reset_optimizer()
        if rule != "average" or self.comm.size == 1:
            return
        for name, tensor in self.replica.optimizer_vectors().items():
            self.average_tensor(torch.cat([tensor, tensor.new_zeros(1)]), name, result=tensor)

    def _start_window(self, progress: Progress) -> None:
        if self.current_period.unit is PeriodUnit.SECONDS:
            # Ranks must agree on the step of the next exchange without a message per step: rank 0 converts
            # the seconds into steps at its own speed, once per period.
            pace_s = (progress.time_s - self._last_time_s) / self._window_steps
            wanted = max(1, round(self.current_period.value / max(pace_s, 1e-9)))
            wanted = min(wanted, _MOST_STEPS)
            self._steps_a_period = self._agree(wanted, "steps_a_period")
        self._window_frames = self._window_steps = 0
        self._last_frames = progress.frames_per_rank
        self._last_time_s = progress.time_s

    def _agree(self, steps: int, name: str) -> int:
        """Return rank 0's number of steps.  Collective."""
        agreed = torch.tensor([steps], dtype=torch.int64)
        with self.timeline.span(Span.COMM):
            return int(self.comm.broadcast(agreed, name=name).item())

    @property
    def is_apart(self) -> bool:
        """Whether ranks have trained separately since the last exchange."""
        return self._window_steps > 0

    def forget_window(self) -> None:
        """Note that local training has been exchanged, or is in the evaluated mean."""
        self._window_frames = self._window_steps = 0

    def finish(self) -> None:
        if self.is_apart and self._together is None:
            self.exchange()
        self.forget_window()
        # Bitwise, whatever the back-end's order of summation.
        self.comm.broadcast(self.replica.parameters.whole, name="parameters")

    @contextlib.contextmanager
    def evaluation_parameters(self) -> Iterator[None]:
        if self.comm.size == 1 or self._together is not None:
            yield
            return
        with self.replica.restored():
            self.average_parameters()
            yield

    def statistics(self) -> dict[str, Any]:
        shown = super().statistics()
        return {**shown, "period": str(self.current_period)} if self._records_periods else shown

    def state_dict(self) -> dict[str, Any]:
        return {
            "window_frames": self._window_frames,
            "window_steps": self._window_steps,
            "last_frames": self._last_frames,
            "last_time_s": self._last_time_s,
            "steps_a_period": self._steps_a_period,
            "next_look": self._next_look,
            "together": self._together is not None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the window's counters; ignore what a subclass has added."""
        for name in (
            "window_frames",
            "window_steps",
            "last_frames",
            "last_time_s",
            "steps_a_period",
            "next_look",
        ):
            setattr(self, f"_{name}", state[name])
        if not state["together"]:
            self._together = None

    def begin_as_copy(self) -> None:
        super().begin_as_copy()
        self._window_frames = 0
