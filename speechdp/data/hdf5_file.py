"""Create HDF5 files so that a full disk gives an error, and nothing worse."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import h5py
import numpy as np

#: HDF5's own structures in a file of a dozen datasets and attributes take far less.
_STRUCTURE_BYTES = 1 << 16
#: Object headers carry checksums of their own, and every HDF5 since 1.10 (2016) reads them.
_LIBVER = ("v110", "v110")
_COPY_BYTES = 1 << 24


@contextmanager
def create_hdf5(path: Path, num_bytes: int) -> Iterator[Any]:
    """Yield a new h5py.File to which at most `num_bytes` of data may be written.

    HDF5 can crash the process when a write fails for want of space and the file is then closed.  So an
    empty HDF5 file is laid down with plain writes and its whole size reserved before HDF5 opens it; on
    closing, HDF5 cuts the file to what it used.

    Raises:
        OSError: the disk has no room for the file.
    """
    with h5py.File(path.name, "w", driver="core", backing_store=False, libver=_LIBVER) as empty:
        empty.flush()
        image = empty.id.get_file_image()
    with path.open("wb", buffering=0) as raw:
        write_all(raw, image)
        os.posix_fallocate(raw.fileno(), 0, num_bytes + _STRUCTURE_BYTES)
    with h5py.File(path, "r+", libver=_LIBVER, locking=False) as file:
        yield file


def write_all(file: IO[bytes], data: bytes | memoryview) -> None:
    """Write all of `data` to an unbuffered file, which may take less at a time."""
    view = memoryview(data)
    if view.nbytes == 0:  # which cannot be cast
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
