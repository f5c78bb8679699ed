"""Look at the strings of variable length in an HDF5 file before the HDF5 library does.

They lie in "global heap collections", and what points to them has no checksum: where either is damaged,
HDF5 2.0 loops for ever, or writes past its memory.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import h5py

_MARK = b"GCOL\1"  # the signature, and the only version there is
_HEAD_BYTES = 16
_STRING_HEAD = struct.Struct("<HH4xQ")  # index, references, reserved, size in bytes
_POINTER = struct.Struct("<IQI")  # length in bytes, the heap's place in the file, index in it
_VARIABLE_LENGTH = 9  # class of the type
#: Of an attribute's message before its name, by version: versions 1, 2, and 3 with the text's encoding.
_ATTRIBUTE_HEAD = struct.Struct("<BBHHH")
_ATTRIBUTE_HEAD_BYTES = {1: 8, 2: 8, 3: 9}
#: Of everything that is not values of arrays; a shard has some thousand bytes of it.
_MOST_BYTES = 1 << 28


@dataclass(frozen=True)
class _Piece:
    """Bytes of the file from `start` on."""

    start: int
    content: bytes

    def places(self, word: bytes) -> Iterator[int]:
        """Yield where a word stands, counted in the piece."""
        position = self.content.find(word)
        while position >= 0:
            yield position
            position = self.content.find(word, position + 1)


class StringHeaps:
    """All heaps of a file, each looked through.  Only what lies between the values of the arrays is read.

    Args:
        raw: the file.
        file: the same, opened with h5py.

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
        """Check what attributes of this name point to, wherever one stands.  Raises ValueError."""
        word = name.encode() + b"\0"
        for piece in self._pieces:
            for position in piece.places(word):
                self.check(_pointer_behind(piece.content, position, len(word)))

    def check(self, pointers: bytes) -> None:
        """Check that each pointer (16 bytes) means a string of its length.  Raises ValueError."""
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
            # Index 0 is the room left, whose size counts its head in; others are padded to 8 bytes.
            step = num_bytes if index == 0 else _STRING_HEAD.size + (num_bytes + 7) // 8 * 8
            if not _STRING_HEAD.size <= step <= end - position:
                raise ValueError(f"the string at byte {piece.start + position} is damaged")
            self._sizes[piece.start + first, index] = num_bytes
            position += step


def _pointer_behind(content: bytes, name_place: int, name_bytes: int) -> bytes:
    """Return the pointer of an attribute whose name stands here; nothing if this is no string attribute."""
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
    """Read all that lies between extents (first byte, number of bytes)."""
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
    """Return (first byte, number of bytes) of each array's values, chunk by chunk where there are chunks."""
    extents: list[tuple[int, int]] = []
    for dataset in file.values():
        if not isinstance(dataset, h5py.Dataset):
            continue
        if dataset.chunks is not None:
            dataset.id.chunk_iter(lambda chunk: extents.append((chunk.byte_offset, chunk.size)))
        elif (offset := dataset.id.get_offset()) is not None:
            extents.append((offset, dataset.id.get_storage_size()))
    return extents
