"""Compute Kaldi's log-mel and MFCC features of several utterances at once, on the CPU or on a GPU.

The definitions are those of `features.kaldi_features`; here they are a few operations on one matrix, which
release the GIL.

Legend: U utterances, S samples of one, T frames of one, R frames of all, W samples of a window,
P points of the spectrum, D feature dimensions.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from speechdp.data.signal.features import (
    LOW_FREQ_HZ,
    SILENCE_ALONE,
    STD_FLOOR,
    FeatureConfig,
    audible_beside,
    check_mel_bins,
    loudness_of_silence,
    mel_of,
    shift_samples,
    window_samples,
)
from speechdp.data.transforms.framing import Framing, multiply

FloatArray = npt.NDArray[np.float64]

_PRE_EMPHASIS = 0.97
_LIFTER = 22.0
_EPSILON = float(np.finfo(np.float32).eps)
#: Frames computed together: on a CPU, what fits its cache; on a GPU, a limit on the memory.
_BLOCK_FRAMES, _BLOCK_FRAMES_GPU = 256, 16384


@dataclass(frozen=True)
class _Tables:
    """Tables that depend only on sampling rate, settings and device.

    Attributes:
        framing: where the windows lie.
        window: (W,) Povey's window.
        num_fft: points of the transform.
        mel: (P, bins) float64, the filters, without the point at half the sampling rate.
        waves: the transform as two products, with (W, P) float64 cosines and sines; None: use the FFT.
        cosines: (bins, D) float64, cosine transform and lifter; None for log_mel.
    """

    framing: Framing
    window: Tensor
    num_fft: int
    mel: Tensor
    waves: tuple[Tensor, Tensor] | None
    cosines: Tensor | None


def raw_features(
    waves: Sequence[Tensor], num_frames: Sequence[int], sampling_rate: int, config: FeatureConfig
) -> Tensor:
    """Compute the features of utterances on one device, without normalising them.

    On the CPU pass one utterance at a time: then its bits do not depend on other utterances.

    Args:
        waves: (S,) float32 each, in 16-bit scale, S > 0.
        num_frames: T of each, T > 0; `features.num_frames_of` gives Kaldi's.
        sampling_rate: in Hz.
        config: kind and sizes.

    Returns:
        (R, D) float32, the utterances one after another.

    Raises:
        ConfigError: more mel bins than the sampling rate can fill.
    """
    tables = _tables(sampling_rate, config, waves[0].device)
    flat = tables.framing.lay_out(waves, num_frames, reflect=True)
    emphasised = flat.clone()
    emphasised[1:] -= _PRE_EMPHASIS * flat[:-1]
    starts = tables.framing.starts(num_frames)
    num_rows = starts[-2] + num_frames[-1]
    frames = tables.framing.rows(flat)[:num_rows]  # (R + spare, W)
    emphasised = tables.framing.rows(emphasised)[:num_rows]
    block = _BLOCK_FRAMES if flat.device.type == "cpu" else _BLOCK_FRAMES_GPU
    rows = torch.cat(
        [
            _block(x, y, tables)
            for x, y in zip(torch.split(frames, block), torch.split(emphasised, block), strict=True)
        ]
    )
    if len(waves) == 1:
        return rows
    return torch.cat([rows[at : at + num] for at, num in zip(starts, num_frames, strict=False)])


def normalise_rows(rows: Tensor, num_frames: Sequence[int], config: FeatureConfig) -> Tensor:
    """Normalise utterances' features (R, D) as `features.normalise` does each."""
    if not (config.mean_normalise or config.variance_normalise):
        return rows
    if not bool(_silent_rows(rows, config).any()):
        return _normalised(rows, num_frames, config)
    return torch.cat(
        [_normalised_beside_silence(part, config) for part in torch.split(rows, list(num_frames))]
    )


def audible_frames(features: Tensor, config: FeatureConfig) -> Tensor:
    """Return which frames of unnormalised features (T, D) are not digital silence: (T,) bool."""
    return audible_beside(_silent_rows(features, config))


def _silent_rows(rows: Tensor, config: FeatureConfig) -> Tensor:
    silence = loudness_of_silence(config)
    if silence is None:
        return rows.new_zeros(len(rows), dtype=torch.bool)
    columns, below = silence
    return (rows[:, columns] < below).all(dim=1)


def _normalised_beside_silence(features: Tensor, config: FeatureConfig) -> Tensor:
    audible = audible_frames(features, config)
    return beside_silence(_normalised(features[audible], [int(audible.sum())], config), audible)


def beside_silence(normalised: Tensor, audible: Tensor) -> Tensor:
    """Put normalised frames where `audible`, (T,) bool, is true, and their lowest values elsewhere.

    If no frame is audible, all values are SILENCE_ALONE.
    """
    features = normalised.new_full((len(audible), normalised.shape[1]), SILENCE_ALONE)
    if len(normalised):
        features[audible], features[~audible] = normalised, normalised.amin(dim=0)
    return features


def _normalised(rows: Tensor, num_frames: Sequence[int], config: FeatureConfig) -> Tensor:
    if not len(rows):
        return rows
    if config.mean_normalise:
        rows = rows - _spread(_means(rows, num_frames).float(), num_frames)
    if config.variance_normalise:
        centred = rows.double() - _spread(_means(rows, num_frames), num_frames)
        std = _means(centred.square_(), num_frames).sqrt().float()
        rows = rows / _spread(std.clamp_(min=STD_FLOOR), num_frames)
    return rows


