"""K-step averaging: every rank trains locally and the parameters are averaged once per period."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from speechdp.errors import ConfigError
from speechdp.parallel.strategy import Progress, Traits, part_of
from speechdp.strategies.mechanisms.last_models import LastModels
from speechdp.strategies.mechanisms.nodes import NodewiseStrategy
from speechdp.strategies.mechanisms.periodic import MomentumRule
from speechdp.strategies.mechanisms.window_loss import WindowLoss
from speechdp.timing.timeline import Span


@dataclass(eq=False)
class ModelAveraging(NodewiseStrategy):
    """Average parameters over all ranks once per period.

    Update rule: K times w_i <- w_i - lr * g_i(w_i) on every rank i, with g_i the mean gradient of its own
    frames; then w_i <- (sum_j n_j w_j) / (sum_j n_j), n_j the frames of rank j since the previous average.
    With K = 1 and plain SGD this is gradient averaging.

    Exchange: the flat parameters with the weight appended, in one allreduce; 2 (N-1)/N times the
    parameters' bytes sent by each rank per period (twice with momentum=average).  With compression= quantised
    differences to the last average instead (`QuantisedMean`).  first=best and leave_out add an allreduce of N
    numbers before it.

    Guarantee: replicas are bitwise equal after each average, and after finish.

    Source: K-AVG, Zhou & Cong 2018 (arXiv 1708.01012, algorithm 1); Kaldi's nnet3 averaging per iteration
    (commit f400766: steps/libs/nnet3/train/common.py, nnet3-combine.cc); `begin`: post-local SGD, Lin et al.
    Deviations: weights by frames (kaldi-aslp does the same) instead of equal ones; momentum is an option.
    From Kaldi: `first`, `leave_out` (its margin is 1.0), `max_change` (2.0; only the limit on the whole
    model, which Kaldi also lowers in the first iteration, not the limit per layer) and `combine` (20).  A
    Kaldi job starts each iteration with fresh momentum; here only a rank that was left out does.
    """

    #: The optimizer's state at an average: each rank's own, the ranks' mean, or zero.
    momentum: MomentumRule = "keep"
    #: The first round: an average like the others, or the parameters of the rank with the best objective.
    first: Literal["average", "best"] = "average"
    #: Exclude ranks from an average whose objective is worse than the best by more than this; nats per frame,
    #: 0: none.
    leave_out: float = 0.0
    #: Largest norm of the change of the whole model by one minibatch; 0: no limit.
    max_change: float = 0.0
    #: Number of models from the end of training that may be averaged into the final one; 0: the last average
    #: is final.
    combine: int = 0

    @property
    def traits(self) -> Traits:
        combines = self.combine > 0
        return replace(
            super().traits,
            follows_whole_run=combines,
            offers_models=combines,
            survives_divergence=self.leave_out > 0,
        )

    def check_options(self) -> None:
        super().check_options()
        for name in ("leave_out", "max_change"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{self.name}:{name}={getattr(self, name)}: must be 0 (off) or positive")
        if self.between_nodes.value > 0 and (self.leave_out > 0 or self.first == "best"):
            raise ConfigError(
                f"{self.name}:between_nodes={self.between_nodes}: leave_out and first=best compare all "
                "ranks at every average; leave them out, or between_nodes"
            )
        if self.combine < 0 or self.combine == 1:
            raise ConfigError(f"{self.name}:combine={self.combine}: must be 0 (off) or at least 2 models")

    def set_up(self) -> None:
        super().set_up()
        self._window_loss = WindowLoss(skips_overflows=self.replica.scaler is not None)
        self._rounds = 0  # averages so far
        self._times_left_out = 0  # of this rank
        self._share: float | None = None  # weight that a rule gives this rank in the current average
        self._last_models = LastModels(self.combine, self.comm)
        self._before = self.replica.parameters.values.clone() if self.max_change > 0 else None

    @property
    def _judges(self) -> bool:
        """Whether the next average depends on the ranks' objectives."""
        return self.comm.size > 1 and (self.leave_out > 0 or (self.first == "best" and self._rounds == 0))

    def observe_loss(self, total: Tensor, frames: int) -> None:
        """Record the loss if the next average depends on it."""
        if self._judges:
            self._window_loss.add(total, frames)

    def update(self, progress: Progress) -> None:
        if self._before is None:
            super().update(progress)
            return
        values = self.replica.parameters.values
        self._before.copy_(values)
        super().update(progress)
        with self.timeline.span(Span.UPDATE):
            norm = torch.dist(values, self._before)
            # A tensor, so that the host need not wait for the device; at 1, lerp returns `values` bitwise.
            share = self.max_change / torch.clamp(norm, min=self.max_change)
            torch.lerp(self._before, values, share, out=values)

    def exchange(self) -> None:
        with self.timeline.span(Span.COMM):
            self.average_parameters(compressed=True)
            self.start_from_here()
            if (
                self._share == 0
            ):  # momentum and scale of a model that has gone astray say nothing of the average
                self._times_left_out += 1
                self.replica.reset_optimizer()
                self.replica.reset_loss_scale()
            self.settle_momentum(self.momentum)
        self._rounds += 1

    def weight(self) -> float:
        return super().weight() if self._share is None else self._share

    def average_parameters(self, *, compressed: bool = False) -> None:
        self._share = self._judge() if self._judges else None
        super().average_parameters(compressed=compressed)

    def _judge(self) -> float | None:
        """Compare objectives; return this rank's weight, 0 or 1, if they decide it, else None."""
        rank, loss = self.comm.rank, self._window_loss
        objectives = torch.zeros(self.comm.size, dtype=torch.float64)
        objectives[rank] = loss.mean
        self.comm.allreduce(objectives, name="objectives")
        best = int(objectives.argmin())  # the first of equal ones, on every rank
        if self.first == "best" and self._rounds == 0:
            return 1.0 if rank == best else 0.0
        is_astray = loss.frames > 0 and bool(objectives[rank] > objectives[best] + self.leave_out)
        return 0.0 if is_astray else None

    def _start_window(self, progress: Progress) -> None:
        super()._start_window(progress)
        self._window_loss.reset()
        if self.combine and not self.is_apart:  # otherwise it is the mean of one node
            self._last_models.offer(self.replica.parameters.values, progress)

    def finish(self) -> None:
        is_new = self.is_apart
        super().finish()
        if self.combine:
            self._last_models.conclude(self.replica.parameters.values, is_new=is_new)

    def final_models(self) -> list[Tensor]:
        """Return the means of the last 2, 3, ... models that combine= has kept.  Collective."""
        return self._last_models.means(self.replica.parameters.values) if self.combine else []

    def statistics(self) -> dict[str, Any]:
        left_out = {"times_left_out": self._times_left_out} if self.leave_out > 0 else {}
        return {**super().statistics(), **left_out}

    def state_dict(self) -> dict[str, Any]:
        return {
            **super().state_dict(),
            "rounds": self._rounds,
            "times_left_out": self._times_left_out,
            **{f"loss.{k}": v for k, v in self._window_loss.state_dict().items()},
            **{f"last.{k}": v for k, v in self._last_models.state_dict().items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._rounds, self._times_left_out = state["rounds"], state["times_left_out"]
        self._window_loss.load_state_dict(part_of("loss.", state))
        self._last_models.load_state_dict(part_of("last.", state))
