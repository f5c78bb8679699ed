"""The readers of benchmarks/data/data_path.py: each delivers the same padded batches, epoch after epoch."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data import Dataset as MapDataset

from benchmarks.data.corpora import BATCH_SIZE, index_of, plan_of
from speechdp.data.loading.loader import Loader
from speechdp.data.loading.reader import SplitReader
from speechdp.data.loading.source_request import Context
from speechdp.data.plan.assignment import planned
from speechdp.data.plan.epoch_plan import EpochPlan, RankPlan
from speechdp.data.shards.dataset import Dataset

#: Features (B, T, F) float32, targets (B, T) int64 with -1 where nothing is learnt, lengths (B,) int64.
Delivered = tuple[Tensor, Tensor, Tensor]
#: Features (T, F) and targets (T,) of a segment.
Sample = tuple[npt.NDArray[np.float32], npt.NDArray[np.integer[Any]]]
#: Runs an epoch; what only moves bytes yields None for each batch or block.
Epoch = Callable[[], Iterable[Delivered | None]]

_BLOCK_BYTES = 4 << 20


@dataclass(frozen=True)
class Task:
    """What is read.

    Attributes:
        folder: of the corpus.
        workers: processes of a DataLoader; 0 reads in the process that takes the batches.
        chunk_frames: longest segment; 0 takes utterances whole.
        left_context: frames before a segment, without targets.
    """

    folder: Path
    workers: int = 0
    chunk_frames: int = 0
    left_context: int = 0


def open_ours(task: Task, stack: ExitStack) -> Epoch:
    """Read with our loader, in its own thread."""
    reader = SplitReader(Dataset.open(task.folder), "train", context=Context(left=task.left_context))
    stack.callback(reader.close)

    def plan(_epoch: int) -> EpochPlan:
        return plan_of(reader.index, task.chunk_frames)

    def epoch() -> Iterator[Delivered]:
        with Loader(reader, planned(plan, 0, 1)) as loader:
            for step in loader:
                yield step.batch.features, step.batch.targets, step.batch.lengths

    return epoch


class Segments(MapDataset[Sample]):
    """What one would write over these shards with h5py: a segment an item, files opened where they are read.

    Args:
        paths: the shards.
        plan: the segments.
        left_context: frames before each, without targets.

    Attributes:
        batches: the numbers of each batch's segments.
    """

    def __init__(self, paths: Sequence[Path], plan: RankPlan, left_context: int) -> None:
        self._paths = paths
        self._left_context = left_context
        self._arrays: list[tuple[Any, Any]] = []
        self._rows: list[tuple[int, int, int, int]] = []
        self.batches: list[list[int]] = []
        starts = []
        for path in paths:
            with h5py.File(path, "r") as file:
                starts.append(file["offsets"][:].tolist())
        for segments in map(plan.batch, range(plan.num_batches)):
            columns = (segments.shard, segments.utterance, segments.start, segments.num_frames)
            rows = list(zip(*(column.tolist() for column in columns), strict=True))
            self.batches.append(list(range(len(self._rows), len(self._rows) + len(rows))))
            self._rows += [(s, starts[s][u], starts[s][u] + start, num) for s, u, start, num in rows]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> Sample:
        if not self._arrays:
            files = [h5py.File(path, "r") for path in self._paths]
            self._arrays = [(file["features"], file["targets"]) for file in files]
        shard, first, start, num_frames = self._rows[number]
        features, targets = self._arrays[shard]
        begin, end = max(first, start - self._left_context), start + num_frames
        labels = targets[begin:end]
        labels[: start - begin] = -1
        return features[begin:end], labels


def pad(samples: Sequence[Sample]) -> Delivered:
    """Pad pairs of features (T, F) and targets (T,) to a batch; faster than torch's pad_sequence."""
    lengths = [len(features) for features, _ in samples]
    features = torch.zeros(len(samples), max(lengths), samples[0][0].shape[1])
    targets = torch.full(features.shape[:2], -1)
    feature_rows, target_rows = features.numpy(), targets.numpy()
    for row, (length, sample) in enumerate(zip(lengths, samples, strict=True)):
        feature_rows[row, :length], target_rows[row, :length] = sample
    return features, targets, torch.tensor(lengths)


def in_batches(samples: Iterable[Any]) -> Iterator[list[Any]]:
    """Yield so many samples at a time as a batch has."""
    rest = iter(samples)
    while batch := list(islice(rest, BATCH_SIZE)):
        yield batch


def open_dataloader(task: Task, stack: ExitStack) -> Epoch:
    """Read with torch's DataLoader over h5py."""
    dataset = Dataset.open(task.folder)
    plan = plan_of(index_of(dataset), task.chunk_frames).ranks[0]
    segments = Segments(dataset.shard_paths("train"), plan, task.left_context)
    loader = DataLoader(
        segments, batch_sampler=segments.batches, collate_fn=pad, num_workers=task.workers,
        persistent_workers=task.workers > 0,
    )  # fmt: skip
    return lambda: loader


