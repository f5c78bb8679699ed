"""The HMM of a transcript: every state sequence that a recording of its words may pass through.

The HMM equals decoding's HL composed with the transcript (`decode.graphs.graph.LexiconTransducer`), without
epsilon arcs: all pronunciations of a word in parallel, optional silence at both ends and between words,
3-state left-to-right phones.  If classes depend on the neighbours of a phone, also across word boundaries, a
phone with several possible neighbours has a copy for each that makes a difference.  The HMM is stored as
arrays, so that `labels.forward_backward` can process those of a whole batch at a time.

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

#: Log-probability of impossible events.  It is finite, so that the difference of two of them is not NaN.
LOG_ZERO = -1e30

#: More frames than any recording has: the `min_frames` of a transcript that cannot be pronounced.
NO_PATH = int(np.iinfo(np.int64).max)

#: The class of CTC's blank; the other classes are the phones.
BLANK = 0
#: Stands for the class before the first frame.
_START = -1

LogProbs = NDArray[np.float64]
States = NDArray[np.int64]
#: (source state, log-probability of the arc)
_Arc = tuple[int, float]


@dataclass(frozen=True)
class TranscriptOptions:
    """Options for the HMMs of transcripts.

    Attributes:
        topology: hmm: `TranscriptCompiler`; ctc: `CtcCompiler`, which has no probabilities.
        self_loop: self-loop probability of every class.
        silence_probability: probability of a pause at a word boundary.
        transition_scale: factor on all log-probabilities of the HMM.
    """

    topology: Literal["hmm", "ctc"] = "hmm"
    self_loop: float = 0.6
    silence_probability: float = 0.5
    transition_scale: float = 1.0


@dataclass(frozen=True)
class TranscriptHmm:
    """The HMM of one transcript; each state comes after all its predecessors except itself.

    Attributes:
        classes: (S,) class that each state emits.
        predecessors: (S, K) states from which it may be entered; the first is the state itself (its
            self-loop).  If there are fewer than K, the state itself fills the rest.
        log_probs: (S, K) log-probability of each of these arcs; LOG_ZERO if there is none.
        initial: (S,) log-probability of beginning in the state.
        final: (S,) log-probability of ending in the state.
        min_frames: frames of the shortest path; a recording with fewer has no path.  NO_PATH: none has one.
    """

    classes: States
    predecessors: States
    log_probs: LogProbs
    initial: LogProbs
    final: LogProbs
    min_frames: int

    @classmethod
    def without_path(cls) -> TranscriptHmm:
        """Return an HMM that no recording fits: one state, which is neither entered nor left."""
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

    Attributes: as for `TranscriptHmm`, with B in front; all are arrays: (B, S), (B, S, K), (B,).
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
        """Pad HMMs to the largest numbers of states and predecessors among them; at least one HMM."""
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
    """Makes the HMMs of transcripts; thread-safe.

    Probabilities are those of `decode.graphs.graph.LexiconTransducer`: a pause has `silence_probability` at
    each word boundary; variants of a word have those of the lexicon, or 1 each; a visit of n frames to a
    state takes its self-loop n - 1 times and leaves it once.

    Args:
        lexicon: the words.
        inventory: numbers the states without context.
        self_loop: each of these states' self-loop probability, (C,), within (0, 1); or one for all.
        silence_probability: probability of a pause at a word boundary, within [0, 1); 0: no silence.
        transition_scale: factor on all log-probabilities of the HMM, at least 0.
        tying: the classes if they depend on the neighbours of a phone; None: each state is a class.

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

        A word that is not in the lexicon becomes its `<unk>`; if it has none, no recording fits the
        transcript.

        Raises:
            ConfigError: there are no words, and silence is left out.
        """
        known = self._lexicon.pronounceable(words)
        if len(known) < len(words):
            return TranscriptHmm.without_path()
        chains = _Chains(self._stay, self._leave)
        # Arcs that lead to the next word boundary; state -1 is the beginning of the recording.
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
        """Return the arcs that leave a word boundary, with and without a pause."""
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
    """Makes the graphs of connectionist temporal classification (CTC) over phones; thread-safe.

    A phone is one state.  A blank may precede and follow it, and must separate two equal phones.  Silence in
    a pronunciation is a blank that may not be left out.  Every arc has probability 1.  Pronunciations of a
    word are in parallel, as in `TranscriptCompiler`, so with one per word the sum over all paths is that of
    CTC.

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

        Words that are not in the lexicon are treated as by `TranscriptCompiler`.
        """
        known = self._lexicon.pronounceable(words)
        if len(known) < len(words):
            return TranscriptHmm.without_path()
        chains = _Chains(self._certain, self._certain)
        # Arcs that lead to the next word boundary, each with the class that it comes from.
        boundary = self._with_blank(chains, [((-1, 0.0), _START)])
        for word in known:
            ends = [
                end
                for phones in self._variants_of(word)
                for end in self._add_phones(chains, phones, boundary)
            ]
            boundary = self._with_blank(chains, ends)
        hmm = chains.finish([arc for arc, _ in boundary], min_frames=0)
        return replace(hmm, min_frames=_shortest_path(hmm))

    def _add_phones(
        self, chains: _Chains, phones: Sequence[int], boundary: list[tuple[_Arc, int]]
    ) -> list[tuple[_Arc, int]]:
        """Add a pronunciation after a word boundary; return the arcs that leave it, with their classes.

        Silence makes the blank at its place necessary: with a second blank there, paths would count twice.
        """
        entries = boundary
        for place, phone in enumerate(phones):
            if place > 0:
                entries = self._with_blank(chains, entries)
            if phone == BLANK:
                entries = [entry for entry in entries if entry[1] == BLANK]
            else:
                arcs = [arc for arc, before in entries if before != phone]
                entries = [(chains.add_state(phone, arcs), phone)]
        return entries

    @staticmethod
    def _with_blank(chains: _Chains, entries: list[tuple[_Arc, int]]) -> list[tuple[_Arc, int]]:
        """Add an optional blank behind the arcs that come from none."""
        arcs = [arc for arc, before in entries if before != BLANK]
        return [*entries, (chains.add_state(BLANK, arcs), BLANK)] if arcs else entries

    def _variants_of(self, word: str) -> list[list[int]]:
        return [phones_of(phones, self._inventory) for phones in self._lexicon.pronunciations[word]]


def num_ctc_classes(num_states: int) -> int:
    """Return the number of CTC's classes if the HMMs of the same phones have `num_states`."""
    return num_states // STATES_PER_PHONE  # the blank takes the place of silence


