"""Read a Kaldi data directory: wav.scp, segments, text and utt2spk."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from speechdp.counting import agreeing, counted
from speechdp.data.corpora.corpus import Corpus, CorpusUtterance, file_lines
from speechdp.data.corpora.path_map import PathMap
from speechdp.data.corpora.pipes import Pipe, PipeRunner
from speechdp.data.signal.audio import AudioPart, AudioSource, file_of, with_channel
from speechdp.data.signal.channel import Channel
from speechdp.errors import ConfigError
from speechdp.labels.text_normalise import plain_transcript

_Value = TypeVar("_Value")
#: An entry of an scp as wav-copy writes it.
_IN_ARCHIVE = re.compile(r"(?P<file>.+):\d+")
#: The part of a line of reco2file_and_channel after the recording.
_CHANNEL = re.compile(r"\S+\s+(?P<channel>[1-9][0-9]?|[A-Za-z])")


def is_kaldi_dir(source: Path) -> bool:
    """Return whether a folder is a Kaldi data directory."""
    return (source / "wav.scp").is_file()


@dataclass(frozen=True)
class ReadingRules:
    """How the files of a corpus are read.

    Attributes:
        path_map: replaces the beginnings of paths in tables.
        pipes: runs the programs of pipes; None: pipes are refused.
        skip_incomplete: leave out, and count, utterances that lack readable audio, a transcript or a speaker.
        needs_text: refuse, or leave out, utterances without a transcript.
        channel: what is read of files with several channels if no table specifies it; None: they are refused.
    """

    path_map: PathMap = field(default_factory=PathMap)
    pipes: PipeRunner | None = None
    skip_incomplete: bool = False
    needs_text: bool = True
    channel: Channel | None = None

    def find_file(self, folder: Path, value: str) -> Path:
        """Resolve a path of a table as Kaldi does, from the working directory, or else from `folder`."""
        path = Path(self.path_map.mapped(value))
        if not path.is_absolute() and not path.exists() and (folder / path).exists():
            return folder / path
        return path  # if it is missing, opening it reports that

    def run_pipes(self, texts: Mapping[str, str], path: Path, numbers: Mapping[str, int]) -> dict[str, Path]:
        """Run the entries of a table that end with | and return the files with their output.

        Args:
            texts: the entries, by key.
            path: the table.
            numbers: line numbers of the entries, by key.

        Raises:
            ConfigError: pipes are not allowed, need a shell, or fail.
        """
        if not texts:
            return {}
        where = {key: f"{path}:{numbers[key]}" for key in texts}
        if self.pipes is None:
            first = next(iter(texts))
            programs = ", ".join(dict.fromkeys(Pipe.parse(texts[first], where[first]).programs))
            raise ConfigError(
                f"{where[first]}: a pipe ({first}) runs {programs} ({counted(len(texts), 'pipe')} in all); "
                "let the programs run with --allow-pipes, or write their output to files"
            )
        return self.pipes.run(
            {key: Pipe.parse(text, where[key], self.path_map.mapped) for key, text in texts.items()}
        )


PLAIN_RULES = ReadingRules()


def read_kaldi_dir(source: Path, rules: ReadingRules = PLAIN_RULES) -> Corpus:
    """Read the utterances of a Kaldi data directory; transcripts keep their case.

    Audio paths are resolved as by Kaldi (from the working directory), or else from the directory itself.

    Raises:
        ConfigError: a pipe that may not run or fails, a malformed line, a repeated id, or ids that differ
            between the files; names the file and line, and the remedy.
    """
    audio = read_audio_table(source, rules)
    tables = {"utt2spk": read_speakers(source)}
    if rules.needs_text or (source / "text").is_file():
        tables["text"] = read_table(source / "text", may_be_empty=True)
    is_cut = (source / "segments").is_file()
    listed = "segments" if is_cut else "wav.scp"
    whose = ", or whose recording is not in wav.scp" if is_cut else ""
    notices: tuple[str, ...] = ()
    if rules.skip_incomplete:
        lacking = {
            f"are not in {listed}{whose}": _lacking([*tables.values()], audio),
            **{
                f"are not in {name}": _lacking([audio], table)
                for name, table in tables.items()
                if name != "text" or rules.needs_text
            },
        }
        if rules.needs_text:
            lacking["have an empty transcript"] = [
                u for u, text in tables["text"].items() if not plain_transcript(text)
            ]
        gone = {utterance for names in lacking.values() for utterance in names}
        audio = {utterance: place for utterance, place in audio.items() if utterance not in gone}
        notices = left_out(lacking)
    else:
        for name, table in tables.items():
            _check_same(source, listed, audio, table, name, may_lack=name == "text" and not rules.needs_text)
    texts = tables.get("text", {})
    utterances = (
        CorpusUtterance(u, tables["utt2spk"][u], texts.get(u, ""), place) for u, place in audio.items()
    )
    return Corpus.of(source, utterances, may_lack_text=not rules.needs_text, notices=notices)


def read_table(path: Path, *, may_be_empty: bool = False) -> dict[str, str]:
    """Read lines of a key and a value; the value is the rest of the line.

    Raises:
        ConfigError: a key without value (unless `may_be_empty`) or a repeated key.
    """
    return {key: value for key, (_, value) in _numbered_table(path, may_be_empty=may_be_empty).items()}


def read_speakers(source: Path) -> dict[str, str]:
    """Read the speaker of each utterance from utt2spk, or from spk2utt if there is only that.

    Raises:
        ConfigError: neither file exists, a line is malformed, or an utterance is repeated.
    """
    path, inverse = source / "utt2spk", source / "spk2utt"
    if path.is_file() or not inverse.is_file():
        if not path.exists():
            raise ConfigError(
                f"{path}: does not exist, nor does spk2utt; write a line 'UTTERANCE SPEAKER' for each "
                "utterance (with the utterance as its speaker if speakers are unknown)"
            )
        table = _numbered_table(path)
        for utterance, (number, value) in table.items():
            if (num_fields := len(value.split())) > 1:
                raise ConfigError(
                    f"{path}:{number}: {utterance} has {num_fields} speakers; write one, without blanks"
                )
        return {utterance: speaker for utterance, (_, speaker) in table.items()}
    found: dict[str, str] = {}
    for speaker, (number, value) in _numbered_table(inverse, may_be_empty=True).items():
        for utterance in value.split():
            if utterance in found:
                raise ConfigError(
                    f"{inverse}:{number}: {utterance} is listed a second time; remove one of them"
                )
            found[utterance] = speaker
    return found


def _numbered_table(path: Path, *, may_be_empty: bool = False) -> dict[str, tuple[int, str]]:
    table: dict[str, tuple[int, str]] = {}
    for number, line in file_lines(path):
        key, *rest = line.split(maxsplit=1)
        if not rest and not may_be_empty:
            raise ConfigError(f"{path}:{number}: {line!r} has one field; write an utterance id and its value")
        if key in table:
            raise ConfigError(f"{path}:{number}: {key} is listed a second time; remove one of the lines")
        table[key] = (number, rest[0] if rest else "")
    return table


def read_wav_scp(source: Path, rules: ReadingRules = PLAIN_RULES) -> dict[str, AudioSource]:
    """Read the audio file of each recording; pipes are run if the rules allow it.

    Raises:
        ConfigError: no such file, a pipe that may not run or fails, audio inside an archive, a malformed line
            or a repeated id.
    """
    path = source / "wav.scp"
    table = _numbered_table(path)
    pipes = {key: value for key, (_, value) in table.items() if value.endswith("|")}
    files = rules.run_pipes(pipes, path, {key: number for key, (number, _) in table.items()})
    for key, (number, value) in table.items():
        in_archive = None if key in files else _IN_ARCHIVE.fullmatch(value)
        if in_archive and rules.find_file(source, in_archive["file"]).is_file():
            raise ConfigError(
                f"{path}:{number}: the audio of {key} is inside an archive, which is not read; name a file "
                f"for each recording, or a pipe (with --allow-pipes): {key} wav-copy {value} - |"
            )
    return {
        key: AudioPart(files[key], name=f"{path}:{number}: what the pipe of {key} wrote")
        if key in files
        else rules.find_file(source, value)
        for key, (number, value) in table.items()
    }


def read_audio_table(source: Path, rules: ReadingRules = PLAIN_RULES) -> dict[str, AudioSource]:
    """Read the audio of each utterance: the entries of wav.scp, cut by segments if there is such a file.

    Of files with several channels, the channel is the one given by segments, else by reco2file_and_channel,
    else by the rules.

    Raises:
        ConfigError: as `read_wav_scp`; a segment of a recording that is not in wav.scp; a malformed line of
            reco2file_and_channel.
    """
    channels = read_channels(source)
    recordings = {
        key: with_channel(with_channel(audio, channels.get(key)), rules.channel)
        for key, audio in read_wav_scp(source, rules).items()
    }
    path = source / "segments"
    if not path.is_file():
        return recordings
    segments = read_segments(path)
    missing = [utterance for utterance, segment in segments.items() if segment.recording not in recordings]
    if missing and not rules.skip_incomplete:
        raise ConfigError(
            f"{path}: recording {segments[missing[0]].recording} of utterance {missing[0]} is not in wav.scp "
            f"({len(missing)} missing); add it, or leave them out with --skip-incomplete"
        )
    return {
        utterance: segment.part_of(recordings[segment.recording], utterance)
        for utterance, segment in segments.items()
        if segment.recording in recordings
    }


def read_channels(source: Path) -> dict[str, Channel]:
    """Read the channel of each recording from reco2file_and_channel, if it exists: 1 or A is the first.

    Raises:
        ConfigError: a malformed line, or a repeated recording.
    """
    path = source / "reco2file_and_channel"
    if not path.is_file():
        return {}
    channels: dict[str, Channel] = {}
    for recording, (number, value) in _numbered_table(path).items():
        found = _CHANNEL.fullmatch(value)
        if found is None:
            raise ConfigError(
                f"{path}:{number}: {recording} {value}: is not understood; write RECORDING FILE CHANNEL, the "
                "channel as 1, 2 or A, B"
            )
        name = found["channel"]
        channels[recording] = int(name) if name.isdecimal() else ord(name.upper()) - ord("A") + 1
    return channels


@dataclass(frozen=True)
class Segment:
    """A line of segments: the stretch of a recording that is an utterance; `end_s` None: up to its end."""

    recording: str
    start_s: float
    end_s: float | None
    channel: int | None

    def part_of(self, recording: AudioSource, utterance: str) -> AudioPart:
        """Return the audio of the utterance."""
        name = f"utterance {utterance} of {recording}"
        of_several = recording.of_several if isinstance(recording, AudioPart) else None
        return AudioPart(file_of(recording), self.start_s, self.end_s, self.channel, name, of_several)


def read_segments(path: Path) -> dict[str, Segment]:
    """Read a table of utterances that are stretches of recordings.

    Raises:
        ConfigError: a malformed line, or a repeated utterance.
    """
    return {
        utterance: _segment(f"{path}:{number}", value.split())
        for utterance, (number, value) in _numbered_table(path, may_be_empty=True).items()
    }


def _segment(where: str, fields: Sequence[str]) -> Segment:
    form = "write UTTERANCE RECORDING START END in seconds (END -1: up to the end)"
    if len(fields) not in (3, 4):
        raise ConfigError(f"{where}: has {len(fields) + 1} fields, not 4 or 5; {form}")
    try:
        start, end = float(fields[1]), float(fields[2])
        channel = int(fields[3]) if len(fields) == 4 else None
    except ValueError as error:
        raise ConfigError(f"{where}: {error}; {form}") from error
    if not (0 <= start < float("inf") and (end == -1 or start < end < float("inf")) and (channel or 0) >= 0):
        raise ConfigError(f"{where}: {' '.join(fields[1:])} is no stretch of time; {form}")
    return Segment(fields[0], start, None if end == -1 else end, channel)


def left_out(reasons: Mapping[str, Sequence[str]], max_named: int = 1) -> tuple[str, ...]:
    """Return messages on the utterances left out, one per reason ("have no text"), naming the first ones.

    Args:
        reasons: ids of the utterances, by reason.
        max_named: how many ids to name per reason.
    """
    return tuple(
        f"left out: {counted(len(names), 'utterance')} that {agreeing(len(names), reason)}, "
        f"first {', '.join(names[:max_named])}"
        for reason, names in reasons.items()
        if names
    )


def _lacking(tables: Iterable[Mapping[str, object]], there: Mapping[str, object]) -> list[str]:
    """Return the ids in `tables` that are not in `there`, sorted."""
    return sorted({key for table in tables for key in table} - there.keys())


def _check_same(
    source: Path,
    listed: str,
    audio: Mapping[str, object],
    table: Mapping[str, str],
    name: str,
    *,
    may_lack: bool,
) -> None:
    missing = [] if may_lack else sorted(audio.keys() - table.keys())
    extra = sorted(table.keys() - audio.keys())
    if missing or extra:
        utterance, there, absent = (missing[0], listed, name) if missing else (extra[0], name, listed)
        raise ConfigError(
            f"{source / absent}: lacks utterance {utterance} of {there} ({len(missing) + len(extra)} ids "
            "differ); run Kaldi's utils/fix_data_dir.sh, or leave them out with --skip-incomplete"
        )
