"""Determinise and minimise decoding graphs, and add self-loops.

    min(det(graph)) without self-loops, disambiguation symbols removed, then self-loops

Meanwhile arcs that read no class carry disambiguation symbols (lexicon_tree.py): back-off arcs, and arcs
after pronunciations that are equal to another one, begin another one or contain silence.  Without them
determinisation would not terminate.

Source: Mohri, Pereira & Riley, "Speech recognition with weighted finite-state transducers", Springer
Handbook on Speech Processing, 2008; the order of steps is Kaldi's mkgraph.sh.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import kaldifst
import numpy as np
from numpy.typing import NDArray

from speechdp.decode.graphs.fst_arrays import EPSILON, FstArrays

#: Messages of kaldifst: the limit on states, or on iterations over loops, was reached; or the same labels
#: write different words.
_NOT_DONE = ("Determinization aborted since", "not determinizable")


def determinise_within(fst: Any, max_states: int) -> bool:
    """Determinise an FST and remove its epsilons, if the result has at most `max_states` states.

    Returns:
        Whether this succeeded; if not, the FST is left unusable.
    """
    try:
        kaldifst.determinize_star(fst, max_states=max_states)
    except RuntimeError as error:
        if not any(reason in str(error) for reason in _NOT_DONE):
            raise
        return False
    return True


def determinised(graph: FstArrays, num_classes: int, max_states: int) -> FstArrays | None:
    """Determinise and minimise a graph without self-loops; remove its disambiguation symbols.

    Args:
        graph: input labels are class + 1, EPSILON, or negative: disambiguation symbols.
        num_classes: number of classes.
        max_states: limit on states: a larger graph is not determinised, and no more states are made.

    Returns:
        The result; None if the graph has or would get more states, or cannot be determinised.
    """
    if len(graph.final) > max_states:
        return None
    symbols = graph.ilabel < EPSILON
    fst = replace(graph, ilabel=np.where(symbols, num_classes - graph.ilabel, graph.ilabel)).fst()
    if not determinise_within(fst, max_states):
        return None
    shared = FstArrays.of(fst)
    shared.ilabel[shared.ilabel > num_classes] = EPSILON
    fst = shared.fst()
    kaldifst.minimize_encoded(fst)
    return FstArrays.of(fst)


def with_entry_costs(graph: FstArrays, leave_cost: NDArray[np.float64]) -> FstArrays:
    """Add, in place, the cost of leaving each class's state, (C,), to the arcs that read class + 1."""
    reads = graph.ilabel > EPSILON
    graph.cost[reads] += leave_cost[graph.ilabel[reads] - 1]
    return graph


def with_self_loops(arcs: FstArrays, stay_cost: Sequence[float]) -> FstArrays:
    """Make each arc that reads a class lead to a state with a self-loop of that class.

    A state gets the self-loop itself if all arcs into it read the same class; else a new state is inserted
    before it for each class.

    Args:
        arcs: input labels are class + 1, EPSILON, or negative, which becomes EPSILON; the cost of leaving a
            state is in the arcs that enter it.
        stay_cost: cost of each class's self-loop, (C,).
    """
    if arcs.start < 0:
        return arcs
    # Each pair of a state and a label that enters it, once: (target, label); nothing enters the start.
    width, reads = len(stay_cost) + 1, np.maximum(arcs.ilabel, EPSILON)
    assert reads.max(initial=EPSILON) < width
    codes = np.append(arcs.target.astype(np.int64) * width + reads, arcs.start * width + EPSILON)
    pairs, pair_of = np.unique(codes, return_inverse=True)
    target, label = pairs // width, pairs % width
    lasts = label != EPSILON
    is_new = lasts & (np.bincount(target)[target] > 1)
    state = target.copy()  # the state that the arcs of each pair lead to instead
    state[is_new] = len(arcs.final) + np.arange(is_new.sum())
    loop_cost = np.asarray(stay_cost)[label[lasts] - 1]
    return FstArrays.joined(
        arcs.start,
        np.append(arcs.final, np.full(is_new.sum(), np.inf)),
        (
            (arcs.source, reads, arcs.olabel, arcs.cost, state[pair_of[:-1]]),
            (state[is_new], EPSILON, EPSILON, 0.0, target[is_new]),
            (state[lasts], label[lasts], EPSILON, loop_cost, state[lasts]),
        ),
    )
