"""The epoch plan: which frames which rank trains on, in which step.  Pure: same arguments, same plan.

Every rank computes the plan by itself from the shards' indices and the seed.  So it knows without messages
how many steps the epoch has and how many frames all ranks together train on in each step.  A plan keeps 4
bytes an utterance and 8 a batch; the segments of a batch are computed when they are requested.

Legend: S segments, N steps, R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from speechdp.data.plan.orders import GROUP_BATCHES, ORDERS, Order, PlanOptions
from speechdp.data.plan.segments import CorpusIndex, Int32Array, Segments
from speechdp.data.plan.windows import Pieces, Windows

__all__ = [
    "GROUP_BATCHES",
    "ORDERS",
    "CorpusIndex",
    "EpochPlan",
    "Order",
    "PlanOptions",
    "RankPlan",
    "Segments",
    "padding_share",
    "plan_epoch",
]


@dataclass(frozen=True)
class RankPlan:
    """One rank's part of an epoch.  Thread-safe; requests for neighbouring batches are the cheapest.

    Attributes:
        windows: the windows that hold the segments.
        rank: the rank whose part this is.
        frames: (N,) frames of each batch.
        padded_frames: (N,) the same with padding to the longest segment.
    """

    windows: Windows
    rank: int
    frames: Int32Array
    padded_frames: Int32Array

    @property
    def num_batches(self) -> int:
        """Number of batches, empty ones included: the epoch's steps."""
        return len(self.frames)

    def batch(self, index: int) -> Segments:
        """Return the segments of a batch; none in a step that this rank joins with 0 frames."""
        return _segments(self.windows.index, self.windows.batch(self.rank, index))

    @property
    def segments(self) -> Segments:
        """All segments, batch after batch; for a large corpus this takes much memory."""
        windows = [self.windows.window(self.rank, w).pieces for w in range(self.windows.num_windows)]
        columns = (
            [w.utterance for w in windows],
            [w.start for w in windows],
            [w.num_frames for w in windows],
        )
        return _segments(self.windows.index, Pieces(*(np.concatenate(column) for column in columns)))


@dataclass(frozen=True)
class EpochPlan:
    """An epoch over all ranks.

    Attributes:
        ranks: each rank's part.
        num_steps: steps of the epoch, the same on every rank: as many as the longest part has batches.
        frames: (R, N) frames of each rank and step.
        padded_frames: (R, N) the same with padding to the longest segment of the batch.
    """

    ranks: tuple[RankPlan, ...]
    num_steps: int
    frames: Int32Array
    padded_frames: Int32Array

    def group(self, step: int) -> range:
        """Return the steps that order `blocking-sort` sorts together with this one, on every rank."""
        first_step = self.ranks[0].windows.first_step
        window = int(np.searchsorted(first_step, step, side="right")) - 1
        begin = int(first_step[window])
        start = begin + (step - begin) // GROUP_BATCHES * GROUP_BATCHES
        return range(start, min(start + GROUP_BATCHES, int(first_step[window + 1])))


def plan_epoch(index: CorpusIndex, options: PlanOptions, epoch: int, size: int) -> EpochPlan:
    """Deal a corpus to `size` ranks: every frame exactly once, each rank about the same number.

    The shards are shuffled each epoch and laid end to end; rank r gets the r-th of `size` stretches with
    equal numbers of frames.  So a rank reads only the shards that its stretch touches, whether there are more
    shards than ranks or fewer.  Inside its stretch utterances are shuffled and taken window by window (a
    small corpus has one window); a window's segments are ordered according to `options.order` and cut into
    batches.  With every order, batches are put into steps so that the batches of all ranks in a step cost
    about the same, and synchronous ranks wait little for the longest.
    """
    windows = Windows(index, options, epoch, size)
    ranks = tuple(RankPlan(windows, r, windows.frames[r], windows.padded[r]) for r in range(size))
    return EpochPlan(ranks, windows.frames.shape[1], windows.frames, windows.padded)


def padding_share(plan: EpochPlan) -> float:
    """Return the share of the epoch's computed frames that is padding, over all ranks."""
    return 1.0 - int(plan.frames.sum()) / max(1, int(plan.padded_frames.sum()))


def _segments(index: CorpusIndex, pieces: Pieces) -> Segments:
    columns = (index.shard, index.utterance, index.speed)
    shard, utterance, speed = (
        None if column is None else column[pieces.utterance].astype(np.int64) for column in columns
    )
    assert shard is not None and utterance is not None
    start, num_frames = pieces.start.astype(np.int64), pieces.num_frames.astype(np.int64)
    if speed is None:
        return Segments(shard, utterance, start, num_frames)
    return Segments(shard, utterance, start, num_frames, speed)
