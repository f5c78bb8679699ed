"""Read how many bytes of sound a header announces, for formats whose length libsndfile does not check.

libsndfile reads a file that is cut short as if it were complete.  For WAV, AIFF and AU it logs the difference
(`audio.py`); for NIST SPHERE, RF64 and W64 it does not.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

#: First lines of a SPHERE file: its kind, and the number of bytes of the header.
_SPHERE = re.compile(rb"NIST_1A\s+(\d+)\s")
#: Position of the size of an RF64 file's data chunk (EBU Tech 3306): after "ds64", its size and the file's.
_RF64_DATA_SIZE = 28
#: Size field of a data chunk whose size does not fit the field.
_IN_DS64 = 0xFFFFFFFF
#: Name of the data chunk of Sony Wave64, a GUID.
_W64_DATA = b"data\xf3\xac\xd3\x11\x8c\xd1\x00\xc0\x4f\x8e\xdb\x8a"
#: More bytes than any file has: the header was written before the length was known.
_UNKNOWN = 1 << 62


def sound_bytes(path: Path, kind: str) -> tuple[int, int] | None:
    """Return how many bytes of sound a header announces and how many follow it.

    Args:
        path: the file.
        kind: its format, as named by soundfile.

    Returns:
        None: another format, or the header does not say.

    Raises:
        OSError: the file cannot be read.
    """
    announced = _ANNOUNCED.get(kind)
    if announced is None:
        return None
    with path.open("rb") as file:
        found = announced(file)
        if found is None or found[0] >= _UNKNOWN:
            return None
        return found[0], max(os.fstat(file.fileno()).st_size - found[1], 0)


def _sphere(file: BinaryIO) -> tuple[int, int] | None:
    """Return the bytes of sound that a SPHERE header announces, and where they begin."""
    begin = _SPHERE.match(file.read(16))
    if begin is None:
        return None
    size = int(begin[1])
    file.seek(0)
    header = file.read(size).partition(b"\nend_head")[0]
    # libsndfile writes a number as a text: "sample_n_bytes -s1 1" of u-law.
    values = dict(re.findall(rb"^(\w+) -(?:i|s\d+) (\d+)\s*$", header, re.MULTILINE))
    if b"sample_count" not in values or b"sample_n_bytes" not in values:
        return None
    frames, sample = int(values[b"sample_count"]), int(values[b"sample_n_bytes"])
    return frames * sample * int(values.get(b"channel_count", 1)), size


def _rf64(file: BinaryIO) -> tuple[int, int] | None:
    """Return the bytes of sound that an RF64 header announces, and where they begin."""
    head = file.read(_RF64_DATA_SIZE + 8)
    if head[12:16] != b"ds64":
        return None
    at = 12
    while len(chunk := _at(file, at, 8)) == 8:
        size = int.from_bytes(chunk[4:], "little")
        if chunk[:4] == b"data":
            return int.from_bytes(head[_RF64_DATA_SIZE:], "little") if size == _IN_DS64 else size, at + 8
        at += 8 + size + size % 2
    return None


def _w64(file: BinaryIO) -> tuple[int, int] | None:
    """Return the bytes of sound that a W64 header announces, and where they begin."""
    at = 40  # after "riff", the size of the file and "wave"
    while len(chunk := _at(file, at, 24)) == 24:
        size = int.from_bytes(chunk[16:], "little")  # including these 24 bytes
        if chunk[:16] == _W64_DATA:
            return size - 24, at + 24
        if size < 24:
            return None
        at += (size + 7) // 8 * 8
    return None


def _at(file: BinaryIO, place: int, count: int) -> bytes:
    """Return `count` bytes from a position in the file, fewer at its end."""
    if place >= _UNKNOWN:
        return b""
    file.seek(place)
    return file.read(count)


_ANNOUNCED: dict[str, Callable[[BinaryIO], tuple[int, int] | None]] = {
    "NIST": _sphere,
    "RF64": _rf64,
    "W64": _w64,
}
