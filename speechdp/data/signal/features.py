"""Compute log-mel or MFCC features by Kaldi's definitions, and define the settings of all kinds of features.

Legend: S samples, T frames, D feature dimensions.
"""

from __future__ import annotations

import functools
import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from speechdp.counting import counted
from speechdp.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

_MaskT = TypeVar("_MaskT", npt.NDArray[np.bool_], "Tensor")

#: Least standard deviation to divide by: values that are equal in all frames stay zero.
STD_FLOOR = 1e-2
#: Limits for digital silence, nats: an isolated step of 16-bit samples gives at most 3.4 in a band, and 0 of
#: energy.  The quietest backgrounds of AN4, FSDD, kathleen16k and yesno have at least 7 in their loudest
#: band.
_LOUDEST_SILENT_BAND, _LOUDEST_SILENT_ENERGY = 4.0, 1.0
#: Normalised features of an utterance that is only digital silence: as low as quiet frames.
SILENCE_ALONE = -2.0
#: Fewest mel filters.
_LEAST_MEL_BINS = 3
#: Kaldi's lowest mel edge, in Hz.
LOW_FREQ_HZ = 20.0
#: Settings that have other values only for data from Kaldi.
_KALDI_DEFAULTS: dict[str, Any] = {"snip_edges": False, "kaldi_dim": 0, "cmvn": "utterance"}
#: Settings that only spectrograms have.
_SPECTROGRAM_FIELDS = ("num_fft", "preemphasis", "min_level_db", "ref_level_db")


