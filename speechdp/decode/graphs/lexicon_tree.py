"""Spell out grammars: replace each word by its units (phones or states), for all words at once.

The words that may come next form a tree whose branches share their endings with those of other words
(chains.py).

Legend: G states of the grammar, P pronunciations.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from speechdp.decode.graphs.chains import Chains, Int64Array, Sequences, shared
from speechdp.decode.graphs.fst_arrays import EPSILON, Arcs, FstArrays

#: Symbol that back-off arcs read until it is removed; further back-off arcs of a state read lower numbers.
#: Arcs that distinguish words that sound alike read lower numbers, too.
BACKOFF = -1


class Spellings:
    """The pronunciations of a lexicon.

    Args:
        words: label of each pronunciation's word, (P,); a word may have several.
        units: units of each pronunciation, one or more, each at least 0.
        costs: cost of each pronunciation, (P,).
        have_silence: whether each pronunciation contains silence, (P,): it could be confused with other words
            and a pause, and is distinguished by a separate symbol after its last unit.

    Attributes:
        sequences: unit + 1 of each pronunciation.
        word, cost, has_silence: for each of the sequences, (P,).
    """

    def __init__(
        self,
        words: Sequence[int],
        units: Sequence[Sequence[int]],
        costs: Sequence[float],
        have_silence: Sequence[bool],
    ) -> None:
        self.sequences = Sequences([[unit + 1 for unit in each] for each in units])
        self.word = np.asarray(words, dtype=np.int64)[self.sequences.order]
        self.cost = np.asarray(costs, dtype=np.float64)[self.sequences.order]
        self.has_silence = np.asarray(have_silence, dtype=bool)[self.sequences.order]


def spell_out(
    grammar: FstArrays, spellings: Spellings, pause: Sequence[int], pause_cost: float, no_pause_cost: float
) -> FstArrays:
    """Replace the words of a grammar by their pronunciations, with optional pauses around them.

    Args:
        grammar: reads words, or EPSILON to back off; every state leads to a final state.
        spellings: pronunciations of its words; arcs of words without any are left out.
        pause: the units of silence.
        pause_cost, no_pause_cost: cost of a pause, or of none, before the first word and after each word;
            inf: no pauses.

    Returns:
        An FST that reads unit + 1 and writes words.  State g comes before the pause, state G + g after it.
        All arcs of a state read different labels: arcs that read no unit have negative labels (BACKOFF and
        lower), except those that skip a pause.

    Example:
        >>> fst = kaldifst.compile("0 1 1 1 0.5\\n1")
        >>> one = spell_out(FstArrays.of(fst), Spellings([1], [[6, 7]], [0.0], [False]), [0], np.inf, 0.0)
        >>> print(str(one.fst()).strip())
        0 2 0 0
        1 3 0 0
        2 4 7 1 0.5
        3
        4 1 8 0
    """
    num_states = 2 * len(grammar.final)
    behind = len(grammar.final) + np.arange(len(grammar.final))
    # Nothing leads to the boundary of the other states, which are only reached by backing off.
    boundary = np.unique(np.append(grammar.target[grammar.ilabel != EPSILON], grammar.start)).astype(np.int64)
    arcs: list[Arcs] = [(boundary, EPSILON, EPSILON, no_pause_cost, behind[boundary])]
    if np.isfinite(pause_cost):
        costs, silence = np.full(len(boundary), pause_cost), np.zeros_like(boundary)
        pauses = Chains(boundary, silence, silence + EPSILON, costs, behind[boundary])
        added, num_states = shared(pauses, Sequences([[unit + 1 for unit in pause]]), num_states)
        arcs += added
    away = grammar.where(grammar.ilabel == EPSILON).by_source()
    number = np.arange(len(away.source)) - np.searchsorted(away.source, away.source)
    arcs.append((behind[away.source], BACKOFF - number, EPSILON, away.cost, behind[away.target]))
    added, num_states = shared(
        _pronounced(grammar, spellings, behind),
        spellings.sequences,
        num_states,
        apart=spellings.has_silence,
        symbol=BACKOFF - 1,
    )
    final = np.full(num_states, np.inf, np.float32)
    final[behind] = grammar.final
    return FstArrays.joined(grammar.start, final, arcs + added)


def _pronounced(grammar: FstArrays, spellings: Spellings, behind: Int64Array) -> Chains:
    """Return a chain for each pronunciation of each arc's word."""
    by_word = np.argsort(spellings.word, kind="stable")
    words = spellings.word[by_word]
    arc = np.flatnonzero(grammar.ilabel != EPSILON)
    first = np.searchsorted(words, grammar.ilabel[arc], side="left")
    number = np.searchsorted(words, grammar.ilabel[arc], side="right") - first
    arc = np.repeat(arc, number)
    which = by_word[np.arange(len(arc)) + np.repeat(first - (number.cumsum() - number), number)]
    cost = grammar.cost[arc] + spellings.cost[which]
    target = grammar.target[arc].astype(np.int64)
    return Chains(behind[grammar.source[arc]], which, spellings.word[which], cost, target)
