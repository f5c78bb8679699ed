"""Read stretches of several files into one piece of memory: the contents of a batch."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

from speechdp.data.shards import contiguous
from speechdp.data.shards.contiguous import ArrayPlace, RowReader

#: Stand for an offset that has not been looked up yet, and for one that only HDF5 knows.
_UNKNOWN, _CHUNKED = -1, -2


@dataclass(frozen=True)
class Extents:
    """Rows start:start+num of the dataset of file `owner`, to be read into memory from byte `begin` on.

    The columns have equal length.  They are lists because a loop over lists is faster than over arrays.
    """

    owner: list[int]
    start: list[int]
    num: list[int]
    begin: list[int]


class DatasetTable:
    """The same dataset in each of several files, with rows of one kind; thread-safe.

    Args:
        num_files: number of files; owners are 0 to num_files - 1.
        open_file: returns a file's reader and the location of its dataset; called at the first read.
    """

    def __init__(self, num_files: int, open_file: Callable[[int], tuple[RowReader, ArrayPlace]]) -> None:
        self._open_file = open_file
        self._lock = threading.Lock()
        self._datasets: list[tuple[RowReader, ArrayPlace] | None] = [None] * num_files
        self._offsets = [_UNKNOWN] * num_files
        self._descriptors = [_UNKNOWN] * num_files

    def read(self, extents: Extents, row_bytes: int, out: memoryview, *, announce: bool = False) -> None:
        """Read extents into `out`, in a loop that is short for contiguous datasets.

        Args:
            extents: rows to read, and where they go.
            row_bytes: size of a row.
            out: the memory, as bytes.
            announce: announce all extents to the kernel before the first read: a disk or a network then
                serves many at a time.  If they are in the page cache, this costs half as much as reading.

        Raises:
            ShardError: as `RowReader.read_into`.
        """
        offsets, descriptors = self._offsets, self._descriptors
        for owner in set(extents.owner):
            if offsets[owner] == _UNKNOWN:
                self._open(owner)
        rows = list(zip(extents.owner, extents.start, extents.num, extents.begin, strict=True))
        if announce:
            with contextlib.suppress(OSError):  # reading the file reports the problem
                for owner, start, num, _ in rows:
                    place = max(0, offsets[owner]) + start * row_bytes
                    os.posix_fadvise(descriptors[owner], place, num * row_bytes, os.POSIX_FADV_WILLNEED)
        read = contiguous.preadv
        for owner, start, num, begin in rows:
            num_bytes = num * row_bytes
            into = out[begin : begin + num_bytes]
            offset = offsets[owner]
            if offset >= 0:
                try:
                    if read(descriptors[owner], (into,), offset + start * row_bytes) == num_bytes:
                        continue
                except OSError:
                    pass  # the slow read below reports the problem; it also continues after a short read
            self._read_slowly(owner, start, num, into)

    def close(self) -> None:
        """Forget the files; a later read opens them again."""
        with self._lock:
            count = len(self._offsets)
            self._offsets, self._descriptors = [_UNKNOWN] * count, [_UNKNOWN] * count
            self._datasets = [None] * count

    def _open(self, owner: int) -> None:
        with self._lock:
            reader, place = self._datasets[owner] = self._open_file(owner)
            self._descriptors[owner] = reader.descriptor()
            self._offsets[owner] = _CHUNKED if place.offset_bytes is None else place.offset_bytes

    def _read_slowly(self, owner: int, start: int, num: int, into: memoryview) -> None:
        dataset = self._datasets[owner]
        assert dataset is not None
        dataset[0].read_into(dataset[1], start, num, into)
