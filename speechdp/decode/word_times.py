"""Find when each word of an alignment was spoken, and how confident the network was."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from speechdp.labels.hmm import (
    FloatArray,
    IntArray,
    StateInventory,
    phones_of,
    states_of,
)
from speechdp.labels.lexicon import SILENCE, Lexicon
from speechdp.labels.transcript_hmm import BLANK

#: Range [first, end) of a word's visits to states or classes.
_Place = tuple[int, int]


@dataclass(frozen=True)
class WordSpan:
    """A word and its frames [first, end) in an utterance."""

    word: str
    first: int
    end: int


def word_spans(
    words: Sequence[str], states: IntArray, lexicon: Lexicon, inventory: StateInventory
) -> list[WordSpan]:
    """Find the frames of each word in an alignment of a transcript.

    Args:
        words: the transcript.
        states: the context-independent state of each frame, (T,): the result of `Aligner.align`, or for a
            model with context, `StateTying.states` of that.
        lexicon: contains the pronunciation that was spoken.
        inventory: numbers the states.

    Returns:
        One span per word, in order.  Frames of silence belong to none.

    Example:
        >>> lexicon, inventory = Lexicon({"a": (("A",),)}), StateInventory(("A",))
        >>> word_spans(["a"], np.array([0, 1, 2, 3, 3, 4, 5], np.int32), lexicon, inventory)
        [WordSpan(word='a', first=3, end=7)]
    """
    begins = np.flatnonzero(np.diff(states, prepend=-1))  # first frame of each visit to a state
    ends = np.append(begins[1:], len(states))
    visited = states[begins].tolist()
    silence = set(inventory.classes_of(SILENCE))
    variants = [[states_of(v, inventory) for v in lexicon.pronunciations[word]] for word in words]

    def after_silence(visit: int) -> int:
        while visit < len(visited) and visited[visit] in silence:
            visit += 1
        return visit

    def places(visit: int, number: int) -> Iterator[_Place]:
        for first in range(visit, after_silence(visit) + 1):
            for variant in reversed(variants[number]):
                if visited[first : first + len(variant)] == variant:
                    yield first, first + len(variant)

    placed = _placed(len(words), places, lambda visit: after_silence(visit) == len(visited))
    return [
        WordSpan(word, int(begins[a]), int(ends[b - 1])) for word, (a, b) in zip(words, placed, strict=True)
    ]


def ctc_word_spans(
    words: Sequence[str], classes: IntArray, lexicon: Lexicon, inventory: StateInventory
) -> list[WordSpan]:
    """Find the frames of each word in an alignment by a CTC model.

    A word lasts from the first frame of its first phone to the last of its last phone, including the blanks
    between them.  If a word ends with the phone that the next begins with, without a blank between, the
    frames of that phone are divided evenly.  CTC learns words, not times: phones may appear late and briefly.

    Args:
        words: the transcript.
        classes: the class of each frame, (T,), as returned by `Aligner.align` for a `CtcTransducer`.
        lexicon: contains the pronunciation that was spoken.
        inventory: HMM states of the same phones.

    Returns:
        One span per word, in order.

    Example:
        >>> lexicon, inventory = Lexicon({"a": (("A",),)}), StateInventory(("A",))
        >>> ctc_word_spans(["a", "a"], np.array([0, 1, 1, 0, 1, 0], np.int32), lexicon, inventory)
        [WordSpan(word='a', first=1, end=3), WordSpan(word='a', first=4, end=5)]
    """
    begins = np.flatnonzero(np.diff(classes, prepend=-1))
    ends = np.append(begins[1:], len(classes))
    is_heard = classes[begins] != BLANK
    begins, ends = begins[is_heard], ends[is_heard]
    visited = classes[begins].tolist()
    variants = [
        [[c for c in phones_of(v, inventory) if c != BLANK] for v in lexicon.pronunciations[word]]
        for word in words
    ]

    def places(visit: int, number: int) -> Iterator[_Place]:
        for first in (visit - 1, visit) if visit else (visit,):  # the last yielded is tried first
            for variant in reversed(variants[number]):
                if visited[first : first + len(variant)] == variant and (variant or first == visit):
                    yield first, first + len(variant)

    placed = _placed(len(words), places, lambda visit: visit == len(visited))
    return _divided(words, placed, begins, ends)


def _placed(
    num_words: int, places: Callable[[int, int], Iterable[_Place]], is_end: Callable[[int], bool]
) -> tuple[_Place, ...]:
    """Return the visits [first, end) of each word of an alignment.

    Searches depth first: a pronunciation may be the beginning of another, and may itself begin or end with
    silence.

    Args:
        num_words: number of words in the transcript.
        places: given the visit after the previous word and a word's number, yields where that word may be;
            the last is tried first.
        is_end: returns whether the alignment has no word left from a visit on.
    """
    paths: list[tuple[int, tuple[_Place, ...]]] = [(0, ())]
    tried: set[tuple[int, int]] = set()  # dead ends: without it there may be 2 ** words paths
    while paths:
        visit, placed = paths.pop()
        if (visit, len(placed)) in tried:
            continue
        tried.add((visit, len(placed)))
        if len(placed) < num_words:
            paths += ((end, (*placed, (first, end))) for first, end in places(visit, len(placed)))
        elif is_end(visit):
            return placed
    raise AssertionError("the alignment is not one of this transcript")


def _divided(
    words: Sequence[str], placed: Sequence[_Place], begins: IntArray, ends: IntArray
) -> list[WordSpan]:
    """Return the words' frames; those of a visit to a phone that several words share are divided."""
    sharing: dict[int, list[int]] = {}
    for number, (first, end) in enumerate(placed):
        for visit in range(first, end):
            sharing.setdefault(visit, []).append(number)

    def edge(visit: int, part: int) -> int:
        return int(begins[visit] + (ends[visit] - begins[visit]) * part // len(sharing[visit]))

    spans = []
    for number, (first, end) in enumerate(placed):
        word = words[number]
        if first == end:  # the word's pronunciation is silence alone
            at = int(begins[first]) if first < len(begins) else int(ends[-1]) if len(ends) else 0
            spans.append(WordSpan(word, at, at))
            continue
        since = edge(first, sharing[first].index(number))
        spans.append(WordSpan(word, since, edge(end - 1, sharing[end - 1].index(number) + 1)))
    return spans


def confidences(
    spans: Sequence[WordSpan], classes: IntArray, log_likelihoods: FloatArray, phones: IntArray
) -> list[float]:
    """Return how confident the network is of each word, 0 to 1.

    The confidence is the share of a frame's scores (normalised to a sum of 1 over all classes) that goes to
    the states of the phone found there, averaged over the word's frames.  It distinguishes well-heard words
    from badly heard ones, but takes no account of other words that would sound the same.

    Args:
        spans: of the words.
        classes: the class of each frame, (T,).
        log_likelihoods: scaled, (T, C), nats.
        phones: the phone of each class, (C,), in ascending order.
    """
    scores = np.exp(log_likelihoods - log_likelihoods.max(axis=1, keepdims=True, initial=-np.inf))
    shares = scores / scores.sum(axis=1, keepdims=True)
    of_phone = np.add.reduceat(shares, np.unique(phones, return_index=True)[1], axis=1)
    own = of_phone[np.arange(len(classes)), phones[classes]]
    return [float(own[span.first : max(span.end, span.first + 1)].mean()) for span in spans]