@dataclass(frozen=True)
class FeatureConfig:
    """How features are made; stored in every shard."""

    kind: Literal["log_mel", "mfcc", "kaldi", "spectrogram"] = "log_mel"
    """log_mel: logarithms of mel filter-bank energies; mfcc: their cosine transform; kaldi: Kaldi's own,
    read and not computed; spectrogram: mel and linear magnitudes to synthesise speech from."""
    num_mel_bins: int = 40
    """Number of mel filters."""
    num_ceps: int = 13
    """Number of cepstral coefficients (mfcc only)."""
    frame_length_ms: float = 25.0
    """Window length in milliseconds."""
    frame_shift_ms: float = 10.0
    """Time between frames in milliseconds."""
    mean_normalise: bool = True
    """Subtract each utterance's mean of each dimension."""
    variance_normalise: bool = True
    """Divide by each utterance's standard deviation of each dimension."""
    dtype: Literal["float16", "float32"] = "float16"
    """Number format in the shards; float16 halves the bytes read."""
    snip_edges: bool = False
    """Only frames whose window lies within the recording, as Kaldi's own default has it."""
    kaldi_dim: int = 0
    """Number of values a frame (kaldi only)."""
    cmvn: Literal["utterance", "speaker"] = "utterance"
    """Whose mean and deviation are taken: the utterance's, or the speaker's from Kaldi's cmvn.scp."""
    num_fft: int = 0
    """Points of the Fourier transform (spectrogram only)."""
    preemphasis: float = 0.0
    """Weight of the sample before that is subtracted from each (spectrogram only)."""
    min_level_db: float = -100.0
    """Level that becomes 0, in dB under ref_level_db (spectrogram only)."""
    ref_level_db: float = 20.0
    """Level that becomes 1, in dB (spectrogram only)."""

    def __post_init__(self) -> None:
        if self.kind not in ("log_mel", "mfcc", "kaldi", "spectrogram"):
            raise ConfigError(f"features {self.kind!r} are not known; choose log_mel or mfcc")
        if self.dtype not in ("float16", "float32"):
            raise ConfigError(f"dtype {self.dtype!r} is not known; choose float16 or float32")
        if self.num_mel_bins < _LEAST_MEL_BINS:
            raise ConfigError(f"--num-mel-bins {self.num_mel_bins}: must be at least {_LEAST_MEL_BINS}")
        for option, value in (
            ("--frame-length-ms", self.frame_length_ms),
            ("--frame-shift-ms", self.frame_shift_ms),
        ):
            if not 0 < value < math.inf:
                raise ConfigError(f"{option} {value:g}: must be a number above 0, e.g. 10")
        if self.cmvn not in ("utterance", "speaker") or (self.kind == "kaldi") != (self.kaldi_dim > 0):
            raise ConfigError(
                "kaldi_dim is the number of values of kaldi features; cmvn is utterance or speaker"
            )
        if self.kind == "mfcc" and not 1 <= self.num_ceps <= self.num_mel_bins:
            raise ConfigError(f"num_ceps {self.num_ceps} must lie in 1..num_mel_bins ({self.num_mel_bins})")
        if self.kind == "spectrogram":
            self._check_spectrogram()

    def _check_spectrogram(self) -> None:
        if self.num_fft < 4 or self.num_fft % 2:
            raise ConfigError(f"num_fft {self.num_fft} of a spectrogram must be even and above 3, e.g. 512")
        if not 0.0 <= self.preemphasis < 1.0:
            raise ConfigError(f"preemphasis {self.preemphasis} must lie in 0..1, 1 excluded, e.g. 0.97")
        if self.min_level_db >= 0.0:
            raise ConfigError(f"min_level_db {self.min_level_db} must be below 0, e.g. -100")
        if self.mean_normalise or self.variance_normalise:
            raise ConfigError("spectrograms are scaled by their level; set no mean or variance normalisation")

    @property
    def feature_dim(self) -> int:
        """Number of values a frame (D)."""
        return {
            "log_mel": self.num_mel_bins,
            "mfcc": self.num_ceps,
            "kaldi": self.kaldi_dim,
            "spectrogram": self.num_mel_bins + self.linear_dim,
        }[self.kind]

    @property
    def linear_dim(self) -> int:
        """Number of lines of the linear spectrum, which follow the mel values of a frame (L)."""
        return self.num_fft // 2 + 1

    @property
    def frame_shift_s(self) -> float:
        """Time between frames in seconds."""
        return self.frame_shift_ms / 1000.0

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as JSON-like values.

        Those of Kaldi's data and of spectrograms are included only where they are used: they mean nothing for
        other data.
        """
        values = asdict(self)
        if self.kind != "spectrogram":
            values = {name: value for name, value in values.items() if name not in _SPECTROGRAM_FIELDS}
        return {n: v for n, v in values.items() if n not in _KALDI_DEFAULTS or v != _KALDI_DEFAULTS[n]}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> FeatureConfig:
        """Read the result of `to_dict`.  Raises ConfigError on fields that this version does not know."""
        try:
            return cls(**values)
        except TypeError as error:
            raise ConfigError(
                f"feature settings of another version: {error}; prepare the data again"
            ) from error


def num_frames_of(num_samples: int, sampling_rate: int, config: FeatureConfig) -> int:
    """Return the number of frames that Kaldi makes: samples / shift, rounded, or fewer with snip_edges.

    A spectrogram has 1 + samples / shift, rounded down: its first frame is centred at the first sample.
    """
    shift = shift_samples(sampling_rate, config)
    if config.kind == "spectrogram":
        return (num_samples + shift) // shift * (num_samples > 0)
    if config.snip_edges:
        window = int(sampling_rate * 0.001 * config.frame_length_ms)
        num_frames = 1 + (num_samples - window) // shift
        return num_frames * (num_frames > 0)  # arrays of numbers go through as well
    return (num_samples + shift // 2) // shift


def check_samples(samples: npt.NDArray[np.float32]) -> None:
    """Refuse an empty array, more than one channel, and values that are not finite.  Raises ConfigError."""
    if samples.ndim != 1 or samples.size == 0:
        raise ConfigError(f"features need one channel of samples, not an array of shape {samples.shape}")
    if not np.isfinite(samples).all():
        raise ConfigError("samples hold NaN or infinity")


def kaldi_features(
    samples: npt.NDArray[np.float32], sampling_rate: int, config: FeatureConfig, *, snip_edges: bool = False
) -> npt.NDArray[np.float32]:
    """Compute Kaldi's features of (S,) samples in 16-bit scale, not normalised: (T, D) float32."""
    import kaldi_native_fbank as knf  # noqa: PLC0415 - readers of shards do without it

    if config.kind == "kaldi":
        raise ConfigError("Kaldi's own features are read from feats.scp, they cannot be computed")
    assert config.kind in ("log_mel", "mfcc")
    check_mel_bins(sampling_rate, config)
    options = knf.FbankOptions() if config.kind == "log_mel" else knf.MfccOptions()
    options.frame_opts.samp_freq = float(sampling_rate)
    options.frame_opts.frame_length_ms = config.frame_length_ms
    options.frame_opts.frame_shift_ms = config.frame_shift_ms
    options.frame_opts.dither = 0.0
    options.frame_opts.snip_edges = snip_edges
    options.mel_opts.num_bins = config.num_mel_bins
    options.mel_opts.low_freq = LOW_FREQ_HZ
    if config.kind == "log_mel":
        computer = knf.OnlineFbank(options)
    else:
        options.num_ceps = config.num_ceps
        computer = knf.OnlineMfcc(options)
    computer.accept_waveform(float(sampling_rate), np.ascontiguousarray(samples, dtype=np.float32))
    computer.input_finished()
    frames = np.empty((computer.num_frames_ready, config.feature_dim), dtype=np.float32)  # (T, D)
    for t in range(frames.shape[0]):
        frames[t] = computer.get_frame(t)
    return frames


