"""Compute a sound from magnitudes by Griffin and Lim's algorithm.

Equals librosa's griffinlim with its defaults, but needs neither numba, which compiles for half a minute
before the first sound, nor scikit-learn.

Legend: T frames, N points of the transform, L = N // 2 + 1 lines, H samples from frame to frame.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_FloatArray = npt.NDArray[np.float32]
_ComplexArray = npt.NDArray[np.complex64]

#: How far each step goes beyond the latest estimate, as a share of the change.
_MOMENTUM = 0.99
_TINY = np.finfo(np.float32).tiny


def griffin_lim(magnitudes: _FloatArray, window: _FloatArray, shift: int, num_iterations: int) -> _FloatArray:
    """Return a sound whose short-time Fourier transform comes close to the magnitudes.

    Args:
        magnitudes: (T, L); frame t is centred at sample t * shift.
        window: (N,) window of analysis and synthesis.
        shift: H.
        num_iterations: iterations of the search for phases; the initial phases are random, but always the
            same.

    Returns:
        (S,) of (T - 1) * H samples.

    Source: D. Griffin, J. Lim, "Signal estimation from modified short-time Fourier transform", 1984, with the
    momentum of N. Perraudin, P. Balazs, P. Soendergaard, "A fast Griffin-Lim algorithm", 2013.
    """
    num_frames, num_lines = magnitudes.shape
    # Drawn line by line, as in librosa: so the same spectrograms give the same sounds.
    phases = np.random.RandomState(0).random((num_lines, num_frames)).T
    estimate = (magnitudes * np.exp(2j * np.pi * phases)).astype(np.complex64)
    before: _ComplexArray | None = None
    for _ in range(num_iterations):
        rebuilt = _transform(_sound(estimate, window, shift), window, shift)
        estimate = rebuilt if before is None else rebuilt - np.float32(_MOMENTUM / (1 + _MOMENTUM)) * before
        estimate = estimate / (np.abs(estimate) + _TINY) * magnitudes
        before = rebuilt
    return _sound(estimate, window, shift)


def _transform(sound: _FloatArray, window: _FloatArray, shift: int) -> _ComplexArray:
    """Return the short-time Fourier transform (T, L), with silence beyond the edges."""
    padded = np.pad(sound, len(window) // 2)
    frames = np.lib.stride_tricks.sliding_window_view(padded, len(window))[::shift]  # (T, N)
    return np.fft.rfft(frames * window).astype(np.complex64, copy=False)


def _sound(transform: _ComplexArray, window: _FloatArray, shift: int) -> _FloatArray:
    """Return the sound whose transform is closest in the least-squares sense: (S,)."""
    frames = np.fft.irfft(transform, n=len(window)).astype(np.float32, copy=False) * window  # (T, N)
    weights: _FloatArray = np.broadcast_to(window**2, frames.shape)
    inner = slice(len(window) // 2, len(window) // 2 + (len(transform) - 1) * shift)
    sound, weight = (_overlapped(parts, shift)[inner] for parts in (frames, weights))
    return np.divide(sound, weight, out=sound, where=weight > _TINY)


def _overlapped(frames: _FloatArray, shift: int) -> _FloatArray:
    """Overlap-add frames (T, N), each `shift` samples after the one before."""
    num_frames, size = frames.shape
    pieces = -(-size // shift)
    padded = np.pad(frames, ((0, 0), (0, pieces * shift - size))).reshape(num_frames, pieces, shift)
    total = np.zeros((num_frames + pieces - 1, shift), dtype=np.float32)
    for number in range(pieces):
        total[number : number + num_frames] += padded[:, number]
    return total.reshape(-1)