def open_webdataset(task: Task, stack: ExitStack) -> Epoch:
    """Read tar files with WebDataset: decoded, to pairs, batched with padding."""
    wds: Any = importlib.import_module("webdataset")
    urls = [str(path) for path in sorted((task.folder / "tars").iterdir())]
    pairs = wds.WebDataset(urls, shardshuffle=False).decode().to_tuple("features.npy", "targets.npy")
    batches = pairs.batched(BATCH_SIZE, collation_fn=pad)
    if task.workers == 0:
        return lambda: batches
    loader = wds.WebLoader(batches, batch_size=None, num_workers=task.workers, persistent_workers=True)
    return lambda: loader


class Shar(IterableDataset[Delivered]):
    """Lhotse Shar read from front to end, each worker its part of the shards; no sampler in between."""

    def __init__(self, folder: Path) -> None:
        lhotse: Any = importlib.import_module("lhotse")
        self._cuts = lhotse.CutSet.from_shar(in_dir=folder, split_for_dataloading=True)

    def __iter__(self) -> Iterator[Delivered]:
        for cuts in in_batches(self._cuts):
            yield pad([(cut.load_features(), cut.load_targets()) for cut in cuts])


def open_shar(task: Task, stack: ExitStack) -> Epoch:
    """Read Lhotse Shar, here or in the workers of a DataLoader."""
    batches = Shar(task.folder / "shar")
    if task.workers == 0:
        return lambda: batches
    loader = DataLoader(batches, batch_size=None, num_workers=task.workers, persistent_workers=True)
    return lambda: loader


def open_arks(kind: str, task: Task, stack: ExitStack) -> Epoch:
    """Read Kaldi archives of features and targets side by side, from front to end."""
    kaldi: Any = importlib.import_module("kaldi_native_io")
    paths = sorted((task.folder / kind).glob("features.*"))

    def samples() -> Iterator[Sample]:
        for path in paths:
            targets = path.with_name(path.name.replace("features", "targets"))
            with (
                kaldi.SequentialFloatMatrixReader(f"ark:{path}") as matrices,
                kaldi.SequentialInt32VectorReader(f"ark:{targets}") as vectors,
            ):
                for (key, matrix), (other, vector) in zip(matrices, vectors, strict=True):
                    assert key == other
                    # A copy, because the reader's next step frees the matrix; the vector is a list.
                    yield matrix.copy(), np.fromiter(vector, np.int64, len(vector))

    return lambda: map(pad, in_batches(samples()))


def open_limit_read(task: Task, stack: ExitStack) -> Epoch:
    """Read the shards' bytes into one buffer, again and again; nothing else."""
    paths = Dataset.open(task.folder).shard_paths("train")
    files = [os.open(path, os.O_RDONLY) for path in paths]
    for fd in files:
        stack.callback(os.close, fd)
    buffer = bytearray(_BLOCK_BYTES)

    def epoch() -> Iterator[None]:
        for fd in files:
            position = 0
            while got := os.preadv(fd, [buffer], position):
                position += got
                yield None

    return epoch


def open_limit_memcpy(task: Task, stack: ExitStack) -> Epoch:
    """Copy as many bytes as each batch has within memory, from the whole corpus to one buffer."""
    dataset = Dataset.open(task.folder)
    plan = plan_of(index_of(dataset)).ranks[0]
    frame_bytes = dataset.feature_dim * np.dtype(dataset.features.dtype).itemsize + 4
    sizes = (plan.frames * frame_bytes).tolist()
    source = np.ones(sum(sizes), dtype=np.uint8)
    buffer = np.ones(max(sizes), dtype=np.uint8)
    return partial(_copies, source, buffer, sizes)


def _copies(source: npt.NDArray[np.uint8], buffer: npt.NDArray[np.uint8], sizes: list[int]) -> Iterator[None]:
    position = 0
    for size in sizes:
        np.copyto(buffer[:size], source[position : position + size])
        position += size
        yield None


READERS: dict[str, Callable[[Task, ExitStack], Epoch]] = {
    "ours": open_ours,
    "dataloader": open_dataloader,
    "webdataset": open_webdataset,
    "shar": open_shar,
    "arks": partial(open_arks, "arks"),
    "compressed": partial(open_arks, "compressed"),
    "limit_read": open_limit_read,
    "limit_memcpy": open_limit_memcpy,
}


@dataclass(frozen=True)
class Checksum:
    """What a contender delivered in an epoch, or in several: all are to agree.

    Attributes:
        frames: learnt.
        batches: delivered.
        padded_sum: of all features, zero padding included.
        weighted_sum: of the frames learnt, each times its target and one: finds frames with wrong targets.
    """

    frames: int
    batches: int
    padded_sum: float
    weighted_sum: float


def checksum(batches: Iterable[Delivered | None]) -> Checksum:
    """Add up an epoch's batches; None of them only moves bytes."""
    frames, count, padded, weighted = 0, 0, 0.0, 0.0
    for batch in batches:
        assert batch is not None
        features, targets, lengths = batch
        assert (features.dtype, targets.dtype) == (torch.float32, torch.int64)
        padding = torch.arange(targets.shape[1]) >= lengths[:, None]
        assert not features[padding].any() and (targets[padding] == -1).all()
        assert (targets[torch.arange(len(lengths)), lengths - 1] >= 0).all()  # the last frame is learnt
        frames += int((targets >= 0).sum())
        sums = features.sum(dim=2, dtype=torch.float64)
        padded += float(sums.sum())
        weighted += float((sums * (targets + 1)).sum())
        count += 1
    return Checksum(frames, count, padded, weighted)
