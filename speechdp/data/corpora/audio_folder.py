"""Read a folder of audio files with transcripts beside them or labels in their names."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from speechdp.counting import counted
from speechdp.data.corpora.corpus import UNKNOWN_SPEAKER, Corpus, CorpusUtterance, file_lines
from speechdp.data.corpora.kaldi_dir import PLAIN_RULES, ReadingRules, left_out, read_table
from speechdp.errors import ConfigError
from speechdp.files import why_no_folder
from speechdp.labels.lexicon import digit_words
from speechdp.labels.text_normalise import plain_transcript
from speechdp.ownership.overwrite import is_record

#: The pattern to try if there are neither transcripts nor --pattern: FSDD's file names.
DEFAULT_PATTERN = "{digit}_{speaker}_{index}"

#: Suffixes of formats that libsndfile reads.
_AUDIO_SUFFIXES = frozenset(
    {".wav", ".flac", ".ogg", ".oga", ".opus", ".mp3", ".aif", ".aiff", ".aifc", ".au", ".sph"}
    | {".caf", ".rf64", ".w64"}
)
#: Suffixes of formats that it does not read.
_OTHER_SUFFIXES = frozenset({".m4a", ".aac", ".amr", ".webm", ".wma", ".mka", ".3gp", ".wv", ".ape"})
# Lists of checksums (FSDD has a SHA256SUMS.wav) and the hidden files some systems put beside each file.
_NO_AUDIO = re.compile(r"\.|(md5|sha[0-9]+)sums?\b", re.IGNORECASE)
#: Files that identify prepared data and runs, by the format recorded in them.
_RECORDS = frozenset({"data.json", "run.json"})
_TRANSCRIPTS = ".trans.txt"
#: Beginning of TIMIT's transcripts.
_OF_TIMIT = re.compile(r"0 [0-9]{4,} ")
#: Suffixes of transcript lists in forms that are not read.
_TABLE_SUFFIXES = frozenset({".csv", ".tsv"})
_MAX_NAMED = 5
_FIELDS = {"digit": r"[0-9]", "word": r"[^/]+?", "speaker": r"[^/]+?", "index": r"[0-9]+"}
# Stricter than the pattern: yesno's 0_1_0_0_1_1_0_1 is not a digit said by speaker 1_0_0_1_1_0.
_FSDD_NAME = re.compile(r"[0-9]_[A-Za-z][^_]*_[0-9]+")


def read_audio_folder(source: Path, pattern: str | None = None, rules: ReadingRules = PLAIN_RULES) -> Corpus:
    """Find the audio below a folder and its transcripts, which keep their case and punctuation.

    Sources of transcripts are tried in this order: labels in the file names if a pattern is given; a
    Kaldi-form file `text` (and `utt2spk`) in the folder; `*.trans.txt` files in LibriSpeech's form; a .txt
    file beside each audio file; labels in the names by FSDD's pattern.

    Args:
        source: the folder; subfolders are searched too.
        pattern: a file name without suffix, with the fields {digit} (0-9), {word}, {speaker} and {index};
            with a slash it covers the last folders too, e.g. "{word}/{speaker}_nohash_{index}".
        rules: whether transcripts are needed, and whether audio without transcript, or the reverse, is left
            out.

    Raises:
        ConfigError: no audio, or an audio file without transcript; names it.
    """
    files = find_audio(source)
    if pattern is not None:
        return _by_pattern(source, files, pattern)
    if (source / "text").is_file():
        return _by_kaldi_text(source, files, rules)
    texts = sorted(path for path in _files_below(source) if path.suffix == ".txt")
    transcripts = [path for path in texts if path.name.endswith(_TRANSCRIPTS)]
    if transcripts:
        return _by_trans_txt(source, files, transcripts, rules)
    if any(file.with_suffix(".txt").is_file() for file in files):
        return _by_text_beside(source, files, texts, rules)
    if 2 * sum(1 for file in files if _FSDD_NAME.fullmatch(file.stem)) > len(files):
        return _by_pattern(source, files, DEFAULT_PATTERN)
    if not rules.needs_text:
        return _with_transcripts(source, files, {}, {}, "text", rules)
    tables = sorted(path.name for path in source.iterdir() if path.suffix.lower() in _TABLE_SUFFIXES)
    raise ConfigError(
        f"{source}: no transcripts found; give a file 'text' (utterance-id words), *.trans.txt files, a .txt "
        f"beside each audio file, labels in the file names with --pattern '{DEFAULT_PATTERN}', or a reader "
        "of your own with --corpus MODULE:CLASS"
        + (f"; or give {source / tables[0]} itself as SOURCE, if it has a header" if tables else "")
        + "; docs/preparing.md says how to make 'text' of "
        + (f"a table like {tables[0]}" if tables else "other forms (VCTK, TIMIT, STM)")
        + f"; to recognise audio without any: speechdp transcribe RUN {shlex.quote(str(source))}, "
        "with a trained RUN"
    )


def find_audio(source: Path, *, unreadable: bool = False) -> list[Path]:
    """Return the audio files below a folder, sorted.

    Args:
        source: the folder.
        unreadable: include formats that cannot be read, so that reading them reports that, unless a converted
            file is beside them.

    Raises:
        ConfigError: no such folder, or no audio in it.
    """
    if not source.is_dir():
        raise ConfigError(
            f"{source}: {why_no_folder(source)}; give a Kaldi data directory, a folder of audio, "
            "or a manifest, by whose name (.csv, .tsv, .jsonl, .list) it is known"
        )
    suffixes = _AUDIO_SUFFIXES | _OTHER_SUFFIXES if unreadable else _AUDIO_SUFFIXES
    files = without_converted(
        sorted(
            path
            for path in _files_below(source)
            if path.suffix.lower() in suffixes and not _NO_AUDIO.match(path.name)
        )
    )
    if not files:
        raise ConfigError(f"{source}: holds no audio ({' '.join(sorted(_AUDIO_SUFFIXES))}); check the path")
    return files


def without_converted(files: Iterable[Path]) -> list[Path]:
    """Return files without those in an unreadable format that have a converted, readable file beside them."""
    every = list(files)
    readable = {path.with_suffix("") for path in every if path.suffix.lower() in _AUDIO_SUFFIXES}
    return [
        path
        for path in every
        if path.suffix.lower() not in _OTHER_SUFFIXES or path.with_suffix("") not in readable
    ]


def _files_below(source: Path) -> Iterator[Path]:
    """Yield all files below a folder, following links to folders, each folder once: links may form cycles.

    Skips hidden folders, and prepared data and runs kept inside the corpus: their recordings are copies of
    the corpus's own, or synthetic.
    """
    seen: set[str] = set()
    for folder, below, names in os.walk(source, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen or (Path(folder) != source and _is_made_here(Path(folder), names)):
            below.clear()
            continue
        seen.add(real)
        below[:] = [name for name in below if not name.startswith(".")]
        yield from (Path(folder) / name for name in names)


def _is_made_here(folder: Path, names: list[str]) -> bool:
    """Return whether a folder that holds files with these names is a data directory or a run."""
    return any(is_record(folder / record) for record in _RECORDS.intersection(names))


def _by_pattern(source: Path, files: list[Path], pattern: str) -> Corpus:
    expression = _compile(pattern)
    depth = pattern.count("/") + 1
    names = {file: "/".join(file.relative_to(source).with_suffix("").parts[-depth:]) for file in files}
    matches: list[tuple[Path, re.Match[str]]] = []
    for file, name in names.items():
        match = expression.fullmatch(name)
        if match is None:
            raise ConfigError(
                f"{file}: its name does not match --pattern '{pattern}'; "
                + (
                    "move it away or rename it"
                    if any(map(expression.fullmatch, names.values()))
                    else "nor does any other here: give a pattern that does"
                )
            )
        matches.append((file, match))
    ids = recording_names(source, files)
    return Corpus.of(source, (_labelled(ids[file], file, match.groupdict()) for file, match in matches))


def _compile(pattern: str) -> re.Pattern[str]:
    expression = ""
    for literal, field in re.findall(r"([^{}]*)(?:\{([^{}]*)\})?", pattern):
        expression += re.escape(literal)
        if field and field not in _FIELDS:
            known = " ".join(f"{{{name}}}" for name in _FIELDS)
            raise ConfigError(f"--pattern '{pattern}': {{{field}}} is not known; the fields are {known}")
        if field:
            expression += f"(?P<{field}>{_FIELDS[field]})"
    try:
        compiled = re.compile(expression)
    except re.error as error:
        raise ConfigError(f"--pattern '{pattern}': {error.msg}; name each field once") from error
    if not {"digit", "word"} & compiled.groupindex.keys():
        raise ConfigError(f"--pattern '{pattern}': has no field for the word; use {{digit}} or {{word}}")
    return compiled


def _labelled(utterance_id: str, file: Path, fields: dict[str, str]) -> CorpusUtterance:
    text = digit_words()[int(fields["digit"])] if "digit" in fields else fields["word"]
    return CorpusUtterance(
        utterance_id=utterance_id,
        speaker=_plain_name(fields.get("speaker", UNKNOWN_SPEAKER)),
        text=text if plain_transcript(text) else "",
        audio=file,
        index=int(fields["index"]) if "index" in fields else None,
    )


def recording_names(source: Path, files: list[Path]) -> dict[Path, str]:
    """Name each file by its stem, or by its path below the source if stems repeat; names have no blanks.

    Raises:
        ConfigError: two files would have the same name.
    """
    names = {file: _plain_name(file.stem) for file in files}
    if len(set(names.values())) < len(names):
        names = {
            file: _plain_name("-".join(file.relative_to(source).with_suffix("").parts)) for file in files
        }
    first: dict[str, Path] = {}
    for file, name in names.items():
        if first.setdefault(name, file) is not file:
            raise ConfigError(f"{first[name]} and {file} are both utterance {name}; rename one")
    return names


def _by_kaldi_text(source: Path, files: list[Path], rules: ReadingRules) -> Corpus:
    names = _FileNames.of(source, files)
    texts = _named_table(source / "text", names, may_be_empty=True)
    speakers = _named_table(source / "utt2spk", names) if (source / "utt2spk").is_file() else {}
    return _with_transcripts(source, files, texts, speakers, "text", rules)


def _by_trans_txt(source: Path, files: list[Path], transcripts: list[Path], rules: ReadingRules) -> Corpus:
    names = _FileNames.of(source, files)
    texts: dict[str, str] = {}
    for path in transcripts:
        for utterance, text in _named_table(path, names, may_be_empty=True).items():
            if utterance in texts:
                raise ConfigError(f"{path}: utterance {utterance} has two transcripts; remove one")
            texts[utterance] = text
    speakers = {utterance: utterance.split("-")[0] for utterance in texts}
    return _with_transcripts(source, files, texts, speakers, "*.trans.txt", rules)


def _by_text_beside(source: Path, files: list[Path], every_text: list[Path], rules: ReadingRules) -> Corpus:
    ids = recording_names(source, files)
    texts: dict[str, str] = {}
    without: list[Path] = []
    for file in files:
        path = file.with_suffix(".txt")
        if path.is_file():
            texts[ids[file]] = " ".join(line for _, line in file_lines(path))
        else:
            without.append(file)
    if texts and all(map(_OF_TIMIT.match, texts.values())):
        first = next(file for file in files if ids[file] in texts).with_suffix(".txt")
        raise ConfigError(
            f"{first}: begins with two sample numbers, as all transcripts here do, which are not spoken; "
            "docs/preparing.md says how to make a file 'text' from TIMIT's"
        )
    if without and rules.needs_text and not rules.skip_incomplete:
        first, *others = without
        named = ", ".join(str(file) for file in others[: _MAX_NAMED - 1])
        more = ", ..." if len(without) > _MAX_NAMED else ""
        also = f", and {len(others):,} more of {len(files):,} audio files have none: {named}{more}"
        raise ConfigError(
            f"{first}: has no transcript {first.with_suffix('.txt').name} beside it{also if others else ''}; "
            "write what is missing, or leave such files out with --skip-incomplete"
        )
    corpus = _with_transcripts(source, files, texts, {}, "*.txt", rules)
    return dataclasses.replace(corpus, notices=corpus.notices + _texts_alone(every_text, files))


def _texts_alone(texts: list[Path], files: list[Path]) -> tuple[str, ...]:
    """Report .txt files without readable audio beside them: one may be a README, many are a mistake."""
    beside = {file.with_suffix(".txt") for file in files}
    alone = [path for path in texts if path not in beside and not _NO_AUDIO.match(path.name)]
    if not alone:
        return ()
    number = counted(len(alone), ".txt file")
    return (f"not used, because no readable audio file has the same name: {number}, first {alone[0]}",)


def _with_transcripts(
    source: Path,
    files: list[Path],
    texts: Mapping[str, str],
    speakers: Mapping[str, str],
    kind: str,
    rules: ReadingRules,
) -> Corpus:
    ids = recording_names(source, files)
    by_id = {ids[file]: file for file in files}
    spoken = {utterance: text if plain_transcript(text) else "" for utterance, text in texts.items()}
    lost = sorted(texts.keys() - by_id.keys())
    missing = sorted(by_id.keys() - texts.keys()) if rules.needs_text else []
    notices: tuple[str, ...] = ()
    if rules.skip_incomplete:
        empty = [u for u in sorted(by_id) if rules.needs_text and spoken.get(u) == ""]
        without = {*missing, *empty}
        by_id = {u: file for u, file in by_id.items() if u not in without}
        notices = left_out(
            {
                f"have no transcript in {kind}": missing,
                f"have no audio, but a transcript in {kind}": lost,
                "have an empty transcript": empty,
            }
        )
    elif missing:
        raise ConfigError(
            f"{by_id[missing[0]]}: utterance {missing[0]} has no transcript in {source}/{kind} "
            f"({len(missing)} missing); add it, or leave them out with --skip-incomplete"
        )
    elif lost:
        raise ConfigError(
            f"{source}/{kind}: no audio file for utterance {lost[0]} ({len(lost)} missing); "
            "add it, or leave them out with --skip-incomplete"
        )
    folders = {} if by_id.keys() <= speakers.keys() else _speakers_of_folders(source, files)
    utterances = (
        CorpusUtterance(u, speakers.get(u) or folders[file.parent], spoken.get(u, ""), file)
        for u, file in by_id.items()
    )
    return Corpus.of(source, utterances, may_lack_text=not rules.needs_text, notices=notices)


def _speakers_of_folders(source: Path, files: Iterable[Path]) -> dict[Path, str]:
    """Use the folders that hold audio as speakers, with the folders' names.

    If names repeat (ann/wav, bob/wav), the folders directly below the source are the speakers instead, or the
    whole paths if there is only one such folder.
    """
    below = {
        folder: tuple(map(_plain_name, folder.relative_to(source).parts))
        for folder in dict.fromkeys(file.parent for file in files)
    }
    named = [parts for parts in below.values() if parts]
    names = {parts[-1] for parts in named}
    tops = {parts[0] for parts in named}

    def speaker(parts: tuple[str, ...]) -> str:
        if len(names) == len(named):
            return parts[-1]
        return parts[0] if len(tops) > 1 else "-".join(parts)

    return {folder: speaker(parts) if parts else UNKNOWN_SPEAKER for folder, parts in below.items()}


def _plain_name(name: str) -> str:
    """Return a name without blanks, in composed letters (NFC): file names from a Mac are decomposed."""
    return unicodedata.normalize("NFC", "_".join(name.split()))


@dataclasses.dataclass(frozen=True)
class _FileNames:
    """The names that tables may use for the audio files of a corpus.

    Attributes:
        ids: ids of all files.
        of_blank: for file names with blanks: the id, by the name without blanks.
        most_words: largest number of words in a file's name.
    """

    ids: frozenset[str]
    of_blank: Mapping[str, str]
    most_words: int

    @classmethod
    def of(cls, source: Path, files: list[Path]) -> _FileNames:
        """Collect the names of the files.  Raises ConfigError as `recording_names`."""
        names = recording_names(source, files)
        num_words = {file: len(file.stem.split()) for file in files}
        of_blank = {_plain_name(file.stem): name for file, name in names.items() if num_words[file] > 1}
        return cls(frozenset(names.values()), of_blank, max(num_words.values()))

    def refuse_blanks(self, path: Path) -> None:
        """Refuse a table that has a file's name with its blanks: the first blank would end the id."""
        if not self.of_blank:
            return
        seen: set[str] = set()  # an id that occurs a second time may be the beginning of another one
        for number, line in file_lines(path):
            first, *others = line.split()[: self.most_words]
            plain = _plain_name(first)
            if plain in self.ids and plain not in seen:
                seen.add(plain)
                continue
            for end in range(1, len(others) + 1):
                written = " ".join((first, *others[:end]))
                name = self.of_blank.get(_plain_name(written))
                if name is not None:
                    raise ConfigError(
                        f"{path}:{number}: an id ends at its first blank; write {name} for {written!r}, and "
                        "likewise in every line"
                    )


def _named_table(path: Path, names: _FileNames, *, may_be_empty: bool = False) -> dict[str, str]:
    """Read a table of utterances that are named like their files.

    Raises:
        ConfigError: as `read_table`, or an utterance occurs twice or under a name with blanks.
    """
    names.refuse_blanks(path)
    table: dict[str, str] = {}
    for name, value in read_table(path, may_be_empty=may_be_empty).items():
        plain = _plain_name(name)
        if plain in table:
            raise ConfigError(f"{path}: {name} is listed twice, in two encodings of its letters; remove one")
        table[plain] = value
    return table
