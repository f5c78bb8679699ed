"""K-step averaging: every rank trains by itself and the parameters are averaged once a period."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

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
class ModelAveraging(Strategy):
    """Average parameters over all ranks once a period.

    Update rule: K times w_i <- w_i - lr * g_i(w_i) on every rank i, with g_i the mean gradient of its own
    frames; then w_i <- (sum_j n_j w_j) / (sum_j n_j), n_j the frames rank j has seen since the last
    average.  With K = 1 and plain SGD this is gradient averaging.

    Exchange: the flat parameters and the weight behind them in one allreduce; 2 (N-1)/N times the
    parameters' bytes sent by a rank and period (twice with momentum=average).

    Guarantee: replicas are bitwise equal after each average, and after finish.

    Source: K-AVG, Zhou & Cong 2018 (arXiv 1708.01012, algorithm 1); Kaldi's nnet3 averaging per iteration.
    Deviations: weights by frames (kaldi-aslp does the same) instead of equal ones; momentum is an option.
    """

    synchronous: ClassVar[bool] = True
    replicas_equal: ClassVar[bool] = False

    #: Steps (16), frames a rank (600kf) or seconds (5s) between averages.
    period: Period = field(default_factory=lambda: Period(16))
    #: What becomes of the optimizer's state at an average: each rank's own, their mean, or zero.
    momentum: Literal["keep", "average", "reset"] = "keep"

    @property
    def exchanges_every_step(self) -> bool:  # type: ignore[override]
        return self.period == Period(1)

    def attach(self, replica: Replica, comm: Communicator, timeline: Timeline) -> None:
        super().attach(replica, comm, timeline)
        self._window_frames = 0  # of this rank since the last average
        self._window_steps = 0
        self._last_frames = 0.0
        self._last_time_s = 0.0
        #: Steps between averages when the period is in seconds: 1 until a step has been timed.
        self._steps_a_period = 1

    def step(self, progress: Progress) -> None:
        self._window_frames += self.replica.frames
        self._window_steps += 1
        with self.timeline.span(Span.UPDATE):
            self.replica.apply_gradients(self.replica.frames)
        if self._is_due(progress):
            self._average()
            self._start_window(progress)

    def _is_due(self, progress: Progress) -> bool:
        if self.period.unit is PeriodUnit.STEPS:
            return self._window_steps >= self.period.value
        if self.period.unit is PeriodUnit.FRAMES:
            return progress.frames_per_rank - self._last_frames >= self.period.value
        return self._window_steps >= self._steps_a_period

    def _average(self) -> None:
        with self.timeline.span(Span.COMM):
            weight = self._weight()
            self._average_tensor(self.replica.parameters.whole, weight, "parameters")
            if self.momentum == "average":
                for name, tensor in self._optimizer_vectors():
                    self._average_tensor(self._with_extra(tensor), weight, name, result=tensor)
            elif self.momentum == "reset":
                self.replica.reset_optimizer()

    def _weight(self) -> float:
        return float(self._window_frames) or _NO_FRAMES

    def _average_tensor(self, whole: Tensor, weight: float, name: str, result: Tensor | None = None) -> None:
        """Average `whole[:-1]` over ranks by weight; `whole[-1]` carries the weight in the same exchange."""
        if self.comm.size == 1:
            return
        whole[-1] = 1.0
        whole.mul_(weight)
        self.comm.allreduce(whole, name=name)
        torch.div(whole[:-1], whole[-1], out=whole[:-1] if result is None else result)

    def _optimizer_vectors(self) -> list[tuple[str, Tensor]]:
        return [(n, t) for n, t in self.replica.optimizer_tensors().items() if t.dim() == 1]

    def _with_extra(self, tensor: Tensor) -> Tensor:
        return torch.cat([tensor, tensor.new_zeros(1)])

    def _start_window(self, progress: Progress) -> None:
        if self.period.unit is PeriodUnit.SECONDS:
            # Ranks must agree on the step of the next average without a message at every step: rank 0
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
            self._average()
            self._window_frames = self._window_steps = 0
        # Bitwise, whatever the back-end's order of summation.
        self.comm.broadcast(self.replica.parameters.whole, name="parameters")

    @contextlib.contextmanager
    def evaluation_parameters(self) -> Iterator[None]:
        if self.comm.size == 1:
            yield
            return
        own = self.replica.parameters.values.clone()
        self._average_tensor(self.replica.parameters.whole, self._weight(), "parameters")
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
        for name, value in state.items():
            setattr(self, f"_{name}", value)
