"""Compute the mel and linear spectrograms used for speech synthesis, and turn them back into sound.

Both hold magnitudes of a short-time Fourier transform in decibels, scaled to [0, 1], as in the public code
for Tacotron (https://github.com/keithito/tacotron, util/audio.py).  They equal the results of librosa's stft
and filters.mel, which are not used because importing librosa takes seconds.

Legend: S samples, T frames, M mel bins, L lines of the linear spectrum, D = M + L, N points of the transform.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Literal

import numpy as np
import numpy.typing as npt

from speechdp.data.signal.features import (
    FeatureConfig,
    check_samples,
    num_frames_of,
    shift_samples,
    window_samples,
)
from speechdp.data.signal.griffin_lim import griffin_lim
from speechdp.errors import ConfigError

_FloatArray = npt.NDArray[np.float32]

PREEMPHASIS = 0.97
NUM_MEL_BINS = 80
FRAME_LENGTH_MS = 50.0
FRAME_SHIFT_MS = 12.5
#: Magnitudes below this (-100 dB) are as good as silence; their logarithm would be -infinity.
_LEAST_MAGNITUDE = 1e-5
#: A transform with more points than this, or than this many windows, adds no detail and takes much memory.
_MAX_NUM_FFT, _MAX_WINDOWS = 65536, 16
#: The transform has at least this many times the points of the window.
_PADDING = 1.2
_SAMPLES_A_BLOCK = 256  # summed at once where pre-emphasis is undone
_FRAMES_A_BLOCK = 512  # keeps the transform of a long recording in the cache


def usual_num_fft(sampling_rate: int, frame_length_ms: float) -> int:
    """Return the least power of two that is 1.2 windows or more: 2048 at 24 kHz and 50 ms, 512 at 8 kHz."""
    window = sampling_rate * frame_length_ms / 1000.0
    return max(4, 1 << (int(np.ceil(_PADDING * window)) - 1).bit_length())


def spectrogram_config(
    sampling_rate: int,
    *,
    num_mel_bins: int = NUM_MEL_BINS,
    frame_length_ms: float = FRAME_LENGTH_MS,
    frame_shift_ms: float = FRAME_SHIFT_MS,
    num_fft: int | None = None,
    dtype: Literal["float16", "float32"] = "float16",
) -> FeatureConfig:
    """Return Tacotron's settings for a sampling rate in Hz (Wang et al. 2017, table 1), checked.

    Raises:
        ConfigError: the window does not fit the transform or the shift, or mel bins would stay empty.
    """
    if not (math.isfinite(frame_length_ms) and math.isfinite(frame_shift_ms)):
        raise ConfigError("a frame's length and shift must be finite numbers of ms, e.g. 50 and 12.5")
    config = FeatureConfig(
        kind="spectrogram",
        num_mel_bins=num_mel_bins,
        frame_length_ms=frame_length_ms,
        frame_shift_ms=frame_shift_ms,
        mean_normalise=False,
        variance_normalise=False,
        num_fft=usual_num_fft(sampling_rate, frame_length_ms) if num_fft is None else num_fft,
        preemphasis=PREEMPHASIS,
        dtype=dtype,
    )
    check_spectrogram(sampling_rate, config)
    return config


def check_spectrogram(sampling_rate: int, config: FeatureConfig) -> None:
    """Refuse settings that do not fit a sampling rate in Hz.  Raises ConfigError."""
    window = window_samples(sampling_rate, config)
    named = f"a window of {config.frame_length_ms:g} ms"
    if window < 2 or shift_samples(sampling_rate, config) < 1:
        raise ConfigError(
            f"{named} every {config.frame_shift_ms:g} ms at {sampling_rate} Hz holds no samples; "
            "give longer ones"
        )
    if config.frame_shift_ms > config.frame_length_ms:
        raise ConfigError(
            f"a shift of {config.frame_shift_ms:g} ms leaves out sound between windows: {named} is shorter; "
            f"give at most {config.frame_length_ms:g}"
        )
    if window > _MAX_NUM_FFT:
        raise ConfigError(
            f"{named} at {sampling_rate} Hz has over {_MAX_NUM_FFT} samples; give a shorter one"
        )
    _check_num_fft(sampling_rate, config, window)
    fewer = config.num_mel_bins <= config.linear_dim  # more cannot all be filled, and may be any number
    if not fewer or not mel_filters(sampling_rate, config.num_fft, config.num_mel_bins).any(axis=1).all():
        raise ConfigError(
            f"{config.num_mel_bins} mel bins are too many for {sampling_rate} Hz and num_fft "
            f"{config.num_fft}; use fewer --num-mel-bins, e.g. 40"
        )


def _check_num_fft(sampling_rate: int, config: FeatureConfig, window: int) -> None:
    """Refuse a transform that is shorter than a window of `window` samples, or far longer."""
    named = f"a window of {config.frame_length_ms:g} ms at {sampling_rate} Hz"
    most = min(_MAX_NUM_FFT, _MAX_WINDOWS * window)
    usual = min(most, usual_num_fft(sampling_rate, config.frame_length_ms))
    if window > config.num_fft:
        raise ConfigError(
            f"num_fft {config.num_fft} is shorter than {named} ({window} samples); give {usual}"
        )
    if config.num_fft > most:
        raise ConfigError(f"num_fft {config.num_fft} is too large for {named} (at most {most}); give {usual}")


def compute_spectrogram(samples: _FloatArray, sampling_rate: int, config: FeatureConfig) -> _FloatArray:
    """Compute the spectrograms of one utterance.

    Args:
        samples: (S,) float32 in [-1, 1].
        sampling_rate: in Hz.
        config: of kind "spectrogram".

    Returns:
        (T, D) float32 in [0, 1], each row [mel | linear], T = 1 + S // shift: frame t is centred at sample
        t * shift; beyond the edges there is silence.

    Raises:
        ConfigError: no samples, NaN among them, or settings that do not fit the sampling rate.
    """
    assert config.kind == "spectrogram"
    check_samples(samples)
    check_spectrogram(sampling_rate, config)
    emphasised = _preemphasise(samples, config.preemphasis)
    num_frames = num_frames_of(len(samples), sampling_rate, config)
    shift = shift_samples(sampling_rate, config)
    padded = np.pad(emphasised, config.num_fft // 2)
    frames = np.lib.stride_tricks.sliding_window_view(padded, config.num_fft)[::shift]  # (T, N)
    window = _window(window_samples(sampling_rate, config), config.num_fft)
    filters = mel_filters(sampling_rate, config.num_fft, config.num_mel_bins).T  # (L, M)
    rows = np.empty((num_frames, config.feature_dim), dtype=np.float32)
    for start in range(0, num_frames, _FRAMES_A_BLOCK):
        block = slice(start, min(num_frames, start + _FRAMES_A_BLOCK))
        magnitudes = np.abs(np.fft.rfft(frames[block] * window))  # (t, L)
        np.matmul(magnitudes, filters, out=rows[block, : config.num_mel_bins])
        rows[block, config.num_mel_bins :] = magnitudes
    return _scale(rows, config)


def invert_linear(
    linear: _FloatArray,
    sampling_rate: int,
    config: FeatureConfig,
    *,
    num_iterations: int = 60,
    power: float = 1.5,
) -> _FloatArray:
    """Turn a linear spectrogram into sound by Griffin and Lim's algorithm.

    Args:
        linear: (T, L) in [0, 1], the columns after the mel values in `compute_spectrogram`.
        sampling_rate: in Hz.
        config: the settings with which the spectrogram was computed.
        num_iterations: iterations of the search for phases; the initial phases are random, but always the
            same.
        power: exponent applied to the magnitudes, which removes some of the noise between the harmonics
            (public Tacotron code uses 1.5 for a network's output; 1 keeps the levels).

    Returns:
        (S,) float32 of (T - 1) * shift samples, not clipped.

    Raises:
        ConfigError: the spectrogram has another shape or too few frames.
    """
    if linear.ndim != 2 or linear.shape[1] != config.linear_dim or len(linear) < 2:
        raise ConfigError(
            f"a spectrogram of shape {linear.shape} cannot be turned into sound; "
            f"give (T, {config.linear_dim}), T above 1"
        )
    magnitudes = unscale(linear.astype(np.float32), config) ** power
    window = _window(window_samples(sampling_rate, config), config.num_fft)
    sound = griffin_lim(magnitudes, window, shift_samples(sampling_rate, config), num_iterations)
    return _deemphasise(sound, config.preemphasis)


def unscale(values: _FloatArray, config: FeatureConfig) -> _FloatArray:
    """Return the magnitudes that values in [0, 1] represent."""
    levels = np.clip(values, 0.0, 1.0) * -config.min_level_db + config.min_level_db + config.ref_level_db
    magnitudes: _FloatArray = np.power(np.float32(10.0), levels * np.float32(0.05))
    return magnitudes


@lru_cache(maxsize=4)
def mel_filters(sampling_rate: int, num_fft: int, num_mel_bins: int) -> _FloatArray:
    """Return (M, L) triangular filters of equal area between 0 Hz and half the sampling rate.

    Source: M. Slaney, "Auditory Toolbox", 1998: the mel scale is linear up to 1 kHz and logarithmic above.
    """
    lines = np.linspace(0.0, sampling_rate / 2.0, num_fft // 2 + 1)  # Hz
    edges = _hz_of(np.linspace(0.0, _slaney_mel(sampling_rate / 2.0), num_mel_bins + 2))
    widths = np.diff(edges)
    ramps = edges[:, None] - lines  # (M + 2, L)
    rising, falling = -ramps[:-2] / widths[:-1, None], ramps[2:] / widths[1:, None]
    filters = np.maximum(0.0, np.minimum(rising, falling)) * (2.0 / (edges[2:] - edges[:-2]))[:, None]
    result = filters.astype(np.float32)
    result.flags.writeable = False  # cached and returned again
    return result


_LINEAR_HZ_A_MEL = 200.0 / 3.0
_BREAK_HZ = 1000.0
_BREAK_MEL = _BREAK_HZ / _LINEAR_HZ_A_MEL
_LOG_STEP = np.log(6.4) / 27.0  # per mel above the break


def _slaney_mel(frequency_hz: float) -> float:
    if frequency_hz < _BREAK_HZ:
        return frequency_hz / _LINEAR_HZ_A_MEL
    return float(_BREAK_MEL + np.log(frequency_hz / _BREAK_HZ) / _LOG_STEP)


def _hz_of(mel: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    above = _BREAK_HZ * np.exp(_LOG_STEP * (np.maximum(mel, _BREAK_MEL) - _BREAK_MEL))
    return np.where(mel < _BREAK_MEL, mel * _LINEAR_HZ_A_MEL, above)


@lru_cache(maxsize=4)
def _window(num_samples: int, num_fft: int) -> _FloatArray:
    """Return (N,) a periodic Hann window with zeros on both sides."""
    hann = 0.5 - 0.5 * np.cos(2.0 * np.pi * np.arange(num_samples) / num_samples)
    before = (num_fft - num_samples) // 2
    window = np.zeros(num_fft, dtype=np.float32)
    window[before : before + num_samples] = hann
    window.flags.writeable = False
    return window


def _preemphasise(samples: _FloatArray, weight: float) -> _FloatArray:
    emphasised = samples.astype(np.float32)  # a copy
    emphasised[1:] -= np.float32(weight) * samples[:-1]
    return emphasised


def _deemphasise(samples: _FloatArray, weight: float) -> _FloatArray:
    """Undo `_preemphasise`: y_t = x_t + weight y_(t-1)."""
    blocks = np.pad(samples.astype(np.float64), (0, -len(samples) % _SAMPLES_A_BLOCK))
    blocks = blocks.reshape(-1, _SAMPLES_A_BLOCK)
    powers = weight ** np.arange(_SAMPLES_A_BLOCK + 1)
    age = np.subtract.outer(np.arange(_SAMPLES_A_BLOCK), np.arange(_SAMPLES_A_BLOCK))
    blocks = blocks @ np.where(age >= 0, powers[np.maximum(age, 0)], 0.0).T  # as if each began in silence
    for number in range(1, len(blocks)):
        blocks[number] += blocks[number - 1, -1] * powers[1:]
    return blocks.reshape(-1)[: len(samples)].astype(np.float32)


def _scale(magnitudes: _FloatArray, config: FeatureConfig) -> _FloatArray:
    """Convert magnitudes to decibels and scale these to [0, 1], in place."""
    np.maximum(magnitudes, np.float32(_LEAST_MAGNITUDE), out=magnitudes)
    np.log10(magnitudes, out=magnitudes)
    magnitudes *= np.float32(20.0)
    magnitudes -= np.float32(config.ref_level_db + config.min_level_db)
    magnitudes /= np.float32(-config.min_level_db)
    return np.clip(magnitudes, 0.0, 1.0, out=magnitudes)
