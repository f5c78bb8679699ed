"""Choose and run the reader of a corpus: a class found by its name, ours or another package's.

Other packages register a class with `corpus`, offer it by an entry point of the group `speechdp.corpora`, or
name it as MODULE:CLASS.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import ClassVar, SupportsIndex, TypeVar

from speechdp.data.corpora.audio_folder import read_audio_folder
from speechdp.data.corpora.corpus import UNKNOWN_SPEAKER, Corpus, CorpusUtterance
from speechdp.data.corpora.kaldi_dir import (
    PLAIN_RULES,
    ReadingRules,
    is_kaldi_dir,
    left_out,
    read_kaldi_dir,
)
from speechdp.data.corpora.manifest import is_ljspeech_folder, is_manifest, read_manifest
from speechdp.data.signal.audio import AudioPart, with_channel
from speechdp.errors import ConfigError
from speechdp.extensions import ExtensionPoint, code_of, read_options
from speechdp.labels.text_normalise import plain_transcript


class CorpusReader(ABC):
    """Reads one kind of corpus; subclasses are dataclasses whose fields are their options."""

    name: ClassVar[str]

    @abstractmethod
    def read(self, source: Path) -> Iterable[CorpusUtterance]:
        """Yield the utterances of a corpus, in any order.

        Audio is opened later: a path is absolute, or relative to `source`.  If every utterance has a split,
        the corpus is divided accordingly unless --split says otherwise.

        Args:
            source: as given by the user.

        Raises:
            ConfigError: it is no such corpus; one line that names file and remedy.
        """


_Class = TypeVar("_Class", bound=type[CorpusReader])


_OURS = ("folder", "kaldi", "manifest")
#: All readers; packages offer theirs by the entry points of this group.
CORPORA = ExtensionPoint[CorpusReader]("corpus", "speechdp.corpora", CorpusReader, lambda: _OURS)


def corpus(name: str) -> Callable[[_Class], _Class]:
    """Return a decorator that registers a reader of corpora under a name.

    Args:
        name: letters, digits and underscores, for `speechdp prepare --corpus`.

    Raises:
        ConfigError: the class is no reader, a field cannot be an option, or the name is invalid or taken.

    Example::

        @speechdp.corpus("csv")
        @dataclasses.dataclass(frozen=True)
        class CsvCorpus(CorpusReader):
            file: str = "corpus.csv"

            def read(self, source):
                for row in csv.DictReader((source / self.file).open(encoding="utf-8")):
                    yield CorpusUtterance(row["id"], row["speaker"], row["text"], Path(row["audio"]))
    """

    return CORPORA.decorator(name)


def reader_of(source: Path, given: str | None, pattern: str | None = None) -> str:
    """Return the reader's name: `given` if there is one, else `kaldi`, `manifest` or `folder` by detection.

    Args:
        source: the folder or file.
        given: value of --corpus.
        pattern: pattern of labels in file names; with one, a folder's metadata.csv is ignored.

    Raises:
        ConfigError: a folder's metadata.csv cannot be read.
    """
    if given:
        return given
    if is_manifest(source):
        return "manifest"
    if is_kaldi_dir(source):
        return "kaldi"
    return "manifest" if pattern is None and is_ljspeech_folder(source) else "folder"


def read_corpus(
    source: Path, reader: str | None, pattern: str | None = None, rules: ReadingRules = PLAIN_RULES
) -> Corpus:
    """Read a corpus.

    Args:
        source: the folder or file.
        reader: `folder`, `kaldi`, `manifest`, or another package's `NAME` or `MODULE:CLASS`, followed by
            `:option=value,...`; None: one of the first three by detection.
        pattern: pattern of labels in file names, for a folder of audio.
        rules: how files are read; for another package's reader only the channel and those on empty
            transcripts apply.

    Raises:
        ConfigError: there is no such reader, it fails, or its result is no corpus.
    """
    text = reader_of(source, reader, pattern)
    name, _, options = text.partition(":")
    if name in _OURS and options:
        raise ConfigError(f"--corpus {text}: {name} has no options; write --corpus {name}")
    if pattern is not None and name != "folder":
        raise ConfigError(
            f"{source}: is read by --corpus {text}, not as a folder of audio; leave --pattern out"
            if reader
            else f"{source}: is a manifest, which has the labels; leave --pattern out"
            if name == "manifest"
            else f"{source}: is a Kaldi data directory (it has a wav.scp); leave --pattern out, or give "
            "--corpus folder"
        )
    if name == "kaldi":
        return read_kaldi_dir(source, rules)
    if name == "folder":
        corpus = read_audio_folder(source, pattern, rules)
    elif name == "manifest":
        corpus = _corpus_of(name, source, read_manifest(source, rules), rules)
    else:
        corpus = _read_from_outside(source, text, rules)
    if rules.channel is None:
        return corpus
    utterances = (
        dataclasses.replace(u, audio=with_channel(u.audio, rules.channel)) for u in corpus.utterances
    )
    return dataclasses.replace(corpus, utterances=tuple(utterances))


def _read_from_outside(source: Path, text: str, rules: ReadingRules) -> Corpus:
    """Read a corpus by another package's class."""
    cls, options = CORPORA.named(text)
    values = read_options(cls.name, cls, options, kind="corpus")
    with code_of(cls, f"corpus {cls.name}", f"correct the reader, or what it reads in {source}"):
        utterances = list(cls(**values).read(source))
    return _corpus_of(cls.name, source, utterances, rules)


