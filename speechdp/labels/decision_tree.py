"""Grow decision trees that tie context-dependent states, from Gaussian statistics of an alignment.

As in Kaldi's build-tree, each leaf is one Gaussian with diagonal covariance.  The questions are the sets of
phones that arise when the phones themselves are clustered (Kaldi's cluster-phones).  A leaf is split by the
question that raises the likelihood most, and the split with the largest gain of all leaves comes first.

Legend: K contexts seen, D dimensions of the input, Q questions, P phones with silence.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from speechdp.errors import ConfigError
from speechdp.labels.gaussian_mixtures import DoubleArray
from speechdp.labels.hmm import STATES_PER_PHONE, FloatArray, IntArray, StateInventory
from speechdp.labels.lexicon import SILENCE
from speechdp.labels.state_tying import Context, Node, Side, Split, StateTying, contexts_of, num_phones

#: Least number of frames of a tied state.
MIN_FRAMES = 100
#: Least gain in likelihood by a split, in nats (Kaldi's default).
_MIN_GAIN = 300.0
_VARIANCE_FLOOR = 0.01  # as a share of the variance of all frames
_SAME = 1e-9  # relative difference of log-likelihoods that rounding may cause

Rows = NDArray[np.int64]


class ContextStatistics:
    """Number, sum and sum of squares of the frames of each state in each context; silence is left out.

    Args:
        inventory: the states without context.
        context: the side or sides that states depend on; contexts that differ only on the other side are one.

    Example:
        >>> statistics = ContextStatistics(StateInventory(("A",)), "left")
        >>> statistics.add(np.ones((3, 2), np.float32), np.array([0, 3, 4], np.int32))
        >>> [int(values[0]) for values in statistics.sums.values()]  # A_0 and A_1, after silence
        [1, 1]
    """

    def __init__(self, inventory: StateInventory, context: Context) -> None:
        self.inventory, self.context = inventory, context
        #: (1 + 2 D,) each, by a code for left phone, phone, right phone and state.
        self.sums: dict[int, DoubleArray] = {}
        self._shape = (*[num_phones(inventory)] * 3, STATES_PER_PHONE)

    def add(self, x: FloatArray, states: IntArray) -> None:
        """Add an utterance: inputs (T, D) and states without context (T,)."""
        at = contexts_of(states)
        right = at.right if self.context == "both" else np.zeros_like(at.right)
        codes = np.ravel_multi_index((at.left, at.phone, right, at.state), self._shape)
        speech = np.flatnonzero(at.phone > 0)
        order = speech[np.argsort(codes[speech], kind="stable")]
        if len(order) == 0:
            return
        found, starts = np.unique(codes[order], return_index=True)
        frames = x[order].astype(np.float64)
        columns = np.concatenate([np.ones((len(frames), 1)), frames, frames**2], axis=1)
        for code, values in zip(found.tolist(), np.add.reduceat(columns, starts, axis=0), strict=True):
            before = self.sums.get(code)
            self.sums[code] = values if before is None else before + values

    def matrix(self, codes: Sequence[int], dim: int) -> DoubleArray:
        """Return the sums of some contexts, (K, 1 + 2 D); 0 for contexts that were not seen here."""
        nothing = np.zeros(1 + 2 * dim)
        return np.array([self.sums.get(code, nothing) for code in codes]).reshape(-1, 1 + 2 * dim)

    def contexts(self, codes: Sequence[int]) -> tuple[Rows, ...]:
        """Return left phone, phone, right phone and state of each context, (K,) each."""
        return np.unravel_index(np.array(codes, np.int64), self._shape)


@dataclass(frozen=True)
class _Gaussians:
    """Computes the likelihood of frames under their best single Gaussian, from sums of frames."""

    floor: DoubleArray

    def log_likelihood(self, sums: DoubleArray) -> DoubleArray:
        """Return the log-likelihood for sums (..., 1 + 2 D), nats."""
        dim = len(self.floor)
        frames = sums[..., :1]
        some = np.maximum(frames, 1e-10)
        mean = sums[..., 1 : 1 + dim] / some
        variance = np.maximum(sums[..., 1 + dim :] / some - mean**2, self.floor)
        per_frame = np.log(variance).sum(axis=-1) + dim * (1 + np.log(2 * np.pi))
        return np.asarray(-0.5 * frames[..., 0] * per_frame)


def check_max_classes(inventory: StateInventory, max_classes: int) -> None:
    """Refuse fewer tied states than there are states without context.  Raises ConfigError."""
    if max_classes < inventory.num_classes:
        raise ConfigError(
            f"--tied-states {max_classes}: there are {inventory.num_classes} without context; give more"
        )


def grow(
    statistics: ContextStatistics,
    codes: Sequence[int],
    sums: DoubleArray,
    max_classes: int,
    min_frames: float = MIN_FRAMES,
) -> StateTying:
    """Grow the trees of all states.

    Args:
        statistics: decodes the codes of contexts.
        codes: codes of the K contexts seen.
        sums: sums of these contexts, (K, 1 + 2 D).
        max_classes: most tied states, including those of silence.
        min_frames: least number of frames in each half of a split.

    Raises:
        ConfigError: `max_classes` is less than the states without context, or there are too many phones.
    """
    inventory = statistics.inventory
    check_max_classes(inventory, max_classes)
    total = sums.sum(axis=0)
    dim = (len(total) - 1) // 2
    frames = max(total[0], 1.0)
    variance = total[1 + dim :] / frames - (total[1 : 1 + dim] / frames) ** 2
    gaussians = _Gaussians(_VARIANCE_FLOOR * np.maximum(variance, 1e-6))
    left, phone, right, state = statistics.contexts(codes)
    sets = _questions(phone * STATES_PER_PHONE + state, sums, gaussians, inventory)
    sides: dict[Side, Rows] = {"left": left}
    if statistics.context == "both":
        sides["right"] = right
    growth = _Growth(sums, sides, sets, gaussians, min_frames)
    roots = [
        _Leaf(np.flatnonzero((phone == number // STATES_PER_PHONE) & (state == number % STATES_PER_PHONE)))
        for number in range(inventory.num_classes)
    ]
    growth.split(roots, max_classes)
    names = np.array((SILENCE, *inventory.phones))
    questions = [tuple(names[members].tolist()) for members in sets]
    numbers = itertools.count()

    def node(leaf: _Leaf) -> Node:
        if leaf.halves is None:
            return next(numbers)
        question, side = leaf.asked
        return Split(side, question, node(leaf.halves[0]), node(leaf.halves[1]))

    return StateTying(inventory, statistics.context, questions, [node(root) for root in roots])


def _questions(
    states: Rows, sums: DoubleArray, gaussians: _Gaussians, inventory: StateInventory
) -> NDArray[np.bool_]:
    """Return sets of phones that sound alike, (Q, P): single phones, and the clusters that merging gives.

    Clusters are merged in pairs; the first pair is the one whose states lose the least likelihood by sharing
    Gaussians.
    """
    size = num_phones(inventory)
    of_state = np.zeros((inventory.num_classes, sums.shape[1]))
    np.add.at(of_state, states, sums)
    of_phone = of_state.reshape(size, STATES_PER_PHONE, -1)
    seen = np.flatnonzero(of_phone[:, :, 0].sum(axis=1) > 0)
    clusters = {int(phone): of_phone[phone] for phone in seen}
    members = {int(phone): np.arange(size) == phone for phone in seen}
    sets = [np.arange(size) == 0, *(members[int(phone)] for phone in seen if phone > 0)]
    own = {c: gaussians.log_likelihood(values).sum() for c, values in clusters.items()}

    def losses(cluster: int, others: list[int]) -> DoubleArray:
        joined = np.array([clusters[other] for other in others]) + clusters[cluster]
        together = gaussians.log_likelihood(joined).sum(axis=-1)
        return np.asarray(np.array([own[other] for other in others]) + own[cluster] - together)

    order = list(clusters)
    queue: list[tuple[float, int, int]] = []
    for place, cluster in enumerate(order[:-1]):
        others = order[place + 1 :]
        queue += zip(losses(cluster, others).tolist(), [cluster] * len(others), others, strict=True)
    heapq.heapify(queue)
    following = size
    while len(clusters) > 2:  # the question about one of the last two is the opposite of that about the other
        _, a, b = heapq.heappop(queue)
        if a not in clusters or b not in clusters:
            continue
        joined = clusters.pop(a) + clusters.pop(b)
        others = list(clusters)
        clusters[following], members[following] = joined, members[a] | members[b]
        own[following] = gaussians.log_likelihood(joined).sum()
        sets.append(members[following])
        for loss, other in zip(losses(following, others).tolist(), others, strict=True):
            heapq.heappush(queue, (loss, other, following))
        following += 1
    return np.array(sets)


class _Leaf:
    """A node of a growing tree.

    Attributes:
        rows: rows of the contexts that belong to the node.
        halves: the nodes it was split into, yes first.
        asked: the question, and the side it is about.
    """

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.halves: tuple[_Leaf, _Leaf] | None = None
        self.asked: tuple[int, Side] = (0, "left")


@dataclass(frozen=True)
class _Growth:
    """Splits leaves.

    Attributes:
        sums: sums of the contexts, (K, 1 + 2 D).
        sides: the neighbours that questions may be about, (K,) each.
        sets: the questions, (Q, P).
    """

    sums: DoubleArray
    sides: dict[Side, Rows]
    sets: NDArray[np.bool_]
    gaussians: _Gaussians
    min_frames: float

    def split(self, leaves: Sequence[_Leaf], max_leaves: int) -> None:
        """Split the leaf with the largest gain, repeatedly, until there are enough leaves."""
        queue: list[tuple[float, int, _Leaf, tuple[int, Side]]] = []
        numbers = itertools.count()

        def consider(leaf: _Leaf) -> None:
            gain, asked = self._best(leaf.rows)
            if gain >= _MIN_GAIN:
                heapq.heappush(queue, (-gain, next(numbers), leaf, asked))

        for leaf in leaves:
            consider(leaf)
        count = len(leaves)
        while queue and count < max_leaves:
            _, _, leaf, asked = heapq.heappop(queue)
            question, side = asked
            yes = self.sets[question, self.sides[side][leaf.rows]]
            leaf.asked, leaf.halves = asked, (_Leaf(leaf.rows[yes]), _Leaf(leaf.rows[~yes]))
            count += 1
            for half in leaf.halves:
                consider(half)

    def _best(self, rows: Rows) -> tuple[float, tuple[int, Side]]:
        """Return the gain of the best question for a leaf, and the question."""
        best: tuple[float, tuple[int, Side]] = (-np.inf, (0, "left"))
        if len(rows) < 2:
            return best
        sums = self.sums[rows]
        total = sums.sum(axis=0)
        before = float(self.gaussians.log_likelihood(total))
        for side, neighbours in self.sides.items():
            yes = self.sets[:, neighbours[rows]].astype(np.float64) @ sums  # (Q, 1 + 2 D)
            no = total - yes
            gain = self.gaussians.log_likelihood(yes) + self.gaussians.log_likelihood(no) - before
            gain[np.minimum(yes[:, 0], no[:, 0]) < self.min_frames] = -np.inf
            # Take the first of the questions that divide the contexts in the same way, not the one that
            # rounding favours.
            question = int(np.argmax(gain >= gain.max() - _SAME * abs(before)))
            if gain[question] > best[0] + _SAME * abs(before):
                best = float(gain[question]), (question, side)
        return best
