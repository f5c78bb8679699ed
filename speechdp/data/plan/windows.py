"""Deal an epoch's utterances to ranks and make batches of them window by window, so that a plan stays small.

An epoch has one order of utterances, 4 bytes each.  A window is a stretch of that order that belongs to one
rank.  Its segments are cut, arranged and batched when they are requested, and again if they have been dropped
from memory since.

Legend: U utterances, S segments, R ranks, W windows of a rank, N steps.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from speechdp.data.plan.orders import (
    GROUP_BATCHES,
    Costs,
    PlanOptions,
    arrange,
    costs_of,
    cut,
    even_out,
    steps_of,
)
from speechdp.data.plan.segments import CorpusIndex, Int32Array, IntArray, ranges

#: A window has about this many segments, unless it must be larger to hold a group of batches.
WINDOW_SEGMENTS = 1 << 16
#: Windows stay in memory until together they have more segments than this; the latest two always stay.
_KEPT_SEGMENTS = 1 << 18


@dataclass(frozen=True)
class Pieces:
    """Segments (S,) as places of their utterances in the index."""

    utterance: npt.NDArray[Any]
    start: npt.NDArray[Any]
    num_frames: npt.NDArray[Any]

    def __len__(self) -> int:
        return len(self.utterance)


@dataclass(frozen=True)
class Window:
    """A window of one rank: step k has the pieces bounds[k]:bounds[k + 1]."""

    pieces: Pieces
    bounds: IntArray


@dataclass(frozen=True)
class _Edges:
    """Begin and end of a rank's windows, (W + 1,): the place of an utterance, and chunks of it to skip."""

    utterance: IntArray
    chunks: IntArray


