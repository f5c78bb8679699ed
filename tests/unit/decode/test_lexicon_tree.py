"""Grammars spelt out: the same sequences at the same costs as word by word, shared as far as they can be."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest

from speechdp.decode.graphs.fst_arrays import EPSILON, FstArrays
from speechdp.decode.graphs.lexicon_tree import BACKOFF, Spellings, spell_out

PAUSE = 0
PAUSE_COST, NO_PAUSE_COST = 0.25, 0.125
#: Words' labels and units: homophones, beginnings of others, variants, a unit that is repeated.
SPELT = [(1, [1, 2]), (2, [1, 2]), (2, [1]), (3, [1, 2, 3]), (4, [3, 3]), (5, [2, 2, 3]), (6, [3, 2, 3])]
COSTS = [0.5, 0.0, 1.0, 0.25, 2.0, 0.0, 0.75]


def spellings() -> Spellings:
    words, units = zip(*SPELT, strict=True)
    return Spellings(words, units, COSTS, [False] * len(SPELT))


def random_grammar(seed: int, num_states: int = 4) -> FstArrays:
    """Return a grammar whose states may read a word twice, and back off to one or two lower states."""
    rng = np.random.default_rng(seed)
    arcs = []
    for state in range(num_states):
        for word in rng.choice(np.arange(1, 7), rng.integers(1, 7)):
            arcs.append((state, word, rng.integers(8) / 4, rng.integers(num_states)))
        for lower in rng.choice(state, min(state, int(rng.integers(1, 3))), replace=False) if state else ():
            arcs.append((state, EPSILON, rng.integers(1, 8) / 4, lower))
    source, word, cost, target = map(np.array, zip(*arcs, strict=True))
    final = np.where(rng.random(num_states) < 0.5, 1.5, np.inf)
    final[0] = 0.5
    return FstArrays.joined(int(rng.integers(num_states)), final, [(source, word, word, cost, target)])


def arcs_of(fst: FstArrays) -> dict[int, list[tuple[int, int, float, int]]]:
    arcs: dict[int, list[tuple[int, int, float, int]]] = {state: [] for state in range(len(fst.final))}
    for source, *arc in zip(*(getattr(fst, name).tolist() for name in _COLUMNS), strict=True):
        arcs[source].append(tuple(arc))
    return arcs


_COLUMNS = ("source", "ilabel", "olabel", "cost", "target")


def sequences(fst: FstArrays, most: int) -> dict[tuple[tuple[int, ...], tuple[int, ...]], float]:
    """Return the cost of every pair of units that are read (up to so many) and words that are written."""
    arcs, best = arcs_of(fst), {}
    stack = [(fst.start, (), (), 0.0)]
    while stack:
        state, read, written, cost = stack.pop()
        if np.isfinite(fst.final[state]):
            key, whole = (read, written), cost + float(fst.final[state])
            best[key] = min(whole, best.get(key, np.inf))
        for label, word, more, target in arcs[state]:
            reads = (*read, label - 1) if label > EPSILON else read
            if len(reads) <= most:
                stack.append((target, reads, (*written, word) if word else written, cost + more))
    return best


def word_by_word(
    grammar: FstArrays, most: int
) -> Iterator[tuple[tuple[tuple[int, ...], tuple[int, ...]], float]]:
    """Yield units, words and cost of every path of a grammar, pronunciation and pause."""
    arcs = arcs_of(grammar)
    spelt = [(word, tuple(units), cost) for (word, units), cost in zip(SPELT, COSTS, strict=True)]
    pauses = [((PAUSE,), PAUSE_COST), ((), NO_PAUSE_COST)]
    stack = [(grammar.start, units, (), cost) for units, cost in pauses]
    while stack:
        state, read, written, cost = stack.pop()
        if np.isfinite(grammar.final[state]):
            yield (read, written), cost + float(grammar.final[state])
        for label, _, more, target in arcs[state]:
            if label == EPSILON:
                stack.append((target, read, written, cost + more))
                continue
            for (word, units, own), (pause, paused) in itertools.product(spelt, pauses):
                reads = (*read, *units, *pause)
                if word == label and len(reads) <= most:
                    stack.append((target, reads, (*written, word), cost + more + own + paused))


@pytest.mark.parametrize("seed", range(20))
def test_sequences_and_costs_are_those_of_each_word_by_itself(seed: int) -> None:
    grammar = random_grammar(seed)
    expected: dict[tuple[tuple[int, ...], tuple[int, ...]], float] = {}
    for key, cost in word_by_word(grammar, 5):
        expected[key] = min(cost, expected.get(key, np.inf))
    found = sequences(spell_out(grammar, spellings(), [PAUSE], PAUSE_COST, NO_PAUSE_COST), 5)
    assert found.keys() == expected.keys()
    for key, cost in expected.items():
        assert found[key] == pytest.approx(cost, abs=1e-5)


@pytest.mark.parametrize("seed", range(20))
def test_no_two_arcs_of_a_state_read_the_same(seed: int) -> None:
    grammar = random_grammar(seed)
    fst = spell_out(grammar, spellings(), [PAUSE], PAUSE_COST, NO_PAUSE_COST)
    for state, arcs in arcs_of(fst).items():
        labels = [label for label, *_ in arcs]
        assert len(set(labels)) == len(labels)
        for label, word, cost, target in arcs:
            assert (label == EPSILON) == (target == state + len(grammar.final) and cost == NO_PAUSE_COST)
            assert word == EPSILON or label != BACKOFF
            is_behind_pause = len(grammar.final) <= state < 2 * len(grammar.final)
            assert is_behind_pause or label != BACKOFF


def test_words_share_beginnings_and_endings() -> None:
    grammar = FstArrays.joined(0, [0.0], [(np.zeros(4, int), [1, 2, 3, 4], [1, 2, 3, 4], [3, 1, 4, 2], 0)])
    units = [[1, 2, 5, 6], [1, 2, 6, 6], [3, 5, 6], [4, 5, 6]]
    fst = spell_out(grammar, Spellings([1, 2, 3, 4], units, [0.0] * 4, [False] * 4), [PAUSE], np.inf, 0.0)
    # The boundary and behind it; 1 and 1 2; the endings 5 6 and 6: each once.
    assert len(fst.final) == 2 + 2 + 2
    arcs = arcs_of(fst)
    assert arcs[0] == [(EPSILON, EPSILON, 0.0, 1)]
    (branch,) = (arc for arc in arcs[1] if arc[0] == 1 + 1)
    assert branch[1:3] == (EPSILON, 1.0)  # the cheapest of its words is known as it begins
    assert sorted(arc[:3] for arc in arcs[1] if arc != branch) == [(1 + 3, 3, 4.0), (1 + 4, 4, 2.0)]
    deeper = arcs[arcs[branch[3]][0][3]]
    assert sorted(arc[:3] for arc in deeper) == [(1 + 5, 1, 2.0), (1 + 6, 2, 0.0)]


def test_a_word_with_silence_is_written_behind_its_end() -> None:
    """Else a pause and another word would read the same units and write another word."""
    grammar = FstArrays.joined(0, [0.0], [(np.zeros(2, int), [1, 2], [1, 2], 0.0, 0)])
    spelt = Spellings([1, 2], [[PAUSE, 3, 1], [3, 1]], [0.0, 0.0], [True, False])
    fst = spell_out(grammar, spelt, [PAUSE], PAUSE_COST, NO_PAUSE_COST)
    writes = {word: label for arcs in arcs_of(fst).values() for label, word, *_ in arcs if word}
    assert writes[1] < BACKOFF and writes[2] == 1 + 3


def test_words_without_a_pronunciation_are_left_out() -> None:
    grammar = FstArrays.joined(0, [0.0], [(np.zeros(2, int), [1, 7], [1, 7], 0.0, 0)])
    fst = spell_out(grammar, spellings(), [PAUSE], np.inf, 0.0)
    assert set(fst.olabel.tolist()) == {EPSILON, 1}
    assert len(spell_out(grammar, Spellings([], [], [], []), [PAUSE], np.inf, 0.0).ilabel) == 1
