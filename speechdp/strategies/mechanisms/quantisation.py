"""Represent vectors as integers of 8 or 4 bits, with one scale per block of values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from speechdp.strategies.mechanisms.number_formats import BLOCK, HEADER_BYTES, SCALE_BYTES, message_bytes

#: Number of values processed at a time, so that a pass finds the previous one's results in the cache.
_STRETCH = 512 * BLOCK
#: Lowest scale, whose inverse is still finite: a block of zeros has it.
_LEAST_SCALE = float(torch.finfo(torch.float32).tiny)


@dataclass(frozen=True)
class Message:
    """A quantised vector as it is sent: weight, scales, codes.

    Attributes:
        whole: all its bytes.
        length: number of values in the vector.
        weight: weight of the sending rank.  (1,), float64
        scales: one per block.  (blocks,), float32
        codes: codes of each block, the last one padded.  (blocks, BLOCK) bytes, or half of it with 4 bits
    """

    whole: Tensor
    length: int
    weight: Tensor
    scales: Tensor
    codes: Tensor

    @staticmethod
    def over(memory: Tensor, length: int, bits: int) -> Message:
        """Return the message of `length` values at the start of `memory` (uint8, aligned)."""
        blocks = -(-length // BLOCK)
        whole = memory[: message_bytes(length, bits)]
        codes_at = HEADER_BYTES + SCALE_BYTES * blocks
        block_bytes = BLOCK * bits // 8
        return Message(
            whole,
            length,
            whole[:HEADER_BYTES].view(torch.float64),
            whole[HEADER_BYTES:codes_at].view(torch.float32),
            whole[codes_at : codes_at + blocks * block_bytes].view(blocks, block_bytes),
        )


class Quantiser:
    """Write vectors into messages and read them back, stretch by stretch, in buffers of its own.

    A code is the nearest integer multiple of its block's scale, which is the largest magnitude in the block
    over 127 (8 bits) or 7 (4 bits): an error is at most half a scale.  A block with a value that is not
    finite is read back with values that are not finite.

    Args:
        bits: bits per code, 8 or 4.
        like: a vector of the type and device of those to be written, float32 or float64.
    """

    def __init__(self, bits: int, like: Tensor) -> None:
        assert bits in (8, 4), bits
        self.bits = bits
        self._levels = 2 ** (bits - 1) - 1
        #: Buffer for the caller's current stretch; `write` overwrites it.
        self.values = like.new_empty(_STRETCH)
        self._decoded = like.new_empty(_STRETCH)
        blocks = _STRETCH // BLOCK
        self._whole = torch.empty(blocks, BLOCK, dtype=torch.uint8, device=like.device)

    def message(self, memory: Tensor, length: int) -> Message:
        """Return the message of `length` values in `memory`, with this number of bits."""
        return Message.over(memory, length, self.bits)

    def write(self, message: Message, start: int, length: int) -> None:
        """Write the first `length` of `values` to position `start` in a message; overwrites `values`.

        Args:
            start: start of a stretch.
            length: length of the stretch.
        """
        blocks = -(-length // BLOCK)
        self.values[length : blocks * BLOCK] = 0.0
        rows = self.values[: blocks * BLOCK].view(blocks, BLOCK)
        first = start // BLOCK
        # Many times faster than one pass of `aminmax`, or of a norm.
        largest = torch.abs(rows, out=self._decoded[: rows.numel()].view_as(rows)).amax(1)
        scales = message.scales[first : first + blocks].copy_(largest.div_(self._levels))
        scales.clamp_(min=_LEAST_SCALE)
        # In single precision, as the reader will have them.
        rows.mul_(scales.to(rows.dtype).reciprocal().unsqueeze(1)).round_()
        codes = message.codes[first : first + blocks]
        if self.bits == 8:
            codes.view(torch.int8).copy_(rows)
            return
        # Two values per byte, with 8 added to each; in separate steps, modulo 256.
        half, whole = BLOCK // 2, self._whole[:blocks]
        whole.view(torch.int8).copy_(rows)
        torch.add(whole[:, :half], whole[:, half:], alpha=16, out=codes).add_(8 + 8 * 16)

    def read(self, message: Message, start: int, length: int) -> Tensor:
        """Return the stretch of a message that starts at `start`, valid until the next.  (length,)"""
        blocks = -(-length // BLOCK)
        rows = self._decoded[: blocks * BLOCK].view(blocks, BLOCK)
        first = start // BLOCK
        codes = message.codes[first : first + blocks]
        if self.bits == 8:
            rows.copy_(codes.view(torch.int8))
        else:
            half, whole = BLOCK // 2, self._whole[:blocks]
            torch.bitwise_and(codes, 15, out=whole[:, :half])
            torch.bitwise_right_shift(codes, 4, out=whole[:, half:])
            rows.copy_(whole).sub_(8)
        rows.mul_(message.scales[first : first + blocks].to(rows.dtype).unsqueeze(1))
        return self._decoded[:length]

    def write_difference(self, message: Message, x: Tensor, known: Tensor) -> None:
        """Write Q(x - known) to a message, and add to `known` what readers will add to theirs.

        The rounding error of `x` is thereby part of the next difference.

        Args:
            x: vector of the message's length.  (n,)
            known: the same wherever the message is read.  (n,)
        """
        for start, end in stretches(message.length):
            torch.sub(x[start:end], known[start:end], out=self.values[: end - start])
            self.write(message, start, end - start)
            known[start:end].add_(self.read(message, start, end - start))

    def add_difference(self, message: Message, known: Tensor) -> None:
        """Add to `known` what `write_difference` added to the sender's.  (n,)"""
        for start, end in stretches(message.length):
            known[start:end].add_(self.read(message, start, end - start))


def stretches(length: int) -> list[tuple[int, int]]:
    """Return start and end of each stretch of a vector."""
    return [(start, min(start + _STRETCH, length)) for start in range(0, length, _STRETCH)]
