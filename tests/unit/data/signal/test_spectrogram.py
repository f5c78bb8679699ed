"""Spectrograms equal librosa's own functions, and what is made of them sounds like what went in."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from speechdp.data.signal import spectrogram
from speechdp.data.signal.audio import read_audio
from speechdp.data.signal.compute import compute_features
from speechdp.data.signal.features import FeatureConfig, num_frames_of, shift_samples, window_samples
from speechdp.data.signal.griffin_lim import griffin_lim
from speechdp.data.signal.spectrogram import (
    compute_spectrogram,
    invert_linear,
    mel_filters,
    spectrogram_config,
    unscale,
    usual_num_fft,
)
from speechdp.errors import ConfigError
from tests.helpers.corpora import fsdd_dir, tone
from tests.helpers.librosa_as_written import librosa_as_written


def _reference(samples: npt.NDArray[Any], rate: int, config: FeatureConfig) -> npt.NDArray[Any]:
    """Compute the spectrograms as public Tacotron code does, by librosa's functions, in float64."""
    librosa = librosa_as_written()
    emphasised = np.append(samples[0], samples[1:] - 0.97 * samples[:-1].astype(np.float64))
    magnitudes = np.abs(
        librosa.stft(
            emphasised,
            n_fft=config.num_fft,
            hop_length=int(rate * config.frame_shift_ms / 1000),
            win_length=int(rate * config.frame_length_ms / 1000),
        )
    )
    mel = librosa.filters.mel(sr=rate, n_fft=config.num_fft, n_mels=config.num_mel_bins) @ magnitudes
    levels = 20 * np.log10(np.maximum(1e-5, np.vstack([mel, magnitudes]))) - 20
    return np.clip((levels + 100) / 100, 0, 1).T


@pytest.mark.parametrize(("rate", "seconds"), [(8000, 1.23), (22050, 0.7), (24000, 0.01)])
def test_it_is_what_librosa_computes(rate: int, seconds: float) -> None:
    samples = tone(seconds, rate, seed=1)
    config = spectrogram_config(rate)
    rows = compute_spectrogram(samples, rate, config)
    assert rows.shape == (num_frames_of(len(samples), rate, config), 80 + config.linear_dim)
    np.testing.assert_allclose(rows, _reference(samples, rate, config), atol=2e-4)  # 0.02 dB


def test_other_settings_are_librosas_too() -> None:
    config = spectrogram_config(
        16000, num_mel_bins=40, frame_length_ms=25.0, frame_shift_ms=10.0, num_fft=1000
    )
    samples = tone(7.0, 16000)  # more than one block of frames
    np.testing.assert_allclose(
        compute_spectrogram(samples, 16000, config), _reference(samples, 16000, config), atol=2e-4
    )


def test_the_usual_sizes() -> None:
    assert [usual_num_fft(rate, 50.0) for rate in (8000, 16000, 20000, 24000)] == [512, 1024, 2048, 2048]
    config = spectrogram_config(24000)
    assert (config.feature_dim, config.linear_dim) == (80 + 1025, 1025)
    assert mel_filters(8000, 512, 80).any(axis=1).all()
    assert num_frames_of(99, 8000, spectrogram_config(8000)) == 1
    assert num_frames_of(100, 8000, spectrogram_config(8000)) == 2
    assert num_frames_of(0, 8000, spectrogram_config(8000)) == 0


def test_a_spectrogram_is_one_kind_of_features() -> None:
    config = spectrogram_config(8000)
    samples = tone(0.3)
    np.testing.assert_array_equal(
        compute_features(samples, 8000, config), compute_spectrogram(samples, 8000, config)
    )
    assert FeatureConfig.from_dict(config.to_dict()) == config
    assert not {"num_fft", "preemphasis", "min_level_db", "ref_level_db"} & FeatureConfig().to_dict().keys()


def test_silence_and_loud_sound_stay_in_range() -> None:
    config = spectrogram_config(8000)
    assert (compute_spectrogram(np.zeros(800, np.float32), 8000, config) == 0).all()
    loud = np.where(np.arange(8000) % 7 < 3, 1, -1).astype(np.float32)
    rows = compute_spectrogram(loud, 8000, config)
    assert rows.max() == 1 and rows.min() >= 0
    assert unscale(np.ones((1, 1), np.float32), config)[0, 0] == pytest.approx(10.0)