def _corpus_of(name: str, source: Path, utterances: Iterable[CorpusUtterance], rules: ReadingRules) -> Corpus:
    """Make a corpus of the utterances from a reader; leave out those without words if that is allowed."""
    folder = source if source.is_dir() else source.parent
    checked = [_checked(name, source, folder, each) for each in utterances]
    empty: list[str] = []
    if rules.skip_incomplete and rules.needs_text:
        empty = [u.utterance_id for u in checked if not plain_transcript(u.text)]
        checked = [u for u in checked if plain_transcript(u.text)]
    notices = left_out({"have an empty transcript": empty})
    return Corpus.of(source, checked, may_lack_text=not rules.needs_text, notices=notices)


#: Allowed types of an utterance's fields, and the remedy for any other.
_KINDS: dict[str, tuple[type | tuple[type, ...], str]] = {
    "utterance_id": (str, "give a text without spaces"),
    "speaker": (str, f"give a text, {UNKNOWN_SPEAKER!r} where it is not known"),
    "text": (str, "give the words as a text"),
    "audio": ((str, Path, AudioPart), "give a path"),
    "index": (
        (type(None), SupportsIndex),  # None first: isinstance with a protocol is slow
        "give a whole number or None",
    ),
}


def _checked(name: str, source: Path, folder: Path, utterance: object) -> CorpusUtterance:
    """Return an utterance with its audio's path resolved from `folder`; refuse anything else."""
    if not isinstance(utterance, CorpusUtterance):
        raise ConfigError(f"corpus {name}: read() yields {utterance!r}; yield CorpusUtterance objects")
    for field, (kind, remedy) in _KINDS.items():
        value = getattr(utterance, field)
        if not isinstance(value, kind):
            raise ConfigError(
                f"corpus {name}: {field} of utterance {utterance.utterance_id!r} is {value!r}; {remedy}"
            )
    if not utterance.utterance_id or utterance.utterance_id.split() != [utterance.utterance_id]:
        raise ConfigError(
            f"{source}: {utterance.utterance_id!r} cannot be an utterance's id; give ids without spaces"
        )
    audio = utterance.audio
    if isinstance(audio, AudioPart):
        return dataclasses.replace(utterance, audio=dataclasses.replace(audio, path=folder / audio.path))
    return dataclasses.replace(utterance, audio=folder / audio)