def loudness_of_silence(config: FeatureConfig) -> tuple[slice, float] | None:
    """Return how to distinguish digital silence from anything a microphone records; None: impossible.

    A frame is silent if all its values in these columns are below this limit.  The limit is above what a
    single step of 16-bit samples in the frame, or noise of a tenth of a step, gives there, and below the
    background of any recording.  The frames before and after silence have a few samples of sound at the edge
    of their window: they do not count as audible either.

    Returns:
        Columns of unnormalised features, and the limit, nats.
    """
    if config.kind == "log_mel":
        return slice(None), _LOUDEST_SILENT_BAND
    if config.kind == "mfcc":
        return slice(0, 1), _LOUDEST_SILENT_ENERGY
    return None  # Kaldi's own features have their own scale


def audible_beside(silent: _MaskT) -> _MaskT:
    """Return which frames count as audible, (T,) bool: neither silent nor beside a silent one."""
    audible = ~silent
    audible[1:] &= ~silent[:-1]
    audible[:-1] &= ~silent[1:]
    return audible


def normalise(features: npt.NDArray[np.float32], config: FeatureConfig) -> npt.NDArray[np.float32]:
    """Normalise one utterance's (T, D) features per dimension according to `config`.

    Digital silence, which editors, gates and codecs leave, lies so far below everything else that it would
    shift mean and deviation of the speech.  So neither includes it, and silent frames get the lowest values
    of the other frames, or SILENCE_ALONE if there are none.
    """
    if features.shape[0] == 0 or not (config.mean_normalise or config.variance_normalise):
        return features
    if (silence := loudness_of_silence(config)) is not None:
        columns, below = silence
        silent = np.all(features[:, columns] < below, axis=1)
        if silent.any():
            audible = audible_beside(silent)
            normalised = np.full_like(features, SILENCE_ALONE)
            if audible.any():
                normalised[audible] = _normalised(features[audible], config)
                normalised[~audible] = normalised[audible].min(axis=0)
            return normalised
    return _normalised(features, config)


def _normalised(features: npt.NDArray[np.float32], config: FeatureConfig) -> npt.NDArray[np.float32]:
    if config.mean_normalise:
        features = features - features.mean(axis=0, dtype=np.float64).astype(np.float32)
    if config.variance_normalise:
        std = features.std(axis=0, dtype=np.float64).astype(np.float32)
        features = features / np.maximum(std, STD_FLOOR)
    return features


