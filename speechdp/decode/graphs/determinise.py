"""Determinised, minimised decoding graphs: words share what they begin with, and so do contexts.

    min(det(HL o G)) without self-loops, disambiguation symbols removed, then self-loops

HL and G carry disambiguation symbols meanwhile (labels above the classes): one on back-off arcs,
others at the end of pronunciations that are equal to another or begin it.  Without them determinisation
would not end.
Source: Mohri, Pereira & Riley, "Speech recognition with weighted finite-state transducers", Springer
Handbook on Speech Processing, 2008; the order of steps is Kaldi's mkgraph.sh.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import kaldifst
import numpy as np

from speechdp.decode.graphs.fst_arrays import EPSILON, FstArrays
from speechdp.labels.lexicon import SILENCE, Pronunciation

_TOO_LARGE = "Determinization aborted since"  # passed so many states, or looped so often: as kaldifst says it


def disambiguation_symbols(
    pronunciations: Mapping[str, tuple[Pronunciation, ...]],
) -> dict[tuple[str, Pronunciation], int]:
    """Number the pronunciations that need a symbol at their end: from 1, apart for those that are equal.

    Those need one that several words share, that begin another one, or that contain silence.
    """
    variants = [(word, variant) for word, each in pronunciations.items() for variant in each]
    counts = Counter(variant for _, variant in variants)
    beginnings = {variant[:n] for _, variant in variants for n in range(1, len(variant))}
    used: Counter[Pronunciation] = Counter()
    symbols = {}
    for word, variant in variants:
        if counts[variant] > 1 or variant in beginnings or SILENCE in variant:
            used[variant] += 1
            symbols[word, variant] = used[variant]
    return symbols


def determinise_within(fst: Any, max_states: int) -> bool:
    """Determinise an FST and remove its epsilons, unless it would get more than so many states.

    Returns:
        Whether it was done; if not, what is left of the FST is of no use.
    """
    try:
        kaldifst.determinize_star(fst, max_states=max_states)
    except RuntimeError as error:
        if _TOO_LARGE not in str(error):
            raise
        return False
    return True


def determinised(fst: Any, num_classes: int, max_states: int) -> Any | None:
    """Determinise and minimise HL o G without self-loops; remove its disambiguation symbols.

    Args:
        fst: input labels are class + 1, or more than `num_classes`: disambiguation symbols.  What is left of
            it is of no use.
        num_classes: number of classes.
        max_states: more than so many states are not made.

    Returns:
        The result, or None where it would have more states.
    """
    if not determinise_within(fst, max_states):
        return None
    fst = _without_symbols(fst, num_classes)
    kaldifst.minimize_encoded(fst)
    return fst


def _without_symbols(fst: Any, num_classes: int) -> Any:
    """Return an FST with disambiguation symbols turned into epsilons."""
    arrays = FstArrays.of(fst)
    arrays.ilabel[arrays.ilabel > num_classes] = EPSILON
    return arrays.fst()


def with_self_loops(fst: Any, stay_cost: Sequence[float]) -> Any:
    """Let each arc that reads a class lead to a state that can last: one with a self-loop of that class.

    A state gets the self-loop itself if all arcs into it read the same class; else a new state is put
    before it for each class.

    Args:
        fst: input labels are class + 1 or epsilon; costs of leaving a state are in the arcs that enter it.
        stay_cost: cost of each class's self-loop, (C,).
    """
    arcs = FstArrays.of(fst)
    if arcs.start < 0:
        return fst
    # The pairs of a state and a label that enters it, each once: (target, label); nothing enters the start.
    width = len(stay_cost) + 1
    assert arcs.ilabel.max(initial=EPSILON) < width, "a disambiguation symbol is left"
    codes = np.append(arcs.target.astype(np.int64) * width + arcs.ilabel, arcs.start * width + EPSILON)
    pairs, pair_of = np.unique(codes, return_inverse=True)
    target, label = pairs // width, pairs % width
    lasts = label != EPSILON
    is_new = lasts & (np.bincount(target)[target] > 1)
    state = target.copy()  # that arcs of a pair lead to instead
    state[is_new] = len(arcs.final) + np.arange(is_new.sum())
    loop_cost = np.asarray(stay_cost)[label[lasts] - 1]
    return FstArrays.joined(
        arcs.start,
        np.append(arcs.final, np.full(is_new.sum(), np.inf)),
        (
            (arcs.source, arcs.ilabel, arcs.olabel, arcs.cost, state[pair_of[:-1]]),
            (state[is_new], EPSILON, EPSILON, 0.0, target[is_new]),
            (state[lasts], label[lasts], EPSILON, loop_cost, state[lasts]),
        ),
    ).fst()
