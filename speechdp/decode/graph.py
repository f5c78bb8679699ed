"""Decoding graphs: a lexicon-and-HMM transducer (HL) composed with a grammar (G) by kaldifst.

HL reads one label a frame, `class + 1` (0 is epsilon), and writes words; G accepts word sequences.
Costs are -log probabilities, so the decoder's best path is the most probable one.

No determinisation is done, hence no disambiguation symbols are needed: they exist in Kaldi's recipes
only to make L o G determinisable.  Viterbi search is as right on a non-deterministic graph.  The price
is that words do not share prefixes; that is nothing for vocabularies up to some thousands of words.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import kaldifst
import numpy as np
from numpy.typing import ArrayLike

from speechdp.errors import ConfigError
from speechdp.labels.hmm import STATES_PER_PHONE, StateInventory, states_of
from speechdp.labels.lexicon import SILENCE, Lexicon, digit_words

EPSILON = 0


class Grammar(str, Enum):
    """Which word sequences may be recognised.

    word-loop: any words of the lexicon, in any number; digit-loop: the same over the digit words;
    word: exactly one word of the lexicon; transcript-set: one of the corpus's transcripts as a whole.
    """

    WORD_LOOP = "word-loop"
    DIGIT_LOOP = "digit-loop"
    WORD = "word"
    TRANSCRIPT_SET = "transcript-set"


@dataclass(frozen=True)
class DecodingGraph:
    """A graph to search.

    Attributes:
        fst: kaldifst.StdVectorFst; input labels are class + 1, output labels index `words` + 1.
        words: the words by output label - 1.
    """

    fst: Any
    words: tuple[str, ...]


class LexiconTransducer:
    """HL: every word's HMM, with optional silence at both ends and between words.

    Built once for a lexicon and a model's transitions; `compose` makes a graph for each grammar.

    The start state is a word boundary.  From it an epsilon arc (probability 1 - silence) or the silence
    HMM (probability silence) leads to the hub; from the hub a chain for each pronunciation leads back to
    the boundary, or the utterance ends.  A state's self-loop carries its class, and so does the arc that
    enters it: a visit of n frames costs n - 1 self-loops and one leaving.  Variants of a word have
    probability 1 each, as in Kaldi without pronunciation probabilities.

    Args:
        lexicon: the words.
        inventory: numbers the states.
        self_loop: each class's self-loop probability, (C,), within (0, 1).
        silence_probability: of a pause at a word boundary, within [0, 1); 0 leaves silence out.
    """

    def __init__(
        self,
        lexicon: Lexicon,
        inventory: StateInventory,
        self_loop: ArrayLike,
        silence_probability: float = 0.5,
    ) -> None:
        stay = np.asarray(self_loop, dtype=np.float64)
        if stay.shape != (inventory.num_classes,):
            raise ConfigError(
                f"the model has {stay.size} classes, the lexicon {inventory.num_classes}; "
                "decode with the data directory the model was trained on"
            )
        assert 0 <= silence_probability < 1
        assert ((stay > 0) & (stay < 1)).all()
        self.lexicon = lexicon
        self.words = lexicon.words
        self.word_ids: Mapping[str, int] = {word: i for i, word in enumerate(self.words, start=1)}
        self._inventory = inventory
        self._stay_cost = -np.log(stay)
        self._leave_cost = -np.log1p(-stay)
        self.fst = kaldifst.StdVectorFst()
        self._build(silence_probability)
        kaldifst.arcsort(self.fst, sort_type="olabel")

    def compose(self, grammar: Any) -> DecodingGraph:
        """Compose with an acceptor over `word_ids`: HL o G, without states that lead nowhere.

        Epsilon arcs stay: removing them would join every word's end with every word's beginning.
        """
        kaldifst.arcsort(grammar, sort_type="ilabel")
        fst = kaldifst.compose(self.fst, grammar, connect=True)
        kaldifst.arcsort(fst, sort_type="ilabel")
        return DecodingGraph(fst, self.words)

    def min_frames(self, words: Iterable[str]) -> int:
        """Return the fewest frames that can hold `words`: one a state of each shortest pronunciation."""
        variants = (self.lexicon.pronunciations[word] for word in words)
        return sum(STATES_PER_PHONE * min(map(len, v)) for v in variants)

    def _build(self, silence_probability: float) -> None:
        boundary, hub = self.fst.add_state(), self.fst.add_state()
        self.fst.start = boundary
        self.fst.set_final(hub, 0.0)
        self._arc(boundary, EPSILON, EPSILON, -np.log1p(-silence_probability), hub)
        if silence_probability > 0:
            silence = states_of([SILENCE], self._inventory)
            self._chain(boundary, hub, silence, EPSILON, -np.log(silence_probability))
        for word, variants in self.lexicon.pronunciations.items():
            for variant in variants:
                states = states_of(variant, self._inventory)
                self._chain(hub, boundary, states, self.word_ids[word], 0.0)

    def _chain(self, source: int, target: int, classes: Sequence[int], word: int, cost: float) -> None:
        """Add a left-to-right HMM from `source` to `target`; its first arc writes `word` and costs `cost`.

        The word stands on the first arc, not the last, so that composition with a grammar follows only
        the words the grammar allows.
        """
        for c in classes:
            state = self.fst.add_state()
            self._arc(source, c + 1, word, cost, state)
            self._arc(state, c + 1, EPSILON, self._stay_cost[c], state)
            source, word, cost = state, EPSILON, self._leave_cost[c]
        self._arc(source, EPSILON, EPSILON, cost, target)

    def _arc(self, source: int, label: int, word: int, cost: float, target: int) -> None:
        self.fst.add_arc(source, kaldifst.StdArc(label, word, float(cost), target))


def word_loop(word_ids: Sequence[int], insertion_log_prob: float = 0.0) -> Any:
    """Accept any number of words, each with probability 1 / V times exp(insertion_log_prob).

    Args:
        word_ids: the vocabulary of V words.
        insertion_log_prob: added to each word's log-probability; negative gives fewer words.
    """
    return _one_word_arcs(word_ids, np.log(len(word_ids)) - insertion_log_prob, loop=True)


def single_word(word_ids: Sequence[int]) -> Any:
    """Accept exactly one word, each with probability 1 / V."""
    return _one_word_arcs(word_ids, np.log(len(word_ids)), loop=False)


def _one_word_arcs(word_ids: Sequence[int], cost: float, *, loop: bool) -> Any:
    fst = kaldifst.StdVectorFst()
    start = fst.start = fst.add_state()
    end = start if loop else fst.add_state()
    fst.set_final(end, 0.0)
    for word in word_ids:
        fst.add_arc(start, kaldifst.StdArc(word, word, float(cost), end))
    return fst


def transcript(word_ids: Sequence[int]) -> Any:
    """Accept one word sequence, at no cost."""
    return transcript_set([word_ids])


def transcript_set(transcripts: Iterable[Sequence[int]]) -> Any:
    """Accept any one of several word sequences, at no cost: a tree, so that common beginnings are shared."""
    fst = kaldifst.StdVectorFst()
    start = fst.start = fst.add_state()
    following: dict[tuple[int, int], int] = {}
    for word_ids in transcripts:
        state = start
        for word in word_ids:
            target = following.get((state, word))
            if target is None:
                target = following[state, word] = fst.add_state()
                fst.add_arc(state, kaldifst.StdArc(word, word, 0.0, target))
            state = target
        fst.set_final(state, 0.0)
    return fst


def choose_grammar(transcripts: Iterable[Sequence[str]]) -> Grammar:
    """Choose digit-loop if all words are digits, else word-loop."""
    used = {word.lower() for words in transcripts for word in words}
    return Grammar.DIGIT_LOOP if used and used <= set(digit_words()) else Grammar.WORD_LOOP


def build_graph(
    transducer: LexiconTransducer,
    grammar: Grammar,
    transcripts: Iterable[Sequence[str]] = (),
    insertion_log_prob: float = 0.0,
) -> DecodingGraph:
    """Build the decoding graph of a named grammar.

    Args:
        transducer: HL.
        grammar: which word sequences are allowed.
        transcripts: the word sequences of transcript-set; not used by the others.
        insertion_log_prob: see `word_loop`; loops only.

    Raises:
        ConfigError: a loop without words, or transcripts with words that are not in the lexicon.
    """
    ids = transducer.word_ids
    if grammar is Grammar.TRANSCRIPT_SET:
        return transducer.compose(transcript_set(word_ids_of(words, ids) for words in transcripts))
    digits = set(digit_words())
    vocabulary = [i for w, i in ids.items() if grammar is not Grammar.DIGIT_LOOP or w.lower() in digits]
    if not vocabulary:
        raise ConfigError(f"the grammar {grammar.value} needs words that the lexicon does not have")
    if grammar is Grammar.WORD:
        return transducer.compose(single_word(vocabulary))
    return transducer.compose(word_loop(vocabulary, insertion_log_prob))


def word_ids_of(words: Sequence[str], ids: Mapping[str, int]) -> list[int]:
    """Look the output labels of `words` up.  Raises ConfigError on a word that is not in the lexicon."""
    for word in words:
        if word not in ids:
            raise ConfigError(
                f"word {word!r} of a transcript is not in the lexicon; add it and prepare again"
            )
    return [ids[word] for word in words]
