"""When each word of an alignment was spoken, and how sure the network was of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from speechdp.labels.hmm import STATES_PER_PHONE, FloatArray, IntArray, StateInventory, states_of
from speechdp.labels.lexicon import SILENCE, Lexicon


@dataclass(frozen=True)
class WordSpan:
    """A word on frames [first, end) of an utterance."""

    word: str
    first: int
    end: int


def word_spans(
    words: Sequence[str], classes: IntArray, lexicon: Lexicon, inventory: StateInventory
) -> list[WordSpan]:
    """Find the frames of each word in an alignment of a transcript.

    Args:
        words: the transcript.
        classes: the class of each frame, (T,), as `Aligner.align` gives them.
        lexicon: with the pronunciation that was spoken.
        inventory: numbers the states.

    Returns:
        One span a word, in order.  Frames of silence belong to none.

    Example:
        >>> lexicon, inventory = Lexicon({"a": (("A",),)}), StateInventory(("A",))
        >>> word_spans(["a"], np.array([0, 1, 2, 3, 3, 4, 5], np.int32), lexicon, inventory)
        [WordSpan(word='a', first=3, end=7)]
    """
    begins = np.flatnonzero(np.diff(classes, prepend=-1))  # first frame of each visit to a state
    ends = np.append(begins[1:], len(classes))
    visited = classes[begins].tolist()
    silence = set(inventory.classes_of(SILENCE))
    variants = [[states_of(v, inventory) for v in lexicon.pronunciations[word]] for word in words]

    def after_silence(visit: int) -> int:
        while visit < len(visited) and visited[visit] in silence:
            visit += 1
        return visit

    # Depth first: a pronunciation may be the beginning of another, and may itself begin or end with silence.
    paths: list[tuple[int, tuple[tuple[int, int], ...]]] = [(0, ())]
    while paths:
        visit, placed = paths.pop()
        if len(placed) == len(words):
            if after_silence(visit) == len(visited):
                pairs = zip(words, placed, strict=True)
                return [WordSpan(word, int(begins[a]), int(ends[b - 1])) for word, (a, b) in pairs]
            continue
        for first in sorted({visit, after_silence(visit)}):
            for states in reversed(variants[len(placed)]):
                if visited[first : first + len(states)] == states:
                    end = first + len(states)
                    paths.append((end, (*placed, (first, end))))
    raise AssertionError("the alignment is not one of this transcript")


def confidences(spans: Sequence[WordSpan], classes: IntArray, log_likelihoods: FloatArray) -> list[float]:
    """Return how sure the network is of each word, 0 to 1.

    It is the share of a frame's scores (made to add up to 1 over all classes) that goes to the states of the
    phone that was found there, averaged over the word's frames.  It tells well-heard words from badly heard
    ones; it knows nothing of other words that would sound the same.

    Args:
        spans: of the words.
        classes: the class of each frame, (T,).
        log_likelihoods: scaled, (T, C), nats; classes in threes, one phone each.
    """
    scores = np.exp(log_likelihoods - log_likelihoods.max(axis=1, keepdims=True, initial=-np.inf))
    shares = scores / scores.sum(axis=1, keepdims=True)
    of_phone = shares.reshape(len(shares), -1, STATES_PER_PHONE).sum(axis=2)
    own = of_phone[np.arange(len(classes)), classes // STATES_PER_PHONE]
    return [float(own[span.first : span.end].mean()) for span in spans]
