"""When each word of an alignment was spoken, and how sure the network was of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from speechdp.labels.hmm import STATES_PER_PHONE, FloatArray, IntArray, StateInventory, states_of
from speechdp.labels.lexicon import SILENCE, Lexicon
from speechdp.labels.state_tying import StateTying


@dataclass(frozen=True)
class WordSpan:
    """A word on frames [first, end) of an utterance."""

    word: str
    first: int
    end: int


def word_spans(
    words: Sequence[str], states: IntArray, lexicon: Lexicon, inventory: StateInventory
) -> list[WordSpan]:
    """Find the frames of each word in an alignment of a transcript.

    Args:
        words: the transcript.
        states: the state of each frame without context, (T,): what `Aligner.align` gives, or, of a model with
            context, `StateTying.states` of that.
        lexicon: with the pronunciation that was spoken.
        inventory: numbers the states.

    Returns:
        One span a word, in order.  Frames of silence belong to none.

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

    # Depth first: a pronunciation may be the beginning of another, and may itself begin or end with silence.
    paths: list[tuple[int, tuple[tuple[int, int], ...]]] = [(0, ())]
    while paths:
        visit, placed = paths.pop()
        if len(placed) == len(words):
            if after_silence(visit) == len(visited):
                pairs = zip(words, placed, strict=True)
                return [WordSpan(word, int(begins[a]), int(ends[b - 1])) for word, (a, b) in pairs]
            continue
        for first in range(visit, after_silence(visit) + 1):
            for variant in reversed(variants[len(placed)]):
                if visited[first : first + len(variant)] == variant:
                    end = first + len(variant)
                    paths.append((end, (*placed, (first, end))))
    raise AssertionError("the alignment is not one of this transcript")


def confidences(
    spans: Sequence[WordSpan], classes: IntArray, log_likelihoods: FloatArray, tying: StateTying | None = None
) -> list[float]:
    """Return how sure the network is of each word, 0 to 1.

    It is the share of a frame's scores (made to add up to 1 over all classes) that goes to the states of the
    phone that was found there, averaged over the word's frames.  It tells well-heard words from badly heard
    ones; it knows nothing of other words that would sound the same.

    Args:
        spans: of the words.
        classes: the class of each frame, (T,).
        log_likelihoods: scaled, (T, C), nats.
        tying: what the classes are; None: states without context, in threes.
    """
    scores = np.exp(log_likelihoods - log_likelihoods.max(axis=1, keepdims=True, initial=-np.inf))
    shares = scores / scores.sum(axis=1, keepdims=True)
    phones = (np.arange(shares.shape[1]) if tying is None else tying.states) // STATES_PER_PHONE
    of_phone = np.add.reduceat(shares, np.unique(phones, return_index=True)[1], axis=1)
    own = of_phone[np.arange(len(classes)), phones[classes]]
    return [float(own[span.first : span.end].mean()) for span in spans]
