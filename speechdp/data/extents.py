"""Read many stretches of several files into one piece of memory: what a batch is made of."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from speechdp.data import contiguous
from speechdp.data.contiguous import ArrayPlace, RowReader


@dataclass(frozen=True)
class Extents:
    """Rows start:start+num of the dataset of each extent's owner, for bytes begin:end of a common memory.

    Columns of one length: owner, start, num, begin, end.
    """

    owner: npt.NDArray[np.int64]
    start: npt.NDArray[np.int64]
    num: npt.NDArray[np.int64]
    begin: npt.NDArray[np.int64]
    end: npt.NDArray[np.int64]


def read_extents(
    datasets: dict[int, tuple[RowReader, ArrayPlace]],
    extents: Extents,
    out: memoryview,
    *,
    announce: bool = False,
) -> None:
    """Read extents of several files' datasets into `out`, in a loop that is short where all are contiguous.

    Args:
        datasets: by owner.
        extents: what goes where.
        out: the memory, as bytes.
        announce: name all extents to the kernel before the first is read: a disk or a network then serves
            many at a time.  From the page cache it costs half as much as reading.

    Raises:
        ShardError: as `RowReader.read_into`.
    """
    if any(place.offset_bytes is None for _, place in datasets.values()):
        for number in range(len(extents.owner)):
            _read_extent(datasets, extents, number, out)
        return
    first = np.zeros(max(datasets) + 1, dtype=np.int64)
    row_bytes = 0
    for owner, (_, place) in datasets.items():
        first[owner], row_bytes = place.offset_bytes or 0, place.row_bytes
    files = {owner: reader.descriptor() for owner, (reader, _) in datasets.items()}
    positions = first[extents.owner] + extents.start * row_bytes
    columns = (extents.owner, positions, extents.begin, extents.end)
    rows = list(zip(*(column.tolist() for column in columns), strict=True))
    if announce:
        with contextlib.suppress(OSError):  # what is wrong with a file, reading it will say
            for owner, position, begin, end in rows:
                os.posix_fadvise(files[owner], position, end - begin, os.POSIX_FADV_WILLNEED)
    read = contiguous.preadv
    for number, (owner, position, begin, end) in enumerate(rows):
        try:
            got = read(files[owner], (out[begin:end],), position)
        except OSError:
            got = -1
        if got != end - begin:
            _read_extent(datasets, extents, number, out)  # goes on after a short read, or says what is wrong


def _read_extent(
    datasets: dict[int, tuple[RowReader, ArrayPlace]], extents: Extents, number: int, out: memoryview
) -> None:
    reader, place = datasets[int(extents.owner[number])]
    into = out[int(extents.begin[number]) : int(extents.end[number])]
    reader.read_into(place, int(extents.start[number]), int(extents.num[number]), into)