def usual_mel_bins(sampling_rate: int) -> int:
    """Return the default number of mel filters: 24 up to 8 kHz, else 40.

    At 8 kHz and 25 ms the lowest of 40 filters hold a single line of the spectrum each; on the spoken
    digits 24 gave fewer word errors (docs/results.md).
    """
    return 24 if sampling_rate <= 8000 else 40


def check_mel_bins(sampling_rate: int, config: FeatureConfig) -> None:
    """Refuse frames without samples or without a shift, and more mel bins than the spectrum can fill.

    Kaldi aborts the process if a filter covers no point of the spectrum.
    """
    window = window_samples(sampling_rate, config)
    for option, value, samples, least in (
        ("--frame-length-ms", config.frame_length_ms, window, 2),
        ("--frame-shift-ms", config.frame_shift_ms, shift_samples(sampling_rate, config), 1),
    ):
        if samples < least:
            raise ConfigError(
                f"{option} {value:g}: is less than {counted(least, 'sample')} at {sampling_rate} Hz; give "
                "more, e.g. 10"
            )
    if _fills_mel_bins(config.num_mel_bins, sampling_rate, window):
        return
    most = min(config.num_mel_bins - 1, 2 * window)  # see _fills_mel_bins: larger numbers never fit
    fewer = (n for n in range(most, _LEAST_MEL_BINS - 1, -1) if _fills_mel_bins(n, sampling_rate, window))
    number = next(fewer, None)
    raise ConfigError(
        f"{config.num_mel_bins} mel bins are too many for {sampling_rate} Hz and a window of "
        f"{config.frame_length_ms:g} ms; give a longer --frame-length-ms"
        + ("" if number is None else f", or --num-mel-bins {number}")
    )


@functools.cache
def _fills_mel_bins(num_mel_bins: int, sampling_rate: int, window: int) -> bool:
    """Return whether each mel filter covers a point of the spectrum of a window with `window` samples.

    The filters are laid out as in Kaldi: equally spaced on mel(f) = 1127 ln(1 + f / 700) from 20 Hz to half
    the rate.  Cached because it is called for every utterance with the same arguments.
    """
    num_fft = 1 << (window - 1).bit_length()
    if num_mel_bins > num_fft:  # two filters share each of the num_fft / 2 points
        return False
    points = mel_of(np.arange(num_fft // 2) * (sampling_rate / num_fft))
    lowest, highest = mel_of(np.array([LOW_FREQ_HZ, sampling_rate / 2]))
    edges = np.linspace(lowest, highest, num_mel_bins + 2)
    above = np.append(points, np.inf)[points.searchsorted(edges[:-2], side="right")]  # (bins,)
    return bool((above < edges[2:]).all())


def mel_of(frequency_hz: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.float64]:
    """Return frequencies in Hz on Kaldi's mel scale."""
    mel: npt.NDArray[np.float64] = 1127.0 * np.log1p(frequency_hz / 700.0)
    return mel


def shift_samples(sampling_rate: int, config: FeatureConfig) -> int:
    """Return the number of samples between two frames."""
    return int(sampling_rate * 0.001 * config.frame_shift_ms)


def shift_s(sampling_rate: int, config: FeatureConfig) -> float:
    """Return the seconds between two frames in the audio.

    The rate is 0 if it is not known, as for Kaldi's own features.

    At 22,050 Hz, 10 ms are 220.5 samples, but frames are 220 samples apart: computed with
    `FeatureConfig.frame_shift_s`, the nominal shift, times would be a fifteenth of a second off after half a
    minute.

    Example:
        >>> round(3000 * shift_s(22_050, FeatureConfig()), 3)
        29.932
    """
    return shift_samples(sampling_rate, config) / sampling_rate if sampling_rate else config.frame_shift_s


def window_samples(sampling_rate: int, config: FeatureConfig) -> int:
    """Return the number of samples of a frame."""
    return int(sampling_rate * 0.001 * config.frame_length_ms)
