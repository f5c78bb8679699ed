"""Read audio files, and find where speech begins and ends in them.

Legend: S samples, T frames.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import soundfile
import soxr

from speechdp.data.signal.channel import MIX, Channel
from speechdp.data.signal.features import FeatureConfig, shift_samples
from speechdp.data.signal.sound_header import sound_bytes
from speechdp.errors import (
    ConfigError,
    OutsideRecordingError,
    SeveralChannelsError,
    UnreadableAudioError,
    one_line,
)

_REMEDY = "convert it to mono 16-bit WAV or FLAC, or leave it out"
#: Errors of soundfile: the last two for raw samples without a header, and for names that cannot be encoded.
_ERRORS = (soundfile.LibsndfileError, OSError, TypeError, ValueError)
#: libsndfile's log line if a file has fewer bytes of sound than its header announces: WAV, AIFF, AU.
_CUT_SHORT = re.compile(r"^(?:data|\s*SSND|\s*Data Size)\s*: (\d+) \(should be (\d+)\)", re.MULTILINE)
#: Headers written before the length was known announce at least this much (sox: this, ffmpeg: all ones).
_UNKNOWN_LENGTH = 0x7FFFF000
#: Fewer bytes than this are missing if a writer counted the bytes of the header or of padding as sound.
_LEAST_MISSING = 1024
_PIECE_SAMPLES = 1 << 22
#: Full scale is 1, and decoders of MP3 slightly exceed it.  Files with larger samples hold 16-bit values as
#: floating point numbers: stored as audio, they would be clipped to a square wave.
LARGEST_SAMPLE = 16.0
#: A frame this far under the utterance's loudest, in dB, is silence ...
_SILENCE_DB = 40.0
#: ... if at least this many such frames are adjacent at an edge.
_MIN_SILENCE_FRAMES = 5


#: The end of a part may exceed the end of its file by less than this; the part is cut there (Kaldi's
#: extract-segments, --max-overshoot).
MAX_OVERSHOOT_S = 0.5


@dataclass(frozen=True)
class AudioPart:
    """A stretch of an audio file, from one of its channels.

    Attributes:
        path: the file.
        start_s: start in the file.
        end_s: end in the file; None: the end of the file.
        channel: a channel that the file must have, counted from 0; None: not specified.
        of_several: what is read if `channel` is None and the file has several; None: such a file is refused.
        name: name of the file in messages; "": its path.
    """

    path: Path
    start_s: float = 0.0
    end_s: float | None = None
    channel: int | None = None
    name: str = ""
    of_several: Channel | None = None

    def __str__(self) -> str:
        is_whole = self.start_s == 0 and self.end_s is None
        end = "the end" if self.end_s is None else f"{self.end_s:g} s"
        return (self.name or str(self.path)) + ("" if is_whole else f" ({self.start_s:g} s to {end})")

    def samples(self, num_samples: int, sampling_rate: int) -> tuple[int, int]:
        """Return the first sample and the one after the last, counted as by Kaldi's extract-segments.

        Raises:
            OutsideRecordingError: the file ends before the part, or the part has no sample.
        """
        start = int(self.start_s * sampling_rate)
        end = num_samples if self.end_s is None else int(self.end_s * sampling_rate)
        if start >= num_samples or end >= num_samples + int(MAX_OVERSHOOT_S * sampling_rate):
            raise OutsideRecordingError(f"{self}: the recording ends at {num_samples / sampling_rate:g} s")
        if end <= start:
            raise OutsideRecordingError(f"{self}: holds no sample")
        return start, min(end, num_samples)


#: Where the audio of an utterance is.
AudioSource = Path | AudioPart


@dataclass(frozen=True)
class AudioInfo:
    """What a file's header says about its audio, or about a part of it."""

    source: AudioSource
    sampling_rate: int
    num_samples: int
    channel: Channel | None = None  # channel read of a file with several, counted from 1; None: it has one


