"""Decoding graphs: a grammar (G) whose words are spelt out by a lexicon and HMMs (HL).

HL reads one label per frame, `class + 1` (0 is epsilon), and writes words; G accepts word sequences.
Costs are -log probabilities, so the decoder's best path is the most probable one.  If states depend on
context, only the lexicon (L) is composed with G, and the result is converted to states (phone_context.py).

In graphs for decoding, words share their beginnings and endings (lexicon_tree.py); graphs that are not too
large are also determinised and minimised (determinise.py).  The graph of one transcript, for alignment, is
only composed: Viterbi search is just as correct on a non-deterministic graph.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import Any

import kaldifst
import numpy as np
from numpy.typing import ArrayLike

from speechdp.decode.graphs.determinise import determinised, with_entry_costs, with_self_loops
from speechdp.decode.graphs.fst_arrays import EPSILON, FstArrays
from speechdp.decode.graphs.lexicon_tree import Spellings, spell_out
from speechdp.decode.graphs.ngram_grammar import ngram_acceptor
from speechdp.decode.graphs.phone_context import in_context
from speechdp.decode.language_model import GrammarFst, LanguageModel
from speechdp.errors import ConfigError
from speechdp.labels.hmm import STATES_PER_PHONE, StateInventory, phones_of, states_of
from speechdp.labels.lexicon import SILENCE, Lexicon, digit_words
from speechdp.labels.state_tying import StateTying
from speechdp.labels.transcript_hmm import BLANK, num_ctc_classes

#: A graph with more states is not determinised: that would take minutes, and gigabytes.
_MAX_DETERMINISED_STATES = 1_000_000


class Grammar(str, Enum):
    """The word sequences that may be recognised.

    word-loop: any words of the lexicon, in any number; digit-loop: the same over the digit words;
    word: exactly one word of the lexicon; transcript-set: one of the corpus's transcripts as a whole;
    ngram: any words of a language model, with its probabilities; graph: those of a graph made by Kaldi.
    """

    NGRAM = "ngram"
    GRAPH = "graph"
    WORD_LOOP = "word-loop"
    DIGIT_LOOP = "digit-loop"
    WORD = "word"
    TRANSCRIPT_SET = "transcript-set"


#: Grammars of any sequences of words with equal weights.
LOOPS = frozenset({Grammar.WORD_LOOP, Grammar.DIGIT_LOOP})
#: Grammars whose sequences may have any number of words, so that insertion scores matter.
OF_ANY_LENGTH = LOOPS | {Grammar.NGRAM}


@dataclass
class DecodingGraph:
    """A graph to search.

    Attributes:
        fst: kaldifst.StdConstFst, or StdVectorFst; input labels are class + 1, output labels index
            `words` + 1.
        words: the words, by output label - 1.
        is_determinised: whether the graph was determinised and minimised.
        num_arcs, recognised: for graphs for recognition: the number of arcs, and the words that arcs write.
        insertion_log_prob: the score that `set_insertion` has added to each word's log-probability.
    """

    fst: Any
    words: tuple[str, ...]
    is_determinised: bool = False
    num_arcs: int = 0
    recognised: frozenset[str] = frozenset()
    insertion_log_prob: float = field(default=0.0, init=False)
    _without_insertion: FstArrays | None = field(default=None, init=False, repr=False)

    @classmethod
    def of(cls, arrays: FstArrays, words: tuple[str, ...], *, is_determinised: bool) -> DecodingGraph:
        """Make a graph from the states and arcs of its FST."""
        written = np.flatnonzero(np.bincount(arrays.olabel))
        recognised = frozenset(words[label - 1] for label in written.tolist() if label != EPSILON)
        return cls(arrays.const_fst(), words, is_determinised, len(arrays.ilabel), recognised)

    def set_insertion(self, log_prob: float) -> None:
        """Add a score to each word's log-probability, replacing an earlier one; negative: fewer words.

        The score is added to the arcs that write a word, which is much faster than building another graph.
        """
        if log_prob == self.insertion_log_prob:
            return
        if self._without_insertion is None:
            self._without_insertion = FstArrays.of(self.fst)
        arrays = self._without_insertion
        self.fst = None  # released before the new one is made: it may take gigabytes
        score = np.where(arrays.olabel != EPSILON, np.float32(log_prob), np.float32(0))
        self.fst = replace(arrays, cost=arrays.cost - score).const_fst()
        self.insertion_log_prob = log_prob

    @property
    def num_states(self) -> int:
        """Number of states."""
        return int(self.fst.num_states)


class LexiconTransducer:
    """HL: every word's HMM, with optional silence at both ends and between words.

    Built once for a lexicon and a model's transitions; `compose` makes a graph from each grammar.

    The start state is a word boundary.  From it an epsilon arc (probability 1 - silence) or the silence
    HMM (probability silence) leads to the hub.  From the hub a chain for each pronunciation leads back to
    the boundary, or the utterance ends.  A state's self-loop carries its class, and so does the arc that
    enters it: a visit of n frames costs n - 1 self-loops and one exit.  Variants of a word have the
    probabilities of the lexicon, or 1 each if it has none, as in Kaldi.

    Args:
        lexicon: the words.
        inventory: numbers the states.
        self_loop: each class's self-loop probability, (C,), within (0, 1).
        silence_probability: probability of a pause at a word boundary, within [0, 1); 0: no silence.
        tying: the class of each state in each context; None: classes are the inventory's states.
    """

    def __init__(
        self,
        lexicon: Lexicon,
        inventory: StateInventory,
        self_loop: ArrayLike,
        silence_probability: float = 0.5,
        tying: StateTying | None = None,
    ) -> None:
        stay = np.asarray(self_loop, dtype=np.float64)
        self._num_classes = inventory.num_classes if tying is None else tying.num_classes
        if stay.shape != (self._num_classes,):
            raise ConfigError(
                f"the model has {stay.size} classes, the lexicon {self._num_classes}; "
                "decode with the data directory the model was trained on"
            )
        assert tying is None or tying.inventory == inventory
        assert 0 <= silence_probability < 1
        assert ((stay > 0) & (stay < 1)).all()
        self._inventory, self._tying = inventory, tying
        self._stay_cost = -np.log(stay)
        self._leave_cost = -np.log1p(-stay)
        self._no_pause_cost = -np.log1p(-silence_probability)
        self._pause_cost = -np.log(silence_probability) if silence_probability > 0 else np.inf
        self._take(lexicon)

    def _take(self, lexicon: Lexicon) -> None:
        self.lexicon = lexicon
        self.words = lexicon.words
        self.word_ids: Mapping[str, int] = {word: i for i, word in enumerate(self.words, start=1)}

    @property
    def checksum(self) -> str:
        """A checksum of everything that determines the result of `compose_shared` for a grammar."""
        lexicon = self.lexicon
        pronounced = [
            (variants, lexicon.log_probs(word)) for word, variants in lexicon.pronunciations.items()
        ]
        costs = self._stay_cost.tolist(), float(self._no_pause_cost), float(self._pause_cost)
        facts = type(self).__name__, self._inventory.sha256, self.words, pronounced, costs
        digest = hashlib.sha256(repr(facts).encode())
        if self._tying is not None:
            digest.update(self._tying.table.tobytes())
        return digest.hexdigest()

    @cached_property
    def _spellings(self) -> Spellings:
        """The pronunciations as units: states, or phones if states depend on context."""
        given = [
            (self.word_ids[word], self._spelling(variant), -log_prob, SILENCE in variant)
            for word, variants in self.lexicon.pronunciations.items()
            for variant, log_prob in zip(variants, self.lexicon.log_probs(word), strict=True)
        ]
        return Spellings(*zip(*given, strict=True))

    def compose(self, grammar: Any, words: Iterable[str] | None = None) -> DecodingGraph:
        """Compose with an acceptor over `word_ids`: HL o G, without states that lead nowhere.

        Each word of each grammar arc is a separate chain.  Epsilon arcs are kept: removing them would join
        every word's end with every word's beginning.

        Args:
            grammar: reads words, or epsilon.
            words: all words that it reads, each once; None: those of the lexicon, which takes long if they
                are many.
        """
        kaldifst.arcsort(grammar, sort_type="ilabel")
        fst = kaldifst.compose(
            self._lexicon_fst(self.words if words is None else words), grammar, connect=True
        )
        if self._tying is not None and fst.num_states:
            arrays = in_context(FstArrays.of(fst), self._tying, self._leave_cost)
            fst = with_self_loops(arrays, self._stay_cost.tolist()).fst()
        kaldifst.arcsort(fst, sort_type="ilabel")
        return DecodingGraph(fst, self.words)

    def compose_shared(self, grammar: Any) -> DecodingGraph:
        """Compose with an acceptor over `word_ids` so that words share their beginnings and endings.

        Unless it would be very large, the graph is also determinised: min(det(HL o G)), with self-loops.

        Args:
            grammar: reads words, or epsilon to back off; states that lead nowhere are removed from it.
        """
        kaldifst.connect(grammar)
        if not grammar.num_states:
            return DecodingGraph.of(FstArrays.of(grammar), self.words, is_determinised=True)
        pause, costs = self._units([SILENCE]), (float(self._pause_cost), float(self._no_pause_cost))
        spelt = spell_out(FstArrays.of(grammar), self._spellings, pause, *costs)
        arrays = self._in_classes(spelt)
        smaller = determinised(arrays, self._num_classes, _MAX_DETERMINISED_STATES)
        looped = with_self_loops(arrays if smaller is None else smaller, self._stay_cost.tolist())
        return DecodingGraph.of(looped, self.words, is_determinised=smaller is not None)

    def compose_language_model(self, model: LanguageModel, scale: float) -> DecodingGraph:
        """Compose with a language model, so that words share their beginnings and endings.

        Raises:
            ConfigError: the model accepts no sequence of words of the lexicon.
        """
        ids = {word: self.word_ids[word] for word in self.lexicon.recognised_words}
        if not model.words & ids.keys():
            raise ConfigError(
                "no word of the language model is in the lexicon; prepare the data with one that fits"
            )
        if not isinstance(model, GrammarFst):
            return self.compose_shared(ngram_acceptor(model, ids, scale=scale))
        graph = self.compose_shared(model.acceptor(ids, scale=scale))
        if not graph.num_states:
            raise ConfigError(
                "no sentence of the language model has only words of the lexicon; prepare the data with one "
                "that fits"
            )
        return graph

    def _in_classes(self, graph: FstArrays) -> FstArrays:
        """Convert the result of `spell_out` to read classes: without self-loops; the cost of leaving a state
        is in the arc that enters it."""
        if self._tying is not None:
            return in_context(graph, self._tying, self._leave_cost)
        return with_entry_costs(graph, self._leave_cost)

    def min_frames(self, words: Iterable[str]) -> int:
        """Return the fewest frames that can hold `words`: one per state of each shortest pronunciation."""
        variants = (self.lexicon.pronunciations[word] for word in words)
        return sum(STATES_PER_PHONE * min(map(len, v)) for v in variants)

    def _lexicon_fst(self, words: Iterable[str]) -> Any:
        """Return the transducer of words, its arcs sorted by word; with context, it reads phones."""
        fst = kaldifst.StdVectorFst()
        boundary, hub = fst.add_state(), fst.add_state()
        fst.start = boundary
        fst.set_final(hub, 0.0)
        _add_arc(fst, boundary, (EPSILON, EPSILON, self._no_pause_cost, hub))
        if np.isfinite(self._pause_cost):
            self._chain(fst, (boundary, hub), self._units([SILENCE]), (EPSILON, self._pause_cost))
        for word in words:
            variants = self.lexicon.pronunciations[word]
            for variant, log_prob in zip(variants, self.lexicon.log_probs(word), strict=True):
                self._chain(fst, (hub, boundary), self._units(variant), (self.word_ids[word], -log_prob))
        kaldifst.arcsort(fst, sort_type="olabel")
        return fst

    def _units(self, phones: Sequence[str]) -> list[int]:
        """Return the units of phones: states, or the phones' numbers if states depend on context."""
        units = states_of if self._tying is None else phones_of
        return units(phones, self._inventory)

    def _spelling(self, phones: Sequence[str]) -> list[int]:
        """Return the units by which `spell_out` spells a pronunciation."""
        return self._units(phones)

    def _chain(
        self, fst: Any, ends: tuple[int, int], units: Sequence[int], word_cost: tuple[int, float]
    ) -> None:
        """Add a left-to-right HMM between two states, or with context a chain of phones without costs.

        The first arc writes a word: composition with a grammar then follows only the words it allows.

        Args:
            fst: the FST to add to.
            ends: the states before and after the chain.
            units: its states, or phones.
            word_cost: the word, and the cost of its pronunciation.
        """
        source, target = ends
        word, cost = word_cost
        for unit in units:
            state = fst.add_state()
            _add_arc(fst, source, (unit + 1, word, cost, state))
            cost = 0.0
            if self._tying is None:
                _add_arc(fst, state, (unit + 1, EPSILON, self._stay_cost[unit], state))
                cost = self._leave_cost[unit]
            source, word = state, EPSILON
        _add_arc(fst, source, (EPSILON, EPSILON, cost, target))


