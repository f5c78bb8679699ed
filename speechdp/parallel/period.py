"""How often replicas are averaged: the *period*, in steps, frames or seconds."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum
from typing import TypeVar

from speechdp.errors import ConfigError

SomePeriod = TypeVar("SomePeriod", bound="Period")

_PATTERN = re.compile(r"(?P<number>\d+(?:\.\d+)?)(?P<unit>steps?|s|f|kf|mf|frames?)?", re.IGNORECASE)
#: Frames of a rank are sums of means over ranks; their rounding error must not cost a step.
_FRAMES_ROUNDING = 1e-3
_FRAMES = {"f": 1, "frame": 1, "frames": 1, "kf": 1_000, "mf": 1_000_000}


class PeriodUnit(Enum):
    """The unit of a period."""

    STEPS = "steps"
    FRAMES = "frames"
    SECONDS = "seconds"


@dataclass(frozen=True)
class Period:
    """An averaging period: `16` (steps), `600kf` (frames per rank, as Kaldi counts an iteration), `5s`."""

    value: float
    unit: PeriodUnit = PeriodUnit.STEPS

    @classmethod
    def parse(cls: type[SomePeriod], text: str) -> SomePeriod:
        """Read `16`, `16steps`, `400000f`, `600kf`, `1.2mf` or `5s`.

        Raises:
            ConfigError: anything else, or a period that is not positive.
        """
        match = _PATTERN.fullmatch(text.strip())
        if match is None or not 0 < float(match["number"]) < math.inf:
            raise ConfigError(f"{text!r} is not a period; write 16 (steps), 600kf (frames) or 5s")
        number, unit = float(match["number"]), (match["unit"] or "steps").lower()
        if unit == "s":
            return cls(number, PeriodUnit.SECONDS)
        if unit in _FRAMES:
            return cls(number * _FRAMES[unit], PeriodUnit.FRAMES)
        if number != int(number):
            raise ConfigError(f"{text!r} is not a whole number of steps")
        return cls(number, PeriodUnit.STEPS)

    def __str__(self) -> str:
        if self.unit is PeriodUnit.STEPS:
            return plain_number(self.value)
        if self.unit is PeriodUnit.SECONDS:
            return f"{plain_number(self.value)}s"
        return (
            f"{plain_number(self.value / 1000)}kf"
            if self.value % 1000 == 0
            else f"{plain_number(self.value)}f"
        )


@dataclass(frozen=True)
class Beginning(Period):
    """A delay from the start of training: a period, or `0` for none."""

    value: float = 0.0

    @classmethod
    def parse(cls: type[SomePeriod], text: str) -> SomePeriod:
        """Read what `Period.parse` reads, or `0`.

        Raises:
            ConfigError: anything else.
        """
        return cls(0.0) if text.strip() == "0" else super().parse(text)


def frames_reach(frames: float, wanted: float) -> bool:
    """Return whether frames of a rank, a sum of means over ranks, have reached `wanted`."""
    return frames >= wanted - _FRAMES_ROUNDING


def rounds_between(between_nodes: Period, period: Period) -> int:
    """Return the number of periods between two averages between nodes; 0: it is not a whole number."""
    rounds = round(between_nodes.value / period.value)
    is_whole = math.isclose(between_nodes.value, rounds * period.value)
    return rounds if is_whole and between_nodes.unit is period.unit else 0


def plain_number(value: float) -> str:
    """Write a number so that `Period.parse` reads the same back: all its digits, no exponent."""
    return f"{Decimal(repr(value)):f}".removesuffix(".0")
