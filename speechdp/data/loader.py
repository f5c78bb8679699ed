"""Read planned batches in a background thread, so that loading overlaps with compute."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np

from speechdp.data.alignment_file import TargetsFile, open_targets
from speechdp.data.assignment import Assignment, Place
from speechdp.data.batch import Batch, Example, collate
from speechdp.data.dataset import Dataset
from speechdp.data.plan import CorpusIndex, Segments
from speechdp.data.shards import Shard
from speechdp.errors import ShardError


@dataclass(frozen=True)
class Context:
    """Frames around a segment that are input without being learnt (never beyond the utterance)."""

    left: int = 0
    right: int = 0


class SplitReader:
    """A split's shards, opened read-only, with the targets of the shards or of an alignment directory.

    Args:
        dataset: the data directory.
        split: e.g. "train".
        alignments: directory with one targets file a shard (same file names), or None for the shards' own.
    """

    def __init__(
        self, dataset: Dataset, split: str, alignments: Path | None = None, context: Context | None = None
    ) -> None:
        self.feature_dim = dataset.feature_dim
        self.shards = [dataset.open_shard(split, i) for i in range(len(dataset.shard_paths(split)))]
        self.targets: list[TargetsFile] | None = None
        if alignments is not None:
            if not alignments.is_dir():
                raise ShardError(f"{alignments}: no such alignment directory; make it with train --realign")
            self.targets = [open_targets(alignments / shard.path.name, shard) for shard in self.shards]
        self.index = CorpusIndex.of_lengths([np.diff(shard.offsets) for shard in self.shards])
        self._context = context or Context()
        self._verified = [np.zeros(shard.num_utterances, dtype=bool) for shard in self.shards]

    def examples(self, segments: Segments) -> list[Example]:
        """Read segments.  Raises ShardError on damage; each utterance is verified when first read."""
        columns = (segments.shard, segments.utterance, segments.start, segments.num_frames)
        return [self._example(*row) for row in zip(*(c.tolist() for c in columns), strict=True)]

    def batch(self, segments: Segments) -> Batch:
        """Read segments as one batch."""
        return collate(self.examples(segments), self.feature_dim)

    def _example(self, shard_index: int, utterance: int, start: int, num_frames: int) -> Example:
        shard = self.shards[shard_index]
        length = int(shard.offsets[utterance + 1] - shard.offsets[utterance])
        begin = max(0, start - self._context.left)
        end = min(length, start + num_frames + self._context.right)
        if not self._verified[shard_index][utterance]:
            features, targets = shard.read(utterance, verify=True)
            features, targets = features[begin:end], targets[begin:end]
            self._verified[shard_index][utterance] = True
        else:
            features, targets = shard.read_frames(utterance, begin, end - begin)
        if self.targets is not None:
            targets = self.targets[shard_index].read(utterance)[begin:end]
        return Example(features, targets, start - begin, num_frames)

    def whole(self, shard_index: int, utterance: int) -> Example:
        """Read one utterance whole."""
        shard: Shard = self.shards[shard_index]
        length = int(shard.offsets[utterance + 1] - shard.offsets[utterance])
        return self._example(shard_index, utterance, 0, length)

    def close(self) -> None:
        """Close the files."""
        for shard in self.shards:
            shard.close()
        for targets in self.targets or []:
            targets.close()


@dataclass(frozen=True)
class Step:
    """A batch and its place in training.

    Attributes:
        batch: what this rank trains on; 0 frames where it only joins the others.
        at: the assignment it was read for.
    """

    batch: Batch
    at: Assignment

    @property
    def epoch(self) -> int:
        """Epoch of the step: 0, 1, ..."""
        return self.at.place.epoch

    @property
    def ends_epoch(self) -> bool:
        """Whether this is the epoch's last step; asynchronous ranks learn that from a meeting."""
        return self.at.index == self.at.num_steps - 1


class Loader(Iterator[Step]):
    """The batches of this rank's assignments, read ahead by one background thread.

    The thread holds at most `read_ahead` batches and one more in its hand; its errors are raised by
    `next`; `close` joins it.
    It starts no process: forking after MPI_Init corrupts memory on some fabrics.

    Args:
        reader: of the split.
        assignments: what to read, in order; iterated in the thread.
        pin: copy batches to pinned memory, for a GPU.
        read_ahead: batches held.
        augment: changes a batch in place.
    """

    def __init__(
        self,
        reader: SplitReader,
        assignments: Iterator[Assignment],
        *,
        pin: bool = False,
        read_ahead: int = 4,
        augment: Callable[[Batch, Place], None] | None = None,
    ) -> None:
        self._reader = reader
        self._assignments = assignments
        self._pin = pin
        self._augment = augment
        self._queue: queue.Queue[Step | BaseException | None] = queue.Queue(read_ahead)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="speechdp-loader", daemon=True)
        self._thread.start()

    def __next__(self) -> Step:
        if self._stop.is_set():
            raise StopIteration
        item = self._queue.get()
        if isinstance(item, Step):
            return item
        self._stop.set()
        if item is None:
            raise StopIteration
        raise item

    def _run(self) -> None:
        end: BaseException | None = None
        try:
            for step in self._steps():
                if not self._put(step):
                    return
        except BaseException as error:  # handed to the training thread, which raises it
            end = error
            self._put(end)
            if not isinstance(error, Exception):
                raise
            return
        self._put(end)

    def _steps(self) -> Iterator[Step]:
        for assignment in self._assignments:
            batch = self._reader.batch(assignment.segments)
            if self._augment is not None:
                self._augment(batch, assignment.place)
            yield Step(batch.pin() if self._pin else batch, assignment)

    def _put(self, item: Step | BaseException | None) -> bool:
        while not self._stop.is_set():
            try:
                self._queue.put(item, timeout=0.1)
            except queue.Full:
                continue
            return True
        return False

    def close(self) -> None:
        """Stop reading and join the thread; safe to call twice."""
        self._stop.set()
        while not self._queue.empty():
            self._queue.get_nowait()
        self._thread.join()

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
