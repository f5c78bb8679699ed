"""Order the segments of a window of one rank, cut them into batches, and put the batches into steps.

Everything here works on lengths alone.  A window's segments are arranged (`arrange`), cut into batches
(`cut`), evened out over the ranks (`even_out`) and put into steps (`steps_of`).

Legend: S segments, N batches (of one rank in one window), n steps of the window, the same on every rank.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from speechdp.data.plan.segments import IntArray
from speechdp.errors import ConfigError

Order = Literal["shuffled", "pooled", "laplace", "blocking-sort"]
#: `shuffled`: segments in entirely random order.
#: `pooled`: sorted by length inside random pools of POOL_BATCHES batches, batches in random order.
#: `laplace`: in random bins of POOL_BATCHES batches, sorted by length alternately up and down, so that
#: neighbours match; batches stay in this order (RETURNN's `laplace` sequence ordering).
#: `blocking-sort`: in random groups of GROUP_BATCHES batches, each sorted by length before any of it is
#: used; batches shuffled inside the group (the data feeder of public Tacotron code).
ORDERS: tuple[Order, ...] = get_args(Order)

#: Segments are sorted by length inside pools of this many batches: little padding, order still random.
POOL_BATCHES = 16
#: `blocking-sort` sorts, and reads, this many batches at a time.
GROUP_BATCHES = 32


@dataclass(frozen=True)
class PlanOptions:
    """How a corpus is cut into batches.

    Attributes:
        batch_size: segments per rank and step; not used if `batch_frames` is given.
        chunk_frames: longest segment; 0 takes utterances whole.
        seed: of the shuffling; the same seed gives the same plan.
        order: in which order segments come.
        batch_frames: a batch holds as many segments as fit in this many frames, padding included; a longer
            segment is a batch by itself.  0: `batch_size` counts.
        window_frames: if utterances are chunked, all chunks of one come within about this many frames of its
            rank; 0: within those of some ten thousand segments.
    """

    batch_size: int
    chunk_frames: int = 0
    seed: int = 0
    order: Order = "pooled"
    batch_frames: int = 0
    window_frames: int = 0

    def __post_init__(self) -> None:
        if self.batch_frames < 0:
            raise ConfigError(
                f"--batch-frames {self.batch_frames}: must be 0 (batches of --batch-size) or more"
            )
        if self.batch_size < 1 and (self.batch_frames == 0 or self.batch_size < 0):
            raise ConfigError(f"--batch-size {self.batch_size}: must be at least 1 segment")
        if self.chunk_frames < 0:
            raise ConfigError(f"--chunk-frames {self.chunk_frames}: must be 0 (whole utterances) or more")
        if self.window_frames < 0:
            raise ConfigError(f"window of {self.window_frames} frames: must be 0 (by segments) or more")
        if self.order not in ORDERS:
            raise ConfigError(f"--order {self.order}: not known; choose from {', '.join(ORDERS)}")


@dataclass(frozen=True)
class Costs:
    """What batches cost, (N,) each."""

    frames: IntArray
    padded: IntArray
    longest: IntArray


def arrange(lengths: npt.NDArray[Any], options: PlanOptions, rng: np.random.Generator) -> IntArray:
    """Return the places (S,) of segments of these lengths in the order in which they are cut into batches."""
    shuffled: IntArray = rng.permutation(len(lengths))
    if options.order == "shuffled":
        return shuffled
    # Batches by frames may cross the ends of pools: the lengths on both sides must be similar there.
    is_alternating = options.order == "laplace" or (options.order == "pooled" and options.batch_frames > 0)
    return shuffled[_sorted_in_blocks(lengths[shuffled], block_segments(lengths, options), is_alternating)]


def block_segments(lengths: npt.NDArray[Any], options: PlanOptions) -> int:
    """Return how many segments are sorted together."""
    size = options.batch_size
    if options.batch_frames > 0:
        size = max(1, options.batch_frames * len(lengths) // max(1, int(lengths.sum())))
    return size * (GROUP_BATCHES if options.order == "blocking-sort" else POOL_BATCHES)


def _sorted_in_blocks(lengths: npt.NDArray[Any], block: int, is_alternating: bool) -> IntArray:
    """Sort every `block` consecutive lengths, stably; if alternating, every other block downwards."""
    count = len(lengths)
    # numpy sorts 16 bits by radix, several times faster.
    is_short = count > 0 and int(lengths.max()) <= np.iinfo(np.int16).max
    keys = lengths.astype(np.int16 if is_short else np.int64)
    if is_alternating:
        keys[(np.arange(count) // block) % 2 == 1] *= -1
    num_full = count // block
    order = np.empty(count, dtype=np.int64)
    whole = order[: num_full * block].reshape(num_full, block)
    whole[:] = np.argsort(keys[: num_full * block].reshape(num_full, block), axis=1, kind="stable")
    whole += np.arange(num_full)[:, np.newaxis] * block
    order[num_full * block :] = np.argsort(keys[num_full * block :], kind="stable") + num_full * block
    return order


def cut(lengths: npt.NDArray[Any], options: PlanOptions) -> IntArray:
    """Cut arranged segments of these lengths into batches: batch k is bounds[k]:bounds[k + 1], (N + 1,)."""
    if options.batch_frames == 0:
        num_batches = -(-len(lengths) // options.batch_size)
        return np.minimum(np.arange(num_batches + 1) * options.batch_size, len(lengths))
    # A batch with the longest segment of one group and the shortest of the next would be mostly padding.
    block = block_segments(lengths, options) if options.order == "blocking-sort" else max(1, len(lengths))
    bounds = [0]
    for first in range(0, len(lengths), block):
        _cut_by_frames(lengths[: first + block], options.batch_frames, bounds)
    return np.array(bounds, dtype=np.int64)


def _cut_by_frames(lengths: npt.NDArray[Any], batch_frames: int, bounds: list[int]) -> None:
    """Append the ends of batches of at most `batch_frames` padded frames, from bounds[-1] to the end."""
    start, count = bounds[-1], len(lengths)
    while start < count:
        most = max(1, batch_frames // int(lengths[start]))
        longest = np.maximum.accumulate(lengths[start : start + most])
        padded = longest * np.arange(1, len(longest) + 1)
        start += max(1, int(np.searchsorted(padded, batch_frames, side="right")))
        bounds.append(start)


def costs_of(lengths: npt.NDArray[Any], bounds: IntArray) -> Costs:
    """Return what the batches of arranged segments cost; none of them may be empty."""
    starts = bounds[:-1]  # may be empty, as for a rank without segments
    longest = np.maximum.reduceat(lengths, starts).astype(np.int64)
    return Costs(np.add.reduceat(lengths, starts, dtype=np.int64), longest * np.diff(bounds), longest)


def even_out(lengths: npt.NDArray[Any], bounds: IntArray, num_batches: int) -> IntArray:
    """Halve the costliest batch until there are `num_batches`, or only batches of one segment."""
    missing = num_batches - (len(bounds) - 1)
    if missing <= 0 or len(bounds) == 1:
        return bounds
    padded = costs_of(lengths, bounds).padded.tolist()
    pairs = list(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True))
    heap = [(-cost, *pair) for cost, pair in zip(padded, pairs, strict=True) if pair[1] - pair[0] > 1]
    heapq.heapify(heap)
    ends: list[int] = []
    while heap and len(ends) < missing:
        _, start, end = heapq.heappop(heap)
        middle = (start + end) // 2
        ends.append(middle)
        for half in ((start, middle), (middle, end)):
            if half[1] - half[0] > 1:
                cost = (half[1] - half[0]) * int(lengths[half[0] : half[1]].max())
                heapq.heappush(heap, (-cost, *half))
    return np.sort(np.concatenate([bounds, np.array(ends, dtype=np.int64)]))


def steps_of(costs: Costs, num_steps: int, options: PlanOptions, rng: np.random.Generator) -> IntArray:
    """Return which batch (n,) a rank has in each step; N and larger numbers stand for empty batches.

    Args:
        costs: costs of the rank's batches.
        num_steps: n >= N.
        options: options of the plan.
        rng: in the same state on every rank, so that similar batches fall into the same step.
    """
    if options.order == "laplace":
        return np.arange(num_steps)
    if options.order == "blocking-sort":
        return np.lexsort((rng.random(num_steps), np.arange(num_steps) // GROUP_BATCHES))
    shuffled: IntArray = rng.permutation(num_steps)
    # The k-th costliest batches of all ranks fall into one step.  Pooled batches by frames all have about the
    # same number of padded frames; ranks then wait for the longest segment in a recurrent network.
    first, second = costs.padded, costs.longest
    if options.order == "pooled" and options.batch_frames > 0:
        first, second = second, first
    costliest = np.lexsort((-second, -first))
    return np.concatenate([costliest, np.arange(len(costliest), num_steps)])[shuffled]
