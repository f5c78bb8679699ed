"""Read a manifest: a table, or JSON, with the audio and the words of each utterance."""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from speechdp.counting import counted
from speechdp.data.corpora.corpus import UNKNOWN_SPEAKER, CorpusUtterance, file_lines, whole_lines
from speechdp.data.corpora.kaldi_dir import PLAIN_RULES, ReadingRules
from speechdp.data.signal.audio import AudioPart, AudioSource
from speechdp.errors import ConfigError
from speechdp.json_input import parse_json

_JSON = frozenset({".jsonl", ".json", ".list"})
_DELIMITERS = {".csv": ",", ".tsv": "\t"}
#: Column names of each kind, in any case: ours first, then those of NeMo, Common Voice, SpeechBrain,
#: DeepSpeech, Hugging Face's audio folders, WeNet, Common Voice's spontaneous speech and Coqui TTS, and
#: other names that NeMo and Hugging Face accept.
_COLUMNS = {
    "id": ("id", "utterance_id", "key"),
    "audio": (
        *("audio", "audio_filepath", "path", "wav", "wav_filename", "file_name", "audio_file"),
        *("audio_filename", "audio_file_name"),
    ),
    "text": ("text", "sentence", "wrd", "words", "transcript", "transcription", "txt"),
    "speaker": ("speaker", "speaker_id", "spk_id", "client_id", "speaker_name"),
    "start": ("start", "offset"),
    "end": ("end",),
    "duration": ("duration",),
    "channel": ("channel",),
    "split": ("split",),
}
#: Other characters that may separate fields, mostly in a file without a header.
_OTHER_DELIMITERS = "|;\t"
#: LJSpeech's form: a table of ID|TEXT, or ID|TEXT|TEXT AS SPOKEN, beside the folder that holds ID.wav.
_LJSPEECH_DELIMITER = "|"
_LJSPEECH_FIELDS = (2, 3)
_LJSPEECH_TABLE, _LJSPEECH_AUDIO = "metadata.csv", "wavs"
#: Folder beside Common Voice's lists for file names without a folder, by column: of read speech, and of
#: spontaneous speech.
_COMMON_VOICE_FOLDERS = {"path": Path("clips"), "audio_file": Path("audios")}


def is_manifest(source: Path) -> bool:
    """Return whether a source is a manifest according to its name; it need not exist."""
    return source.suffix.lower() in _JSON | _DELIMITERS.keys() and not source.is_dir()


def is_ljspeech_folder(source: Path) -> bool:
    """Return whether a source is a folder in LJSpeech's form, including the audio of its table.

    A folder of audio with its own transcripts is not: a file `text`, LibriSpeech's *.trans.txt, or .txt files
    beside the audio.
    """
    table, audio = source / _LJSPEECH_TABLE, source / _LJSPEECH_AUDIO
    if not (table.is_file() and audio.is_dir()):
        return False
    if (source / "text").exists() or any(source.glob("*.trans.txt")) or any(audio.rglob("*.txt")):
        return False
    lines = whole_lines(table)
    return _begins_as_ljspeech(lines) and _has_ljspeech_audio(lines, _Places(table, Path(), PLAIN_RULES))