class CtcTransducer(LexiconTransducer):
    """HL over the classes of CTC: each phone is a class, and a blank may be on both sides of it.

    Between two equal phones of a word a blank is required (`transcript_hmm.CtcCompiler`).  It is not required
    if a word ends with the phone that the next begins with: the previous word is not known here, so the two
    may share frames of that phone.  All arcs have probability 1.

    Args:
        lexicon: the words.
        inventory: HMM states of the same phones; class n + 1 is its n-th phone, class 0 the blank.
    """

    def __init__(self, lexicon: Lexicon, inventory: StateInventory) -> None:
        self._num_classes = num_ctc_classes(inventory.num_classes)
        self._inventory, self._tying = inventory, None
        self._stay_cost = np.zeros(self._num_classes)
        self._no_pause_cost = self._pause_cost = 0.0
        self._take(lexicon)

    def min_frames(self, words: Iterable[str]) -> int:
        """Return the fewest frames that can hold `words`: one per phone of each shortest pronunciation."""
        return super().min_frames(words) // STATES_PER_PHONE

    def _units(self, phones: Sequence[str]) -> list[int]:
        return phones_of(phones, self._inventory)  # the blank takes the number of silence

    def _spelling(self, phones: Sequence[str]) -> list[int]:
        """Return the phones' numbers, plus C after a different phone, or plus 2 C after the same phone."""
        units = self._units(phones)
        follows = [1 + (unit == before) for before, unit in itertools.pairwise(units)]
        return [unit + self._num_classes * kind for kind, unit in zip([0, *follows], units, strict=True)]

    def _in_classes(self, graph: FstArrays) -> FstArrays:
        """Add blanks between the phones of words; equal phones are connected only through a blank."""
        reads = graph.ilabel > EPSILON
        kind, unit = np.divmod(graph.ilabel - 1, self._num_classes)
        later = reads & (kind > 0)
        before, blank = np.unique(graph.source[later], return_inverse=True)
        blanks = len(graph.final) + np.arange(len(before))
        label = np.where(reads, unit + 1, graph.ilabel)
        written, cost, target = graph.olabel, graph.cost, graph.target
        direct = ~(later & (kind == 2))
        straight = (graph.source[direct], label[direct], written[direct], cost[direct], target[direct])
        into_blanks = (before, BLANK + 1, EPSILON, 0.0, blanks)
        behind_blanks = (blanks[blank], label[later], written[later], cost[later], target[later])
        final = np.append(graph.final, np.full(len(before), np.inf))
        return FstArrays.joined(graph.start, final, (straight, into_blanks, behind_blanks))

    def _chain(
        self, fst: Any, ends: tuple[int, int], units: Sequence[int], word_cost: tuple[int, float]
    ) -> None:
        """Add phones in sequence between two states, and blanks beside the arcs between them."""
        (source, target), (word, cost) = ends, word_cost
        for place, unit in enumerate(units):
            state = _add_lasting(fst, unit)
            if place == 0 or units[place - 1] != unit:
                _add_arc(fst, source, (unit + 1, word, cost, state))
            if place > 0:
                blank = _add_lasting(fst, BLANK)
                _add_arc(fst, source, (BLANK + 1, EPSILON, 0.0, blank))
                _add_arc(fst, blank, (unit + 1, EPSILON, 0.0, state))
            source, word, cost = state, EPSILON, 0.0
        _add_arc(fst, source, (EPSILON, EPSILON, cost, target))


