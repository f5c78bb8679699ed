"""Read rows of a contiguous HDF5 dataset by their position in the file, without the HDF5 library."""

from __future__ import annotations

import errno
import math
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from speechdp.errors import ShardError
from speechdp.files import cannot_be_read, disk_reason, is_of_disk
from speechdp.process.file_limit import files_left

#: (file descriptor, buffers, position) -> bytes read.
PositionedRead = Callable[[int, Sequence[memoryview], int], int]

#: Makes all positioned reads; a test of failing disks replaces it.
preadv: PositionedRead = os.preadv

_AGAIN = "prepare the data again or copy the file again"


@dataclass(frozen=True)
class ArrayPlace:
    """Location of a dataset in its file.

    Attributes:
        name: name of the dataset.
        offset_bytes: position of its first byte in the file; None if only HDF5 can read it (chunked,
            compressed).
        shape: rows first.
        dtype: type of its values.
        storage: "contiguous", "chunked", "chunked gzip", ...
    """

    name: str
    offset_bytes: int | None
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    storage: str = "contiguous"

    @classmethod
    def of(cls, dataset: Any) -> ArrayPlace:
        """Return the location of an open h5py dataset."""
        direct = dataset.chunks is None and not dataset.dtype.hasobject
        offset = dataset.id.get_offset() if direct else None
        if offset is None and dataset.size == 0:
            offset = 0  # HDF5 allocates nothing for an empty dataset; nothing is ever read from it
        return cls(dataset.name.lstrip("/"), offset, tuple(dataset.shape), dataset.dtype, _storage(dataset))

    @cached_property
    def row_bytes(self) -> int:
        """Size of a row in bytes."""
        return self.dtype.itemsize * math.prod(self.shape[1:])

    @property
    def end_bytes(self) -> int:
        """Position behind its last byte in the file; 0 if only HDF5 can read it."""
        return 0 if self.offset_bytes is None else self.offset_bytes + self.shape[0] * self.row_bytes


#: Most readers of an OpenFiles that have their file open; fewer if a quarter of the files that the process
#: may still open is less.
_MOST_OPEN = 128


def cannot_be_opened(path: Path, error: Exception) -> str:
    """Return the message for a file that cannot be opened, because of the disk or the limit on open files."""
    then = "run again"
    if disk_reason(error) == os.strerror(errno.EMFILE):
        then = "run again; or write fewer shards with `speechdp shard`"
    return cannot_be_read(path, error, then)


