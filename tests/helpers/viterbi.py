"""A plain Viterbi search over any FST, to check the real decoder against."""

from __future__ import annotations

from typing import Any

import kaldifst
import numpy as np
from numpy.typing import NDArray


def best_cost(fst: Any, log_likelihoods: NDArray[np.float32]) -> float:
    """Return the cost of the best path that reads all frames and ends in a final state (inf: none)."""
    arcs = [
        (state, arc.ilabel, float(arc.weight.value), arc.nextstate)
        for state in range(fst.num_states)
        for arc in kaldifst.ArcIterator(fst, state)
    ]
    emitting = [arc for arc in arcs if arc[1] > 0]
    silent = [arc for arc in arcs if arc[1] == 0]
    costs = np.full(fst.num_states, np.inf)
    costs[fst.start] = 0.0
    _relax(costs, silent)
    for frame in log_likelihoods.astype(np.float64):
        after = np.full_like(costs, np.inf)
        for source, label, weight, target in emitting:
            after[target] = min(after[target], costs[source] + weight - frame[label - 1])
        _relax(after, silent)
        costs = after
    finals = np.array([fst.final(state).value for state in range(fst.num_states)])
    return float((costs + finals).min())


def _relax(costs: NDArray[np.float64], silent: list[tuple[int, int, float, int]]) -> None:
    """Follow the arcs that read no frame until nothing improves (Bellman and Ford)."""
    improved = True
    while improved:
        improved = False
        for source, _, weight, target in silent:
            if costs[source] + weight < costs[target] - 1e-12:
                costs[target] = costs[source] + weight
                improved = True
