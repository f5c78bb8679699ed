"""Number formats of compressed exchanges and their sizes; without torch, which is slow to import."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from speechdp.errors import ConfigError

if TYPE_CHECKING:
    import torch

#: Number format in which differences travel.
Compression = Literal["none", "int8", "int4"]
#: Bits per value of each format.
BITS = {"int8": 8, "int4": 4}
#: Values that share a scale; a short block wastes bytes on scales, a long one is coarse where values differ.
BLOCK = 256
#: Size of the weight at the start of a message, a float64.
HEADER_BYTES = 8
SCALE_BYTES = 4
#: Message sizes are multiples of this, so that in a row of messages each is aligned for its header.
_ALIGNMENT_BYTES = 8


def message_bytes(length: int, bits: int) -> int:
    """Return the size of the message of `length` values, in bytes."""
    blocks = -(-length // BLOCK)
    wanted = HEADER_BYTES + blocks * (SCALE_BYTES + BLOCK * bits // 8)
    return -(-wanted // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def refuse_half_precision(option: str, dtype: torch.dtype) -> None:
    """Refuse half-precision parameters, beside which the errors of compression cannot be kept.

    Args:
        option: the option as given: slowmo:compression=int8.

    Raises:
        ConfigError: the parameters are in half precision.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in ("float32", "float64"):
        raise ConfigError(f"{option}: the parameters are {name}; make them float32, or leave compression out")


def share_of_bytes(compression: Compression) -> float:
    """Return the ratio of bytes of a compressed exchange to those in single precision."""
    if compression == "none":
        return 1.0
    return message_bytes(2**20 * BLOCK, BITS[compression]) / (4 * 2**20 * BLOCK)