class Windows:
    """All windows of an epoch.  Thread-safe.

    Args:
        index: of the corpus.
        options: of the plan.
        epoch: number of the epoch; each has another order.
        size: R, ranks that share the corpus.

    Attributes:
        index: of the corpus.
        first_step: (W + 1,) the first step of each window, the same on every rank.
        frames: (R, N) frames of each rank and step.
        padded: (R, N) the same with padding.
    """

    def __init__(self, index: CorpusIndex, options: PlanOptions, epoch: int, size: int) -> None:
        self.index, self._options, self._words = index, options, [options.seed, epoch]
        self._order, cuts = _stretches(index, self._rng([]), size)
        self._stretches = [self._order[cuts[r] : cuts[r + 1]] for r in range(size)]
        self._edges = self._place_windows()
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[int, int], Window] = OrderedDict()
        self._num_kept = 0  # segments of these
        frames, padded = self._count()
        self.first_step = np.cumsum([0, *(part.shape[1] for part in frames)])
        self.frames, self.padded = np.concatenate(frames, axis=1), np.concatenate(padded, axis=1)

    @property
    def num_windows(self) -> int:
        """W, the same on every rank."""
        return len(self._edges[0].chunks) - 1

    def batch(self, rank: int, step: int) -> Pieces:
        """Return the pieces of a rank in a step."""
        assert 0 <= step < self.first_step[-1]
        number = int(np.searchsorted(self.first_step, step, side="right")) - 1
        window = self.window(rank, number)
        start, end = window.bounds[step - self.first_step[number] :][:2]
        pieces = window.pieces
        return Pieces(pieces.utterance[start:end], pieces.start[start:end], pieces.num_frames[start:end])

    def window(self, rank: int, number: int) -> Window:
        """Return a window of a rank; make it unless it is in memory."""
        with self._lock:
            window = self._kept.get((rank, number))
            if window is None:
                window = self._kept[rank, number] = self._make(rank, number)
                self._num_kept += len(window.pieces)
            self._kept.move_to_end((rank, number))
            while self._num_kept > _KEPT_SEGMENTS and len(self._kept) > 2:
                self._num_kept -= len(self._kept.popitem(last=False)[1].pieces)
            return window

    def _make(self, rank: int, number: int) -> Window:
        pieces, order, bounds = self._draft(rank, number)
        lengths = pieces.num_frames[order]
        num_steps = int(self.first_step[number + 1] - self.first_step[number])
        bounds = self._evened(lengths, bounds, num_steps)
        steps = self._steps(costs_of(lengths, bounds), num_steps, number)
        padded = np.concatenate([bounds, np.full(num_steps, bounds[-1])])
        starts, sizes = padded[steps], padded[steps + 1] - padded[steps]
        order = order[ranges(starts, sizes)]
        columns = (pieces.utterance, pieces.start, pieces.num_frames)
        return Window(
            Pieces(*(column[order].astype(np.int32) for column in columns)),
            np.concatenate([[0], np.cumsum(sizes)]),
        )

    def _count(self) -> tuple[list[Int32Array], list[Int32Array]]:
        """Compute the costs of all steps, window by window: lists of (R, n) frames and padded frames."""
        frames, padded = [], []
        for number in range(self.num_windows):
            drafts = []
            for rank in range(len(self._stretches)):
                pieces, order, bounds = self._draft(rank, number)
                drafts.append((pieces.num_frames[order].astype(np.int32), bounds))
            num_steps = max(len(bounds) - 1 for _, bounds in drafts)
            table = np.zeros((2, len(drafts), num_steps), dtype=np.int32)
            for rank, (lengths, bounds) in enumerate(drafts):
                costs = costs_of(lengths, self._evened(lengths, bounds, num_steps))
                steps = self._steps(costs, num_steps, number)
                is_batch = steps < len(costs.frames)
                table[0, rank, is_batch] = costs.frames[steps[is_batch]]
                table[1, rank, is_batch] = costs.padded[steps[is_batch]]
            frames.append(table[0])
            padded.append(table[1])
        return frames, padded

    def _draft(self, rank: int, number: int) -> tuple[Pieces, IntArray, IntArray]:
        """Return a window's pieces, their order, and the bounds of batches in that order."""
        pieces = self._pieces(rank, number)
        rng = self._rng([rank + 1, *self._word_of(number)])
        order = arrange(pieces.num_frames, self._options, rng)
        return pieces, order, cut(pieces.num_frames[order], self._options)

    def _evened(self, lengths: npt.NDArray[Any], bounds: IntArray, num_steps: int) -> IntArray:
        # Batches with a fixed number of segments match the other ranks' by their places, which must not
        # shift.
        return even_out(lengths, bounds, num_steps) if self._options.batch_frames else bounds

    def _steps(self, costs: Costs, num_steps: int, number: int) -> IntArray:
        return steps_of(costs, num_steps, self._options, self._rng([0, *self._word_of(number)]))

    def _pieces(self, rank: int, number: int) -> Pieces:
        """Cut a window's utterances into pieces; an utterance's last piece may be shorter than a chunk."""
        edges = self._edges[rank]
        first, skipped = int(edges.utterance[number]), int(edges.chunks[number])
        last, taken = int(edges.utterance[number + 1]), int(edges.chunks[number + 1])
        utterances = self._stretches[rank][first : last + (taken > 0)]
        lengths = self.index.num_frames[utterances].astype(np.int64)
        starts, ends = np.zeros_like(lengths), self._chunks_of(lengths)
        if taken:
            ends[-1] = taken
        if skipped:
            starts[0] = skipped
        owner = np.repeat(np.arange(len(utterances)), ends - starts)
        chunk = self._options.chunk_frames
        start = ranges(starts, ends - starts) * chunk
        num_frames = lengths[owner] - start
        return Pieces(utterances[owner], start, np.minimum(num_frames, chunk) if chunk else num_frames)

    def _chunks_of(self, lengths: npt.NDArray[Any]) -> npt.NDArray[Any]:
        chunk = self._options.chunk_frames
        return -(-lengths // chunk) if chunk else (lengths > 0).astype(lengths.dtype)

    def _place_windows(self) -> list[_Edges]:
        """Place the windows; shuffle every rank's utterances if there is more than one window."""
        counts = [
            int(self._chunks_of(self.index.num_frames[utterances]).sum(dtype=np.int64))
            for utterances in self._stretches
        ]
        most = _window_segments(self._options)
        num_windows = max(1, *(-(-count // most) for count in counts))
        if num_windows == 1:
            # All segments of a window are shuffled anyway.
            return [_Edges(np.array([0, len(part)]), np.zeros(2, dtype=np.int64)) for part in self._stretches]
        for rank, utterances in enumerate(self._stretches):
            self._rng([rank + 1]).shuffle(utterances)
        return [self._edges_of(utterances, num_windows) for utterances in self._stretches]

    def _edges_of(self, utterances: Int32Array, num_windows: int) -> _Edges:
        """Divide a rank's utterances into windows of full batches, or of equal numbers of frames."""
        lengths = self.index.num_frames[utterances]
        chunks = self._chunks_of(lengths)
        if self._options.batch_frames == 0:
            ends = np.cumsum(chunks, dtype=np.int64)
            total = int(ends[-1]) if len(ends) else 0
            at = np.minimum(np.arange(num_windows + 1) * _window_segments(self._options), total)
            unit = 1
        else:
            ends = np.cumsum(lengths, dtype=np.int64)
            total = int(ends[-1]) if len(ends) else 0
            at, unit = total * np.arange(num_windows + 1) // num_windows, self._options.chunk_frames
        owner = np.searchsorted(ends, at, side="right")
        before = np.concatenate([[0], ends])[owner]
        return _Edges(owner, (at - before) // unit if unit else np.zeros_like(at))

    def _rng(self, words: list[int]) -> np.random.Generator:
        return np.random.default_rng([*self._words, *words])

    def _word_of(self, number: int) -> list[int]:
        return [number + 1] if self.num_windows > 1 else []


def _stretches(index: CorpusIndex, rng: np.random.Generator, size: int) -> tuple[Int32Array, IntArray]:
    """Shuffle the shards and lay them end to end; rank r gets the utterances order[cuts[r]:cuts[r + 1]]."""
    num_shards = int(index.shard.max()) + 1
    rank_of_shard = rng.permutation(num_shards).astype(np.uint16 if num_shards < 1 << 16 else np.int64)
    order = np.argsort(rank_of_shard[index.shard], kind="stable").astype(np.int32)
    lengths = index.num_frames[order]
    # An utterance belongs to the stretch that contains its middle: a partition, whatever the lengths.
    middles = np.cumsum(lengths, dtype=np.float64)
    total = middles[-1]
    middles -= lengths / 2
    cuts = np.searchsorted(middles, total * np.arange(size + 1) / size)
    cuts[0], cuts[-1] = 0, len(order)
    return order, cuts


def _window_segments(options: PlanOptions) -> int:
    """Return the most segments a window has: whole groups of batches, if there is room for one."""
    segments = WINDOW_SEGMENTS
    is_narrow = options.window_frames > 0 and options.chunk_frames > 0
    if is_narrow:
        segments = min(segments, max(1, options.window_frames // options.chunk_frames))
    if options.batch_frames > 0:
        return segments
    unit = options.batch_size * GROUP_BATCHES
    if is_narrow and segments < unit:
        unit = options.batch_size
    return max(1, segments // unit) * unit
