"""Number formats of compressed averages and the bytes they take: known without torch, slow to import."""

from __future__ import annotations

from typing import Literal

#: Number format in which differences travel.
Compression = Literal["none", "int8", "int4"]
#: Bits a value for each of them.
BITS = {"int8": 8, "int4": 4}
#: Values that share a scale; a short one wastes bytes on scales, a long one is coarse where values differ.
BLOCK = 256
#: The weight in front of a message, as float64.
HEADER_BYTES = 8
SCALE_BYTES = 4
#: Messages are whole multiples of this, so that in a row of them each is aligned for its header.
_ALIGNMENT_BYTES = 8


def message_bytes(length: int, bits: int) -> int:
    """Return how long the message of `length` values is, in bytes."""
    blocks = -(-length // BLOCK)
    wanted = HEADER_BYTES + blocks * (SCALE_BYTES + BLOCK * bits // 8)
    return -(-wanted // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def share_of_bytes(compression: Compression) -> float:
    """Return the bytes of a compressed exchange over those of one in single precision."""
    if compression == "none":
        return 1.0
    return message_bytes(2**20 * BLOCK, BITS[compression]) / (4 * 2**20 * BLOCK)
