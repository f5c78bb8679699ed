"""Graphs over phones turned into graphs over tied states: C and H of Kaldi's HCLG, composed in.

A phone's class depends on the phone that comes before it, and with both contexts on the one that comes after:
a place in the new graph is a place in the old one, the phone before it and, if need be, the phone that has
been read but still waits for its right neighbour.  Left neighbours after which nothing differs are one, so
that few places have many copies.
"""

from __future__ import annotations

import math
from typing import Any

import kaldifst

from speechdp.decode.determinise import EPSILON
from speechdp.labels.gaussian_mixtures import DoubleArray
from speechdp.labels.state_tying import EDGE, StateTying

#: Stands for the phone that waits where none does.
_NONE = -1

#: A state of the graph over phones, the phone before it (or before the one that waits), the one that waits.
_Place = tuple[int, int, int]


def in_context(graph: Any, tying: StateTying, leave_cost: DoubleArray) -> Any:
    """Return the graph that reads classes where `graph` reads phones, without self-loops.

    Args:
        graph: input labels are the phone's number + 1 (1 is silence), EPSILON, or symbols above these, which
            become symbols above the classes.
        tying: of its phones.
        leave_cost: of each class, (C,); each arc that enters a state has the cost of leaving it.

    Example::

        looped = with_self_loops(in_context(graph, tying, leave_cost), stay_cost)
    """
    return _Expansion(graph, tying, leave_cost).run()


class _Expansion:
    def __init__(self, graph: Any, tying: StateTying, leave_cost: DoubleArray) -> None:
        self._graph, self._tying = graph, tying
        self._leave_cost = leave_cost.tolist()
        self._result = kaldifst.StdVectorFst()
        self._numbers: dict[_Place, int] = {}
        self._waiting: list[_Place] = []
        self._classes: dict[tuple[int, int, int], list[int]] = {}

    def run(self) -> Any:
        result, graph = self._result, self._graph
        if graph.num_states == 0:
            return result
        result.start = self._number(graph.start, EDGE, _NONE)
        while self._waiting:
            place = self._waiting.pop()
            self._end(place)
            for arc in kaldifst.ArcIterator(graph, place[0]):
                self._follow(place, arc)
        return result

    def _number(self, state: int, left: int, pending: int) -> int:
        """Return the new graph's state of a place."""
        if pending != _NONE:
            left = self._tying.same_left[pending][left]
        elif not self._tying.looks_right:
            left = self._tying.same_left[0][left]
        place = (state, left, pending)
        number = self._numbers.get(place)
        if number is None:
            number = self._numbers[place] = self._result.add_state()
            self._waiting.append(place)
        return number

    def _follow(self, place: _Place, arc: Any) -> None:
        _, left, pending = place
        source, target, cost = self._numbers[place], arc.nextstate, float(arc.weight.value)
        phone = arc.ilabel - 1
        if phone < 0 or phone >= self._tying.num_phones:
            label = EPSILON if phone < 0 else phone - self._tying.num_phones + self._tying.num_classes + 1
            self._arc(source, label, arc.olabel, cost, self._number(target, left, pending))
        elif not self._tying.looks_right:
            end = self._number(target, phone, _NONE)
            self._chain(source, end, (left, phone, EDGE), arc.olabel, cost)
        elif pending == _NONE:
            self._arc(source, EPSILON, arc.olabel, cost, self._number(target, left, phone))
        else:
            end = self._number(target, pending, phone)
            self._chain(source, end, (left, pending, phone), arc.olabel, cost)

    def _end(self, place: _Place) -> None:
        """Let the new graph end where the old one may; behind the phone that waits there is silence."""
        state, left, pending = place
        cost = float(self._graph.final(state).value)
        if not math.isfinite(cost):
            return
        source = end = self._numbers[place]
        if pending != _NONE:
            end = self._result.add_state()
            self._chain(source, end, (left, pending, EDGE), EPSILON, 0.0)
        self._result.set_final(end, cost)

    def _chain(self, source: int, target: int, context: tuple[int, int, int], word: int, cost: float) -> None:
        """Add the states of a phone between two others."""
        classes = self._classes.get(context)
        if classes is None:
            left, phone, right = context
            column = right if self._tying.looks_right else 0
            classes = self._classes[context] = self._tying.table[left, phone, column].tolist()
        for c in classes[:-1]:
            state = self._result.add_state()
            self._arc(source, c + 1, word, cost + self._leave_cost[c], state)
            source, word, cost = state, EPSILON, 0.0
        last = classes[-1]
        self._arc(source, last + 1, word, cost + self._leave_cost[last], target)

    def _arc(self, source: int, label: int, word: int, cost: float, target: int) -> None:
        self._result.add_arc(source, kaldifst.StdArc(label, word, cost, target))
