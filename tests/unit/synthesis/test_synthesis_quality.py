"""Measures of synthetic speech against slow definitions and known cases."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from speechdp.data.signal.features import FeatureConfig
from speechdp.data.signal.spectrogram import spectrogram_config
from speechdp.errors import RunError
from speechdp.synthesis import quality
from tests.helpers.librosa_as_written import librosa_as_written

FEATURES = spectrogram_config(8000)


def random_mel(num_frames: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).uniform(0.2, 0.9, (num_frames, FEATURES.num_mel_bins))


def slow_cepstra(mel: np.ndarray, config: FeatureConfig) -> np.ndarray:
    log_a = np.log(10.0 ** ((mel * -config.min_level_db + config.min_level_db + config.ref_level_db) / 20))
    bins = mel.shape[1]
    k, m = np.arange(1, 14)[:, None], np.arange(bins)
    return log_a @ np.cos(np.pi * k * (m + 0.5) / bins).T * 2 / bins


def slow_mcd(a: np.ndarray, b: np.ndarray) -> float:
    """The cheapest path by the recursion, then the mean of its terms."""
    first, second = slow_cepstra(a, FEATURES), slow_cepstra(b, FEATURES)
    distance = lambda i, j: float(np.sqrt(((first[i] - second[j]) ** 2).sum()))  # noqa: E731
    best: dict[tuple[int, int], tuple[float, int]] = {}
    for i, j in itertools.product(range(len(a)), range(len(b))):
        before = [best[p] for p in ((i - 1, j - 1), (i - 1, j), (i, j - 1)) if p in best] or [(0.0, 0)]
        cost, length = min(before)
        best[i, j] = (cost + distance(i, j), length + 1)
    cost, length = best[len(a) - 1, len(b) - 1]
    return 10 * np.sqrt(2) / np.log(10) * cost / length


def test_cepstra_are_those_of_the_natural_logarithm_of_the_amplitude() -> None:
    for config in (FEATURES, dataclasses.replace(FEATURES, min_level_db=-80.0, ref_level_db=5.0)):
        mel = random_mel(7, 0)
        np.testing.assert_allclose(quality.cepstra(mel, config), slow_cepstra(mel, config), atol=1e-12)


def test_distortion_is_the_definition() -> None:
    a, b = random_mel(9, 1), random_mel(14, 2)
    assert quality.mel_cepstral_distortion(a, b, FEATURES) == pytest.approx(slow_mcd(a, b), rel=1e-9)


def test_distortion_is_in_db() -> None:
    """A ripple that is one cepstrum: its root mean square over the bins, in dB, is the distortion."""
    bins = FEATURES.num_mel_bins
    ripple = 0.05 * np.cos(np.pi * 4 * (np.arange(bins) + 0.5) / bins)
    plain = np.full((6, bins), 0.5)
    expected = -FEATURES.min_level_db * np.sqrt((ripple**2).mean())
    assert quality.mel_cepstral_distortion(plain + ripple, plain, FEATURES) == pytest.approx(expected)


def test_level_and_speed_cost_nothing() -> None:
    mel = random_mel(10, 3)
    slower = np.repeat(mel, 2, axis=0) + 0.07
    assert quality.mel_cepstral_distortion(mel, slower, FEATURES) == pytest.approx(0.0, abs=1e-5)
    assert quality.mel_cepstral_distortion(mel, mel[::-1], FEATURES) > 1


def test_attention_on_the_diagonal_even_and_stuck() -> None:
    diagonal, even = np.eye(12), np.full((30, 12), 1 / 12)
    stuck = np.eye(12)[np.zeros(30, dtype=int)]
    assert quality.focus_rate(diagonal) == 1 and quality.focus_rate(even) == pytest.approx(1 / 12)
    assert quality.diagonality(diagonal) == pytest.approx(1)
    assert quality.diagonality(even) == pytest.approx(0)
    assert quality.diagonality(stuck) < -0.3
    assert quality.diagonality(np.ones((5, 1))) == 0


@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (12, 3), (30, 41)])
def test_the_path_is_librosas(shape: tuple[int, int]) -> None:
    librosa = librosa_as_written()
    distances = np.random.default_rng(shape[1]).random(shape)
    expected = librosa.sequence.dtw(C=distances)[1][::-1]
    np.testing.assert_array_equal(quality.warping_path(distances), expected)


def test_of_paths_that_cost_the_same_it_is_librosas_too() -> None:
    librosa = librosa_as_written()
    distances = np.random.default_rng(0).integers(0, 2, (9, 13)).astype(float)
    expected = librosa.sequence.dtw(C=distances)[1][::-1]
    np.testing.assert_array_equal(quality.warping_path(distances), expected)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_speech_that_is_no_finite_numbers_is_refused_in_a_line(value: float) -> None:
    recorded, synthetic = random_mel(6, 4), random_mel(5, 5)
    synthetic[2, 3] = value
    with (
        np.errstate(invalid="ignore"),
        pytest.raises(RunError, match="a spectrogram holds values that are no"),
    ):
        quality.mel_cepstral_distortion(synthetic, recorded, FEATURES)
