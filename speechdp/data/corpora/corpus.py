"""Describe the utterances of a corpus before any audio is read."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from speechdp.data.corpora.same_sound import SameFiles
from speechdp.data.signal.audio import AudioSource, file_of
from speechdp.errors import ConfigError

#: Speaker of audio whose source names none.
UNKNOWN_SPEAKER = "unknown"
SPLIT_NAMES = ("train", "dev", "test")


@dataclass(frozen=True)
class CorpusUtterance:
    """One utterance: who said which words, and in which file.

    Attributes:
        index: number of the take if the corpus counts takes (FSDD), else None.
        split: `train`, `dev` or `test` if the corpus or the user specifies it, else None.
        own_id: id in its source if the id was changed because of other sources, else None.
    """

    utterance_id: str
    speaker: str
    text: str
    audio: AudioSource
    index: int | None = None
    split: str | None = None
    own_id: str | None = None

    @property
    def words(self) -> tuple[str, ...]:
        """The words of the transcript."""
        return tuple(self.text.split())


@dataclass(frozen=True)
class Corpus:
    """Utterances of one or several sources, sorted by id.

    Attributes:
        source: origin of the utterances, as named in messages; of several sources, those that a rule divides.
        notices: messages for the user, e.g. what was left out.
        held_out: for dev and test, if they are sources of their own: the names of these sources.  A rule
            divides only the other utterances.
        files: which files of several sources are the same; None: not looked up.
    """

    source: Path | str
    utterances: tuple[CorpusUtterance, ...]
    notices: tuple[str, ...] = ()
    held_out: Mapping[str, str] = field(default_factory=dict)
    files: SameFiles | None = None

    @classmethod
    def of(
        cls,
        source: Path | str,
        utterances: Iterable[CorpusUtterance],
        *,
        may_lack_text: bool = False,
        notices: tuple[str, ...] = (),
        held_out: Mapping[str, str] | None = None,
        files: SameFiles | None = None,
    ) -> Corpus:
        """Sort the utterances and refuse what no later step could use.

        Args:
            source, notices, held_out, files: see Corpus.
            utterances: in any order.
            may_lack_text: whether empty transcripts are allowed.

        Raises:
            ConfigError: no utterance, two with the same id, an empty transcript, an unknown split, a split
                for only some utterances, or a name that our files cannot hold; names it.
        """
        ordered = sorted(utterances, key=lambda utterance: utterance.utterance_id)
        if not ordered:
            raise ConfigError(f"{source}: holds no utterance; give a folder with audio and transcripts")
        for first, second in itertools.pairwise(ordered):
            if first.utterance_id == second.utterance_id:
                raise ConfigError(
                    f"{source}: {first.audio} and {second.audio} are both utterance {first.utterance_id}; "
                    "rename one"
                )
        held_out = held_out or {}
        divided = any(utterance.split not in (None, *held_out) for utterance in ordered)
        for utterance in ordered:
            try:
                f"{utterance.utterance_id}{utterance.speaker}{file_of(utterance.audio)}".encode()
            except UnicodeEncodeError as error:  # file names are bytes, in any encoding
                raise ConfigError(f"{utterance.audio}: its name is not UTF-8; rename it") from error
            if not (utterance.words or may_lack_text):
                raise ConfigError(
                    f"{source}: utterance {utterance.utterance_id} ({utterance.audio}) has an empty "
                    "transcript; write one, or leave such utterances out with --skip-incomplete"
                )
            if utterance.split is None and divided:
                raise ConfigError(
                    f"{source}: utterance {utterance.utterance_id} is in no split, while others are; "
                    "give all a split, or none"
                )
            if utterance.split not in (None, *SPLIT_NAMES):
                raise ConfigError(
                    f"{source}: utterance {utterance.utterance_id} is in split {utterance.split!r}; "
                    "splits are train, dev and test: give it one of these, or remove it"
                )
        return cls(source, tuple(ordered), notices, held_out, files)

    @property
    def to_divide(self) -> Corpus:
        """The utterances outside of the sources of dev and test."""
        if not self.held_out:
            return self
        others = tuple(u for u in self.utterances if u.split not in self.held_out)
        return Corpus(self.source, others, self.notices)

    @property
    def has_index(self) -> bool:
        """Whether every utterance has the number of its take."""
        return all(utterance.index is not None for utterance in self.utterances)

    @property
    def has_splits(self) -> bool:
        """Whether every utterance has a split."""
        return all(utterance.split is not None for utterance in self.utterances)

    @property
    def speakers(self) -> tuple[str, ...]:
        """All speakers, sorted."""
        return tuple(sorted({utterance.speaker for utterance in self.utterances}))

    @property
    def words(self) -> frozenset[str]:
        """All words of the transcripts."""
        return frozenset(word for utterance in self.utterances for word in utterance.words)

    def respelled(self, spelling: dict[str, str], *, needs_text: bool = True) -> Corpus:
        """Replace words of the transcripts, e.g. by the upper-case form of a lexicon; "" drops a word.

        Raises:
            ConfigError: a transcript becomes empty although texts are needed.
        """
        if not spelling:
            return self
        respelt = tuple(
            replace(u, text=" ".join(filter(None, (spelling.get(word, word) for word in u.words))))
            for u in self.utterances
        )
        for before, after in zip(self.utterances, respelt, strict=True):
            if needs_text and before.words and not after.words:
                raise ConfigError(
                    f"{self.source}: utterance {before.utterance_id} ({before.audio}) has an empty "
                    "transcript: nothing but punctuation; write one, or leave such utterances out with "
                    "--skip-incomplete"
                )
        return replace(self, utterances=respelt)


def file_lines(path: Path) -> list[tuple[int, str]]:
    """Return the non-empty lines of a UTF-8 text file, stripped, with their numbers from 1.

    Raises:
        ConfigError: as `whole_lines`.
    """
    return [(number, line.strip()) for number, line in enumerate(whole_lines(path), 1) if line.strip()]


def whole_lines(path: Path) -> list[str]:
    """Return the lines of a UTF-8 text file unchanged, empty ones included.

    Raises:
        ConfigError: the file is missing or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); check the path") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 ({error.reason}); convert it, e.g. with iconv") from error
