"""Grammars spelt out: each word of a grammar replaced by its units (phones or states), at once for all words.

The words that may come next are a tree: they share what they begin with.  A branch that is left with one
word writes it, and the rest of the word is shared with all branches that end in the same units and lead to
the same state of the grammar.  A branch costs what the cheapest of its words does, so that search knows
of a word's cost as early as it can.

That is what determinisation and minimisation make of the lexicon composed with the grammar (Mohri, Pereira
& Riley, "Weighted finite-state transducers in speech recognition", Computer Speech & Language 16, 2002),
but for arcs that read nothing.  The composition itself, one chain for each word of each state, is never
made: of a large language model it would take tens of gigabytes.

Legend: G states of the grammar, P pronunciations, U the most units that one has, M words in the grammar's
arcs, each pronunciation apart.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from speechdp.decode.graphs.fst_arrays import EPSILON, Arcs, FstArrays

#: What back-off arcs read, until they read nothing; words that sound alike read lower numbers.
BACKOFF = -1

_Int64Array = NDArray[np.int64]


class Spellings:
    """The pronunciations of a lexicon, sorted by their units, and their endings.

    Args:
        words: label of each pronunciation's word, (P,); a word may have several.
        units: of each pronunciation, one or more, each at least 0.
        costs: of each pronunciation, (P,).
        pause: the first unit of silence.

    Attributes:
        word, cost, length: of each pronunciation, sorted by units, (P,).
        begins_with_pause: whether it could be taken for a pause and another word, (P,); such words are
            written behind their last unit, and so told apart.
        units: (P, U), -1 behind the end.
        ending: number of what is left of a pronunciation when so many units are left, (P, U + 1).
        ending_unit: the first unit of each ending.
        ending_rest: the ending behind that unit; ending 0 has no units.
    """

    def __init__(
        self, words: Sequence[int], units: Sequence[Sequence[int]], costs: Sequence[float], pause: int
    ) -> None:
        length = np.array([len(each) for each in units], dtype=np.int64)
        padded = np.full((len(units), length.max(initial=0)), -1, dtype=np.int64)
        padded[np.arange(padded.shape[1]) < length[:, None]] = [unit for each in units for unit in each]
        order = np.lexsort(padded.T[::-1]) if len(units) else np.empty(0, np.int64)
        self.word = np.asarray(words, dtype=np.int64)[order]
        self.cost = np.asarray(costs, dtype=np.float64)[order]
        self.length, self.units = length[order], padded[order]
        self.begins_with_pause = (self.units[:, :1] == pause).any(1)
        self._find_endings()

    def _find_endings(self) -> None:
        num, most = self.units.shape
        self.ending = np.zeros((num, most + 1), dtype=np.int64)
        units, rests, known = [np.array([-1])], [np.array([0])], 1
        for left in range(1, most + 1):
            has = np.flatnonzero(self.length >= left)
            unit = self.units[has, self.length[has] - left]
            codes, ending = np.unique(
                self.ending[has, left - 1] * (unit.max() + 1) + unit, return_inverse=True
            )
            self.ending[has, left] = known + ending
            rest, first = np.divmod(codes, unit.max() + 1)
            units.append(first)
            rests.append(rest)
            known += len(codes)
        self.ending_unit, self.ending_rest = np.concatenate(units), np.concatenate(rests)


def spell_out(
    grammar: FstArrays, spellings: Spellings, pause: Sequence[int], pause_cost: float, no_pause_cost: float
) -> FstArrays:
    """Replace the words of a grammar by their pronunciations, with optional pauses around them.

    Args:
        grammar: reads words, or epsilon to back off; every state leads to an end.
        spellings: of its words; arcs of words that have none are left out.
        pause: the units of silence.
        pause_cost, no_pause_cost: of a pause or none before the first word and behind each word; inf: there
            are none.

    Returns:
        An FST that reads unit + 1 and writes words, where its first 2 G states are the boundaries of words:
        state g comes before the pause, G + g behind it.  Each of its other states is within a word.  No two
        arcs of a state read the same, if that holds of the grammar: arcs that read no unit have negative
        labels (BACKOFF and lower), but those that leave out a pause.

    Example:
        >>> fst = kaldifst.compile("0 1 1 1 0.5\\n1")
        >>> one = spell_out(FstArrays.of(fst), Spellings([1], [[6, 7]], [0.0], 0), [0], np.inf, 0.0)
        >>> print(str(one.fst()).strip())
        0 2 0 0
        1 3 0 0
        2 4 7 1 0.5
        3
        4 1 8 0
    """
    return _Speller(grammar, spellings).run(pause, pause_cost, no_pause_cost)


class _Speller:
    def __init__(self, grammar: FstArrays, spellings: Spellings) -> None:
        self._grammar, self._spellings = grammar, spellings
        self._arcs: list[Arcs] = []
        self._num_states = 2 * len(grammar.final)

    def run(self, pause: Sequence[int], pause_cost: float, no_pause_cost: float) -> FstArrays:
        boundaries = np.arange(len(self._grammar.final))
        behind = len(boundaries) + boundaries
        self._add(boundaries, EPSILON, EPSILON, no_pause_cost, behind)
        if np.isfinite(pause_cost):
            self._add_pauses(boundaries, behind, pause, pause_cost)
        backs_off = self._grammar.ilabel == EPSILON
        source, target = self._grammar.source[backs_off], self._grammar.target[backs_off]
        self._add(behind[source], BACKOFF, EPSILON, self._grammar.cost[backs_off], behind[target])
        self._add_words(behind)
        final = np.full(self._num_states, np.inf, np.float32)
        final[behind] = self._grammar.final
        return FstArrays.joined(self._grammar.start, final, self._arcs)

    def _add(self, *arcs: NDArray | float) -> None:  # type: ignore[type-arg]
        self._arcs.append(arcs)  # type: ignore[arg-type]

    def _new_states(self, number: int) -> _Int64Array:
        """Return new states, (number,)."""
        self._num_states += number
        return np.arange(self._num_states - number, self._num_states)

    def _add_pauses(
        self, boundaries: _Int64Array, behind: _Int64Array, pause: Sequence[int], cost: float
    ) -> None:
        source = boundaries
        for place, unit in enumerate(pause, start=1):
            target = behind if place == len(pause) else self._new_states(len(boundaries))
            self._add(source, unit + 1, EPSILON, cost if place == 1 else 0.0, target)
            source = target

    def _add_words(self, behind: _Int64Array) -> None:
        spelt = self._spellings
        root, cost, target, variant = self._words(behind)
        word, length = spelt.word[variant], spelt.length[variant]
        shared = self._shared_with_previous(root, variant)
        with_next = np.append(shared[1:], 0)[: len(shared)]
        depth = np.where(spelt.begins_with_pause[variant], length, np.maximum(shared, with_next))
        node, best = self._add_branches(root, cost, variant, shared, depth)
        alone = depth < length
        # What is left of a word that is alone on its branch is shared by all that lead to the same state.
        left = length[alone] - depth[alone] - 1
        num_endings = len(spelt.ending_unit)
        rest = target[alone] * num_endings + spelt.ending[variant[alone], left]
        unit = spelt.units[variant[alone], depth[alone]]
        ends = self._add_endings(rest)
        self._add(node[alone], unit + 1, word[alone], (cost - best)[alone], ends)
        # Words that others go on from, or that sound alike, are written behind their last unit.
        others = ~alone
        alike = self._number_alike(root, variant, shared, length)[others]
        self._add(node[others], BACKOFF - 1 - alike, word[others], (cost - best)[others], target[others])

    def _words(
        self, behind: _Int64Array
    ) -> tuple[_Int64Array, NDArray[np.float64], _Int64Array, _Int64Array]:
        """Return roots, costs, targets and pronunciations of the grammar's words, (M,), sorted by the first
        and the last."""
        grammar, spelt = self._grammar, self._spellings
        by_word = np.argsort(spelt.word, kind="stable")
        sorted_words = spelt.word[by_word]
        arc = np.flatnonzero(grammar.ilabel != EPSILON)
        first = np.searchsorted(sorted_words, grammar.ilabel[arc], side="left")
        number = np.searchsorted(sorted_words, grammar.ilabel[arc], side="right") - first
        arc = np.repeat(arc, number)
        skipped = np.repeat(first - (number.cumsum() - number), number)
        variant = by_word[skipped + np.arange(len(arc))]
        order = np.lexsort((variant, grammar.source[arc]))
        arc, variant = arc[order], variant[order]
        cost = grammar.cost[arc] + spelt.cost[variant]
        return behind[grammar.source[arc]], cost, grammar.target[arc].astype(np.int64), variant

    def _shared_with_previous(self, root: _Int64Array, variant: _Int64Array) -> _Int64Array:
        """Return how many units a word begins with that the one before it from the same root does, (M,)."""
        units = self._spellings.units
        shared = np.zeros(len(root), dtype=np.int64)
        alike = np.flatnonzero(root[1:] == root[:-1]) + 1
        for depth in range(units.shape[1]):
            unit = units[variant[alike], depth]
            alike = alike[(unit >= 0) & (unit == units[variant[alike - 1], depth])]
            if not len(alike):
                break
            shared[alike] += 1
        return shared

    def _add_branches(
        self,
        root: _Int64Array,
        cost: NDArray[np.float64],
        variant: _Int64Array,
        shared: _Int64Array,
        depth: _Int64Array,
    ) -> tuple[_Int64Array, NDArray[np.float64]]:
        """Add what words share with others of the same root, unit by unit.

        Returns:
            The state that each word is at when it no longer shares, (M,), and what has been paid there, (M,).
        """
        node, best = root.copy(), np.zeros(len(root))
        on = np.flatnonzero(depth > 0)
        for at in range(1, int(depth.max(initial=0)) + 1):
            on = on[depth[on] >= at]
            begins = np.flatnonzero(shared[on] < at)
            begun = on[begins]
            state = self._new_states(len(begun))
            cheapest = np.minimum.reduceat(cost[on], begins)
            unit = self._spellings.units[variant[begun], at - 1]
            self._add(node[begun], unit + 1, EPSILON, cheapest - best[begun], state)
            sizes = np.diff(np.append(begins, len(on)))
            node[on], best[on] = np.repeat(state, sizes), np.repeat(cheapest, sizes)
        return node, best

    def _add_endings(self, wanted: _Int64Array) -> _Int64Array:
        """Add states for endings of words, each in front of a state of the grammar.

        Args:
            wanted: target * number of endings + ending, (M,).

        Returns:
            The state of each, (M,).
        """
        spelt = self._spellings
        num_endings = len(spelt.ending_unit)
        waves = []
        wave = np.unique(wanted)
        while len(wave := wave[wave % num_endings > 0]):
            waves.append(wave)
            target, ending = np.divmod(wave, num_endings)
            wave = np.unique(target * num_endings + spelt.ending_rest[ending])
        known = np.unique(np.concatenate(waves)) if waves else np.empty(0, np.int64)
        states = self._new_states(len(known))

        def state_of(codes: _Int64Array) -> _Int64Array:
            target, ending = np.divmod(codes, num_endings)
            within = ending > 0
            found = target
            found[within] = states[np.searchsorted(known, codes[within])]
            return found

        target, ending = np.divmod(known, num_endings)
        behind_it = state_of(target * num_endings + spelt.ending_rest[ending])
        self._add(states, spelt.ending_unit[ending] + 1, EPSILON, 0.0, behind_it)
        return state_of(wanted)

    def _number_alike(
        self, root: _Int64Array, variant: _Int64Array, shared: _Int64Array, length: _Int64Array
    ) -> _Int64Array:
        """Number the words of a root that sound alike: 0 for the first, (M,)."""
        first = np.ones(len(root), dtype=bool)
        first[1:] = (shared[1:] < length[1:]) | (length[1:] != length[:-1])
        index = np.arange(len(root))
        return index - np.maximum.accumulate(np.where(first, index, 0))
