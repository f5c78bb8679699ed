"""Read rows of a contiguous HDF5 dataset past the HDF5 library, by position in the file."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from speechdp.errors import ShardError


@dataclass(frozen=True)
class ArrayPlace:
    """Where a dataset lies in its file; `offset_bytes` is None where HDF5 has to be asked (chunked)."""

    name: str
    offset_bytes: int | None
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @classmethod
    def of(cls, dataset: Any) -> ArrayPlace:
        """Take the place of an open h5py dataset."""
        offset = dataset.id.get_offset() if dataset.chunks is None else None
        if offset is None and dataset.size == 0:
            offset = 0  # HDF5 gives an empty dataset no place; nothing is ever read from it
        return cls(dataset.name.lstrip("/"), offset, tuple(dataset.shape), dataset.dtype)


class RowReader:
    """Read rows of one file's datasets; safe from several threads.

    A positioned read (preadv) into a fresh array costs no lock and no copy, where h5py takes a lock a
    call; chunked datasets, which other tools may have made, go through h5py.  Files are opened at the
    first read, in the process that reads, because an HDF5 handle does not survive a fork.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._fd: int | None = None
        self._file: Any = None

    def read(self, place: ArrayPlace, start: int, num: int) -> npt.NDArray[Any]:
        """Return rows start:start+num of the dataset.  Raises ShardError if the file ends before."""
        if num == 0:
            return np.empty((0, *place.shape[1:]), dtype=place.dtype)
        if place.offset_bytes is None:
            return self._read_chunked(place, start, num)
        rows = np.empty((num, *place.shape[1:]), dtype=place.dtype)
        row_bytes = rows.nbytes // num
        position = place.offset_bytes + start * row_bytes
        fd = self._fd if self._fd is not None else self._open()
        try:
            got = os.preadv(fd, [rows.data], position)
            if got < rows.nbytes:
                self._read_rest(fd, rows, got, position)
        except OSError as error:
            raise ShardError(f"{self._path}: cannot be read ({error.strerror}); check the disk") from error
        return rows

    def close(self) -> None:
        """Close what the reads opened; a later read opens it again."""
        with self._lock:
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None
            if self._file is not None:
                self._file.close()
                self._file = None

    def _read_rest(self, fd: int, rows: npt.NDArray[Any], got: int, position: int) -> None:
        # The kernel may hand over less than asked (at most 2 GiB a call); only 0 means the end.
        view = rows.reshape(-1).view(np.uint8).data
        while got < len(view):
            more = os.preadv(fd, [view[got:]], position + got)
            if more == 0:
                raise ShardError(f"{self._path}: truncated; prepare the data again or copy the file anew")
            got += more

    def _open(self) -> int:
        with self._lock:
            if self._fd is None:
                try:
                    self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
                except OSError as error:
                    raise ShardError(f"{self._path}: cannot be opened ({error.strerror})") from error
            return self._fd

    def _read_chunked(self, place: ArrayPlace, start: int, num: int) -> npt.NDArray[Any]:
        try:
            with self._lock:
                if self._file is None:
                    self._file = h5py.File(self._path, "r", locking=False)
                rows: npt.NDArray[Any] = self._file[place.name][start : start + num]
        except (OSError, KeyError, RuntimeError) as error:
            raise ShardError(f"{self._path}: {place.name} cannot be read; prepare the data again") from error
        if len(rows) != num:
            raise ShardError(f"{self._path}: {place.name} is truncated; prepare the data again")
        return rows
