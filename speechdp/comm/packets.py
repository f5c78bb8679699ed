"""Packets between ranks: a small JSON-like header followed by tensors, sent and received without waiting.

For a message of `PeerCommunicator` the receiver must know the size, and the sender waits.  A packet describes
its own contents, and its sender continues at once.  Feeders send batches in packets.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from speechdp.errors import CommunicationError

#: Allocates memory for a tensor of this shape and dtype that is about to arrive.
Allocate: TypeAlias = Callable[[Sequence[int], torch.dtype], Tensor]
#: Called when a packet has left, with the seconds for which it occupied the outgoing channel.
Sent: TypeAlias = Callable[[float], None]

_FIRST_SLEEP_S, _LONGEST_SLEEP_S, _LONGEST_SLEEP_MOVING_S = 20e-6, 1e-3, 100e-6
#: For this long after the last packet a pending transfer is polled without sleeping: through shared memory
#: without single-copy transfers, the pieces of a tensor arrive as fast as both ranks fetch them.
_BUSY_S = 2e-3


def fresh(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Allocate ordinary memory."""
    return torch.empty(*shape, dtype=dtype)


@dataclass(frozen=True)
class Packet:
    """A packet from another rank.

    Attributes:
        source: rank of the sender.
        head: header, JSON-like.
        tensors: tensors on the CPU.
    """

    source: int
    head: dict[str, Any]
    tensors: tuple[Tensor, ...] = ()


class PacketChannel(ABC):
    """Packets between any two ranks, on a separate channel; only `close` is collective.

    Packets from one rank to another arrive in the order in which they were sent.  Transfers make progress
    only during calls of `receive`, which one thread of a rank may make at a time; any thread may send.

    Attributes:
        sent_bytes: payload this rank has sent.
    """

    rank: int
    size: int
    sent_bytes: int = 0

    @abstractmethod
    def send(
        self, dest: int, head: dict[str, Any], tensors: Sequence[Tensor] = (), sent: Sent | None = None
    ) -> None:
        """Begin to send a packet and return at once.

        Args:
            dest: another rank.
            head: header, JSON-like.
            tensors: contiguous tensors on the CPU; kept, and not to be written, until they have left.
            sent: called when they have left, by the thread that calls `receive`.  Its seconds begin when the
                previous packet has left, so their sum is how long the outgoing channel was in use.

        Raises:
            CommunicationError: the packet cannot be sent.
        """

    @abstractmethod
    def receive(self) -> Packet | None:
        """Return a packet that has arrived, or None.  Advance pending transfers; never wait.

        Raises:
            CommunicationError: the transport has failed.
        """

    @property
    @abstractmethod
    def is_moving(self) -> bool:
        """Whether a transfer from or to this rank is pending."""

    @abstractmethod
    def close(self) -> None:
        """Release the channel.  Collective; no packet may be in flight; safe to call twice."""

    def check(self, dest: int, tensors: Sequence[Tensor]) -> None:
        """Refuse a `dest` that is not another rank of the channel, and tensors that cannot be sent."""
        if dest == self.rank or not 0 <= dest < self.size:
            raise CommunicationError(
                f"rank {self.rank} cannot send to rank {dest}: not one of the other ranks (of {self.size})"
            )
        for tensor in tensors:
            if tensor.is_cuda or not tensor.is_contiguous():
                raise CommunicationError(f"rank {self.rank} can send contiguous tensors on the CPU only")


class Pacing:
    """Sleeps between polls of a channel, for an eighth of the time waited so far, at most 1 ms."""

    def __init__(self) -> None:
        self._since_s = time.monotonic()

    def reset(self) -> None:
        """Start over, as something has arrived."""
        self._since_s = time.monotonic()

    def sleep(self, *, moving: bool) -> None:
        """Sleep until the next poll, which comes sooner while a transfer is pending (`moving`)."""
        waited_s = time.monotonic() - self._since_s
        if moving and waited_s < _BUSY_S:
            time.sleep(0)
            return
        longest_s = _LONGEST_SLEEP_MOVING_S if moving else _LONGEST_SLEEP_S
        time.sleep(min(max(waited_s / 8, _FIRST_SLEEP_S), longest_s))


def describe(tensors: Sequence[Tensor]) -> list[list[Any]]:
    """Return the dtype and shape of each tensor, JSON-like."""
    return [[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in tensors]


def make_room(description: list[list[Any]], allocate: Allocate) -> tuple[Tensor, ...]:
    """Allocate memory for tensors from what `describe` returned."""
    return tuple(allocate(shape, getattr(torch, dtype)) for dtype, shape in description)
