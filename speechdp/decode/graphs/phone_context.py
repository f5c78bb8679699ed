"""Convert graphs over phones to graphs over tied states: this composes C and H of Kaldi's HCLG.

A phone's class depends on the previous phone, and with both contexts also on the next.  So a place in the new
graph consists of a place in the old one, the previous phone and, with both contexts, the phone that has been
read but still waits for its right neighbour.  Left neighbours with the same effect count as one, so that few
places have many copies.

Places are found wave by wave from the start: each wave consists of the places that arcs from the previous
wave lead to.

Legend: P phones, S states of a phone, N places of a wave, M arcs that leave them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from speechdp.decode.graphs.chains import Chains, Int64Array, Sequences, distinct, shared
from speechdp.decode.graphs.determinise import with_entry_costs
from speechdp.decode.graphs.fst_arrays import EPSILON, Arcs, FstArrays
from speechdp.labels.gaussian_mixtures import DoubleArray
from speechdp.labels.state_tying import EDGE, StateTying

#: Stands for the waiting phone if there is none.
_NONE = -1


def in_context(graph: FstArrays, tying: StateTying, leave_cost: DoubleArray) -> FstArrays:
    """Return the graph that reads classes where `graph` reads phones, without self-loops.

    Args:
        graph: input labels are the phone's number + 1 (1 is silence), EPSILON, or negative labels, which are
            kept; with both contexts a new negative one is added.
        tying: tying of its phones.
        leave_cost: cost of leaving each class, (C,); it is added to each arc that enters a state.

    Example::

        looped = with_self_loops(in_context(graph, tying, leave_cost), stay_cost)
    """
    return _Expansion(graph, tying, leave_cost).run()


class _Expansion:
    """Computes the new graph; a place is a number for (old state, waiting phone or _NONE, previous phone)."""

    def __init__(self, graph: FstArrays, tying: StateTying, leave_cost: DoubleArray) -> None:
        self._graph, self._tying, self._leave_cost = graph.by_source(), tying, leave_cost
        self._first_arc = np.searchsorted(self._graph.source, np.arange(len(graph.final) + 1))
        phones = tying.num_phones
        before = np.arange(phones) if tying.looks_right else np.asarray(tying.same_left[0])
        waiting = np.asarray(tying.same_left) if tying.looks_right else np.empty((0, phones), int)
        #: The first left phone with the same effect, by waiting phone (_NONE is the first row).
        self._left = np.vstack([before, waiting])
        #: Read with the first phone, which waits (Kaldi's #-1): otherwise back-off before and after it would
        #: read the same, and the graph could not be determinised.
        self._first_phone = int(graph.ilabel.min(initial=EPSILON)) - 1
        # From all waves: unchanged arcs; sequences of states; their (left, phone, right), (M, 3).
        self._arcs: list[Arcs] = []
        self._chains: list[Arcs] = []
        self._contexts: list[Int64Array] = []

    def run(self) -> FstArrays:
        """Return the graph of all reachable places, found wave by wave from the first."""
        wave = known = self._place(np.array([self._graph.start]), np.array([EDGE]), np.array([_NONE]))
        while len(wave):
            reached = distinct(self._follow(wave))
            wave = reached[~_are_in(known, reached)]
            known = np.sort(np.append(known, wave), kind="stable")
        return self._join(known)

    def _place(self, state: NDArray[Any], left: NDArray[Any], waits: NDArray[Any]) -> Int64Array:
        """Return the numbers of places, (N,)."""
        phones = self._tying.num_phones
        code = state.astype(np.int64) * (phones + 1) + waits + 1
        placed: Int64Array = code * phones + self._left[waits + 1, left]
        return placed

    def _parts(self, place: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Return the states, previous phones and waiting phones of places, (N,) each."""
        phones = self._tying.num_phones
        state, waits = np.divmod(place // phones, phones + 1)
        return state, place % phones, waits - 1

    def _follow(self, wave: Int64Array) -> Int64Array:
        """Add the arcs that leave places; return the places that they lead to, (M,)."""
        graph, tying = self._graph, self._tying
        state = self._parts(wave)[0]
        num_arcs = self._first_arc[state + 1] - self._first_arc[state]
        skipped = np.repeat(self._first_arc[state] - num_arcs.cumsum() + num_arcs, num_arcs)
        arc = skipped + np.arange(len(skipped))
        source = np.repeat(wave, num_arcs)
        _, left, waits = self._parts(source)
        phone, target = graph.ilabel[arc].astype(np.int64) - 1, graph.target[arc]
        reads = phone >= 0
        label = np.where(reads, self._first_phone, phone + 1)
        if tying.looks_right:
            goes = reads & (waits != _NONE)
            context = np.stack([left, waits, phone], 1)
            end = np.where(goes, waits, left), np.where(reads, phone, waits)
        else:
            goes = reads
            context = np.stack([left, phone, np.zeros_like(phone)], 1)
            end = np.where(goes, phone, left), waits
        reached = self._place(target, *end)
        word, cost = graph.olabel[arc], graph.cost[arc]
        stays = ~goes
        self._arcs.append((source[stays], label[stays], word[stays], cost[stays], reached[stays]))
        self._chains.append((source[goes], EPSILON, word[goes], cost[goes], reached[goes]))
        self._contexts.append(context[goes])
        return reached

    def _join(self, places: Int64Array) -> FstArrays:
        """Return the new graph; its first states are the places, ascending."""
        graph = self._graph
        state, left, waits = self._parts(places)
        final = graph.final[state]
        # After a phone that waits at the end comes silence: its states lead to a state where the graph ends.
        late = np.isfinite(final) & (waits != _NONE)
        ends = len(places) + np.arange(late.sum())
        end_cost = final[late]
        final[late] = np.inf
        self._contexts.append(np.stack([left, waits, np.full_like(left, EDGE)], 1)[late])
        numbered = [self._numbered(places, *part) for part in self._chains]
        chains = FstArrays.joined(0, [], [*numbered, (np.flatnonzero(late), EPSILON, EPSILON, 0.0, ends)])
        contexts = np.concatenate(self._contexts)
        classes = self._tying.table[contexts[:, 0], contexts[:, 1], contexts[:, 2]]  # (M, S)
        arcs = [self._numbered(places, *part) for part in self._arcs]
        # Right neighbours often make no difference, so many chains of a place begin with the same classes.
        shape = (self._tying.num_classes,) * classes.shape[1]
        codes, each = np.unique(np.ravel_multi_index(tuple(classes.T), shape), return_inverse=True)
        sequences = Sequences(np.stack(np.unravel_index(codes, shape), 1) + 1)  # in the order of the codes
        source, target = chains.source.astype(np.int64), chains.target.astype(np.int64)
        whole = Chains(source, each, chains.olabel, chains.cost, target)
        added, num_states = shared(whole, sequences, len(places) + len(ends))
        start = self._place(np.array([graph.start]), np.array([EDGE]), np.array([_NONE]))
        costs = np.full(num_states, np.inf, np.float32)
        costs[: len(places) + len(ends)] = np.append(final, end_cost)
        joined = FstArrays.joined(int(np.searchsorted(places, start)[0]), costs, arcs + added)
        return with_entry_costs(joined, self._leave_cost)

    @staticmethod
    def _numbered(
        places: Int64Array,
        source: ArrayLike,
        label: ArrayLike,
        word: ArrayLike,
        cost: ArrayLike,
        end: ArrayLike,
    ) -> Arcs:
        """Return arcs with the places that they leave and lead to replaced by new states."""
        return np.searchsorted(places, source), label, word, cost, np.searchsorted(places, end)


def _are_in(known: Int64Array, wanted: Int64Array) -> NDArray[np.bool_]:
    """Return which values of `wanted` are in `known`, both ascending."""
    at = np.searchsorted(known, wanted).clip(max=len(known) - 1)
    return np.asarray(known[at] == wanted)