def _block(frames: Tensor, emphasised: Tensor, tables: _Tables) -> Tensor:
    """Compute the features of windows (R, W), given without and with pre-emphasis: (R, D).

    The window's first weight is 0, so the effect of pre-emphasis on a window's first sample does not matter.
    """
    num_samples = frames.shape[1]
    means = frames.mean(dim=1, keepdim=True)
    # Only the FFT needs zeros after a window.
    padded = frames.new_zeros(len(frames), tables.num_fft if tables.waves is None else num_samples)
    windowed = padded[:, :num_samples]
    torch.sub(emphasised, means, alpha=1 - _PRE_EMPHASIS, out=windowed)
    windowed *= tables.window
    if tables.waves is None:
        spectrum = torch.view_as_real(torch.fft.rfft(padded))[:, : tables.num_fft // 2]  # (R, P, 2)
        real, imaginary = spectrum.unbind(2)
    else:
        real, imaginary = (multiply(windowed, wave) for wave in tables.waves)
    power = real.square()
    power.addcmul_(imaginary, imaginary)
    log_mel = multiply(power, tables.mel).clamp_(min=_EPSILON).log_()
    if tables.cosines is None:
        return log_mel
    cepstra = multiply(log_mel, tables.cosines)
    # Kaldi replaces C0 by the log-energy of the window before pre-emphasis.
    cepstra[:, 0] = (frames - means).square_().sum(dim=1).clamp_(min=_EPSILON).log_()
    return cepstra


def _means(rows: Tensor, num_frames: Sequence[int]) -> Tensor:
    """Return the mean of each utterance's rows (R, D), summed in double precision: (U, D)."""
    lengths = torch.tensor(num_frames).to(rows.device)
    # Adds one frame after the other, whatever the number of threads, so the result does not vary.
    sums = torch.segment_reduce(rows.double(), "sum", lengths=lengths, unsafe=True)
    return sums / lengths.unsqueeze(1)


def _spread(values: Tensor, num_frames: Sequence[int]) -> Tensor:
    """Repeat each utterance's values (U, D) for its frames: (R, D)."""
    if len(num_frames) == 1:
        return values
    repeats = torch.tensor(num_frames).to(values.device)
    return values.repeat_interleave(repeats, dim=0, output_size=sum(num_frames))


@functools.lru_cache(maxsize=16)
def _tables(sampling_rate: int, config: FeatureConfig, device: torch.device) -> _Tables:
    check_mel_bins(sampling_rate, config)
    size, hop = window_samples(sampling_rate, config), shift_samples(sampling_rate, config)
    num_fft = 1 << (size - 1).bit_length()
    window = (0.5 - 0.5 * np.cos(2 * np.pi / (size - 1) * np.arange(size))) ** 0.85
    cosines = None
    if config.kind == "mfcc":
        cosines = torch.from_numpy(_cosines(config.num_mel_bins, config.num_ceps)).to(device)
    waves = None
    if device.type != "cpu":
        # Not by cuFFT: it sends a plan's tables to the GPU on the default stream, and features are computed
        # on another stream, which does not wait for it.  With other processes on the GPU, this has ended
        # trainings with illegal memory accesses.
        waves = _waves(size, num_fft, device)
    return _Tables(
        framing=Framing(size, hop, 0 if config.snip_edges else hop // 2 - size // 2),
        window=torch.from_numpy(window).to(device, torch.float32),
        num_fft=num_fft,
        mel=torch.from_numpy(_mel_filters(sampling_rate, num_fft, config.num_mel_bins)).to(device),
        waves=waves,
        cosines=cosines,
    )


def _waves(num_samples: int, num_fft: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cosines and sines, (W, P) float64 each; products with them are the two parts of the FFT."""
    angles = 2 * np.pi / num_fft * np.outer(np.arange(num_samples), np.arange(num_fft // 2))
    return torch.from_numpy(np.cos(angles)).to(device), torch.from_numpy(np.sin(angles)).to(device)


def _mel_filters(sampling_rate: int, num_fft: int, num_bins: int) -> FloatArray:
    """Return Kaldi's triangular filters, (P, bins)."""
    points = mel_of(np.arange(num_fft // 2) * (sampling_rate / num_fft))[:, None]
    low, high = mel_of(np.array([LOW_FREQ_HZ, sampling_rate / 2]))
    edges = low + (high - low) / (num_bins + 1) * np.arange(num_bins + 2)
    left, centre, right = edges[:-2], edges[1:-1], edges[2:]
    rising, falling = (points - left) / (centre - left), (right - points) / (right - centre)
    filters: FloatArray = np.maximum(np.minimum(rising, falling), 0)
    return filters


def _cosines(num_bins: int, num_ceps: int) -> FloatArray:
    """Return the orthonormal cosine transform with Kaldi's lifter, (bins, D)."""
    k = np.arange(num_ceps)
    transform: FloatArray = np.sqrt(2 / num_bins) * np.cos(
        np.pi / num_bins * (np.arange(num_bins)[:, None] + 0.5) * k
    )
    transform[:, 0] = np.sqrt(1 / num_bins)
    transform *= 1 + 0.5 * _LIFTER * np.sin(np.pi * k / _LIFTER)
    return transform
