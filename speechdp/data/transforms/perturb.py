"""Perturb recordings at random: other speeds, and noise.

Legend: U utterances, S samples of one, T frames of one, R rows of all, L samples of the noise bank.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from speechdp.data.plan.segments import size_at_speed
from speechdp.data.transforms.augment_options import NoiseLevel
from speechdp.data.transforms.framing import Framing, multiply

SPEEDS = (90, 100, 110)
#: Separate the random generators that draw for different purposes from the same seed.
_SPEED_STREAM, _NOISE_STREAM, _BANK_STREAM = 0x5EED_0001, 0x5EED_0002, 0x5EED_0003
_BANK_SAMPLES = 1 << 17
#: Resampling keeps frequencies up to this share of half the rate, with this many zero crossings on each side.
_PASS_SHARE, _ZERO_CROSSINGS = 0.95, 16


def speed_of_utterances(seed: int, epoch: int, num_utterances: int) -> npt.NDArray[np.int64]:
    """Draw the speed of every utterance in an epoch, in percent: (U,).

    Source: Ko et al. 2015 (Audio augmentation for speech recognition): 90, 100 and 110 percent; here each
    utterance is used at only one of the three in an epoch.
    """
    rng = np.random.default_rng([seed, epoch, _SPEED_STREAM])
    return rng.choice(np.array(SPEEDS, dtype=np.int64), size=num_utterances)


def perturbed_targets(
    targets: npt.NDArray[np.int32], percent: int, start: int, num: int
) -> npt.NDArray[np.int32]:
    """Return the targets of frames start:start+num of an utterance at another speed: (num,).

    Each frame takes the target of the recorded frame that contains its centre.

    Args:
        targets: (T,) targets of the utterance as recorded.
        percent: the speed.
    """
    frames = (2 * np.arange(start, start + num) + 1) * percent // 200
    return targets[np.minimum(frames, len(targets) - 1)]


def at_speed(waves: Sequence[Tensor], percent: int) -> list[Tensor]:
    """Resample utterances (S,) on one device, so that they play at `percent` of their speed.

    The pitch changes with the speed.  Each output sample is a sum of input samples weighted by a sinc under a
    raised cosine, cut off below half of both rates; the weights of each output phase sum to 1.

    Returns:
        (size_at_speed(S, percent),) float32 each.
    """
    if percent == 100:
        return list(waves)
    weights, framing = _resampling(percent, waves[0].device)
    num_phases = weights.shape[1]
    sizes = [size_at_speed(len(wave), percent) for wave in waves]
    num_rows = [-(-size // num_phases) for size in sizes]
    rows = framing.rows(framing.lay_out(waves, num_rows, reflect=False))  # (R, K)
    starts = framing.starts(num_rows)
    flat = multiply(rows[: starts[-2] + num_rows[-1]], weights).flatten()  # (R * phases,)
    return [flat[at * num_phases :][:size] for at, size in zip(starts, sizes, strict=False)]


@dataclass(frozen=True)
class NoiseDraw:
    """The noise of one utterance: white or pink, from sample `offset` of the bank, at `snr_db`."""

    pink: bool
    offset: int
    snr_db: float


def draw_noise(level: NoiseLevel, seed: int, name: Sequence[int]) -> NoiseDraw:
    """Draw the noise of an utterance; `name` identifies it by numbers from 0 upwards, epoch included."""
    rng = np.random.default_rng([seed, _NOISE_STREAM, *name])
    return NoiseDraw(
        bool(rng.integers(2)),
        int(rng.integers(_BANK_SAMPLES)),
        float(rng.uniform(level.low_db, level.high_db)),
    )


def add_noise(waves: Sequence[Tensor], draws: Sequence[NoiseDraw], seed: int) -> list[Tensor]:
    """Add noise to utterances (S,) on one device, at a ratio that holds for each utterance as a whole.

    At the end of the bank the noise continues from its start.  Digital silence stays as it is.
    """
    bank = _noise_bank(seed, waves[0].device)
    sizes = [len(wave) for wave in waves]
    pieces = []
    for size, draw in zip(sizes, draws, strict=True):
        noise, end = bank[int(draw.pink)], draw.offset + size
        pieces.append(
            (noise if end <= len(noise) else noise.repeat(-(-end // len(noise))))[draw.offset : end]
        )
    flat, noise = torch.cat(list(waves)), torch.cat(pieces)
    ratios = torch.tensor([10 ** (-draw.snr_db / 10) for draw in draws], dtype=torch.float64)
    lengths = torch.tensor(sizes).to(flat.device)
    power, noise_power = _energies(flat, lengths), _energies(noise, lengths)
    gains = (ratios.to(flat.device) * power / noise_power).sqrt_().float()
    noise = noise * gains.repeat_interleave(lengths, output_size=len(flat))
    return list(torch.split(flat + noise, sizes))


def _energies(flat: Tensor, lengths: Tensor) -> Tensor:
    # Adds one sample after the other, whatever the number of threads, so the result does not vary.
    return torch.segment_reduce(flat.double().square_(), "sum", lengths=lengths, unsafe=True)


@functools.lru_cache(maxsize=16)
def _resampling(percent: int, device: torch.device) -> tuple[Tensor, Framing]:
    """Return the weights of each output phase, (K, phases) float64, and the framing of their windows."""
    common = math.gcd(percent, 100)
    step, num_phases = percent // common, 100 // common
    cutoff = _PASS_SHARE * min(1.0, num_phases / step)
    width = math.ceil(_ZERO_CROSSINGS / cutoff)
    places = np.arange(-width, step + width + 1)[:, None] - np.arange(num_phases) * (step / num_phases)
    inside = np.clip(places * (cutoff / _ZERO_CROSSINGS), -1, 1)
    weights = np.sinc(cutoff * places) * (0.5 + 0.5 * np.cos(np.pi * inside))
    weights /= weights.sum(axis=0)
    framing = Framing(len(weights), step, -width)
    return torch.from_numpy(weights).to(device), framing


@functools.lru_cache(maxsize=4)
def _noise_bank(seed: int, device: torch.device) -> Tensor:
    """Make white and pink noise of mean power 1: (2, L)."""
    white = np.random.default_rng([seed, _BANK_STREAM]).standard_normal((2, _BANK_SAMPLES))
    spectrum = np.fft.rfft(white[1])
    spectrum[1:] /= np.sqrt(np.arange(1, len(spectrum)))  # power falls as 1 / frequency
    spectrum[0] = 0
    bank = np.stack([white[0], np.fft.irfft(spectrum, _BANK_SAMPLES)])
    bank /= np.sqrt((bank**2).mean(axis=1, keepdims=True))
    return torch.from_numpy(bank).to(device, torch.float32)
