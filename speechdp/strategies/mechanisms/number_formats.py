"""Number formats of compressed exchanges and the bytes they take: known without torch, slow to import."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from speechdp.errors import ConfigError

if TYPE_CHECKING:
    import torch

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


def refuse_half_precision(option: str, dtype: torch.dtype) -> None:
    """Refuse parameters in half precision, beside which nothing can be kept of what compression takes away.

    Args:
        option: as it was given: slowmo:compression=int8.

    Raises:
        ConfigError: likewise.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in ("float32", "float64"):
        raise ConfigError(f"{option}: the parameters are {name}; make them float32, or leave compression out")


def share_of_bytes(compression: Compression) -> float:
    """Return the bytes of a compressed exchange over those of one in single precision."""
    if compression == "none":
        return 1.0
    return message_bytes(2**20 * BLOCK, BITS[compression]) / (4 * 2**20 * BLOCK)
