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

from speechdp.labels.lexicon import SILENCE, Pronunciation

EPSILON = 0

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
        fst: input labels are class + 1, or more than `num_classes`: disambiguation symbols.  It is changed.
        num_classes: number of classes.
        max_states: more than so many states are not made.

    Returns:
        The result, or None where it would have more states.
    """
    if not determinise_within(fst, max_states):
        return None
    _drop_symbols(fst, num_classes)
    kaldifst.minimize_encoded(fst)
    return fst


def _drop_symbols(fst: Any, num_classes: int) -> None:
    """Turn disambiguation symbols into epsilons."""
    for state in range(fst.num_states):
        arcs = [_arc(arc) for arc in kaldifst.ArcIterator(fst, state)]
        if any(label > num_classes for label, *_ in arcs):
            fst.delete_arcs(state, len(arcs))
            for label, word, cost, target in arcs:
                fst.add_arc(
                    state, kaldifst.StdArc(EPSILON if label > num_classes else label, word, cost, target)
                )


def _arc(arc: Any) -> tuple[int, int, float, int]:
    return arc.ilabel, arc.olabel, float(arc.weight.value), arc.nextstate


def with_self_loops(fst: Any, stay_cost: Sequence[float]) -> Any:
    """Let each arc that reads a class lead to a state that can last: one with a self-loop of that class.

    A state gets the self-loop itself if all arcs into it read the same class; else a new state is put
    before it for each class.

    Args:
        fst: input labels are class + 1 or epsilon; costs of leaving a state are in the arcs that enter it.
        stay_cost: cost of each class's self-loop, (C,).
    """
    entering: list[set[int]] = [set() for _ in range(fst.num_states)]
    entering[fst.start].add(EPSILON)
    arcs = []
    for state in range(fst.num_states):
        for each in kaldifst.ArcIterator(fst, state):
            label, word, cost, target = _arc(each)
            entering[target].add(label)
            arcs.append((state, label, word, cost, target))
    result = kaldifst.StdVectorFst()
    for state in range(fst.num_states):
        result.add_state()
        result.set_final(state, fst.final(state).value)
    result.start = fst.start
    lasting: dict[tuple[int, int], int] = {}
    for source, label, word, cost, target in arcs:
        if label != EPSILON:
            if (target, label) not in lasting:
                lasting[target, label] = _lasting(result, target, label, entering[target], stay_cost)
            target = lasting[target, label]  # noqa: PLW2901
        result.add_arc(source, kaldifst.StdArc(label, word, cost, target))
    return result


def _lasting(fst: Any, target: int, label: int, entering: set[int], stay_cost: Sequence[float]) -> int:
    """Return the state that arcs of `label` to `target` lead to instead, with its self-loop."""
    state = target
    if len(entering) > 1:
        state = fst.add_state()
        fst.add_arc(state, kaldifst.StdArc(EPSILON, EPSILON, 0.0, target))
    fst.add_arc(state, kaldifst.StdArc(label, EPSILON, float(stay_cost[label - 1]), state))
    return state
