"""Normalise features by the statistics that Kaldi keeps for each speaker, as apply-cmvn does.

Legend: T frames, D feature dimensions.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from speechdp.data.corpora.corpus import file_lines
from speechdp.data.corpora.kaldi_dir import PLAIN_RULES, ReadingRules
from speechdp.data.kaldi.matrix import MatrixPlace, read_matrix, read_scp
from speechdp.data.signal.features import FeatureConfig
from speechdp.errors import ConfigError

#: Least variance, as in Kaldi's transform/cmvn.cc.
_MIN_VARIANCE = 1e-20


_BOOLEANS = {"true": True, "false": False}


@dataclass(frozen=True)
class CmvnOptions:
    """What Kaldi's apply-cmvn normalises; the defaults are those of apply-cmvn."""

    norm_means: bool = True
    norm_vars: bool = False

    @classmethod
    def read(cls, path: Path) -> CmvnOptions:
        """Read `cmvn_opts`, which Kaldi's scripts keep beside a model.

        Raises:
            ConfigError: the file holds anything other than --norm-means and --norm-vars.
        """
        try:
            words = shlex.split(" ".join(line for _, line in file_lines(path)))
        except ValueError as error:
            raise ConfigError(f"{path}: is not understood ({error}); write e.g. --norm-vars=true") from error
        given: dict[str, bool] = {}
        for word in words:
            name, _, value = word.removeprefix("--").replace("-", "_").partition("=")
            if name not in ("norm_means", "norm_vars") or value not in ("", *_BOOLEANS):
                raise ConfigError(
                    f"{path}: {word[:60]!r} is not supported (--norm-means and --norm-vars are); normalise "
                    "with --cmvn utterance or --cmvn none, or write features with apply-cmvn"
                )
            given[name] = _BOOLEANS.get(value, True)
        return cls(**given)


@dataclass(frozen=True)
class SpeakerStatistics:
    """A speaker's mean and standard deviation of each dimension, (D,) float64."""

    mean: npt.NDArray[np.float64]
    std: npt.NDArray[np.float64]

    def apply(self, features: npt.NDArray[np.float32], config: FeatureConfig) -> npt.NDArray[np.float32]:
        """Normalise (T, D) features according to `config`."""
        result = features.astype(np.float64)
        if config.mean_normalise:
            result -= self.mean
        if config.variance_normalise:
            result /= self.std
        with np.errstate(over="ignore"):  # the shard refuses values that overflow
            return result.astype(np.float32)


class SpeakerCmvn:
    """The statistics in a cmvn.scp, read when they are requested.

    Raises:
        ConfigError: the table cannot be read.
    """

    def __init__(self, path: Path, rules: ReadingRules = PLAIN_RULES) -> None:
        self.path = path
        self._places = read_scp(path, rules)
        self._statistics: dict[str, SpeakerStatistics] = {}

    def of(self, speaker: str, feature_dim: int) -> SpeakerStatistics:
        """Return a speaker's statistics.

        Raises:
            ConfigError: the table lacks the speaker, or its statistics do not fit the features.
        """
        known = self._statistics.get(speaker)
        if known is None:
            place = self._places.get(speaker)
            if place is None:
                raise ConfigError(
                    f"{self.path}: lacks speaker {speaker}; run steps/compute_cmvn_stats.sh again"
                )
            known = self._statistics[speaker] = _read(place, speaker, feature_dim)
        return known


def _read(place: MatrixPlace, speaker: str, feature_dim: int) -> SpeakerStatistics:
    """Convert Kaldi's sums to mean and deviation: row 0 holds sums and the count, row 1 sums of squares."""
    sums = read_matrix(place, speaker).astype(np.float64)
    where = f"{place.path}: speaker {speaker}"
    if sums.shape != (2, feature_dim + 1):
        raise ConfigError(
            f"{where}: statistics of shape {sums.shape}, not (2, {feature_dim + 1}); compute them again"
        )
    count = sums[0, -1]
    if not (np.isfinite(sums).all() and count > 0):
        raise ConfigError(f"{where}: statistics of {count:g} frames; run steps/compute_cmvn_stats.sh again")
    mean = sums[0, :-1] / count
    variance = np.maximum(sums[1, :-1] / count - mean**2, _MIN_VARIANCE)
    return SpeakerStatistics(mean, np.sqrt(variance))