def read_manifest(source: Path, rules: ReadingRules = PLAIN_RULES) -> Iterator[CorpusUtterance]:
    """Yield the utterances of a table with a header (.csv, .tsv), of JSON lines (.jsonl, .json, .list), of a
    JSON object of objects by their ids (.json), or of LJSpeech's table (.csv).

    Paths of audio are absolute, or relative to the manifest's folder.

    Args:
        source: the file, or a folder in LJSpeech's form.
        rules: how paths are mapped, and whether transcripts are needed.

    Raises:
        ConfigError: the file cannot be read, has no column of audio or of words, two columns of one kind, a
            malformed line, a repeated id or no line; one line that names file, line and remedy.

    Example::

        [utterance.text for utterance in read_manifest(Path("train.jsonl"))]
    """
    source = source / _LJSPEECH_TABLE if is_ljspeech_folder(source) else source
    rows = _json_rows(source) if source.suffix.lower() in _JSON else _table_rows(source, rules)
    columns: dict[str, str] = {}
    names: frozenset[str] = frozenset()
    places = _Places(source, Path(), rules)
    lines: dict[str, str] = {}
    for row in rows:
        if row.fields.keys() != names:
            names = frozenset(row.fields)
            columns = _columns_of(row.named_at, names, needs_text=rules.needs_text)
            places = _Places(source, _folder_of(source, columns), rules)
        line = _Line(row.where, {kind: row.fields[name] for kind, name in columns.items()})
        utterance = line.utterance(places)
        other = lines.setdefault(utterance.utterance_id, row.where)
        if other is not row.where:
            raise ConfigError(
                f"{row.where}: is utterance {utterance.utterance_id}, as is {other}; give each an id of its "
                "own, or remove one"
            )
        yield utterance
    if not lines:
        below = "" if source.suffix.lower() in _JSON else " below a header"
        raise ConfigError(f"{source}: holds no utterance; write one on each line{below}")


class _Row(NamedTuple):
    """A line: its place in the file, the place that names its fields, and the fields."""

    where: str
    named_at: str
    fields: Mapping[str, Any]


def _table_rows(source: Path, rules: ReadingRules) -> Iterator[_Row]:
    """Yield each line below the header, or each line of LJSpeech's table."""
    delimiter = _DELIMITERS.get(source.suffix.lower())
    if delimiter is None:
        known = ", ".join([*_DELIMITERS, *sorted(_JSON)])
        raise ConfigError(f"{source}: is not known to be a manifest by its name; rename it to end in {known}")
    lines = whole_lines(source)
    if delimiter == "," and _begins_as_ljspeech(lines):
        _refuse_without_audio(source, lines, rules)
        yield from _ljspeech_rows(source, lines)
        return
    table = csv.reader(
        (f"{line}\n" for line in lines),  # fields of tabs may be empty
        delimiter=delimiter,
        # In tab-separated tables, quotes are part of sentences (Common Voice).
        quoting=csv.QUOTE_NONE if delimiter == "\t" else csv.QUOTE_MINIMAL,
        skipinitialspace=delimiter == ",",  # before a quotation mark (SpeechBrain)
        strict=True,
    )
    header: list[str] | None = None
    named_at = ""
    try:
        for fields in table:
            where = f"{source}:{table.line_num}"
            if not any(map(str.strip, fields)):
                continue
            if header is None:
                header, named_at = [name.strip() for name in fields], where
                _refuse_no_header(where, header, delimiter)
                continue
            if len(fields) != len(header):
                raise ConfigError(
                    f"{where}: has {len(fields)} fields, and the header {len(header)}; put "
                    + ("tabs between fields only" if delimiter == "\t" else "fields with commas into quotes")
                )
            yield _Row(where, named_at, dict(zip(header, fields, strict=True)))
    except csv.Error as error:
        raise ConfigError(f"{source}:{table.line_num}: {error}; write a table as CSV") from error


def _names_columns(fields: Sequence[str]) -> bool:
    """Return whether a first line is a header: one of its fields is a known column name."""
    return any(name.strip().lower() in known for known in _COLUMNS.values() for name in fields)


def _begins_as_ljspeech(lines: Sequence[str]) -> bool:
    """Return whether a table's first non-empty line is in LJSpeech's form."""
    first = next((line for line in lines if line.strip()), "")
    fields = first.split(_LJSPEECH_DELIMITER)
    return len(fields) in _LJSPEECH_FIELDS and not _names_columns(fields)


def _ljspeech_audio(line: str) -> str:
    """Return the audio of a line in LJSpeech's form, relative to the table's folder."""
    return f"{_LJSPEECH_AUDIO}/{line.partition(_LJSPEECH_DELIMITER)[0].strip()}.wav"