def make_compiler(
    lexicon: Lexicon, inventory: StateInventory, options: TranscriptOptions, tying: StateTying | None = None
) -> TranscriptCompiler | CtcCompiler:
    """Return the compiler for the HMMs of transcripts that the options describe.

    Args:
        lexicon: the words that transcripts may have.
        inventory: the states of the lexicon's phones.
        options: topology, transitions and pauses.
        tying: the classes of states in context; None: each state is a class.  CTC needs None.
    """
    if options.topology == "ctc":
        assert tying is None  # CTC's classes are phones
        return CtcCompiler(lexicon, inventory)
    return TranscriptCompiler(
        lexicon, inventory, options.self_loop, options.silence_probability, options.transition_scale, tying
    )


def _shortest_path(hmm: TranscriptHmm) -> int:
    """Return the number of frames of the shortest path through an HMM."""
    frames: list[float] = []
    for state, (predecessors, log_probs) in enumerate(zip(hmm.predecessors, hmm.log_probs, strict=True)):
        before = [frames[p] for p, arc in zip(predecessors[1:], log_probs[1:], strict=True) if arc > LOG_ZERO]
        frames.append(1 if hmm.initial[state] > LOG_ZERO else 1 + min(before))
    return int(min(n for n, final in zip(frames, hmm.final, strict=True) if final > LOG_ZERO))


class _PhoneGraph:
    """The phones of an HMM whose classes are states without context, in order.

    Attributes:
        phones: the phone at each place.
        entries: for each place, the places from which it may be entered, with the arcs' log-probabilities.
        begins, ends: for each place, the log-probability of beginning and of ending there.
        lefts, rights: for each place, the phones that may be next to it, sorted; EDGE beyond the ends.
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
    """The copies of a phone for its possible neighbours: one for each pair of groups of neighbours.

    Attributes:
        left, right: the group of each possible neighbour on that side; within a group they make no
            difference.
        classes: classes of the states of each copy, (left groups, right groups, states).
    """

    left: dict[int, int]
    right: dict[int, int]
    classes: States


class _Contexts:
    """Gives the phones of HMMs their context-dependent classes.

    Args:
        tying: maps states in context to classes.
        stay, leave: log-probabilities of the states without context, scaled.
    """

    def __init__(self, tying: StateTying, stay: LogProbs, leave: LogProbs) -> None:
        self._tying = tying
        self._stay, self._leave = stay[tying.states], leave[tying.states]
        # Most phones have one neighbour on each side, and the same combinations recur.
        self._known: dict[tuple[int, tuple[int, ...], tuple[int, ...]], _Copies] = {}

    def expand(self, hmm: TranscriptHmm) -> TranscriptHmm:
        """Return an HMM in which each phone is replaced by its copies."""
        graph = _PhoneGraph(hmm)
        copies = [self._copies(*it) for it in zip(graph.phones, graph.lefts, graph.rights, strict=True)]
        chains = _Chains(self._stay, self._leave)
        # For each place and group of right neighbours: the last states of the copies that these may follow.
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
    """Return the first row of each group of equal rows, and the group of each row."""
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
        """Return the HMM that ends with the arcs `last`."""
        classes = np.concatenate(self._classes)
        num_states = self.num_states
        # Within a chain, a state follows the one before it; the first state has the chain's arcs instead.
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
