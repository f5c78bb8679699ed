"""Options of the random changes to the training data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import tyro

from speechdp.errors import ConfigError


@dataclass(frozen=True)
class NoiseLevel:
    """Signal-to-noise ratios to draw from, in dB."""

    low_db: float
    high_db: float

    @staticmethod
    def parse(text: str) -> NoiseLevel:
        """Read `LOW-HIGH`, e.g. 10-30.  Raises ConfigError for anything else."""
        low, dash, high = text.partition("-") if not text.startswith("-") else ("", "", "")
        try:
            level = NoiseLevel(float(low), float(high))
        except ValueError:
            level = NoiseLevel(math.nan, math.nan)
        if not (dash and 0 <= level.low_db <= level.high_db < math.inf):
            raise ConfigError(
                f"--noise-snr-db {text}: write LOW-HIGH in dB, from 0 upwards, LOW not above HIGH, e.g. 10-30"
            )
        return level


@dataclass(frozen=True)
class AugmentOptions:
    """Random changes to the training data, drawn anew in each epoch.  Evaluation never uses them."""

    spec_augment: bool = False
    """Mask random frequency bands and time spans of the features (SpecAugment); helps with small corpora."""
    speed_perturb: bool = False
    """Play each utterance at 90, 100 or 110 % of its speed; needs data prepared with --store audio."""
    noise_snr_db: Annotated[str, tyro.conf.arg(metavar="LOW-HIGH")] = ""
    """Add white or pink noise at a signal-to-noise ratio drawn from this range in dB, e.g. 10-30.
    Needs data prepared with --store audio; empty: no noise."""

    def __post_init__(self) -> None:
        self.noise()

    def noise(self) -> NoiseLevel | None:
        """Return the range of the noise level; None if there is no noise."""
        return NoiseLevel.parse(self.noise_snr_db) if self.noise_snr_db else None
