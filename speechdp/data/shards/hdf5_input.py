"""Open HDF5 files that may be damaged or malicious, without trusting their contents.

HDF5 allocates what a header declares, follows links into other files, and does not survive every damage.  So
whatever HDF5 is asked for is checked first.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import h5py
import numpy as np

from speechdp.data.shards.hdf5_heap import StringHeaps

#: Errors that HDF5 and h5py raise on a damaged file, depending on the damaged byte.
HDF5_ERRORS = (
    OSError,
    LookupError,
    RuntimeError,
    ValueError,
    TypeError,
    AttributeError,
    ArithmeticError,
    MemoryError,
)
#: More than deflate's limit of 1032.
_MOST_COMPRESSION = 1100
_MOST_ATTRIBUTE_BYTES = 1 << 16


class Hdf5Input:
    """An HDF5 file opened for reading; names refer to its root group.

    Every method may raise any of HDF5_ERRORS.
    """

    def __init__(self, raw: BinaryIO, file: Any) -> None:
        self._raw, self._file = raw, file
        self._size_bytes = os.fstat(raw.fileno()).st_size
        for name in file:
            # Soft links, external links, and external or virtual storage would read other files.
            if not isinstance(file.get(name, getlink=True), h5py.HardLink):
                raise ValueError(f"{name!r} is a link")
        self._heaps = StringHeaps(raw, file)

    def __contains__(self, name: str) -> bool:
        return name in self._file

    def attributes(self) -> dict[str, Any]:
        """Return all attributes; each must be a single integer or string."""
        values: dict[str, Any] = {}
        for name in self._file.attrs:
            attribute = h5py.h5a.open(self._file.id, name.encode())
            kind = attribute.get_type()
            if attribute.shape != () or not isinstance(kind, (h5py.h5t.TypeIntegerID, h5py.h5t.TypeStringID)):
                raise ValueError(f"attribute {name!r} is no number and no text")
            if attribute.get_storage_size() > _MOST_ATTRIBUTE_BYTES:
                raise ValueError(f"attribute {name!r} is too long")
            if isinstance(kind, h5py.h5t.TypeStringID) and kind.is_variable_str():
                self._heaps.check_attribute(name)
            value = self._file.attrs[name]
            values[name] = value.item() if isinstance(value, np.generic) else value
        return values

    def dataset(self, name: str) -> Any:
        """Return a dataset of numbers or strings, after checking that the file is large enough for it."""
        dataset = self._file[name]
        if not isinstance(dataset, h5py.Dataset):
            raise TypeError(f"{name!r} is no dataset")
        layout = dataset.id.get_create_plist()
        if dataset.is_virtual or layout.get_external_count():
            raise ValueError(f"{name!r} has its values in other files")
        stored_bytes = dataset.id.get_storage_size()
        chunked = dataset.chunks is not None
        most_bytes = stored_bytes * _MOST_COMPRESSION if chunked else stored_bytes
        if stored_bytes > self._size_bytes or dataset.size * dataset.dtype.itemsize > most_bytes:
            raise ValueError(f"{name!r} says it is larger than the file can hold")
        if h5py.check_string_dtype(dataset.dtype) is None and dataset.dtype.kind not in "iuf":
            raise TypeError(f"{name!r} holds neither numbers nor text")
        if dataset.dtype.hasobject:
            self._check_strings(dataset, chunked)
        return dataset

    def array(self, name: str) -> Any:
        """Return all values of a dataset of numbers."""
        dataset = self.dataset(name)
        if dataset.dtype.kind not in "iuf":
            raise TypeError(f"{name!r} holds no numbers")
        return dataset[...]

    def _check_strings(self, dataset: Any, chunked: bool) -> None:
        start = dataset.id.get_offset()
        if chunked or (start is None and dataset.size):
            raise ValueError(f"{dataset.name} holds strings of variable length in chunks, which are not read")
        if start is not None:
            self._raw.seek(start)
            self._heaps.check(self._raw.read(dataset.id.get_storage_size()))


@contextmanager
def open_hdf5(path: Path) -> Iterator[Hdf5Input]:
    """Yield an HDF5 file, opened unlocked.

    Raises:
        FileNotFoundError: there is no such file.
        HDF5_ERRORS: truncated, damaged or not HDF5; the block may raise these, too.
    """
    with path.open("rb") as raw, h5py.File(path, "r", locking=False) as file:
        yield Hdf5Input(raw, file)
