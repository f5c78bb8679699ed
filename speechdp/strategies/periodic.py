"""What strategies have in common that train apart and exchange parameters once a period."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from speechdp.comm.base import Communicator
from speechdp.strategies.base import Progress, Strategy
from speechdp.strategies.period import Period, PeriodUnit
from speechdp.timing.timeline import Span, Timeline
from speechdp.train.replica import Replica

#: Weight of a rank that had no frame since the last average: nothing beside a frame (weight 1), yet an
#: average in which no rank had one is still their mean.  A power of two scales without rounding.
_NO_FRAMES = 2.0**-64


@dataclass(eq=False)
class PeriodicStrategy(Strategy):
    """Train apart for a period, then `exchange`; a window is the time since the last exchange.

    Subclasses write `exchange` and extend `state_dict` by what else they keep.
    """

    replicas_equal: ClassVar[bool] = False

    #: Steps (16), frames a rank (600kf) or seconds (5s) between exchanges.
    period: Period = field(default_factory=lambda: Period(16))

    @property
    def exchanges_every_step(self) -> bool:  # type: ignore[override]
        return self.period == Period(1)

    def attach(self, replica: Replica, comm: Communicator, timeline: Timeline) -> None:
        super().attach(replica, comm, timeline)
        self._window_frames = 0  # of this rank since the last exchange
        self._window_steps = 0
        self._last_frames = 0.0
        self._last_time_s = 0.0
        #: Steps between exchanges when the period is in seconds: 1 until a step has been timed.
        self._steps_a_period = 1

    def step(self, progress: Progress) -> None:
        self._window_frames += self.replica.frames
        self._window_steps += 1
        with self.timeline.span(Span.UPDATE):
            self.replica.apply_gradients(self.replica.frames)
        if self.is_due(progress):
            self.exchange()
            self._start_window(progress)

    def is_due(self, progress: Progress) -> bool:
        """Say whether this step ends a window; the same on every rank."""
        if self.period.unit is PeriodUnit.STEPS:
            return self._window_steps >= self.period.value
        if self.period.unit is PeriodUnit.FRAMES:
            return progress.frames_per_rank - self._last_frames >= self.period.value
        return self._window_steps >= self._steps_a_period

    @abstractmethod
    def exchange(self) -> None:
        """Combine the ranks' parameters at the end of a window.  Collective."""

    def weight(self) -> float:
        """Return this rank's weight in an average: its frames of the window."""
        return float(self._window_frames) or _NO_FRAMES

    def average_parameters(self) -> None:
        """Replace the replica's parameters by the weighted mean over ranks.  Collective; one exchange."""
        self.average_tensor(self.replica.parameters.whole, "parameters")

    def average_tensor(self, whole: Tensor, name: str, result: Tensor | None = None) -> None:
        """Average `whole[:-1]` over ranks by weight; `whole[-1]` carries the weight in the same exchange."""
        if self.comm.size == 1:
            return
        weight = self.weight()
        whole[-1] = 1.0
        whole.mul_(weight)
        self.comm.allreduce(whole, name=name)
        torch.div(whole[:-1], whole[-1], out=whole[:-1] if result is None else result)

    def _start_window(self, progress: Progress) -> None:
        if self.period.unit is PeriodUnit.SECONDS:
            # Ranks must agree on the step of the next exchange without a message at every step: rank 0
            # turns the seconds into steps at its own pace, once a period.
            pace_s = (progress.time_s - self._last_time_s) / self._window_steps
            wanted = max(1, round(self.period.value / max(pace_s, 1e-9)))
            agreed = torch.tensor([wanted], dtype=torch.int64)
            with self.timeline.span(Span.COMM):
                self._steps_a_period = int(self.comm.broadcast(agreed, name="steps_a_period").item())
        self._window_frames = self._window_steps = 0
        self._last_frames = progress.frames_per_rank
        self._last_time_s = progress.time_s

    def finish(self) -> None:
        if self._window_steps > 0:
            self.exchange()
            self._window_frames = self._window_steps = 0
        # Bitwise, whatever the back-end's order of summation.
        self.comm.broadcast(self.replica.parameters.whole, name="parameters")

    @contextlib.contextmanager
    def evaluation_parameters(self) -> Iterator[None]:
        if self.comm.size == 1:
            yield
            return
        own = self.replica.parameters.values.clone()
        self.average_parameters()
        try:
            yield
        finally:
            self.replica.parameters.values.copy_(own)

    def state_dict(self) -> dict[str, Any]:
        return {
            "window_frames": self._window_frames,
            "window_steps": self._window_steps,
            "last_frames": self._last_frames,
            "last_time_s": self._last_time_s,
            "steps_a_period": self._steps_a_period,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up the window's counters; ignores what a subclass has added."""
        for name in ("window_frames", "window_steps", "last_frames", "last_time_s", "steps_a_period"):
            setattr(self, f"_{name}", state[name])
