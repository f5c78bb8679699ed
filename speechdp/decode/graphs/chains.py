"""Add many chains to an FST at once, sharing their beginnings and endings.

A chain leads from one state to another, reads a sequence of labels and writes a word.  Examples are the
pronunciation of a word between two states of a grammar, and the HMM states of a phone between two of its
neighbours.  Chains that leave the same state form a tree, because they share their beginnings.  Where a chain
leaves the tree it writes its word; its remaining labels are shared with all chains that read the same from
there on and lead to the same state.  A branch has the cost of its cheapest chain, so that the search meets
costs as early as possible.

Determinisation and minimisation of the chains would give the same result (Mohri, Pereira & Riley, "Weighted
finite-state transducers in speech recognition", Computer Speech & Language 16, 2002).  But the chains
themselves, which may take tens of gigabytes, are never made.

Legend: M chains, P sequences, U labels of the longest sequence.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from speechdp.decode.graphs.fst_arrays import EPSILON, Arcs

Int64Array = NDArray[np.int64]
BoolArray = NDArray[np.bool_]


class Sequences:
    """Sequences of labels, sorted, and their endings.

    Args:
        labels: each sequence has one or more, each at least 1.

    Attributes:
        order: index of each sequence among those given, (P,).
        labels: (P, U), 0 after the end.
        length: (P,).
        ending: [p, n] is the number of the ending formed by the last n labels of sequence p, (P, U + 1).
        ending_label: the first label of each ending.
        ending_rest: the ending after that label; ending 0 has no labels.
    """

    def __init__(self, labels: Sequence[Sequence[int]] | Int64Array) -> None:
        length = np.fromiter(map(len, labels), np.int64, len(labels))
        padded = np.zeros((len(length), length.max(initial=0)), dtype=np.int64)
        flat = np.fromiter(itertools.chain.from_iterable(labels), np.int64, length.sum())
        padded[np.arange(padded.shape[1]) < length[:, None]] = flat
        self.order = np.lexsort(padded.T[::-1]) if padded.size else np.arange(len(length))
        self.length, self.labels = length[self.order], padded[self.order]
        self._find_endings()

    def _find_endings(self) -> None:
        num, most = self.labels.shape
        width = int(self.labels.max(initial=0)) + 1
        self.ending = np.zeros((num, most + 1), dtype=np.int64)
        labels, rests, known = [np.array([0])], [np.array([0])], 1
        for left in range(1, most + 1):
            has = np.flatnonzero(self.length >= left)
            label = self.labels[has, self.length[has] - left]
            codes, ending = np.unique(self.ending[has, left - 1] * width + label, return_inverse=True)
            self.ending[has, left] = known + ending
            rest, first = np.divmod(codes, width)
            labels.append(first)
            rests.append(rest)
            known += len(codes)
        self.ending_label, self.ending_rest = np.concatenate(labels), np.concatenate(rests)


def distinct(values: Int64Array) -> Int64Array:
    """Return the values that occur, ascending.  Sorts: np.unique of numpy 2.3 hashes, which is slower."""
    values = np.sort(values)
    is_new = np.ones(len(values), dtype=bool)
    is_new[1:] = values[1:] != values[:-1]
    return values[is_new]


@dataclass
class Chains:
    """Chains to add to an FST.

    Attributes:
        source: state that each chain leaves, (M,).
        sequence: number of the sequence that each reads, (M,).
        word, cost: word that each writes, and its cost, (M,).
        target: state that each leads to, (M,).
    """

    source: Int64Array
    sequence: Int64Array
    word: NDArray[np.integer]
    cost: NDArray[np.floating]
    target: Int64Array

    def in_order(self) -> Chains:
        """Return the chains sorted by the state that they leave, then by the sequence that they read."""
        order = np.lexsort((self.sequence, self.source))
        source, sequence, target = (each[order] for each in (self.source, self.sequence, self.target))
        return Chains(source, sequence, self.word[order], self.cost[order], target)


def shared(
    chains: Chains, sequences: Sequences, num_states: int, *, apart: ArrayLike = False, symbol: int = EPSILON
) -> tuple[list[Arcs], int]:
    """Return arcs for chains, with as few states as sharing of beginnings and endings allows.

    If a chain ends where others continue, or if several chains of a state read the same, the word is written
    by an extra arc that reads no label of the sequence.

    Args:
        chains: in any order.
        sequences: the sequences that they read.
        num_states: states of the FST so far; new states are numbered from there.
        apart: sequences that always end with such an extra arc, whose symbol no other sequence uses, (P,).
        symbol: symbol that the extra arcs read, negative: the k-th of several chains that read the same has
            `symbol - k`, and sequences in `apart` have lower ones than all others; EPSILON: all read EPSILON.

    Returns:
        The arcs, and the number of states including the new ones.

    Example:
        >>> one = Chains(*(np.array([value]) for value in (0, 0, 9, 0.5, 1)))
        >>> arcs, num_states = shared(one, Sequences([[5, 6]]), 2)
        >>> print(str(FstArrays.joined(0, [np.inf, 0.0, np.inf], arcs).fst()).strip())
        0 2 5 9 0.5
        1
        2 1 6 0
    """
    all_apart = np.broadcast_to(np.asarray(apart, dtype=bool), sequences.length.shape)
    return _Sharing(chains.in_order(), sequences, num_states).run(all_apart, symbol)


class _Sharing:
    """The work of `shared`, with the arcs and states made so far.

    Args:
        chains: sorted, so that chains with equal beginnings are adjacent.
        sequences, num_states: as for `shared`.
    """

    def __init__(self, chains: Chains, sequences: Sequences, num_states: int) -> None:
        self._chains, self._sequences = chains, sequences
        self._num_states = num_states
        self._arcs: list[Arcs] = []

    def run(self, apart: BoolArray, symbol: int) -> tuple[list[Arcs], int]:
        """Return the arcs of all chains, and the number of states including the new ones; see `shared`.

        Args:
            apart: for every sequence, (P,).
            symbol: as for `shared`.
        """
        chains, sequences = self._chains, self._sequences
        which, length = chains.sequence, sequences.length[chains.sequence]
        with_previous = self._common_with_previous()
        with_next = np.append(with_previous[1:], 0)[: len(which)]
        depth = np.where(apart[which], length, np.maximum(with_previous, with_next))
        node, paid = self._add_branches(with_previous, depth)
        cost = chains.cost - paid
        alone = np.flatnonzero(depth < length)
        ending = sequences.ending[which[alone], length[alone] - depth[alone] - 1]
        behind = self._add_endings(chains.target[alone], ending)
        label = sequences.labels[which[alone], depth[alone]]
        self._add(node[alone], label, chains.word[alone], cost[alone], behind)
        others = np.flatnonzero(depth == length)
        reads: ArrayLike = EPSILON
        if symbol != EPSILON:
            alike = self._number_alike(with_previous, length)
            own = symbol - alike.max(initial=0) - 1 - which - len(apart) * alike
            reads = np.where(apart[which], own, symbol - alike)[others]
        self._add(node[others], reads, chains.word[others], cost[others], chains.target[others])
        return self._arcs, self._num_states

    def _add(
        self, source: Int64Array, label: ArrayLike, word: ArrayLike, cost: ArrayLike, target: Int64Array
    ) -> None:
        self._arcs.append((source, label, word, cost, target))

    def _new_states(self, number: int) -> Int64Array:
        """Return new states, (number,)."""
        self._num_states += number
        return np.arange(self._num_states - number, self._num_states)

    def _common_with_previous(self) -> Int64Array:
        """Return how many first labels each chain shares with the previous one of the same state, (M,)."""
        labels, which, source = self._sequences.labels, self._chains.sequence, self._chains.source
        common = np.zeros(len(which), dtype=np.int64)
        alike = np.flatnonzero(source[1:] == source[:-1]) + 1
        for depth in range(labels.shape[1]):
            label = labels[which[alike], depth]
            alike = alike[(label > 0) & (label == labels[which[alike - 1], depth])]
            common[alike] += 1
        return common

    def _add_branches(
        self, with_previous: Int64Array, depth: Int64Array
    ) -> tuple[Int64Array, NDArray[np.floating]]:
        """Add the beginnings that chains share with others of the same state, label by label.

        Returns:
            The state where each chain stops sharing, (M,), and the cost of the path to it, (M,).
        """
        chains = self._chains
        node, paid = chains.source.copy(), np.zeros_like(chains.cost)
        on = np.arange(len(node))
        for at in range(1, int(depth.max(initial=0)) + 1):
            on = on[depth[on] >= at]
            begins = np.flatnonzero(with_previous[on] < at)
            begun = on[begins]
            state = self._new_states(len(begun))
            cheapest = np.minimum.reduceat(chains.cost[on], begins)
            label = self._sequences.labels[chains.sequence[begun], at - 1]
            self._add(node[begun], label, EPSILON, cheapest - paid[begun], state)
            sizes = np.diff(np.append(begins, len(on)))
            node[on], paid[on] = np.repeat(state, sizes), np.repeat(cheapest, sizes)
        return node, paid

    def _add_endings(self, target: Int64Array, ending: Int64Array) -> Int64Array:
        """Add states for endings that lead to given states.

        Args:
            target: state that each leads to, (M,).
            ending: number of each ending, (M,).

        Returns:
            The first state of each, (M,): the target itself for the ending without labels.
        """
        sequences = self._sequences
        number = len(sequences.ending_label)
        waves = [np.empty(0, np.int64)]
        wave = distinct(target * number + ending)
        while len(wave := wave[wave % number > 0]):
            waves.append(wave)
            to, left = np.divmod(wave, number)
            wave = distinct(to * number + sequences.ending_rest[left])
        known = distinct(np.concatenate(waves))
        states = self._new_states(len(known))

        def state_of(to: Int64Array, left: Int64Array) -> Int64Array:
            found, within = to.copy(), np.flatnonzero(left)
            found[within] = states[np.searchsorted(known, to[within] * number + left[within])]
            return found

        to, left = np.divmod(known, number)
        behind = state_of(to, sequences.ending_rest[left])
        self._add(states, sequences.ending_label[left], EPSILON, 0.0, behind)
        return state_of(target, ending)

    @staticmethod
    def _number_alike(with_previous: Int64Array, length: Int64Array) -> Int64Array:
        """Number the chains of a state that read the same sequence, from 0, (M,)."""
        first = np.ones(len(length), dtype=bool)
        first[1:] = (with_previous[1:] < length[1:]) | (length[1:] != length[:-1])
        index = np.arange(len(length))
        return index - np.maximum.accumulate(np.where(first, index, 0))
