"""Read audio files, and find where speech starts and ends in them.

Legend: S samples, T frames.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import soundfile
import soxr

from speechdp.data.signal.features import FeatureConfig
from speechdp.errors import ConfigError

_REMEDY = "convert it to mono 16-bit WAV or FLAC, or leave it out"
_PIECE_SAMPLES = 1 << 22
#: A frame this far under the utterance's loudest, in dB, is silence ...
_SILENCE_DB = 40.0
#: ... if at least this many such frames stand together at an edge.
_MIN_SILENCE_FRAMES = 5


@dataclass(frozen=True)
class AudioInfo:
    """What a file's header says."""

    path: Path
    sampling_rate: int
    num_samples: int


def probe(path: Path) -> AudioInfo:
    """Read an audio file's header.

    Raises:
        ConfigError: missing, not audio, empty, or of several channels.
    """
    try:
        info = soundfile.info(str(path))
    except (soundfile.LibsndfileError, OSError) as error:
        raise _unreadable(path, error) from error
    if info.channels != 1:
        raise ConfigError(
            f"{path}: has {info.channels} channels; write one file per channel, e.g. sox IN OUT remix 1"
        )
    if info.frames <= 0:
        raise ConfigError(f"{path}: unreadable audio (0 samples); {_REMEDY}")
    return AudioInfo(path, info.samplerate, info.frames)


def common_sampling_rate(infos: Sequence[AudioInfo], resample_hz: int | None) -> int:
    """Return the sampling rate the features are made at, in Hz.

    Raises:
        ConfigError: the files differ and no rate was asked for; names two of them.
    """
    if resample_hz is not None:
        if resample_hz < 1000:
            raise ConfigError(f"--resample {resample_hz}: give a rate in Hz, e.g. 16000")
        return resample_hz
    first = infos[0]
    for info in infos:
        if info.sampling_rate != first.sampling_rate:
            raise ConfigError(
                f"mixed sampling rates: {first.path} has {first.sampling_rate} Hz, {info.path} has "
                f"{info.sampling_rate} Hz; add --resample {min(first.sampling_rate, info.sampling_rate)}"
            )
    return first.sampling_rate


def read_audio(path: Path, sampling_rate: int) -> npt.NDArray[np.float32]:
    """Read a file of one channel, resampled if its rate is another: (S,) float32 in [-1, 1].

    Raises:
        ConfigError: missing, not audio, empty, cut short, with NaN, or of several channels.
    """
    try:
        with soundfile.SoundFile(str(path)) as file:
            announced, rate = file.frames, file.samplerate
            if file.channels != 1:
                raise ConfigError(f"{path}: has {file.channels} channels; write one file per channel")
            # In pieces: room for all that the header announces may be more than there is.
            pieces = [np.empty(0, dtype=np.float32)]
            while len(piece := file.read(_PIECE_SAMPLES, dtype="float32")):
                pieces.append(piece)
            samples: npt.NDArray[np.float32] = np.concatenate(pieces)
    except (soundfile.LibsndfileError, OSError) as error:
        raise _unreadable(path, error) from error
    if len(samples) == 0 or len(samples) < announced:
        raise ConfigError(f"{path}: unreadable audio ({len(samples)} of {announced} samples); {_REMEDY}")
    if not np.isfinite(samples).all():
        raise ConfigError(f"{path}: unreadable audio (NaN or infinite samples); {_REMEDY}")
    return resample(samples, rate, sampling_rate)


def resample(samples: npt.NDArray[np.float32], from_hz: int, to_hz: int) -> npt.NDArray[np.float32]:
    """Change the sampling rate of (S,) samples with soxr's high quality."""
    if from_hz == to_hz:
        return samples
    changed: npt.NDArray[np.float32] = soxr.resample(samples, from_hz, to_hz, quality="HQ")
    return changed


def to_int16(samples: npt.NDArray[np.float32]) -> npt.NDArray[np.int16]:
    """Round (S,) samples in [-1, 1] to 16 bits; exact for what was read from 16-bit audio, clipped beyond."""
    scaled = np.rint(samples.astype(np.float64) * 32768.0)
    return np.clip(scaled, -32768, 32767).astype(np.int16)


def edge_silence(
    samples: npt.NDArray[np.float32], sampling_rate: int, config: FeatureConfig, num_frames: int
) -> tuple[int, int]:
    """Count the frames of silence before and after speech, by a simple rule on the energy.

    A frame is silent if its energy lies more than 40 dB under the loudest frame's; silent frames count
    if at least 5 stand together at the edge.  Shorter runs belong to the word (a stop's closure).

    Returns:
        Leading and trailing frames; (0, 0) where all frames would be silent.
    """
    shift = sampling_rate * config.frame_shift_s
    half_window = sampling_rate * config.frame_length_ms / 2000.0
    centres = (np.arange(num_frames) + 0.5) * shift  # Kaldi's, with snip_edges false
    starts = np.clip(centres - half_window, 0, len(samples)).astype(np.int64)
    ends = np.clip(centres + half_window, 0, len(samples)).astype(np.int64)
    total = np.concatenate([[0.0], np.cumsum(np.square(samples, dtype=np.float64))])
    energy = total[ends] - total[starts]  # (T,)
    loud = np.flatnonzero(energy > energy.max(initial=0.0) * 10.0 ** (-_SILENCE_DB / 10.0))
    if len(loud) == 0:
        return 0, 0
    leading, trailing = int(loud[0]), num_frames - 1 - int(loud[-1])
    return (
        leading if leading >= _MIN_SILENCE_FRAMES else 0,
        trailing if trailing >= _MIN_SILENCE_FRAMES else 0,
    )


def _unreadable(path: Path, error: Exception) -> ConfigError:
    if not path.exists():
        return ConfigError(
            f"{path}: no such audio file (relative names start from the current folder); check the path"
        )
    reason = " ".join(str(getattr(error, "error_string", error)).split()).rstrip(".")
    return ConfigError(f"{path}: unreadable audio ({reason}); {_REMEDY}")
