"""Create HDF5 files so that a failing disk causes an error and nothing worse."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import h5py
import numpy as np

#: The structures of HDF5 itself take far less in a file of a dozen datasets and attributes.
_STRUCTURE_BYTES = 1 << 16
#: Object headers of this version carry checksums, and every HDF5 since 1.10 (2016) reads them.
_LIBVER = ("v110", "v110")
_COPY_BYTES = 1 << 24


@contextmanager
def create_hdf5(path: Path, num_bytes: int) -> Iterator[Any]:
    """Yield a new h5py.File to which at most `num_bytes` of data may be written.

    HDF5 can crash the process if a write fails and the file is then closed.  So it writes through `_Disk`,
    which reports no failure to it.  Before HDF5 opens the file, an empty HDF5 file is written with plain
    writes and its whole size reserved.  On closing, HDF5 truncates the file to the size used.

    Raises:
        OSError: the disk has no room for the file, or a write failed.
    """
    with h5py.File(path.name, "w", driver="core", backing_store=False, libver=_LIBVER) as empty:
        empty.flush()
        image = empty.id.get_file_image()
    with path.open("wb", buffering=0) as raw:
        write_all(raw, image)
        os.posix_fallocate(raw.fileno(), 0, num_bytes + _STRUCTURE_BYTES)
    with path.open("r+b", buffering=0) as raw:
        disk = _Disk(raw)
        try:
            with h5py.File(disk, "r+", libver=_LIBVER) as file:
                yield file
        except (OSError, RuntimeError):
            disk.check()  # raises what HDF5 was not told
            raise
        disk.check()


class _Disk:
    """The file that HDF5 writes to.  It hides failed writes from HDF5 and keeps the first failure.

    Attributes:
        problem: the first failure; nothing is written after it.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.problem: OSError | None = None

    def check(self) -> None:
        """Raise the first failure, if there was one."""
        if self.problem is not None:
            raise self.problem

    def write(self, data: memoryview) -> int:
        """Write all of `data` at the current position."""
        self._try(lambda: write_all(self._file, data))
        return len(data)

    def truncate(self, size: int) -> int:
        """Truncate the file to `size` bytes."""
        self._try(lambda: self._file.truncate(size))
        return size

    def flush(self) -> None:
        """Do nothing: the file is unbuffered."""

    def seek(self, position: int, whence: int = os.SEEK_SET) -> int:
        """Move to a position."""
        return self._file.seek(position, whence)

    def tell(self) -> int:
        """Return the position."""
        return self._file.tell()

    def read(self, size: int) -> bytes:
        """Read `size` bytes; h5py recognises a file by this method."""
        return self._file.read(size)

    def readinto(self, buffer: memoryview) -> int:
        """Fill `buffer` from the current position."""
        return os.readv(self._file.fileno(), [buffer])

    def _try(self, change: Callable[[], object]) -> None:
        if self.problem is not None:
            return
        try:
            change()
        except OSError as error:
            self.problem = error


def write_all(file: IO[bytes], data: bytes | memoryview) -> None:
    """Write all of `data` to an unbuffered file, which may accept only part of it at a time."""
    view = memoryview(data)
    if view.nbytes == 0:  # an empty view cannot be cast
        return
    view = view.cast("B")
    while view:
        view = view[file.write(view) :]


def copy_rows(source: IO[bytes], dataset: Any) -> None:
    """Fill an HDF5 dataset from a file that holds its rows in order."""
    source.seek(0)
    row_bytes = dataset.dtype.itemsize * int(np.prod(dataset.shape[1:]))
    rows_a_time = max(1, _COPY_BYTES // row_bytes)
    start = 0
    while block := source.read(rows_a_time * row_bytes):
        rows = np.frombuffer(block, dtype=dataset.dtype).reshape(-1, *dataset.shape[1:])
        dataset[start : start + len(rows)] = rows
        start += len(rows)
    assert start == dataset.shape[0], (start, dataset.shape)
