"""The lengths of a corpus's utterances, and the pieces of utterances that batches are made of.

Legend: U utterances, S segments.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
#: Columns with a value per utterance of a corpus take 4 bytes a value.
Int32Array = npt.NDArray[np.int32]

#: The recorded speed, percent.
AS_RECORDED = 100


Size = TypeVar("Size", int, IntArray)


def size_at_speed(size: Size, percent: Size) -> Size:
    """Return how many frames, or samples, `size` of them become at another speed, rounded."""
    return (size * AS_RECORDED + percent // 2) // percent


@dataclass(frozen=True)
class CorpusIndex:
    """The lengths of a split's utterances, shard by shard, in the order of the shards: 12 bytes each.

    Attributes:
        shard: (U,) the shard each utterance is in.
        utterance: (U,) its place in that shard.
        num_frames: (U,) its length.
        speed: (U,) speed at which each is played, percent of the recorded speed; None: all as recorded.
    """

    shard: Int32Array
    utterance: Int32Array
    num_frames: Int32Array
    speed: npt.NDArray[np.int16] | None = None

    def __len__(self) -> int:
        return len(self.num_frames)

    @staticmethod
    def of_lengths(lengths: list[npt.NDArray[Any]]) -> CorpusIndex:
        """Index shards whose utterances have these lengths in frames."""
        counts = [len(shard) for shard in lengths]
        return CorpusIndex(
            shard=np.repeat(np.arange(len(counts), dtype=np.int32), counts),
            utterance=np.concatenate([np.arange(n, dtype=np.int32) for n in counts]),
            num_frames=np.concatenate([shard.astype(np.int32) for shard in lengths]),
        )

    def at_speed(self, percent: npt.NDArray[Any]) -> CorpusIndex:
        """Return the index of the utterances played faster or slower.

        Args:
            percent: (U,) of the recorded speed: 110 leaves an utterance 100 / 110 of its frames, rounded.
        """
        assert len(percent) == len(self)
        speed = percent.astype(np.int64)
        frames = size_at_speed(self.num_frames.astype(np.int64), speed)
        return CorpusIndex(self.shard, self.utterance, frames.astype(np.int32), speed.astype(np.int16))


@dataclass(frozen=True)
class Segments:
    """Pieces of utterances (S,): frames start:start+num_frames of an utterance of a shard.

    Frames are counted at the speed at which the utterance is played: `speed` percent of the recorded speed,
    100 by default.
    """

    shard: IntArray
    utterance: IntArray
    start: IntArray
    num_frames: IntArray
    speed: IntArray = field(default_factory=lambda: np.empty(0, dtype=np.int64))

    def __post_init__(self) -> None:
        if len(self.speed) == 0:
            object.__setattr__(self, "speed", np.full(len(self.shard), AS_RECORDED, dtype=np.int64))
        assert len(self.speed) == len(self.shard)

    def __len__(self) -> int:
        return len(self.shard)

    @staticmethod
    def none() -> Segments:
        """Return no segments."""
        empty = np.empty(0, dtype=np.int64)
        return Segments(empty, empty, empty, empty, empty)

    def take(self, order: IntArray) -> Segments:
        """Return the segments at these places, in this order."""
        return Segments(*(column[order] for column in vars(self).values()))


def ranges(starts: npt.NDArray[Any], sizes: npt.NDArray[Any]) -> IntArray:
    """Concatenate the integers start:start+size of every pair."""
    before = np.cumsum(sizes) - sizes
    result: IntArray = np.arange(int(sizes.sum())) + np.repeat(starts - before, sizes)
    return result
