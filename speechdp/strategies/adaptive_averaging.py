"""Model averaging with a period that follows the training loss, the learning rate, or stages of training."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from speechdp.errors import ConfigError
from speechdp.parallel.period import Period, PeriodUnit, frames_reach
from speechdp.parallel.strategy import Progress, Traits
from speechdp.process.notices import warn
from speechdp.strategies.mechanisms.stages import PointUnit, Stages
from speechdp.strategies.mechanisms.window_loss import WindowLoss
from speechdp.strategies.model_averaging import ModelAveraging
from speechdp.timing.timeline import Span

#: Share of training over which learning_rate=scale raises the learning rate.
_WARMUP_SHARE = 0.25
#: Steps of the longest period: a learning rate near 0 asks for one without end.
_LONGEST = 2.0**31
#: Shortest period in frames or seconds: an average at every step.
_SHORTEST = 1e-3
_POSITIVE = "add a constant that keeps the loss positive, which changes no gradient"
#: Options that only one rule reads.
_RULE_OF = {
    "interval": "adacomm",
    "halve": "adacomm",
    "growth": "adacomm",
    "learning_rate": "adacomm",
    "alpha": "qsr",
    "stages": "stages",
}


@dataclass(eq=False)
class AdaptiveAveraging(ModelAveraging):
    """Average parameters once per period; the period follows loss, learning rate, or stages of training.

    Update rule: as model_averaging.  rule=adacomm: at the first average after each `interval`
        K <- ceil(K0 / f * sqrt((lr0 F) / (lr F0))), at most growth * K0
    with F the mean training loss per frame of all ranks since the last use of the rule, F0 that of the first
    window, lr the schedule's learning rate, lr0 that of the first window.  The paper assumes a loss of at
    least 0: one below 0 counts as 0, and is refused in the first window.  If K did not shrink although lr did
    not fall either, K is halved (halve).  f = 1 with learning_rate=keep.

    learning_rate=scale multiplies the learning rate by f, which rises linearly from 1 to
        f = min(max(P^2 / K0, 1), P),  P learners,
    over the first quarter of training, and divides the period by f.

    rule=qsr: from each average to the next
        K <- max(K0, floor((alpha / lr)^2)),
    lr that of the first update after the average (first parameter group).  While lr rises, and in the first
    window, K = K0: the rule would give a warm-up the longest periods.  With lr = 0, K does not change.

    rule=stages: K <- the period of the last of `stages` whose point training has reached; before the first,
    K0.

    Exchange: as model_averaging; rule=adacomm: an allreduce of three numbers when the rule is used (interval
    in seconds: at every average).

    Guarantee: as model_averaging, and the period is the same on every rank if the learning rate is.  With F
    and lr constant and halve=false it equals model_averaging with that period; so does rule=qsr while
    lr >= alpha / sqrt(K0).

    Source of rule=qsr: Gu et al. 2023, quadratic synchronization rule (arXiv 2310.14423).  Deviation: during
    warm-up they use the period of its end, which the learning rate alone does not give; here it is K0.

    Source of rule=adacomm: Wang & Joshi 2018 (arXiv 1810.08313).  The rule with K0 outside the root, halving,
    and an interval of 60 s are the paper's as recalled.  PaddlePaddle's port (commit 02a032c) has K0 inside
    the root, so K would jump to its root without any change in loss; we do not follow it.  Deviations: F0 is
    measured over a window instead of before training; K is halved only if the learning rate did not fall.
    learning_rate=scale is our reading of the "adaptive measures" by which Cong et al. 2017 went from 4
    learners to 20: the abstract does not say what they are.  It follows from the bound of Zhou & Cong 2018
    (recalled): at equal frames, noise is lowest for a learning rate of about P / sqrt(K) times one learner's,
    and the replicas drift apart with lr * K, which is therefore kept constant.  K = K0 / f and
    f = P / sqrt(K) together give the f above; for P^2 <= K0 (16: up to 4 learners) it changes nothing.
    """

    #: What the period follows: loss and learning rate (AdaComm), the learning rate alone, or `stages`.
    rule: Literal["adacomm", "qsr", "stages"] = "adacomm"
    #: rule=qsr: learning rate at which the period would be 1; 0: not given.
    alpha: float = 0.0
    #: rule=stages: periods from points of training on: 32@30%+64@60%; points in %, epochs, steps or frames.
    stages: Stages | None = None
    #: How often the rule is used: steps (256), frames per rank (600kf) or seconds (60s).
    interval: Period = field(default_factory=lambda: Period(256))
    #: Halve the period when the rule did not shrink it.
    halve: bool = True
    #: The period never exceeds the first one by more than this factor.
    growth: float = 4.0
    #: Keep the schedule's learning rate, or raise it with the number of learners while shortening the period.
    learning_rate: Literal["keep", "scale"] = "keep"

    @property
    def traits(self) -> Traits:
        traits = super().traits
        points = None if self.stages is None else self.stages.point_unit
        return replace(
            traits,
            counts_frames=traits.counts_frames
            or self.interval.unit is PeriodUnit.FRAMES
            or points is PointUnit.FRAMES,
            period_changes=True,
            counts_epochs=points is PointUnit.EPOCHS,
            follows_whole_run=traits.follows_whole_run
            or self.learning_rate == "scale"
            or points is PointUnit.SHARE,
        )

    def check_options(self) -> None:
        super().check_options()
        self._check_rule()
        if not 1 <= self.growth < math.inf:
            raise ConfigError(f"{self.name}:growth={self.growth}: must be at least 1")
        if self.learning_rate == "scale" and self.period.unit is not PeriodUnit.STEPS:
            raise ConfigError(
                f"{self.name}:learning_rate=scale,period={self.period}: needs a period in steps"
            )

    def _check_rule(self) -> None:
        """Refuse missing options of the rule, and options that it does not read."""
        default = AdaptiveAveraging()
        for name, rule in _RULE_OF.items():
            if rule != self.rule and getattr(self, name) != getattr(default, name):
                raise ConfigError(
                    f"{self.name}:{name}: an option of rule={rule}, not of rule={self.rule}; leave it out "
                    f"or give rule={rule}"
                )
        if self.rule == "qsr" and not 0 < self.alpha < math.inf:
            raise ConfigError(
                f"{self.name}:rule=qsr: needs alpha=, more than 0: the learning rate above which the period "
                "stays as it is given, times that period's square root"
            )
        if self.rule == "qsr" and self.period.unit is not PeriodUnit.STEPS:
            raise ConfigError(f"{self.name}:rule=qsr,period={self.period}: needs a period in steps")
        if self.rule == "stages" and self.stages is None:
            raise ConfigError(f"{self.name}:rule=stages: needs stages=, e.g. stages=32@30%+64@60%")
        if self.stages is not None and self.stages.period_unit is not self.period.unit:
            raise ConfigError(
                f"{self.name}:stages={self.stages}: its periods must be in {self.period.unit.value}, as "
                f"period={self.period} is"
            )

    @property
    def current_period(self) -> Period:
        return Period(self._value, self.period.unit)

    def set_up(self) -> None:
        super().set_up()
        self._value = self.period.value  # of the current period
        # losses since the last use of the rule
        self._loss = WindowLoss(skips_overflows=self.replica.scaler is not None)
        self._last_use = 0.0  # step, frames per rank or seconds on rank 0, in the unit of `interval`
        self._first_loss = 0.0  # 0: not known yet
        self._first_rate = self._last_rate = 0.0
        self._has_warned = False

    def observe_loss(self, total: Tensor, frames: int) -> None:
        super().observe_loss(total, frames)
        if self.rule == "adacomm":
            self._loss.add(total, frames)

    def step(self, progress: Progress) -> None:
        if self.rule == "qsr" and self._window_steps == 0 and self._together is None:
            # Not at the preceding average: the scheduler has set this window's learning rate only now.
            self._value = self._period_of_rate(self.replica.learning_rate)
        if self.replica.learning_rate_factor != 1:
            self.replica.update_rule.check_rates(f"{self.name}:learning_rate=scale")
        super().step(progress)
        if self.learning_rate == "scale":
            full = min(max(self.comm.size**2 / self.period.value, 1.0), float(self.comm.size))
            done = progress.epoch / progress.num_epochs / _WARMUP_SHARE
            self.replica.learning_rate_factor = 1.0 + (full - 1.0) * min(done, 1.0)

    def _period_of_rate(self, rate: float) -> float:
        """Return the quadratic synchronisation rule's period in steps; the same on all ranks."""
        before, self._last_rate = self._last_rate, rate
        if rate > before:
            return self.period.value
        if rate <= 0:
            return self._value
        ratio = self.alpha / rate
        # Rounding of a ratio must not cost a step.
        return max(self.period.value, math.floor(min(ratio * ratio * (1 + 1e-9), _LONGEST)))

    def start_apart(self) -> None:
        super().start_apart()
        self._loss.reset()

    def _start_window(self, progress: Progress) -> None:
        if self.rule == "adacomm":
            self._adapt(progress)
        elif self.stages is not None:
            self._value = self.stages.period_at(progress, self.period).value
        super()._start_window(progress)

    def _adapt(self, progress: Progress) -> None:
        """Apply the rule if it is due.  Collective."""
        in_seconds = self.interval.unit is PeriodUnit.SECONDS
        now = float(progress.step) if self.interval.unit is PeriodUnit.STEPS else progress.frames_per_rank
        if not in_seconds and self._is_early(now):
            return
        sums = torch.tensor([*self._loss.sums, 0.0], dtype=torch.float64)
        if self.comm.rank == 0:
            sums[2] = progress.time_s
        with self.timeline.span(Span.COMM):
            loss, frames, time_s = self.comm.allreduce(sums, name="loss").tolist()
        now = time_s if in_seconds else now
        if frames == 0 or self._is_early(now):
            return
        self._loss.reset()
        self._last_use = now
        self._use_rule(loss / frames)

    def _is_early(self, now: float) -> bool:
        if self._first_loss == 0:
            return False
        done, wanted = now - self._last_use, self.interval.value
        return not (frames_reach(done, wanted) if self.interval.unit is PeriodUnit.FRAMES else done >= wanted)

    def _use_rule(self, loss: float) -> None:
        rate = self.replica.learning_rate / self.replica.learning_rate_factor
        if self._first_loss > 0:
            self._value = self._next_value(loss, rate)
        elif 0 < loss < math.inf:
            self._first_loss, self._first_rate = loss, rate
        elif -math.inf < loss < 0:
            raise ConfigError(
                f"{self.name}:rule=adacomm: the rule needs losses above 0, but the training loss is "
                f"{loss:.4g} a frame in the first window; {_POSITIVE}, or give rule=qsr or stages"
            )
        self._last_rate = rate

    def _next_value(self, loss: float, rate: float) -> float:
        if not -math.inf < loss < math.inf:
            return self._value
        if loss < 0 and not self._has_warned and self.comm.rank == 0:
            warn(
                f"{self.name}:rule=adacomm: the training loss has fallen below 0 ({loss:.4g} a frame), "
                f"which the rule treats as 0, so ranks average at every step; {_POSITIVE}"
            )
        self._has_warned |= loss < 0
        # While a warm-up schedule is at 0, there is no ratio.
        rates = self._first_rate / rate if rate > 0 and self._first_rate > 0 else 1.0
        shortened = self.period.value / self.replica.learning_rate_factor
        wanted = self._whole(shortened * math.sqrt(rates * max(loss, 0.0) / self._first_loss))
        if self.halve and wanted >= self._value and rate >= self._last_rate:
            wanted = self._whole(self._value / 2)
        return min(wanted, self.growth * self.period.value)

    def _whole(self, value: float) -> float:
        # Rounding of a ratio that is 1 must not cost a step.
        return (
            max(1.0, math.ceil(value - 1e-6))
            if self.period.unit is PeriodUnit.STEPS
            else max(_SHORTEST, value)
        )

    def state_dict(self) -> dict[str, Any]:
        return {
            **super().state_dict(),
            "value": self._value,
            "last_use": self._last_use,
            "first_loss": self._first_loss,
            "first_rate": self._first_rate,
            "last_rate": self._last_rate,
            "learning_rate_factor": self.replica.learning_rate_factor,
            "interval_loss": self._loss.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        for name in ("value", "last_use", "first_loss", "first_rate", "last_rate"):
            setattr(self, f"_{name}", state[name])
        self.replica.learning_rate_factor = state["learning_rate_factor"]
        self._loss.load_state_dict(state["interval_loss"])