def _correlation(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> float:
    return float(np.corrcoef(one.ravel(), other.ravel())[0, 1])


def test_speech_survives_griffin_and_lim() -> None:
    config = spectrogram_config(8000)
    samples = read_audio(fsdd_dir() / "5_theo_7.flac", 8000)
    rows = compute_spectrogram(samples, 8000, config)
    linear = rows[:, config.num_mel_bins :]
    sound = invert_linear(linear, 8000, config, power=1.0)
    assert abs(len(sound) - len(samples)) < 100
    again = compute_spectrogram(sound, 8000, config)
    difference = np.abs(again - rows)[:, : config.num_mel_bins]
    assert difference.mean() < 0.02  # 2 dB, of a range of 100
    assert _correlation(again, rows) > 0.97
    np.testing.assert_array_equal(sound, invert_linear(linear, 8000, config, power=1.0))
    shuffled = invert_linear(linear[::-1], 8000, config, power=1.0)
    assert _correlation(compute_spectrogram(shuffled, 8000, config), rows) < 0.9


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_fft": 256}, "num_fft 256 is shorter than a window of 50 ms at 8000 Hz .* give 512"),
        ({"num_fft": 513}, "must be even"),
        ({"num_mel_bins": 300}, "300 mel bins are too many for 8000 Hz"),
        ({"frame_shift_ms": 0.01}, "holds no samples"),
        (
            {"num_fft": 3_000_000_000},
            r"too large for a window of 50 ms at 8000 Hz \(at most 6400\); give 512",
        ),
        ({"num_fft": 131072, "frame_length_ms": 5000.0}, r"at most 65536\); give 65536"),
        ({"frame_length_ms": 1e9}, "has over 65536 samples"),
        ({"num_mel_bins": 3_000_000_000}, "3000000000 mel bins are too many"),
        ({"frame_shift_ms": 51.0}, "a shift of 51 ms leaves out sound"),
        ({"frame_length_ms": float("nan")}, "finite"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        spectrogram_config(8000, **settings)


def test_what_is_no_sound_is_refused() -> None:
    config = spectrogram_config(8000)
    with pytest.raises(ConfigError, match="NaN"):
        compute_spectrogram(np.array([0.0, np.nan], np.float32), 8000, config)
    with pytest.raises(ConfigError, match="one channel"):
        compute_spectrogram(np.zeros((0,), np.float32), 8000, config)


@pytest.mark.parametrize(("rate", "frames"), [(8000, 2), (8000, 41), (16000, 90)])
def test_griffin_lim_is_librosas(rate: int, frames: int) -> None:
    librosa = librosa_as_written()
    config = spectrogram_config(rate)
    window, shift = window_samples(rate, config), shift_samples(rate, config)
    magnitudes = np.random.default_rng(frames).random((frames, config.linear_dim), dtype=np.float32)
    expected = librosa.griffinlim(
        magnitudes.T,
        n_iter=8,
        hop_length=shift,
        win_length=window,
        n_fft=config.num_fft,
        pad_mode="constant",
        random_state=0,
    )
    found = griffin_lim(magnitudes, spectrogram._window(window, config.num_fft), shift, 8)
    # Few iterations: what is rounded otherwise grows from one to the next.
    np.testing.assert_allclose(found, expected, atol=2e-3 * np.abs(expected).max())


@pytest.mark.parametrize("size", [1, 256, 257, 5000])
def test_emphasis_is_undone(size: int) -> None:
    samples = np.random.default_rng(size).uniform(-1, 1, size).astype(np.float32)
    emphasised = spectrogram._preemphasise(samples, 0.97)
    np.testing.assert_allclose(spectrogram._deemphasise(emphasised, 0.97), samples, atol=2e-5)


def test_sound_is_made_without_what_takes_long_to_import() -> None:
    program = (
        "import sys, speechdp.synthesis.generate, speechdp.synthesis.quality\n"
        "found = sorted({'librosa', 'numba', 'scipy', 'sklearn', 'matplotlib'} & set(sys.modules))\n"
        "assert not found, found"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)
