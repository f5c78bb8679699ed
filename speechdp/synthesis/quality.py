"""Measure how close synthetic speech is to a recording, and how well the decoder attends to the text.

Legend: T frames, M mel bins, K cepstra, N decoder steps, S symbols.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from speechdp.data.signal.features import FeatureConfig
from speechdp.errors import RunError

FloatArray = npt.NDArray[np.float64]

#: Cepstra to compare: 1 to 13.  Coefficient 0 is the level, which is accidental in a recording.
NUM_CEPSTRA = 13
#: Converts a distance of cepstra, in nats of amplitude, to dB; see `mel_cepstral_distortion`.
MCD_SCALE = 10.0 * np.sqrt(2.0) / np.log(10.0)


def cepstra(mel: npt.NDArray[Any], features: FeatureConfig) -> FloatArray:
    """Return the mel cepstra of a stored spectrogram, (T, M) in [0, 1]: (T, K), K = min(13, M - 1).

    The stored values are converted back to the natural logarithm of the mel filters' amplitude,

        ln a = (ref_level_db + min_level_db - min_level_db * value) * ln(10) / 20,

    The cepstra are the coefficients of its cosine series, without the constant one:

        c_k = 2 / M * sum_m ln a_m cos(pi k (m + 1/2) / M),   k = 1, ..., K,

    With all of them, ln a_m would be c_0 / 2 + sum_k c_k cos(pi k (m + 1/2) / M).
    """
    level_db = features.ref_level_db + features.min_level_db - features.min_level_db * mel.astype(np.float64)
    log_amplitude = level_db * (np.log(10.0) / 20.0)
    num_bins = mel.shape[1]
    k, m = np.arange(1, min(NUM_CEPSTRA, num_bins - 1) + 1)[:, None], np.arange(num_bins)
    series: FloatArray = log_amplitude @ np.cos(np.pi * k * (m + 0.5) / num_bins).T * (2.0 / num_bins)
    return series


def mel_cepstral_distortion(
    synthetic: npt.NDArray[Any], recorded: npt.NDArray[Any], features: FeatureConfig
) -> float:
    """Return the mel-cepstral distortion of two spectrograms (T1, M), (T2, M), in dB.

        MCD = 10 sqrt(2) / ln 10 * mean over the path of sqrt(sum_k (c_k - c'_k)^2)

    The path is that of dynamic time warping (Euclidean distance of the cepstra; steps of one frame in either
    or both, with equal weights), so a difference in speed costs nothing.  Silence counts like speech.  A
    frame's term is the root mean square, over the mel bins, of the difference of the two smoothed spectra in
    dB, with their levels removed; with all cepstra instead of 13 this would be exact.

    Source: Kubichek, "Mel-cepstral distance measure for objective speech quality assessment", IEEE PACRIM
    1993, equation 1; the warping as in later work (often called MCD-DTW).

    Raises:
        RunError: a spectrogram holds values that are not finite.
    """
    from_synthetic, from_recorded = cepstra(synthetic, features), cepstra(recorded, features)
    squares = (from_synthetic**2).sum(axis=1)[:, None] + (from_recorded**2).sum(axis=1)
    distances = np.sqrt(np.maximum(squares - 2.0 * from_synthetic @ from_recorded.T, 0.0))  # (T1, T2)
    path = warping_path(distances)
    return float(MCD_SCALE * distances[path[:, 0], path[:, 1]].mean())


def warping_path(distances: FloatArray) -> npt.NDArray[np.int64]:
    """Return the cheapest path through (T1, T2) distances from corner to corner: (P, 2) places.

    Among steps with the same cost, the one in both directions is taken, else the one in the second.

    Raises:
        RunError: a distance is not finite.
    """
    if not np.isfinite(distances).all():
        raise RunError(
            "mel-cepstral distortion: a spectrogram holds values that are no finite numbers; look at the "
            "loss of the run, and at the data"
        )
    rows, columns = distances.shape
    costs = np.full((rows + 1, columns + 1), np.inf)  # of the cheapest path to each place; a border around it
    costs[0, 0] = 0.0
    for diagonal in range(rows + columns - 1):
        row = np.arange(max(0, diagonal - columns + 1), min(diagonal + 1, rows))
        column = diagonal - row
        before = np.minimum(costs[row, column], np.minimum(costs[row + 1, column], costs[row, column + 1]))
        costs[row + 1, column + 1] = distances[row, column] + before
    place, path = (rows - 1, columns - 1), [(rows - 1, columns - 1)]
    while place != (0, 0):
        row_, column_ = place
        steps = ((row_ - 1, column_ - 1), (row_, column_ - 1), (row_ - 1, column_))
        place = min(steps, key=lambda step: float(costs[step[0] + 1, step[1] + 1]))
        path.append(place)
    return np.array(path[::-1])


def focus_rate(attention: npt.NDArray[Any]) -> float:
    """Return the mean over the steps of attention (N, S) of the largest weight: 1 is a clear choice.

    Source: Ren et al., "FastSpeech: fast, robust and controllable text to speech", NeurIPS 2019,
    section 3.3, equation 1 (there over target frames, here over decoder steps).
    """
    return float(attention.max(axis=1).mean())


def diagonality(attention: npt.NDArray[Any]) -> float:
    """Return how close attention (N, S) is to the diagonal: 1 on it, 0 if spread evenly, less if far off.

    With a single step or symbol there is no diagonal: 0.

        1 - d(attention) / d(even),   d(a) = 1 / N sum_n sum_s a_ns |s / (S - 1) - n / (N - 1)|

    The distance is that of guided attention (Tachibana et al., "Efficiently trainable text-to-speech
    system based on deep convolutional networks with guided attention", ICASSP 2018, section 4.1) without
    its square and exponential; the scale is ours.
    """
    steps, symbols = attention.shape
    if min(steps, symbols) < 2:
        return 0.0
    far = np.abs(np.linspace(0.0, 1.0, symbols) - np.linspace(0.0, 1.0, steps)[:, None])  # (N, S)
    return float(1.0 - (attention * far).sum(axis=1).mean() / far.mean())
