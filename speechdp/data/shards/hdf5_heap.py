"""Check the variable-length strings of an HDF5 file before the HDF5 library reads them.

They lie in "global heap collections".  Neither these nor the pointers to them have a checksum: if either is
damaged, HDF5 2.0 loops for ever or writes past its memory.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import h5py

_MARK = b"GCOL\1"  # the signature, and the only version that exists
_HEAD_BYTES = 16
_STRING_HEAD = struct.Struct("<HH4xQ")  # index, references, reserved, size in bytes
_POINTER = struct.Struct("<IQI")  # length in bytes, position of the heap in the file, index in it
_VARIABLE_LENGTH = 9  # class of the datatype
#: Bytes of an attribute message before its name, by version: 1, 2, and 3, which adds the text encoding.
_ATTRIBUTE_HEAD = struct.Struct("<BBHHH")
_ATTRIBUTE_HEAD_BYTES = {1: 8, 2: 8, 3: 9}
#: Limit for everything but the values of arrays; a shard has some thousand bytes of it.
_MOST_BYTES = 1 << 28


@dataclass(frozen=True)
class _Piece:
    """Bytes of the file, beginning at `start`."""

    start: int
    content: bytes

    def places(self, word: bytes) -> Iterator[int]:
        """Yield the positions of a word in the piece."""
        position = self.content.find(word)
        while position >= 0:
            yield position
            position = self.content.find(word, position + 1)


class StringHeaps:
    """All global heaps of a file, checked.  Reads only what lies between the values of the arrays.

    Args:
        raw: the file.
        file: the same file, opened with h5py.

    Raises:
        ValueError: a heap is damaged.

    Source: HDF5 File Format Specification 3.0, III.E (global heap), IV.A.2.m (attribute message).
    """

    def __init__(self, raw: BinaryIO, file: Any) -> None:
        self._pieces = list(_between(raw, _extents(file)))
        self._sizes: dict[tuple[int, int], int] = {}
        for piece in self._pieces:
            for position in piece.places(_MARK):
                self._note_strings(piece, position)

    def check_attribute(self, name: str) -> None:
        """Check the strings that attributes of this name point to, wherever they are.  Raises ValueError."""
        word = name.encode() + b"\0"
        for piece in self._pieces:
            for position in piece.places(word):
                self.check(_pointer_behind(piece.content, position, len(word)))

    def check(self, pointers: bytes) -> None:
        """Check that each pointer (16 bytes) leads to a string of its length.  Raises ValueError."""
        for length, heap, index in _POINTER.iter_unpack(pointers):
            if length and self._sizes.get((heap, index)) != length:
                raise ValueError(f"a string of {length} bytes is not where it should be")

    def _note_strings(self, piece: _Piece, first: int) -> None:
        content = piece.content
        end = first + int.from_bytes(content[first + 8 : first + _HEAD_BYTES], "little")
        if end > len(content):
            raise ValueError(f"the heap of strings at byte {piece.start + first} is damaged")
        position = first + _HEAD_BYTES
        while position + _STRING_HEAD.size <= end:
            index, _, num_bytes = _STRING_HEAD.unpack_from(content, position)
            # Index 0 is the free space, whose size includes its header; others are padded to 8 bytes.
            step = num_bytes if index == 0 else _STRING_HEAD.size + (num_bytes + 7) // 8 * 8
            if not _STRING_HEAD.size <= step <= end - position:
                raise ValueError(f"the string at byte {piece.start + position} is damaged")
            self._sizes[piece.start + first, index] = num_bytes
            position += step


def _pointer_behind(content: bytes, name_place: int, name_bytes: int) -> bytes:
    """Return the pointer of the attribute whose name is here; empty if this is not a string attribute."""
    for version, head_bytes in _ATTRIBUTE_HEAD_BYTES.items():
        start = name_place - head_bytes
        if start < 0 or content[start] != version:
            continue
        _, _, *sizes = _ATTRIBUTE_HEAD.unpack_from(content, start)
        if sizes[0] != name_bytes:
            continue
        if version == 1:
            sizes = [(size + 7) // 8 * 8 for size in sizes]
        kind = name_place + sizes[0]
        data = kind + sizes[1] + sizes[2]
        if data + _POINTER.size <= len(content) and content[kind] & 15 == _VARIABLE_LENGTH:
            return content[data : data + _POINTER.size]
    return b""


def _between(raw: BinaryIO, extents: Iterable[tuple[int, int]]) -> Iterator[_Piece]:
    """Read everything that lies between extents (first byte, number of bytes)."""
    size_bytes = os.fstat(raw.fileno()).st_size
    position, left_bytes = 0, _MOST_BYTES
    for start, num_bytes in [*sorted(extents), (size_bytes, 0)]:
        gap_bytes = min(start, size_bytes) - position
        if gap_bytes > 0:
            left_bytes -= gap_bytes
            if left_bytes < 0:
                raise ValueError("too little of the file is arrays")
            raw.seek(position)
            yield _Piece(position, raw.read(gap_bytes))
        position = max(position, start + num_bytes)


def _extents(file: Any) -> list[tuple[int, int]]:
    """Return (first byte, number of bytes) of each array's values, for each chunk in chunked datasets."""
    extents: list[tuple[int, int]] = []
    for dataset in file.values():
        if not isinstance(dataset, h5py.Dataset):
            continue
        if dataset.chunks is not None:
            dataset.id.chunk_iter(lambda chunk: extents.append((chunk.byte_offset, chunk.size)))
        elif (offset := dataset.id.get_offset()) is not None:
            extents.append((offset, dataset.id.get_storage_size()))
    return extents
