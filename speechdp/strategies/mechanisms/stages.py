"""Periods that change at given points of training: `32@30%+64@60%`."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from enum import Enum

from speechdp.errors import ConfigError
from speechdp.parallel.period import Period, PeriodUnit, frames_reach, plain_number
from speechdp.parallel.strategy import Progress

_PATTERN = re.compile(r"(?P<number>\d+(?:\.\d+)?)(?P<unit>%|ep|epochs?)", re.IGNORECASE)
#: Tolerance, so that rounding a fraction such as a third does not delay a point by a step.
_ROUNDING = 1e-9


class PointUnit(Enum):
    """The unit of a point of training."""

    STEPS = "steps"
    FRAMES = "frames"
    EPOCHS = "epochs"
    SHARE = "share"


@dataclass(frozen=True)
class Point:
    """A point of training, from its start: `30%`, `3ep`, `5000` (steps), `600mf` (frames per rank)."""

    value: float
    unit: PointUnit

    @classmethod
    def parse(cls, text: str) -> Point:
        """Read a point of training.

        Raises:
            ConfigError: it is not one, or ranks could disagree on it (seconds).
        """
        match = _PATTERN.fullmatch(text.strip())
        if match is None:
            return cls._of_count(text)
        value, is_share = float(match["number"]), match["unit"] == "%"
        if value <= 0 or (is_share and value >= 100):
            raise ConfigError(f"point {text!r} is not within training; write e.g. 30%, 3ep, 5000 or 600mf")
        return cls(value, PointUnit.SHARE if is_share else PointUnit.EPOCHS)

    @classmethod
    def _of_count(cls, text: str) -> Point:
        try:
            counted = Period.parse(text)
        except ConfigError:
            counted = None
        if counted is None or counted.unit is PeriodUnit.SECONDS:
            raise ConfigError(
                f"point {text!r} is no point of training; write 30% (of all epochs), 3ep (epochs), "
                "5000 (steps) or 600mf (frames of a rank)"
            )
        return cls(counted.value, PointUnit(counted.unit.value))

    def is_reached(self, progress: Progress) -> bool:
        """Return whether training has reached the point; the same on every rank."""
        if self.unit is PointUnit.STEPS:
            return progress.step >= self.value
        if self.unit is PointUnit.FRAMES:
            return frames_reach(progress.frames_per_rank, self.value)
        if self.unit is PointUnit.EPOCHS:
            return progress.epoch >= self.value - _ROUNDING
        return progress.epoch / progress.num_epochs >= self.value / 100 - _ROUNDING

    def __str__(self) -> str:
        if self.unit is PointUnit.SHARE:
            return f"{plain_number(self.value)}%"
        if self.unit is PointUnit.EPOCHS:
            return f"{plain_number(self.value)}ep"
        return str(Period(self.value, PeriodUnit(self.unit.value)))


@dataclass(frozen=True)
class Stages:
    """Periods, each starting at a point of training, in the order of the points: `32@30%+64@60%`."""

    stages: tuple[tuple[Period, Point], ...]

    @classmethod
    def parse(cls, text: str) -> Stages:
        """Read `PERIOD@POINT+PERIOD@POINT...`.

        Raises:
            ConfigError: a period or point is invalid, units differ, or points are not in order.
        """
        stages = []
        for part in text.split("+"):
            period, at, point = part.partition("@")
            if not at:
                raise ConfigError(
                    f"stage {part!r} is not understood; write PERIOD@POINT+PERIOD@POINT, e.g. 32@30%+64@60%"
                )
            stages.append((Period.parse(period), Point.parse(point)))
        for (one, here), (other, there) in itertools.pairwise(stages):
            if one.unit is not other.unit or here.unit is not there.unit:
                raise ConfigError(f"stages {text!r} mix units; write all periods in one, all points in one")
            if there.value <= here.value:
                raise ConfigError(f"stages {text!r}: {there} is not after {here}; put them in order")
        return cls(tuple(stages))

    @property
    def period_unit(self) -> PeriodUnit:
        """The unit of all periods."""
        return self.stages[0][0].unit

    @property
    def point_unit(self) -> PointUnit:
        """The unit of all points."""
        return self.stages[0][1].unit

    def period_at(self, progress: Progress, first: Period) -> Period:
        """Return the period of the last point reached; before the first point, `first`."""
        reached = [period for period, point in self.stages if point.is_reached(progress)]
        return reached[-1] if reached else first

    def __str__(self) -> str:
        return "+".join(f"{period}@{point}" for period, point in self.stages)