def _add_lasting(fst: Any, number: int) -> int:
    """Add a state with a self-loop that reads a class."""
    state = int(fst.add_state())
    _add_arc(fst, state, (number + 1, EPSILON, 0.0, state))
    return state


def _add_arc(fst: Any, source: int, arc: tuple[int, int, float, int]) -> None:
    """Add an arc, given as its input label, the word it writes, its cost and its target."""
    label, word, cost, target = arc
    fst.add_arc(source, kaldifst.StdArc(label, word, float(cost), target))


def word_loop(word_ids: Sequence[int]) -> Any:
    """Accept any number of words, each with probability 1 / V.

    Args:
        word_ids: the vocabulary of V words.
    """
    return _one_word_arcs(word_ids, np.log(len(word_ids)), loop=True)


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
    """Accept one word sequence, without cost."""
    return transcript_set([word_ids])


def transcript_set(transcripts: Iterable[Sequence[int]]) -> Any:
    """Accept any one of several word sequences, without cost: a tree that shares common beginnings."""
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
    language_model: LanguageModel | None = None,
    lm_scale: float = 1.0,
) -> DecodingGraph:
    """Build the decoding graph of a named grammar.

    Args:
        transducer: HL.
        grammar: the allowed word sequences.
        transcripts: the word sequences of transcript-set, except those without words or with words that are
            not in the lexicon; not used by other grammars.
        insertion_log_prob: added to each word's log-probability, after the language model's is scaled; only
            in grammars that are `OF_ANY_LENGTH`.
        language_model: the model of ngram; not used by other grammars.
        lm_scale: factor on the model's costs.

    Raises:
        ConfigError: a loop without words, no transcript of words of the lexicon, or no language model.
    """
    graph = _without_insertion(transducer, grammar, transcripts, language_model, lm_scale)
    if grammar in OF_ANY_LENGTH:
        graph.set_insertion(insertion_log_prob)
    return graph


