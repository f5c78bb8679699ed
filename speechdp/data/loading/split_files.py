"""The files of a split: its shards, and targets files if the targets are of another alignment."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from speechdp.comm.base import Communicator
from speechdp.data.shards.alignment_file import TargetsFile, open_targets
from speechdp.data.shards.contiguous import ArrayPlace, RowReader
from speechdp.data.shards.dataset import Dataset
from speechdp.data.shards.extents import DatasetTable, Extents
from speechdp.data.shards.shard import Shard
from speechdp.errors import ShardError
from speechdp.labels.state_tying import tying_in

IntArray = npt.NDArray[np.int64]

#: Least size of an utterance in a shard, bytes, however well it is compressed.
_LEAST_UTTERANCE_BYTES = 0.01


class SplitFiles:
    """The open shards and targets files of a split; each is opened at its first use.

    Args: as for SplitReader.
    """

    def __init__(self, dataset: Dataset, split: str, alignments: Path | None) -> None:
        self._dataset, self._split, self._alignments = dataset, split, alignments
        tying = tying_in(alignments)
        self._num_classes = dataset.num_classes if tying is None else tying.num_classes
        self.num_shards = len(dataset.shard_paths(split))
        self.dtype = getattr(torch, dataset.features.dtype)
        self._lock = threading.Lock()
        self._open: list[_OpenedFiles | None] = [None] * self.num_shards
        self.features = DatasetTable(self.num_shards, self._features_of)
        self._targets = DatasetTable(self.num_shards, lambda number: self._get(number).targets)

    def lengths(self, comm: Communicator | None) -> list[npt.NDArray[Any]]:
        """Check all targets; return the frames of each utterance, shard by shard.

        Collective where ranks share the reading.

        Raises:
            ShardError: a shard that is not what data.json says, or targets outside the classes.
        """
        rank, size = (0, 1) if comm is None else (comm.rank, comm.size)
        counts = [entry.utterances for entry in self._dataset.splits[self._split].shards]
        for path, count in zip(self._dataset.shard_paths(self._split), counts, strict=True):
            _check_count(path, count)
        found = [np.zeros(count, dtype=np.int32) for count in counts]
        for number in range(rank, self.num_shards, size):
            opened = self._get(number)
            opened.check_targets()
            found[number][:] = np.diff(opened.shard.offsets)
        if comm is not None and size > 1:
            everything = torch.from_numpy(np.concatenate(found))
            comm.allreduce(everything, name=f"lengths.{self._split}")
            found = np.split(everything.numpy(), np.cumsum(counts)[:-1])
        return list(found)

    @property
    def storage(self) -> str:
        """Layout of the shards opened so far; if they differ, the most costly."""
        kinds = {opened.shard.storage for opened in self._open if opened is not None}
        return max(kinds, key=len, default="contiguous")

    def open(self, number: int) -> Shard:
        """Return a shard; open it if necessary."""
        return self._get(number).shard

    def read_targets(self, utterances: IntArray, extents: Extents, into: memoryview) -> None:
        """Read extents of the utterances' targets; an utterance is numbered within its shard."""
        if self._alignments is not None:
            for number, utterance in zip(extents.owner, utterances.tolist(), strict=True):
                self._get(number).alignment.verify(utterance)
        self._targets.read(extents, 4, into)

    def targets(self, number: int, first: int, last: int) -> npt.NDArray[np.int32]:
        """Read and concatenate the targets of the utterances first:last of a shard."""
        opened = self._get(number)
        if self._alignments is not None:
            for utterance in range(first, last):
                opened.alignment.verify(utterance)
        begin, end = opened.shard.target_offsets[[first, last]].tolist()
        reader, place = opened.targets
        return reader.read(place, begin, end - begin)

    def close(self) -> None:
        """Close the files; a later read reopens them."""
        self.features.close()
        self._targets.close()
        with self._lock:
            for number, opened in enumerate(self._open):
                if opened is not None:
                    opened.close()
                    self._open[number] = None

    def _features_of(self, number: int) -> tuple[RowReader, ArrayPlace]:
        shard = self.open(number)
        return shard.reader, shard.features_place

    def _get(self, number: int) -> _OpenedFiles:
        opened = self._open[number]
        if opened is None:
            with self._lock:
                opened = self._open[number]
                if opened is None:
                    opened = self._open[number] = self._make(number)
        return opened

    def _make(self, number: int) -> _OpenedFiles:
        shard = self._dataset.open_shard(self._split, number)
        if self._alignments is None:
            return _OpenedFiles(shard, (shard.reader, shard.targets_place))
        file = open_targets(self._alignments / shard.path.name, shard)
        if file.num_classes != self._num_classes:
            raise ShardError(
                f"{file.path}: has targets of {file.num_classes} classes, its folder is of "
                f"{self._num_classes}; delete the folder and make it again"
            )
        return _OpenedFiles(shard, file.dataset, file)


def _check_count(path: Path, count: int) -> None:
    """Refuse more utterances than a shard of this size can hold, before memory is allocated for them."""
    try:
        size_bytes = path.stat().st_size
    except OSError:
        return  # opening the file reports the reason
    if count * _LEAST_UTTERANCE_BYTES > size_bytes:
        raise ShardError(
            f"{path}: is too small for the {count} utterances of data.json; prepare the data again"
        )


@dataclass(frozen=True)
class _OpenedFiles:
    """A shard, the reader of its targets, and the targets file if they are not the shard's own."""

    shard: Shard
    targets: tuple[RowReader, ArrayPlace]
    targets_file: TargetsFile | None = None

    @property
    def alignment(self) -> TargetsFile:
        """The targets file."""
        assert self.targets_file is not None
        return self.targets_file

    def check_targets(self) -> None:
        """Refuse targets that are not class indices.  Raises ShardError."""
        (self.targets_file or self.shard).check_targets()

    def close(self) -> None:
        """Close the files."""
        self.shard.close()
        if self.targets_file is not None:
            self.targets_file.close()
