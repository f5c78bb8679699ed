"""What reads a corpus: a class by its name, ours or one from outside.

Others register a class of their own with `corpus`, offer it by an entry point of the group
`speechdp.corpora`, or name it as MODULE:CLASS.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import ClassVar, TypeVar

from speechdp.data.corpora.audio_folder import read_audio_folder
from speechdp.data.corpora.corpus import Corpus, CorpusUtterance
from speechdp.data.corpora.kaldi_dir import is_kaldi_dir, read_kaldi_dir
from speechdp.errors import ConfigError
from speechdp.extensions import ExtensionPoint, read_options


class CorpusReader(ABC):
    """Reads one kind of corpus; a dataclass, whose fields are its options."""

    name: ClassVar[str]

    @abstractmethod
    def read(self, source: Path) -> Iterable[CorpusUtterance]:
        """Yield the utterances of a corpus, in any order.

        Audio is opened later: a path is absolute, or relative to `source`.  Where every utterance names its
        split, the corpus is divided so unless --split says otherwise.

        Args:
            source: as the user gives it.

        Raises:
            ConfigError: it is no such corpus; one line that names file and remedy.
        """


_Class = TypeVar("_Class", bound=type[CorpusReader])


def _check_declared(where: str, cls: type[CorpusReader]) -> None:
    if cls.__abstractmethods__:
        raise ConfigError(f"{where}: {cls.__name__} has no {', no '.join(sorted(cls.__abstractmethods__))}")


_OURS = ("folder", "kaldi")
#: All of them; packages offer theirs by the entry points of this group.
CORPORA = ExtensionPoint[CorpusReader](
    "corpus", "speechdp.corpora", CorpusReader, lambda: _OURS, _check_declared
)


def corpus(name: str) -> Callable[[_Class], _Class]:
    """Return a decorator that registers a reader of corpora under a name of its own.

    Args:
        name: letters, digits and underscores, as `speechdp prepare --corpus` takes it.

    Raises:
        ConfigError: the class is no reader, a field cannot be an option, or the name is none or another's.

    Example::

        @speechdp.corpus("csv")
        @dataclasses.dataclass(frozen=True)
        class CsvCorpus(CorpusReader):
            file: str = "corpus.csv"

            def read(self, source):
                for row in csv.DictReader((source / self.file).open()):
                    yield CorpusUtterance(row["id"], row["speaker"], row["text"], Path(row["audio"]))
    """

    return CORPORA.decorator(name)


def read_corpus(source: Path, reader: str | None, pattern: str | None = None) -> Corpus:
    """Read a corpus.

    Args:
        source: the folder or file.
        reader: `folder`, `kaldi`, or `NAME` or `MODULE:CLASS` from outside, with `:option=value,...` behind
            it; None: a Kaldi data directory or a folder of audio, whichever it is.
        pattern: of labels in file names, for a folder of audio.

    Raises:
        ConfigError: there is no such reader, or what it reads is no corpus.
    """
    name = reader or ("kaldi" if is_kaldi_dir(source) else "folder")
    if pattern is not None and name != "folder":
        raise ConfigError(
            f"{source}: is read by --corpus {name}, not as a folder of audio; leave --pattern out"
        )
    if name == "folder":
        return read_audio_folder(source, pattern)
    if name == "kaldi":
        return read_kaldi_dir(source)
    cls, rest = CORPORA.named(name)
    made = cls(**read_options(cls.name, cls, rest, kind="corpus"))
    return Corpus.of(source, (_checked(cls.name, source, each) for each in made.read(source)))


def _checked(name: str, source: Path, utterance: object) -> CorpusUtterance:
    """Return an utterance with its audio's whole path; refuse anything else that a reader gives."""
    if not isinstance(utterance, CorpusUtterance):
        raise ConfigError(f"corpus {name}: read() yields {utterance!r}; yield CorpusUtterance objects")
    if not utterance.utterance_id or utterance.utterance_id.split() != [utterance.utterance_id]:
        raise ConfigError(
            f"{source}: {utterance.utterance_id!r} cannot be an utterance's id; give ids without spaces"
        )
    folder = source if source.is_dir() else source.parent
    return dataclasses.replace(utterance, audio=folder / utterance.audio)