class OpenFiles:
    """Limits how many readers have their file open, closing the least recently used; thread-safe."""

    def __init__(self) -> None:
        left = files_left()
        self._most = _MOST_OPEN if left is None else min(_MOST_OPEN, left // 4)
        self._lock = threading.Lock()
        self._recent: OrderedDict[RowReader, None] = OrderedDict()

    def has_read(self, reader: RowReader) -> None:
        """Note that a reader has its file open; if too many have, close the least recently used."""
        oldest = None
        with self._lock:
            self._recent[reader] = None
            self._recent.move_to_end(reader)
            if len(self._recent) > max(self._most, 1):
                oldest, _ = self._recent.popitem(last=False)
        if oldest is not None:
            oldest.close()  # waits for that reader's read, if one is under way


class RowReader:
    """Reads rows of one file's datasets; thread-safe.

    A positioned read (preadv) straight into the caller's memory needs no lock and no copy; h5py takes a lock
    for every call.  Chunked datasets, which other tools may have written, are read by h5py, which reads and
    decompresses whole chunks however few rows are requested.  The file is opened at the first read, read-only
    and unlocked, in the process that reads, because an HDF5 handle does not survive a fork.

    Args:
        path: the file.
        open_files: closes the file after many others have been read; None: it stays open until `close`.
    """

    def __init__(self, path: Path, open_files: OpenFiles | None = None) -> None:
        self._path = path
        self._open_files = open_files
        self._lock = threading.Lock()
        self._fd: int | None = None
        self._file: Any = None

    def read(self, place: ArrayPlace, start: int, num: int) -> npt.NDArray[Any]:
        """Return rows start:start+num of the dataset.  Raises ShardError as `read_into`."""
        if place.dtype.hasobject:  # strings of variable length, as other tools may write them
            return self._read_objects(place, start, num)
        rows = np.empty((num, *place.shape[1:]), dtype=place.dtype)
        if num:
            self.read_into(place, start, num, rows.data)
        return rows

    def read_into(self, place: ArrayPlace, start: int, num: int, out: memoryview) -> None:
        """Read rows start:start+num of the dataset into `out`, of num * place.row_bytes contiguous bytes.

        Raises:
            ShardError: the file ends too early, or the disk fails; names the file.  `out` is then undefined.
        """
        num_bytes = num * place.row_bytes
        assert out.nbytes == num_bytes, (out.nbytes, num_bytes)
        assert start >= 0 and start + num <= place.shape[0], (start, num, place.shape)
        if num == 0:
            return
        if place.offset_bytes is None:
            self._read_chunked(place, start, num, out)
            return
        position = place.offset_bytes + start * place.row_bytes
        if self._open_files is None:
            self._read_contiguous(self.descriptor(), out, position)
            return
        with self._lock:  # another thread may close it meanwhile
            self._read_contiguous(self._opened(), out, position)
        self._open_files.has_read(self)

    def descriptor(self) -> int:
        """Return the descriptor of the opened file, for contiguous datasets; only without `open_files`."""
        if self._fd is not None:
            return self._fd
        with self._lock:
            return self._opened()

    def close(self) -> None:
        """Close the files that reads have opened; a later read reopens them."""
        with self._lock:
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None
            if self._file is not None:
                self._file.close()
                self._file = None

    def _read_contiguous(self, fd: int, out: memoryview, position: int) -> None:
        try:
            got = preadv(fd, [out], position)
            if got < out.nbytes:
                self._read_rest(fd, out, got, position)
        except OSError as error:
            raise ShardError(cannot_be_read(self._path, error)) from error

    def _read_rest(self, fd: int, out: memoryview, got: int, position: int) -> None:
        # The kernel may return less than requested (at most 2 GiB a call); only 0 means the end of the file.
        view = np.frombuffer(out, dtype=np.uint8).data
        while got < len(view):
            more = preadv(fd, [view[got:]], position + got)
            if more == 0:
                raise ShardError(f"{self._path}: truncated; {_AGAIN}")
            got += more

    def _opened(self) -> int:
        """Return the file descriptor.  The caller must hold the lock."""
        if self._fd is None:
            try:
                self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise ShardError(cannot_be_opened(self._path, error)) from error
        return self._fd

    def _read_chunked(self, place: ArrayPlace, start: int, num: int, out: memoryview) -> None:
        rows = np.frombuffer(out, dtype=place.dtype).reshape(num, *place.shape[1:])
        try:
            with self._lock:
                self._dataset(place).read_direct(rows, np.s_[start : start + num])
        except (OSError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise self._unreadable(place, error) from error
        if self._open_files is not None:
            self._open_files.has_read(self)

    def _read_objects(self, place: ArrayPlace, start: int, num: int) -> npt.NDArray[Any]:
        try:
            with self._lock:
                rows: npt.NDArray[Any] = self._dataset(place)[start : start + num]
        except (OSError, KeyError, RuntimeError) as error:
            raise self._unreadable(place, error) from error
        if self._open_files is not None:
            self._open_files.has_read(self)
        return rows

    def _dataset(self, place: ArrayPlace) -> Any:
        if self._file is None:
            self._file = h5py.File(self._path, "r", locking=False)
        return self._file[place.name]

    def _unreadable(self, place: ArrayPlace, error: Exception) -> ShardError:
        if is_of_disk(error):
            return ShardError(cannot_be_read(self._path, error))
        return ShardError(f"{self._path}: {place.name} is truncated, damaged or out of reach; {_AGAIN}")


def _storage(dataset: Any) -> str:
    if dataset.chunks is None:
        return "contiguous"
    if dataset.compression is not None:
        return f"chunked {dataset.compression}"
    return "chunked" if dataset.id.get_create_plist().get_nfilters() == 0 else "chunked filtered"
