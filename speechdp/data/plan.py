"""The epoch plan: which frames which rank trains on, in which step.  Pure: same arguments, same plan.

Every rank computes the plan by itself from the shards' indices and so knows, without a message, how many
steps the epoch has and how many frames all ranks together train on in each.

Legend: U utterances, S segments, N steps, R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from speechdp.errors import ConfigError

IntArray = npt.NDArray[np.int64]

#: Segments are sorted by length inside pools of this many batches: little padding, order still random.
_POOL_BATCHES = 16


@dataclass(frozen=True)
class PlanOptions:
    """How a corpus is cut into batches.

    Attributes:
        batch_size: segments a rank and step.
        chunk_frames: longest segment; 0 takes utterances whole.
        seed: of the shuffling; the same seed gives the same plan.
    """

    batch_size: int
    chunk_frames: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ConfigError(f"--batch-size {self.batch_size}: a batch holds at least 1 segment")
        if self.chunk_frames < 0:
            raise ConfigError(f"--chunk-frames {self.chunk_frames}: 0 (whole utterances) or more")


@dataclass(frozen=True)
class CorpusIndex:
    """The lengths of a split's utterances, shard by shard, in the order of the shards.

    Attributes:
        shard: (U,) the shard each utterance is in.
        utterance: (U,) its place in that shard.
        num_frames: (U,) its length.
    """

    shard: IntArray
    utterance: IntArray
    num_frames: IntArray

    @staticmethod
    def of_lengths(lengths: list[npt.NDArray[Any]]) -> CorpusIndex:
        """Index shards whose utterances have these lengths in frames."""
        counts = [len(shard) for shard in lengths]
        return CorpusIndex(
            shard=np.repeat(np.arange(len(counts)), counts),
            utterance=np.concatenate([np.arange(n) for n in counts]),
            num_frames=np.concatenate(lengths).astype(np.int64),
        )


@dataclass(frozen=True)
class Segments:
    """Pieces of utterances (S,): frames start:start+num_frames of an utterance of a shard."""

    shard: IntArray
    utterance: IntArray
    start: IntArray
    num_frames: IntArray

    def __len__(self) -> int:
        return len(self.shard)

    @staticmethod
    def none() -> Segments:
        """Return no segments."""
        empty = np.empty(0, dtype=np.int64)
        return Segments(empty, empty, empty, empty)

    def take(self, order: IntArray) -> Segments:
        """Return the segments at these places, in this order."""
        return Segments(self.shard[order], self.utterance[order], self.start[order], self.num_frames[order])


@dataclass(frozen=True)
class RankPlan:
    """One rank's part of an epoch: batch b is segments[bounds[b]:bounds[b + 1]]; it may be empty."""

    segments: Segments
    bounds: IntArray

    @property
    def num_batches(self) -> int:
        """Number of batches, empty ones included: the epoch's steps."""
        return len(self.bounds) - 1

    def batch(self, index: int) -> Segments:
        """Return the segments of a batch; a step without any is joined with 0 frames."""
        return self.segments.take(np.arange(self.bounds[index], self.bounds[index + 1]))

    @property
    def frames(self) -> IntArray:
        """Frames of each batch, (N,)."""
        before = np.concatenate([[0], np.cumsum(self.segments.num_frames)])
        return np.diff(before[self.bounds])


@dataclass(frozen=True)
class EpochPlan:
    """An epoch over all ranks.

    Attributes:
        ranks: each rank's part.
        num_steps: steps of the epoch, the same on every rank: as many as the longest part has batches.
        frames: (R, N) frames of each rank and step.
    """

    ranks: tuple[RankPlan, ...]
    num_steps: int
    frames: IntArray


def plan_epoch(index: CorpusIndex, options: PlanOptions, epoch: int, size: int) -> EpochPlan:
    """Deal a corpus to `size` ranks: every frame exactly once, each rank about the same number.

    The shards are put in a new order each epoch and laid end to end; rank r gets the r-th of `size`
    stretches of equal numbers of frames.  So a rank reads only the shards its stretch touches, whether
    there are more shards than ranks or fewer.  Inside its stretch segments are shuffled, sorted by length
    inside pools (to pad little) and cut into batches.  The batches are shuffled in one order for all ranks:
    in a step every rank has a batch from the same place of its pool, hence of about the same length, and
    synchronous ranks wait little for the longest.
    """
    order = _shard_order(index, np.random.default_rng([options.seed, epoch]))
    ends = np.cumsum(index.num_frames[order])
    # The utterance whose middle lies in the stretch belongs to it: a partition, whatever the lengths.
    middles = ends - index.num_frames[order] / 2
    cuts = np.searchsorted(middles, ends[-1] * np.arange(size + 1) / size)
    cuts[0], cuts[-1] = 0, len(order)
    parts = [
        _sorted_in_pools(
            _cut(index, order[cuts[r] : cuts[r + 1]], options.chunk_frames),
            options.batch_size,
            np.random.default_rng([options.seed, epoch, r + 1]),
        )
        for r in range(size)
    ]
    num_steps = max(-(-len(part) // options.batch_size) for part in parts)
    shuffled = np.random.default_rng([options.seed, epoch, 0]).permutation(num_steps)
    ranks = tuple(_batches(part, options.batch_size, shuffled) for part in parts)
    return EpochPlan(ranks, num_steps, np.stack([plan.frames for plan in ranks]))


def _shard_order(index: CorpusIndex, rng: np.random.Generator) -> IntArray:
    num_shards = int(index.shard.max()) + 1
    rank_of_shard = rng.permutation(num_shards)
    return np.argsort(rank_of_shard[index.shard], kind="stable")


def _sorted_in_pools(segments: Segments, batch_size: int, rng: np.random.Generator) -> Segments:
    count = len(segments)
    segments = segments.take(rng.permutation(count))
    pool = np.arange(count) // (batch_size * _POOL_BATCHES)
    return segments.take(np.lexsort((segments.num_frames, pool)))


def _batches(segments: Segments, batch_size: int, shuffled: IntArray) -> RankPlan:
    """Cut segments into batches and put them in an order; batches behind the last segment are empty."""
    count = len(segments)
    starts = np.minimum(shuffled * batch_size, count)
    sizes = np.minimum(starts + batch_size, count) - starts
    return RankPlan(segments.take(_ranges(starts, sizes)), np.concatenate([[0], np.cumsum(sizes)]))


def _cut(index: CorpusIndex, utterances: IntArray, chunk_frames: int) -> Segments:
    """Cut utterances into segments of at most `chunk_frames`; the last of an utterance may be shorter."""
    lengths = index.num_frames[utterances]
    chunk = np.maximum(lengths, 1) if chunk_frames == 0 else np.full_like(lengths, chunk_frames)
    pieces = -(-lengths // chunk)
    owner = np.repeat(np.arange(len(utterances)), pieces)
    start = (_ranges(np.zeros_like(pieces), pieces)) * chunk[owner]
    return Segments(
        shard=index.shard[utterances][owner],
        utterance=index.utterance[utterances][owner],
        start=start,
        num_frames=np.minimum(chunk[owner], lengths[owner] - start),
    )


def _ranges(starts: IntArray, sizes: IntArray) -> IntArray:
    """Concatenate start:start+size for every pair."""
    before = np.cumsum(sizes) - sizes
    ranges: IntArray = np.arange(int(sizes.sum())) + np.repeat(starts - before, sizes)
    return ranges