def file_of(source: AudioSource) -> Path:
    """Return the file that contains the audio."""
    return source if isinstance(source, Path) else source.path


def with_channel(source: AudioSource, of_several: Channel | None) -> AudioSource:
    """Set what is read if the file has several channels, unless the source specifies it already."""
    if of_several is None:
        return source
    part = AudioPart(source) if isinstance(source, Path) else source
    return part if part.channel is not None or part.of_several else replace(part, of_several=of_several)


def named_channel(source: AudioSource) -> Channel | None:
    """Return the channel that a source specifies, counted from 1, or "mix"; None: not specified."""
    if isinstance(source, Path):
        return None
    return source.of_several if source.channel is None else source.channel + 1


def num_channels(path: Path) -> int:
    """Return the number of channels of a file.

    Raises:
        UnreadableAudioError: not audio.
        ConfigError: the file is missing or has 0 bytes.
    """
    try:
        return int(soundfile.info(_name_of_file(path)).channels)
    except _ERRORS as error:
        raise _unreadable(path, error) from error


def _name_of_file(source: AudioSource) -> str:
    """Return the name under which a file is opened.

    Raises:
        ConfigError: it is a pipe, which can be read only once, or would block for ever.
    """
    file = file_of(source)
    if not file.is_file() and file.exists() and not file.is_dir():
        raise ConfigError(f"{source}: is a pipe or a device; write its sound to a file first")
    return str(file)


def probe(source: AudioSource) -> AudioInfo:
    """Read an audio file's header.

    Raises:
        UnreadableAudioError: not audio, or without samples.
        OutsideRecordingError: the part is beyond the end of its file, or without samples.
        SeveralChannelsError: the file has several channels, and none is specified.
        ConfigError: the file is missing, has 0 bytes, or lacks the specified channel.
    """
    try:
        info = soundfile.info(_name_of_file(source))
    except _ERRORS as error:
        raise _unreadable(source, error) from error
    channel = _channel_of(source, info.channels)
    start, end = _stretch(source, info.frames, info.samplerate)
    if end <= start:
        raise _without_samples(source)
    return AudioInfo(source, info.samplerate, end - start, channel)


def _channel_of(source: AudioSource, in_file: int) -> Channel | None:
    """Return what is read of a file with `in_file` channels, counted from 1; None: it has one.

    Raises:
        SeveralChannelsError: none is specified.
        ConfigError: the file lacks the specified channel.
    """
    if isinstance(source, AudioPart) and source.channel is not None and source.channel >= in_file:
        raise ConfigError(f"{source}: has no channel {source.channel}, only {in_file}; correct segments")
    if in_file == 1:
        return None
    channel = named_channel(source)
    if channel is None:
        raise SeveralChannelsError(f"{source}: has {in_file} channels")
    if channel != MIX and channel > in_file:
        raise ConfigError(
            f"{source}: has {in_file} channels, so channel {channel} cannot be read; give another "
            "--channel, or correct its line in reco2file_and_channel"
        )
    return channel


def _stretch(source: AudioSource, num_samples: int, sampling_rate: int) -> tuple[int, int]:
    """Return the first sample of the source and the one after the last.  Raises ConfigError."""
    if isinstance(source, Path) or num_samples <= 0:
        return 0, num_samples
    return source.samples(num_samples, sampling_rate)


def common_sampling_rate(infos: Sequence[AudioInfo], resample_hz: int | None) -> int:
    """Return the sampling rate at which features are computed, in Hz.

    Raises:
        ConfigError: the files differ and no rate was requested; names one file of each rate.
    """
    if resample_hz is not None:
        if resample_hz < 1000:
            raise ConfigError(f"--resample {resample_hz}: give a rate in Hz, e.g. 16000")
        return resample_hz
    sources: dict[int, list[AudioSource]] = {}
    for info in infos:
        sources.setdefault(info.sampling_rate, []).append(info.source)
    if len(sources) > 1:
        having = ", ".join(f"{those[0]} has {rate} Hz" for rate, those in sources.items())
        lowest, usual = min(sources), max(sources, key=lambda rate: (len(sources[rate]), -rate))
        other = "" if usual == lowest else f", the lowest, or {usual}"
        most = f"as {len(sources[usual]):,} of {len(infos):,} have"
        raise ConfigError(f"mixed sampling rates: {having}; add --resample {lowest}{other}, {most}")
    return infos[0].sampling_rate


