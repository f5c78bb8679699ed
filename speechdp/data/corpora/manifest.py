"""Read a manifest: a table, or JSON lines, that names the audio and the words of each utterance."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speechdp.data.corpora.corpus import UNKNOWN_SPEAKER, CorpusUtterance, file_lines
from speechdp.data.corpora.kaldi_dir import PLAIN_RULES, ReadingRules
from speechdp.data.signal.audio import AudioPart, AudioSource
from speechdp.errors import ConfigError
from speechdp.json_input import parse_json

_JSON = frozenset({".jsonl", ".json"})
_DELIMITERS = {".csv": ",", ".tsv": "\t"}
#: How files call what is read of them: ours first, then NeMo, Common Voice, SpeechBrain, DeepSpeech,
#: Hugging Face's audio folders.
_COLUMNS = {
    "id": ("id", "utterance_id", "ID"),
    "audio": ("audio", "audio_filepath", "path", "wav", "wav_filename", "file_name"),
    "text": ("text", "sentence", "wrd", "transcript", "transcription"),
    "speaker": ("speaker", "speaker_id", "spk_id", "client_id"),
    "start": ("start", "offset"),
    "end": ("end",),
    "duration": ("duration",),
    "channel": ("channel",),
    "split": ("split",),
}


def is_manifest(source: Path) -> bool:
    """Return whether a source is a file of a manifest's kind, by its name."""
    return source.suffix.lower() in _JSON | _DELIMITERS.keys() and source.is_file()


def read_manifest(source: Path, rules: ReadingRules = PLAIN_RULES) -> Iterator[CorpusUtterance]:
    """Yield the utterances of a table with a header (.csv, .tsv) or of JSON lines (.jsonl, .json).

    Paths of audio are absolute, or relative to the manifest's folder.

    Args:
        source: the file.
        rules: how paths are mapped, and whether transcripts are needed.

    Raises:
        ConfigError: it cannot be read, has no column of audio or of words or two of one kind, or a line that
            is none; one line that names file, line and remedy.

    Example::

        [utterance.text for utterance in read_manifest(Path("train.jsonl"))]
    """
    lines = _json_lines(source) if source.suffix.lower() in _JSON else _table_lines(source)
    columns: dict[str, str] = {}
    names: frozenset[str] = frozenset()
    for number, fields in lines:
        if fields.keys() != names:
            names = frozenset(fields)
            columns = _columns_of(f"{source}:{number}", names, needs_text=rules.needs_text)
        line = _Line(f"{source}:{number}", {kind: fields[name] for kind, name in columns.items()})
        yield line.utterance(rules)


