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
from speechdp.data.batch import Batch, Example, collate
from speechdp.data.dataset import Dataset
from speechdp.data.plan import CorpusIndex, EpochPlan, Segments
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
        batch: what this rank trains on; 0 frames where its part of the epoch is over.
        epoch: 0, 1, ...
        index: step within the epoch.
        num_steps: steps of the epoch.
        mean_frames: frames of this step averaged over ranks.
        total_frames: frames of this step of all ranks together.
    """

    batch: Batch
    epoch: int
    index: int
    num_steps: int
    mean_frames: float
    total_frames: int

    @property
    def ends_epoch(self) -> bool:
        """Whether this is the epoch's last step."""
        return self.index == self.num_steps - 1


@dataclass(frozen=True)
class Position:
    """Where to begin: step `step` of epoch `epoch`."""

    epoch: int = 0
    step: int = 0


class Loader(Iterator[Step]):
    """All steps of this rank from a position on, read ahead by one background thread.

    The thread holds at most `read_ahead` batches and one more in its hand; its errors are raised by
    `next`; `close` joins it.
    It starts no process: forking after MPI_Init corrupts memory on some fabrics.
    """

    def __init__(
        self,
        reader: SplitReader,
        plan: Callable[[int], EpochPlan],
        rank: int,
        num_epochs: int,
        *,
        start: Position = Position(),
        pin: bool = False,
        read_ahead: int = 4,
        augment: Callable[[Batch, Position], None] | None = None,
    ) -> None:
        self._reader = reader
        self._plan = plan
        self._rank = rank
        self._epochs = range(start.epoch, num_epochs)
        self._start = start
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
        for epoch in self._epochs:
            plan = self._plan(epoch)
            mine, means, totals = plan.ranks[self._rank], plan.frames.mean(axis=0), plan.frames.sum(axis=0)
            first = self._start.step if epoch == self._start.epoch else 0
            for index in range(first, plan.num_steps):
                batch = self._reader.batch(mine.batch(index))
                if self._augment is not None:
                    self._augment(batch, Position(epoch, index))
                yield Step(
                    batch.pin() if self._pin else batch,
                    epoch,
                    index,
                    plan.num_steps,
                    float(means[index]),
                    int(totals[index]),
                )

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