def read_audio(source: AudioSource, sampling_rate: int) -> npt.NDArray[np.float32]:
    """Read one channel of a file or of a part of it, resampled if necessary: (S,) float32 in [-1, 1].

    Raises:
        UnreadableAudioError: not audio, without samples, cut short, with NaN, or of another scale.
        OutsideRecordingError: the part is beyond the end of its file, or without samples.
        SeveralChannelsError: the file has several channels, and none is specified.
        ConfigError: the file is missing, has 0 bytes, or lacks the specified channel.
    """
    try:
        with soundfile.SoundFile(_name_of_file(source)) as file:
            rate = file.samplerate
            channel = _channel_of(source, file.channels)
            start, end = _stretch(source, file.frames, rate)
            if start:
                file.seek(start)
            # Read in pieces: allocating all that the header announces may need more memory than there is.
            pieces: list[npt.NDArray[np.float32]] = []
            missing = end - start
            if end == file.frames:
                _refuse_cut_short(source, file)
            while missing > 0 and len(piece := file.read(min(missing, _PIECE_SAMPLES), dtype="float32")):
                pieces.append(_of_channel(piece, channel))
                missing -= len(piece)
            samples = _joined(pieces)
    except _ERRORS as error:
        raise _unreadable(source, error) from error
    if end <= start:
        raise _without_samples(source)
    _refuse_damaged(source, len(samples), end - start, _peak(samples))
    return resample(samples, rate, sampling_rate)


def _joined(pieces: list[npt.NDArray[np.float32]]) -> npt.NDArray[np.float32]:
    """Join (S,) pieces, releasing each after it is copied: hours of sound are not in memory twice."""
    samples = np.empty(sum(map(len, pieces)), dtype=np.float32)  # pages are allocated as they are written
    end = len(samples)
    while pieces:
        piece = pieces.pop()
        samples[end - len(piece) : end] = piece
        end -= len(piece)
    return samples


def _of_channel(piece: npt.NDArray[np.float32], channel: Channel | None) -> npt.NDArray[np.float32]:
    """Return (S,) samples of (S, channels): one channel, counted from 1, or the mean of all."""
    if channel is None:
        return piece
    if channel == MIX:
        mean: npt.NDArray[np.float32] = piece.mean(axis=1, dtype=np.float32)
        return mean
    # Copy: a view would keep all channels in memory.
    return piece[:, channel - 1].copy()


def read_through(path: Path) -> None:
    """Read a file with any number of channels to its end, to check that it can be read.

    Raises:
        UnreadableAudioError: not audio, without samples, cut short, with NaN, or of another scale.
        ConfigError: the file is missing or has 0 bytes.
    """
    num_read, peak = 0, 0.0
    try:
        with soundfile.SoundFile(_name_of_file(path)) as file:
            announced = file.frames
            _refuse_cut_short(path, file)
            while num_read < announced:
                piece = file.read(min(announced - num_read, _PIECE_SAMPLES), dtype="float32")
                if len(piece) == 0:
                    break
                num_read += len(piece)
                peak = float(np.maximum(peak, _peak(piece)))
    except _ERRORS as error:
        raise _unreadable(path, error) from error
    if announced <= 0:
        raise _without_samples(path)
    _refuse_damaged(path, num_read, announced, peak)