def _table_lines(source: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield number and fields of each line below the header."""
    delimiter = _DELIMITERS.get(source.suffix.lower())
    if delimiter is None:
        known = ", ".join([*_DELIMITERS, *sorted(_JSON)])
        raise ConfigError(f"{source}: is not known to be a manifest by its name; rename it to end in {known}")
    table = csv.reader(
        (f"{line}\n" for line in _text_of(source)),
        delimiter=delimiter,
        # In tables of tabs quotes are part of sentences (Common Voice).
        quoting=csv.QUOTE_NONE if delimiter == "\t" else csv.QUOTE_MINIMAL,
        strict=True,
    )
    header: list[str] | None = None
    try:
        for fields in table:
            if not any(map(str.strip, fields)):
                continue
            if header is None:
                header = [name.strip() for name in fields]
                continue
            if len(fields) != len(header):
                raise ConfigError(
                    f"{source}:{table.line_num}: has {len(fields)} fields, and the header {len(header)}; put "
                    + ("tabs between fields only" if delimiter == "\t" else "fields with commas into quotes")
                )
            yield table.line_num, dict(zip(header, fields, strict=True))
    except csv.Error as error:
        raise ConfigError(f"{source}:{table.line_num}: {error}; write a table as CSV") from error


def _text_of(source: Path) -> list[str]:
    """Return all lines of a file, as wide as they are: fields of tabs may be empty."""
    file_lines(source)  # refuses what is no text
    return source.read_text(encoding="utf-8-sig").split("\n")


def _json_lines(source: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield number and object of each line."""
    for number, line in file_lines(source):
        try:
            fields = parse_json(line)
        except ValueError as error:
            raise ConfigError(f"{source}:{number}: {error}; write a JSON object on each line") from error
        if not isinstance(fields, dict):
            raise ConfigError(f"{source}:{number}: is no JSON object; write one on each line")
        yield number, fields


def _columns_of(where: str, names: frozenset[str], *, needs_text: bool) -> dict[str, str]:
    """Return the column of each kind that there is."""
    columns: dict[str, str] = {}
    for kind, known in _COLUMNS.items():
        found = [name for name in known if name in names]
        if len(found) > 1:
            raise ConfigError(f"{where}: has both {found[0]} and {found[1]} for the {kind}; leave one out")
        if found:
            columns[kind] = found[0]
        elif kind == "audio" or (kind == "text" and needs_text):
            raise ConfigError(f"{where}: has no column for the {kind}; call it {' or '.join(known)}")
    if "end" in columns and "duration" in columns:
        raise ConfigError(f"{where}: has both {columns['end']} and {columns['duration']}; leave one out")
    return columns


def _mapped(path: str, rules: ReadingRules) -> Path:
    """Return where a file is here; what a map leads to is a path of the folder worked in."""
    mapped = rules.path_map.mapped(path)
    return Path(mapped) if mapped == path else Path(mapped).absolute()


@dataclass(frozen=True)
class _Line:
    """What a line says, by kind of column; `where` names it in messages."""

    where: str
    said: Mapping[str, Any]

    def utterance(self, rules: ReadingRules) -> CorpusUtterance:
        path = self._text("audio")
        if not path:
            raise ConfigError(f"{self.where}: names no audio; give a file, or remove the line")
        return CorpusUtterance(
            self._text("id") or self._own_id(Path(path).stem),
            self._text("speaker") or UNKNOWN_SPEAKER,
            self._text("text"),
            self._audio(_mapped(path, rules)),
            split=self._text("split") if "split" in self.said else None,
        )

    def _audio(self, path: Path) -> AudioSource:
        start, end, channel = self._seconds("start") or 0.0, self._end(), self._channel()
        if start == 0 and end is None and channel is None:
            return path
        return AudioPart(path, start, end, channel, name=f"{self.where}: {path}")

    def _end(self) -> float | None:
        start, end, duration = self._seconds("start") or 0.0, self._seconds("end"), self._seconds("duration")
        if duration is not None:
            end = start + duration
        if end is not None and end <= start:
            raise ConfigError(f"{self.where}: ends at {end:g} s, where it starts or before; mend its times")
        return end

    def _own_id(self, stem: str) -> str:
        """Return an id for a line that has none: the file's name and, where it has a start, its times."""
        name, start, end = "_".join(stem.split()), self._seconds("start"), self._end()
        if start is None:
            return name
        times = (round(100 * second) for second in (start, end) if second is not None)
        return "-".join([name, *(f"{time:07d}" for time in times)])

    def _seconds(self, kind: str) -> float | None:
        text = self._text(kind)
        if not text:
            return None
        try:
            seconds = float(text)
        except ValueError:
            seconds = math.nan
        if not 0 <= seconds < math.inf:
            raise ConfigError(f"{self.where}: {kind} is {text!r}; give seconds, 0 or more")
        return seconds

    def _channel(self) -> int | None:
        text = self._text("channel")
        if text and not (text.isdecimal() and int(text) > 0):
            raise ConfigError(f"{self.where}: channel is {text!r}; give its number, 1 for the first")
        return int(text) - 1 if text else None

    def _text(self, kind: str) -> str:
        value = self.said.get(kind)
        if isinstance(value, (list, dict, bool)):
            raise ConfigError(f"{self.where}: {kind} is {value!r}; give a text or a number")
        return "" if value is None else str(value).strip()
