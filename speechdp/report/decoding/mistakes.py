"""Find the mistakes of a decoding: confused words, deleted and inserted words, the worst utterances."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from speechdp.counting import counted
from speechdp.decode.wer import AlignedWord, ErrorKind


@dataclass(frozen=True)
class AlignedUtterance:
    """An utterance with its reference and recognised words aligned.

    Attributes:
        speaker: name of the speaker; "" if unknown.
        words: pairs of reference and recognised word, in order.
    """

    utterance_id: str
    speaker: str
    words: tuple[AlignedWord, ...]

    @property
    def num_said(self) -> int:
        """Number of reference words."""
        return sum(bool(word.reference) for word in self.words)

    @property
    def num_errors(self) -> int:
        """Number of words substituted, deleted or inserted."""
        return sum(word.error is not None for word in self.words)

    @property
    def counts(self) -> str:
        """The numbers of errors and of reference words: `2 errors in 13 words`."""
        return f"{counted(self.num_errors, 'error')} in {counted(self.num_said, 'word')}"

    def count(self, error: ErrorKind) -> int:
        """Return the number of errors of one kind."""
        return sum(word.error == error for word in self.words)


@dataclass(frozen=True)
class Confusion:
    """A word that was recognised as another.

    Attributes:
        times: number of such substitutions.
        said: number of times the reference word was said.
    """

    reference: str
    hypothesis: str
    times: int
    said: int


@dataclass(frozen=True)
class LostOrAdded:
    """A word that was deleted or inserted.

    Attributes:
        said: number of times it was said.
    """

    word: str
    deleted: int
    inserted: int
    said: int


def confusions(utterances: Sequence[AlignedUtterance], most: int) -> list[Confusion]:
    """Return the most frequent substitutions, at most `most`."""
    said = _said(utterances)
    pairs = Counter(
        (word.reference, word.hypothesis)
        for utterance in utterances
        for word in utterance.words
        if word.error == "substitution"
    )
    frequent = sorted(pairs.items(), key=lambda item: (-item[1], item[0]))[:most]
    return [Confusion(*pair, times, said[pair[0]]) for pair, times in frequent]


def lost_and_added(utterances: Sequence[AlignedUtterance], most: int) -> list[LostOrAdded]:
    """Return the words that were deleted or inserted most often, at most `most`."""
    said = _said(utterances)
    words = [word for utterance in utterances for word in utterance.words]
    deleted = Counter(word.reference for word in words if word.error == "deletion")
    inserted = Counter(word.hypothesis for word in words if word.error == "insertion")
    both = deleted + inserted
    frequent = sorted(both, key=lambda word: (-both[word], word))[:most]
    return [LostOrAdded(word, deleted[word], inserted[word], said[word]) for word in frequent]


def worst(utterances: Sequence[AlignedUtterance], most: int) -> list[AlignedUtterance]:
    """Return the utterances with most errors, at most `most`; among equals the shortest ones first."""
    wrong = [utterance for utterance in utterances if utterance.num_errors]
    return sorted(wrong, key=lambda one: (-one.num_errors, one.num_said, one.utterance_id))[:most]


def _said(utterances: Sequence[AlignedUtterance]) -> Counter[str]:
    return Counter(word.reference for utterance in utterances for word in utterance.words if word.reference)