def _refuse_cut_short(source: AudioSource, file: soundfile.SoundFile) -> None:
    """Refuse a file that has less sound than its header announces: an interrupted copy.

    libsndfile reads such a file as if it were complete, and a model would learn all words of the transcript
    from it.
    """
    if (found := _CUT_SHORT.search(file.extra_info)) is not None:
        announced, there = map(int, found.groups())
        if announced >= _UNKNOWN_LENGTH:
            return
    elif (counts := sound_bytes(file_of(source), file.format)) is not None:
        announced, there = counts
    else:
        return
    if announced - there >= _LEAST_MISSING:
        raise _refusal(
            f"{source}: is cut short ({there:,} of {announced:,} bytes of sound)",
            "copy or record it again, or leave it out",
        )


def _peak(samples: npt.NDArray[np.float32]) -> float:
    """Return the largest absolute sample: NaN if any is NaN, 0 without samples."""
    return float(np.maximum(samples.max(initial=0.0), -samples.min(initial=0.0)))


def _refuse_damaged(source: AudioSource, num_read: int, announced: int, peak: float) -> None:
    """Refuse audio that ends before its header says, has NaN or infinite samples, or is of another scale."""
    if num_read == 0 or num_read < announced:
        raise _refusal(f"{source}: unreadable audio ({num_read} of {announced} samples)", _REMEDY)
    if not np.isfinite(peak):
        raise _refusal(f"{source}: unreadable audio (NaN or infinite samples)", _REMEDY)
    if peak > LARGEST_SAMPLE:
        raise _refusal(
            f"{source}: holds samples up to {peak:,.0f}, where 1 is full scale",
            "divide them, by 32,768 where they are 16-bit values, and write it again, or leave it out",
        )


def _refusal(fault: str, remedy: str) -> UnreadableAudioError:
    return UnreadableAudioError(f"{fault}; {remedy}", fault)


def resample(samples: npt.NDArray[np.float32], from_hz: int, to_hz: int) -> npt.NDArray[np.float32]:
    """Change the sampling rate of (S,) samples with soxr's high quality."""
    if from_hz == to_hz:
        return samples
    changed: npt.NDArray[np.float32] = soxr.resample(samples, from_hz, to_hz, quality="HQ")
    return changed


def to_int16(samples: npt.NDArray[np.float32]) -> npt.NDArray[np.int16]:
    """Round (S,) samples in [-1, 1] to 16 bits; exact for samples from 16-bit audio, clipped beyond."""
    scaled = np.rint(samples.astype(np.float64) * 32768.0)
    return np.clip(scaled, -32768, 32767).astype(np.int16)


def edge_silence(
    samples: npt.NDArray[np.float32], sampling_rate: int, config: FeatureConfig, num_frames: int
) -> tuple[int, int]:
    """Count the frames of silence before and after speech, by a simple rule on the energy.

    A frame is silent if its energy lies more than 40 dB under the loudest frame's; silent frames count
    if at least 5 are adjacent at the edge.  Shorter runs belong to the word (a stop's closure).

    Returns:
        Leading and trailing frames; (0, 0) if all frames would be silent.
    """
    shift = shift_samples(sampling_rate, config)
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


def _without_samples(source: AudioSource) -> UnreadableAudioError:
    return _refusal(f"{source}: holds no samples", "copy or record it again, or leave it out")


def _unreadable(source: AudioSource, error: Exception) -> ConfigError:
    if not file_of(source).exists():
        return ConfigError(
            f"{source}: no such audio file (relative names start from the current folder); check the path"
        )
    if file_of(source).is_file() and file_of(source).stat().st_size == 0:
        return ConfigError(f"{source}: is empty; copy or record it again, or leave it out")
    if isinstance(error, UnicodeError):
        return ConfigError(f"{source}: its name is not UTF-8; rename it")
    reason = one_line(getattr(error, "error_string", error)).rstrip(".")
    return _refusal(f"{source}: unreadable audio ({reason})", _REMEDY)
