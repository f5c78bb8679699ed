"""The HMM of a transcript: every state sequence that a recording of these words may pass through.

The HMM is what decoding's HL composed with the transcript is (`decode.graphs.graph.LexiconTransducer`),
without its epsilon arcs: all pronunciations of a word side by side, silence optional at both ends and between
words, 3-state left-to-right phones.  Where classes depend on the neighbours of a phone, also across word
boundaries, a phone with several possible neighbours stands there once for each that makes a difference.  The
HMM is kept as arrays, so that `labels.forward_backward` can pass through those of a whole batch at a time.

Legend: B utterances, S states, K predecessors of a state, C classes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from speechdp.errors import ConfigError
from speechdp.labels.hmm import STATES_PER_PHONE, IntArray, StateInventory, phones_of, states_of
from speechdp.labels.lexicon import SILENCE, Lexicon
from speechdp.labels.state_tying import EDGE, StateTying, first_equal

#: Log-probability of what cannot be.  Finite, so that no difference of two of them is NaN.
LOG_ZERO = -1e30

#: Frames that no recording has: the `min_frames` of a transcript that cannot be pronounced.
NO_PATH = int(np.iinfo(np.int64).max)

#: The class of CTC's blank; the other classes are the phones.
BLANK = 0

LogProbs = NDArray[np.float64]
States = NDArray[np.int64]
#: (state it comes from, log-probability of the arc)
_Arc = tuple[int, float]


@dataclass(frozen=True)
class TranscriptOptions:
    """What the HMMs of transcripts are.

    Attributes:
        topology: hmm: `TranscriptCompiler`; ctc: `CtcCompiler`, which has no probabilities.
        self_loop: of every class.
        silence_probability: of a pause at a word boundary.
        transition_scale: factor on all log-probabilities of the HMM.
    """

    topology: Literal["hmm", "ctc"] = "hmm"
    self_loop: float = 0.6
    silence_probability: float = 0.5
    transition_scale: float = 1.0


@dataclass(frozen=True)
class TranscriptHmm:
    """The HMM of one transcript; states are in order, each after all its predecessors but itself.

    Attributes:
        classes: (S,) class that each state emits.
        predecessors: (S, K) states that it may be entered from; the first is the state itself (its
            self-loop).  Where there are fewer than K, the state itself stands there again.
        log_probs: (S, K) log-probability of each of these arcs; LOG_ZERO where there is none.
        initial: (S,) log-probability of beginning there.
        final: (S,) log-probability of ending there.
        min_frames: frames of the shortest path; a recording with fewer has none.  NO_PATH: none has one.
    """

    classes: States
    predecessors: States
    log_probs: LogProbs
    initial: LogProbs
    final: LogProbs
    min_frames: int

    @classmethod
    def without_path(cls) -> TranscriptHmm:
        """Make the HMM that no recording fits: one state, which is neither entered nor left."""
        never = np.full(1, LOG_ZERO)
        return cls(
            np.zeros(1, np.int64),
            np.zeros((1, 2), np.int64),
            np.full((1, 2), LOG_ZERO),
            never,
            never,
            NO_PATH,
        )


@dataclass(frozen=True)
class TranscriptHmms:
    """The HMMs of a batch, padded with states that cannot be reached.

    Attributes: those of `TranscriptHmm` with B in front, all arrays: (B, S), (B, S, K), (B,).
    """

    classes: States
    predecessors: States
    log_probs: LogProbs
    initial: LogProbs
    final: LogProbs
    min_frames: States

    def __len__(self) -> int:
        return len(self.classes)

    @classmethod
    def of(cls, hmms: Sequence[TranscriptHmm]) -> TranscriptHmms:
        """Pad HMMs to the most states and the most predecessors among them; at least one HMM."""
        shape = (len(hmms), max(len(hmm.classes) for hmm in hmms))
        widest = max(hmm.predecessors.shape[1] for hmm in hmms)
        classes = np.zeros(shape, np.int64)
        predecessors = np.broadcast_to(np.arange(shape[1])[:, np.newaxis], (*shape, widest)).copy()
        log_probs = np.full((*shape, widest), LOG_ZERO)
        initial, final = np.full(shape, LOG_ZERO), np.full(shape, LOG_ZERO)
        for row, hmm in enumerate(hmms):
            states, width = hmm.predecessors.shape
            classes[row, :states] = hmm.classes
            predecessors[row, :states, :width] = hmm.predecessors
            log_probs[row, :states, :width] = hmm.log_probs
            initial[row, :states] = hmm.initial
            final[row, :states] = hmm.final
        min_frames = np.array([hmm.min_frames for hmm in hmms], np.int64)
        return cls(classes, predecessors, log_probs, initial, final, min_frames)


class TranscriptCompiler:
    """Makes the HMMs of transcripts; safe from several threads.

    Probabilities are those of `decode.graphs.graph.LexiconTransducer`: a pause has `silence_probability` at
    each word boundary, variants of a word have those of the lexicon, or 1 each, a visit of n frames to a
    state takes its self-loop n - 1 times and leaves it once.

    Args:
        lexicon: the words.
        inventory: numbers the states without context.
        self_loop: each of these states' self-loop probability, (C,), within (0, 1); or one for all.
        silence_probability: of a pause at a word boundary, within [0, 1); 0 leaves silence out.
        transition_scale: factor on all log-probabilities of the HMM, at least 0.
        tying: the classes where they depend on the neighbours of a phone; None: they are the states.

    Example::

        compiler = TranscriptCompiler(lexicon, inventory, self_loop=0.6)
        hmms = TranscriptHmms.of([compiler.compile(text.split()) for text in texts])
        found = occupancies(log_likelihoods, lengths, hmms)  # labels.forward_backward
    """

    def __init__(
        self,
        lexicon: Lexicon,
        inventory: StateInventory,
        self_loop: ArrayLike,
        silence_probability: float = 0.5,
        transition_scale: float = 1.0,
        tying: StateTying | None = None,
    ) -> None:
        stay = np.broadcast_to(np.asarray(self_loop, np.float64), (inventory.num_classes,))
        assert ((stay > 0) & (stay < 1)).all()
        assert 0 <= silence_probability < 1
        self._lexicon, self._inventory = lexicon, inventory
        self._stay, self._leave = transition_scale * np.log(stay), transition_scale * np.log1p(-stay)
        self._silence = np.array(states_of([SILENCE], inventory), np.int64)
        self._pause: float | None = None
        if silence_probability > 0:
            self._pause = transition_scale * float(np.log(silence_probability))
        self._no_pause = transition_scale * float(np.log1p(-silence_probability))
        self._scale = transition_scale
        self._variants: dict[str, list[tuple[States, float]]] = {}
        self._contexts = None if tying is None else _Contexts(tying, self._stay, self._leave)

    def compile(self, words: Sequence[str]) -> TranscriptHmm:
        """Make the HMM of a transcript; without words it is silence.

        A word that is not in the lexicon is its `<unk>`; where it has none, no recording fits the transcript.

        Raises:
            ConfigError: there is neither a word nor silence.
        """
        known = self._lexicon.pronounceable(words)
        if len(known) < len(words):
            return TranscriptHmm.without_path()
        chains = _Chains(self._stay, self._leave)
        # What leads to the next word boundary; state -1 is the beginning of the recording.
        boundary: list[_Arc] = [(-1, 0.0)]
        min_frames = 0
        for word in known:
            hub = self._pass_boundary(chains, boundary)
            variants = self._variants_of(word)
            boundary = [
                chains.add(variant, [(state, arc + log_prob) for state, arc in hub])
                for variant, log_prob in variants
            ]
            min_frames += min(len(variant) for variant, _ in variants)
        hub = self._pass_boundary(chains, boundary)
        if not chains.num_states:
            raise ConfigError("a transcript without words has no HMM without silence; leave it out")
        hmm = chains.finish(hub, min_frames or len(self._silence))
        return hmm if self._contexts is None else self._contexts.expand(hmm)

    def _pass_boundary(self, chains: _Chains, boundary: list[_Arc]) -> list[_Arc]:
        """Return the arcs behind a word boundary, past a pause or without one."""
        without = [(state, log_prob + self._no_pause) for state, log_prob in boundary]
        if self._pause is None:
            return without
        pause = self._pause
        silence = chains.add(self._silence, [(state, log_prob + pause) for state, log_prob in boundary])
        return [*without, silence]

    def _variants_of(self, word: str) -> list[tuple[States, float]]:
        """Return the states of each variant of a word and its log-probability."""
        found = self._variants.get(word)
        if found is None:
            variants = zip(self._lexicon.pronunciations[word], self._lexicon.log_probs(word), strict=True)
            found = [
                (np.array(states_of(phones, self._inventory), np.int64), self._scale * log_prob)
                for phones, log_prob in variants
            ]
            self._variants[word] = found
        return found


class CtcCompiler:
    """Makes the graphs of connectionist temporal classification over phones; safe from several threads.

    A phone is one state, a blank may stand before and after it, and has to between two of the same phone;
    every arc has probability 1.  Pronunciations of a word stand side by side, as in `TranscriptCompiler`, so
    with one a word the sum over all paths is CTC's.

    Source: Graves et al. 2006.

    Args:
        lexicon: the words.
        inventory: class n + 1 is its n-th phone, class 0 the blank.
    """

    def __init__(self, lexicon: Lexicon, inventory: StateInventory) -> None:
        self._lexicon, self._inventory = lexicon, inventory
        self._certain = np.zeros(num_ctc_classes(inventory.num_classes))

    def compile(self, words: Sequence[str]) -> TranscriptHmm:
        """Make the graph of a transcript; without words it is blank.

        Words that are not in the lexicon: as in `TranscriptCompiler`.
        """
        known = self._lexicon.pronounceable(words)
        if len(known) < len(words):
            return TranscriptHmm.without_path()
        chains = _Chains(self._certain, self._certain)
        start: _Arc = (-1, 0.0)
        # What leads to the next word boundary, and the phone that it comes from.
        boundary: list[tuple[_Arc, int]] = [(start, BLANK), (chains.add_state(BLANK, [start]), BLANK)]
        for word in known:
            ends = [self._add_phones(chains, phones, boundary) for phones in self._variants_of(word)]
            boundary = [*ends, (chains.add_state(BLANK, [arc for arc, _ in ends]), BLANK)]
        hmm = chains.finish([arc for arc, _ in boundary], min_frames=0)
        return replace(hmm, min_frames=_shortest_path(hmm))

    def _add_phones(
        self, chains: _Chains, phones: Sequence[int], boundary: list[tuple[_Arc, int]]
    ) -> tuple[_Arc, int]:
        """Add a pronunciation behind a word boundary; return the arc that leaves it and its last phone."""
        entries = boundary
        for place, phone in enumerate(phones):
            if place > 0:
                entries = [*entries, (chains.add_state(BLANK, [arc for arc, _ in entries]), BLANK)]
            arcs = [arc for arc, before in entries if before != phone]
            entries = [(chains.add_state(phone, arcs), phone)]
        return entries[0]

    def _variants_of(self, word: str) -> list[list[int]]:
        return [phones_of(phones, self._inventory) for phones in self._lexicon.pronunciations[word]]


def num_ctc_classes(num_states: int) -> int:
    """Return how many classes CTC has where the HMMs of the same phones have `num_states`."""
    return num_states // STATES_PER_PHONE  # silence's place is the blank's


def make_compiler(
    lexicon: Lexicon, inventory: StateInventory, options: TranscriptOptions, tying: StateTying | None = None
) -> TranscriptCompiler | CtcCompiler:
    """Return what makes the HMMs of transcripts that the options describe.

    Args:
        lexicon: the words that transcripts may have.
        inventory: the states of its phones.
        options: topology, transitions and pauses.
        tying: the classes of states in context; None: each state is a class.  CTC has none.
    """
    if options.topology == "ctc":
        assert tying is None  # CTC's classes are phones
        return CtcCompiler(lexicon, inventory)
    return TranscriptCompiler(
        lexicon, inventory, options.self_loop, options.silence_probability, options.transition_scale, tying
    )


def _shortest_path(hmm: TranscriptHmm) -> int:
    """Return the frames of the shortest path through an HMM."""
    frames: list[float] = []
    for state, (predecessors, log_probs) in enumerate(zip(hmm.predecessors, hmm.log_probs, strict=True)):
        before = [frames[p] for p, arc in zip(predecessors[1:], log_probs[1:], strict=True) if arc > LOG_ZERO]
        frames.append(1 if hmm.initial[state] > LOG_ZERO else 1 + min(before))
    return int(min(n for n, final in zip(frames, hmm.final, strict=True) if final > LOG_ZERO))


class _PhoneGraph:
    """The phones of an HMM whose classes are states without context, in order.

    Attributes:
        phones: of each place, its phone.
        entries: of each place, the places that it may be entered from, with the log-probability of the arc.
        begins, ends: of each place, the log-probability of beginning and of ending there.
        lefts, rights: of each place, the phones that may be next to it, in order; beyond the ends EDGE.
    """

    def __init__(self, hmm: TranscriptHmm) -> None:
        first, last = slice(None, None, STATES_PER_PHONE), slice(STATES_PER_PHONE - 1, None, STATES_PER_PHONE)
        self.phones: list[int] = (hmm.classes[first] // STATES_PER_PHONE).tolist()
        self.begins: list[float] = hmm.initial[first].tolist()
        self.ends: list[float] = hmm.final[last].tolist()
        before = (hmm.predecessors[first, 1:] // STATES_PER_PHONE).tolist()
        arcs = hmm.log_probs[first, 1:].tolist()
        self.entries: list[list[_Arc]] = [
            [arc for arc in zip(*of_place, strict=True) if arc[1] > LOG_ZERO]
            for of_place in zip(before, arcs, strict=True)
        ]
        lefts = [{EDGE} if begin > LOG_ZERO else set() for begin in self.begins]
        rights = [{EDGE} if end > LOG_ZERO else set() for end in self.ends]
        for place, phone in enumerate(self.phones):
            for other, _ in self.entries[place]:
                lefts[place].add(self.phones[other])
                rights[other].add(phone)
        self.lefts = [tuple(sorted(phones)) for phones in lefts]
        self.rights = [tuple(sorted(phones)) for phones in rights]


@dataclass(frozen=True)
class _Copies:
    """What a phone's possible neighbours make of it: a copy for each pair of groups of them.

    Attributes:
        left, right: the group of each possible neighbour on that side; those of a group make no difference.
        classes: of the states of each copy, (left groups, right groups, states).
    """

    left: dict[int, int]
    right: dict[int, int]
    classes: States


class _Contexts:
    """Gives the phones of HMMs the classes that they have between their neighbours.

    Args:
        tying: says which classes those are.
        stay, leave: log-probabilities of the states without context, scaled.
    """

    def __init__(self, tying: StateTying, stay: LogProbs, leave: LogProbs) -> None:
        self._tying = tying
        self._stay, self._leave = stay[tying.states], leave[tying.states]
        # Most phones have one neighbour on each side, and the same ones come again and again.
        self._known: dict[tuple[int, tuple[int, ...], tuple[int, ...]], _Copies] = {}

    def expand(self, hmm: TranscriptHmm) -> TranscriptHmm:
        """Return an HMM with the copies of each phone instead of the phone."""
        graph = _PhoneGraph(hmm)
        copies = [self._copies(*it) for it in zip(graph.phones, graph.lefts, graph.rights, strict=True)]
        chains = _Chains(self._stay, self._leave)
        # Of each place and group of right neighbours: the last states of the copies that these may follow.
        leaving: list[list[list[int]]] = []
        for place, (phone, own) in enumerate(zip(graph.phones, copies, strict=True)):
            leaving.append([[] for _ in range(own.classes.shape[1])])
            for group, row in enumerate(own.classes):
                arcs = [
                    (state, arc)
                    for other, arc in graph.entries[place]
                    if own.left[graph.phones[other]] == group
                    for state in leaving[other][copies[other].right[phone]]
                ]
                if graph.begins[place] > LOG_ZERO and own.left[EDGE] == group:
                    arcs.append((-1, graph.begins[place]))
                for states, classes in zip(leaving[place], row, strict=True):
                    states.append(chains.add(classes, arcs)[0])
        last = [
            (state, end)
            for end, own, states in zip(graph.ends, copies, leaving, strict=True)
            if end > LOG_ZERO
            for state in states[own.right[EDGE]]
        ]
        return chains.finish(last, hmm.min_frames)

    def _copies(self, phone: int, left: tuple[int, ...], right: tuple[int, ...]) -> _Copies:
        """Return the copies of a phone with these possible neighbours."""
        found = self._known.get((phone, left, right))
        if found is None:
            rights = right if self._tying.looks_right else (0,)
            table = self._tying.table[np.ix_(left, [phone], rights)][:, 0]  # (left, right, states)
            first_left, groups_left = _groups_of(table)
            first_right, groups_right = _groups_of(table.swapaxes(0, 1))
            found = _Copies(
                dict(zip(left, groups_left, strict=True)),
                dict(zip(right, groups_right if self._tying.looks_right else [0] * len(right), strict=True)),
                table[np.ix_(first_left, first_right)].astype(np.int64),
            )
            self._known[phone, left, right] = found
        return found


def _groups_of(rows: IntArray) -> tuple[list[int], list[int]]:
    """Return the first row of each group of equal ones, and the group of each row."""
    first = first_equal(rows)
    kept = sorted(set(first))
    return kept, [kept.index(row) for row in first]


class _Chains:
    """Collects chains of states and the arcs that enter them."""

    def __init__(self, stay: LogProbs, leave: LogProbs) -> None:
        self._stay, self._leave = stay, leave
        self._classes: list[States] = []
        self._entries: list[tuple[int, list[_Arc]]] = []
        self.num_states = 0

    def add(self, classes: States, arcs: list[_Arc]) -> _Arc:
        """Add a chain that is entered by `arcs`; return the arc that leaves it."""
        self._entries.append((self.num_states, arcs))
        self._classes.append(classes)
        self.num_states += len(classes)
        return self.num_states - 1, float(self._leave[classes[-1]])

    def add_state(self, state_class: int, arcs: list[_Arc]) -> _Arc:
        """Add a chain of one state."""
        return self.add(np.array([state_class], np.int64), arcs)

    def finish(self, last: Iterable[_Arc], min_frames: int) -> TranscriptHmm:
        """Return the HMM that ends by the arcs `last`."""
        classes = np.concatenate(self._classes)
        num_states = self.num_states
        # A state is in a chain behind the state before it; the first of a chain has the chain's arcs instead.
        width = 1 + max(1, *(len(arcs) for _, arcs in self._entries))
        predecessors = np.repeat(np.arange(num_states)[:, np.newaxis], width, axis=1)
        log_probs = np.full((num_states, width), LOG_ZERO)
        log_probs[:, 0] = self._stay[classes]
        predecessors[1:, 1] -= 1
        log_probs[1:, 1] = self._leave[classes[:-1]]
        initial, final = np.full(num_states, LOG_ZERO), np.full(num_states, LOG_ZERO)
        for first, arcs in self._entries:
            predecessors[first, 1:], log_probs[first, 1:] = first, LOG_ZERO
            for column, (state, log_prob) in enumerate(arcs, start=1):
                if state < 0:
                    initial[first] = log_prob
                else:
                    predecessors[first, column], log_probs[first, column] = state, log_prob
        for state, log_prob in last:
            if state >= 0:
                final[state] = log_prob
        return TranscriptHmm(classes, predecessors, log_probs, initial, final, min_frames)
