"""Find all audio that is unreadable or outside of its recording in one run, and report the remedy."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from speechdp.data.prepare.jobs import Progress
from speechdp.data.signal.audio import AudioInfo, AudioSource, file_of, probe, read_through
from speechdp.data.signal.features import FeatureConfig, num_frames_of
from speechdp.errors import ConfigError, OutsideRecordingError, SeveralChannelsError, UnreadableAudioError

_MAX_NAMED = 5
AS_THE_OPTION_DOES = ", as --skip-incomplete does"


def without_audio(
    sources: Mapping[str, AudioSource],
    num_workers: int | None,
    progress: Progress,
    features: Callable[[int], FeatureConfig] | None = None,
) -> dict[str, list[str]]:
    """Return the utterances whose audio is unreadable, is outside of its recording, or has no frame.

    Args:
        sources: the audio of utterances, by their ids.
        num_workers, progress: as for `find_unreadable`.
        features: as for `_without_frame`; None: the caller handles audio of no frame.

    Returns:
        Ids of these utterances, by the reason, as messages state it.

    Raises:
        ConfigError: no utterance has usable audio, or a file is missing or of 0 bytes.
    """
    spoilt = find_unreadable(map(file_of, sources.values()), num_workers, progress)
    readable = {utterance: source for utterance, source in sources.items() if file_of(source) not in spoilt}
    outside = find_outside(readable)
    found = {
        "have unreadable audio": [utterance for utterance in sources if utterance not in readable],
        "have times outside of the recording": outside,
    }
    if features is not None:
        for utterance in outside:
            del readable[utterance]
        found["have less than one frame of audio"] = _without_frame(readable, features)
    return found


def find_unreadable(files: Iterable[Path], num_workers: int | None, progress: Progress) -> frozenset[Path]:
    """Read audio files to their ends, and return those for which that fails.

    Args:
        files: the files; repetitions are allowed.
        num_workers: files to read at a time; None: one per core.
        progress: called with the number of files read.

    Raises:
        ConfigError: none can be read, or a file is missing or of 0 bytes.
    """
    every = list(dict.fromkeys(files))
    errors: dict[Path, UnreadableAudioError] = {}
    # Threads are enough: decoding releases the GIL.
    pool = ThreadPoolExecutor(num_workers or len(os.sched_getaffinity(0)))
    try:
        for number, (file, error) in enumerate(zip(every, pool.map(_error_of, every), strict=True), 1):
            if error is not None:
                errors[file] = error
            if number % 100 == 0 or number == len(every):
                progress("reading audio through", number, len(every))
    finally:
        pool.shutdown(cancel_futures=True)  # else Ctrl-C would wait for all files
    if errors and len(errors) == len(every):
        raise unreadable_error(errors, len(every))
    return frozenset(errors)


def _error_of(file: Path) -> UnreadableAudioError | None:
    try:
        read_through(file)
    except UnreadableAudioError as error:
        return error
    return None


def unreadable_error(errors: Mapping[Path, UnreadableAudioError], num_files: int) -> ConfigError:
    """Return the error for files that cannot be read.

    Args:
        errors: the error of each such file, at least one.
        num_files: number of all files, including those that can be read.
    """
    (_, first), *others = sorted(errors.items())
    if not others:
        return ConfigError(str(first) if num_files == 1 else as_option_does(first))
    option = AS_THE_OPTION_DOES if len(errors) < num_files else ""
    return ConfigError(
        f"{first.fault}, and {len(others):,} more of {num_files:,} audio files cannot be read: "
        f"{_named(file for file, _ in others)}; convert them to mono 16-bit WAV or FLAC, or leave them "
        f"out{option}"
    )


def _named(files: Iterable[Path]) -> str:
    """Name the files after the first one, as many as fit a readable line."""
    every = list(files)
    return ", ".join(map(str, every[: _MAX_NAMED - 1])) + (", ..." if len(every) >= _MAX_NAMED else "")


def find_outside(sources: Mapping[str, AudioSource]) -> list[str]:
    """Return the utterances that lie outside of their recording, which itself can be read.

    Args:
        sources: the audio of utterances, by their ids.

    Raises:
        ConfigError: all do, or a channel does not exist.
    """
    errors: dict[str, OutsideRecordingError] = {}
    for utterance, source in sources.items():
        try:
            if not isinstance(source, Path):
                _probe_of_one_channel(source)
        except OutsideRecordingError as error:
            errors[utterance] = error
    if errors and len(errors) == len(sources):
        raise outside_error(list(errors.values()), len(sources))
    return list(errors)


def _without_frame(sources: Mapping[str, AudioSource], features: Callable[[int], FeatureConfig]) -> list[str]:
    """Return the utterances whose readable audio is shorter than one frame; none if all are.

    Args:
        sources: the audio of utterances, by their ids.
        features: returns the feature settings for a sampling rate, in Hz.
    """
    infos = {utterance: _probe_of_one_channel(source) for utterance, source in sources.items()}
    found = [
        utterance
        for utterance, info in infos.items()
        if info is not None
        and num_frames_of(info.num_samples, info.sampling_rate, features(info.sampling_rate)) == 0
    ]
    return [] if len(found) == len(sources) else found


def _probe_of_one_channel(source: AudioSource) -> AudioInfo | None:
    """Read a header as `probe`; None for several channels, which the code that reads all headers reports."""
    try:
        return probe(source)
    except SeveralChannelsError:
        return None


def channels_error(errors: Mapping[Path, SeveralChannelsError], num_files: int) -> SeveralChannelsError:
    """Return the error for files of several channels.

    Args:
        errors: the error of each such file, at least one.
        num_files: number of all files, including those of one channel.
    """
    (_, first), *others = sorted(errors.items())
    if not others:
        return first
    return SeveralChannelsError(
        f"{first.fault}, and {len(others):,} more of {num_files:,} audio files have several: "
        f"{_named(file for file, _ in others)}"
    )


def outside_error(errors: Sequence[OutsideRecordingError], num_utterances: int) -> ConfigError:
    """Return the error for utterances that lie outside of their recordings.

    Args:
        errors: the error of each such utterance, at least one.
        num_utterances: number of all utterances.
    """
    more = f", and {len(errors) - 1:,} more of {num_utterances:,} utterances are outside of theirs"
    what, them = (more, "them") if len(errors) > 1 else ("", "the utterance")
    option = AS_THE_OPTION_DOES if len(errors) < num_utterances else ""
    return ConfigError(f"{errors[0].fault}{what}; correct the times in segments, or leave {them} out{option}")


def as_option_does(error: UnreadableAudioError) -> str:
    """Return the error's message with the option that does what its end advises: leave the file out."""
    return f"{error}{AS_THE_OPTION_DOES}"
