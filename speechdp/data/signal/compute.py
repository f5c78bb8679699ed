"""Compute features of any kind from samples."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from speechdp.data.signal.features import FeatureConfig, check_samples, kaldi_features, normalise
from speechdp.data.signal.spectrogram import compute_spectrogram

#: Kaldi's features are defined on 16-bit sample values.
_INT16_SCALE = 32768.0


def compute_features(
    samples: npt.NDArray[np.float32], sampling_rate: int, config: FeatureConfig
) -> npt.NDArray[np.float32]:
    """Compute the features of one utterance.

    Args:
        samples: (S,) float32 in [-1, 1].
        sampling_rate: in Hz.
        config: kind, sizes and normalisation.

    Returns:
        (T, D) float32, normalised according to `config`; T is `num_frames_of`.  Dither is 0, so the same
        samples always give the same features.

    Raises:
        ConfigError: no samples, NaN among them, or more mel bins than the sampling rate can fill.
    """
    if config.kind == "spectrogram":
        return compute_spectrogram(samples, sampling_rate, config)
    check_samples(samples)
    raw = kaldi_features(samples * _INT16_SCALE, sampling_rate, config, snip_edges=config.snip_edges)
    return normalise(raw, config)