def _has_ljspeech_audio(lines: Sequence[str], places: _Places) -> bool:
    """Return whether any line has its audio in LJSpeech's place; no line of another table with | has."""
    paths = (places.path_of(_ljspeech_audio(line)) for line in lines if line.strip())
    # Path.is_file raises if a line is too long for a name.
    return any(os.path.isfile(places.source.parent / path) for path in paths)  # noqa: PTH113


def _refuse_without_audio(source: Path, lines: Sequence[str], rules: ReadingRules) -> None:
    """Refuse a table that looks like LJSpeech's form but has none of its audio."""
    if not _has_ljspeech_audio(lines, _Places(source, Path(), rules)):
        first = next(number for number, line in enumerate(lines, start=1) if line.strip())
        raise ConfigError(
            f"{source}:{first}: has {_LJSPEECH_DELIMITER!r} between its fields, and no header that is known; "
            f"write a header, and commas between fields; or, if it is in LJSpeech's form, ID|TEXT, put the "
            f"audio there as {source.parent / _LJSPEECH_AUDIO}/ID.wav"
        )


def _ljspeech_rows(source: Path, lines: Sequence[str]) -> Iterator[_Row]:
    """Yield each line of LJSpeech's table, with its words as spoken; quotation marks belong to them."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{source}:{number}"
        name, *texts = map(str.strip, line.split(_LJSPEECH_DELIMITER))
        if 1 + len(texts) not in _LJSPEECH_FIELDS:
            raise ConfigError(
                f"{where}: has {counted(1 + len(texts), 'field')} between {_LJSPEECH_DELIMITER!r}; write "
                "ID|TEXT or ID|TEXT|TEXT AS SPOKEN, as in the first line"
            )
        if not name:
            raise ConfigError(f"{where}: has no id; write the name of its audio file, without .wav, before |")
        spoken = next(filter(None, reversed(texts)), "")
        yield _Row(where, where, {"audio": _ljspeech_audio(line), "text": spoken})


def _refuse_no_header(where: str, header: Sequence[str], delimiter: str) -> None:
    """Refuse a first line without any known column name."""
    if _names_columns(header):
        return
    ours = "tabs" if delimiter == "\t" else "commas"
    line = delimiter.join(header)
    other = next((mark for mark in _OTHER_DELIMITERS.replace(delimiter, "") if mark in line), None)
    if other is None and (delimiter == "," or "," not in line):
        names = delimiter.join(("audio", "text"))
        raise ConfigError(
            f"{where}: has no column name that is known, only {', '.join(map(repr, header[:3]))}; write a "
            f"header above the lines, such as {names!r} (docs/preparing.md, Manifests, has all names)"
        )
    raise ConfigError(
        f"{where}: has {other or ','!r} between its fields, and no header that is known; write a header, and "
        f"{ours} between fields"
    )


def _json_rows(source: Path) -> Iterator[_Row]:
    """Yield the object of each line, or each object of a file that is one object of objects by id."""
    lines = file_lines(source)
    by_id = _objects_by_id(lines) if source.suffix.lower() == ".json" else None
    if by_id is not None:
        for name, fields in by_id.items():
            yield _Row(where := f"{source}: {name}", where, {"id": name, **fields})
        return
    for number, line in lines:
        where = f"{source}:{number}"
        try:
            fields = parse_json(line)
        except ValueError as error:
            raise ConfigError(f"{where}: {error}; write a JSON object on each line") from error
        if not isinstance(fields, dict):
            raise ConfigError(f"{where}: is no JSON object; write one on each line")
        yield _Row(where, where, fields)


def _objects_by_id(lines: Sequence[tuple[int, str]]) -> dict[str, dict[str, Any]] | None:
    """Return the contents of a file that is one object of objects (SpeechBrain), else None."""
    if len(lines) > 1 and _is_json(lines[0][1]):
        return None
    try:
        whole = parse_json("\n".join(line for _, line in lines))
    except ValueError:
        return None
    if not isinstance(whole, dict) or not all(isinstance(fields, dict) for fields in whole.values()):
        return None
    return whole


def _is_json(line: str) -> bool:
    try:
        parse_json(line)
    except ValueError:
        return False
    return True


def _columns_of(where: str, names: frozenset[str], *, needs_text: bool) -> dict[str, str]:
    """Return the name of the column of each kind, for the kinds that exist."""
    columns: dict[str, str] = {}
    for kind, known in _COLUMNS.items():
        found = sorted(
            (name for name in names if name.lower() in known), key=lambda name: known.index(name.lower())
        )
        if len(found) > 1:
            raise ConfigError(f"{where}: has both {found[0]} and {found[1]} for the {kind}; leave one out")
        if found:
            columns[kind] = found[0]
        elif kind == "audio" or (kind == "text" and needs_text):
            raise ConfigError(f"{where}: has no column for the {kind}; call it {' or '.join(known)}")
    if "end" in columns and "duration" in columns:
        raise ConfigError(f"{where}: has both {columns['end']} and {columns['duration']}; leave one out")
    if "start" in columns and "stop" in names:
        raise ConfigError(
            f"{where}: has {columns['start']} and stop, which count samples in SpeechBrain's files; give "
            "start and end, in seconds"
        )
    return columns


def _folder_of(source: Path, columns: Mapping[str, str]) -> Path:
    """Return the folder below the manifest's that holds audio named without a folder."""
    is_common_voice = columns.get("speaker") == "client_id"
    folder = _COMMON_VOICE_FOLDERS.get(columns["audio"]) if is_common_voice else None
    return folder if folder is not None and (source.parent / folder).is_dir() else Path()