def _without_insertion(
    transducer: LexiconTransducer,
    grammar: Grammar,
    transcripts: Iterable[Sequence[str]],
    language_model: LanguageModel | None,
    lm_scale: float,
) -> DecodingGraph:
    ids = transducer.word_ids
    if grammar is Grammar.NGRAM:
        if language_model is None:
            raise ConfigError(
                "the grammar ngram needs a language model; prepare the data with --lm-order or --lm"
            )
        return transducer.compose_language_model(language_model, lm_scale)
    if grammar is Grammar.TRANSCRIPT_SET:
        known = [[ids[word] for word in words] for words in transcripts if words and ids.keys() >= {*words}]
        if not known:
            raise ConfigError(
                "the grammar transcript-set needs a transcript whose words are all in the lexicon: there is "
                "none; choose another --grammar"
            )
        return transducer.compose_shared(transcript_set(known))
    assert grammar is not Grammar.GRAPH
    vocabulary = [ids[word] for word in loop_vocabulary(transducer.lexicon, grammar)]
    if not vocabulary:
        raise ConfigError(f"the grammar {grammar.value} needs words that the lexicon does not have")
    if grammar is Grammar.WORD:
        return transducer.compose_shared(single_word(vocabulary))
    return transducer.compose_shared(word_loop(vocabulary))


def loop_vocabulary(lexicon: Lexicon, grammar: Grammar) -> list[str]:
    """Return the words of a grammar that gives all of them equal weight: digit-loop, word-loop and word."""
    digits = set(digit_words())
    words = lexicon.recognised_words
    return [word for word in words if grammar is not Grammar.DIGIT_LOOP or word.lower() in digits]


def word_ids_of(words: Sequence[str], ids: Mapping[str, int]) -> list[int]:
    """Return the output labels of `words`.  Raises ConfigError on a word that is not in the lexicon."""
    for word in words:
        if word not in ids:
            raise ConfigError(
                f"word {word!r} of a transcript is not in the lexicon; add it and prepare again"
            )
    return [ids[word] for word in words]