@dataclass(frozen=True)
class _Places:
    """Resolves file names; names without a folder are in `folder`, which is below the manifest's."""

    source: Path
    folder: Path
    rules: ReadingRules

    def path_of(self, name: str) -> Path:
        """Return the path of a file, absolute or relative to the manifest's folder.

        A mapping may start with the path as the manifest has it, or with the manifest's folder, as messages
        name the file.  Its result is relative to the working directory.
        """
        path = self.folder / name if Path(name).name == name else Path(name)
        for known in (name, str(self.source.parent / path)):
            mapped = self.rules.path_map.mapped(known)
            if mapped != known:
                return Path(mapped).absolute()
        return path


@dataclass(frozen=True)
class _Line:
    """The values of a line, by kind of column; `where` names the line in messages."""

    where: str
    record: Mapping[str, Any]

    def utterance(self, places: _Places) -> CorpusUtterance:
        path = self._text("audio")
        if not path:
            raise ConfigError(f"{self.where}: names no audio; give a file, or remove the line")
        start = self._seconds("start")
        end = self._end(start or 0.0)
        name = self._text("id") or _own_id(Path(path).stem, start, end)
        if len(name.split()) > 1:
            raise ConfigError(f"{self.where}: id is {name!r}; give one without spaces")
        return CorpusUtterance(
            name,
            self._text("speaker") or UNKNOWN_SPEAKER,
            self._text("text"),
            self._audio(places.path_of(path), start or 0.0, end),
            split=self._text("split") if "split" in self.record else None,
        )

    def _audio(self, path: Path, start: float, end: float | None) -> AudioSource:
        channel = self._channel()
        if start == 0 and end is None and channel is None:
            return path
        return AudioPart(path, start, end, channel, name=f"{self.where}: {path}")

    def _end(self, start: float) -> float | None:
        end, duration = self._seconds("end"), self._seconds("duration")
        if duration is not None:
            end = start + duration
        if end is not None and end <= start:
            raise ConfigError(f"{self.where}: ends at {end:g} s, not after its start; correct its times")
        return end

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
        value = self.record.get(kind)
        if isinstance(value, (list, dict, bool)):
            raise ConfigError(f"{self.where}: {kind} is {value!r}; give a text or a number")
        return "" if value is None else str(value).strip()


def _own_id(stem: str, start: float | None, end: float | None) -> str:
    """Return an id for a line that has none: the file's name and, if it has a start, its times."""
    name = "_".join(stem.split())
    if start is None:
        return name
    times = (round(100 * second) for second in (start, end) if second is not None)
    return "-".join([name, *(f"{time:07d}" for time in times)])
