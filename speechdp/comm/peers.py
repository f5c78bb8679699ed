"""What point-to-point channels share: argument checks and byte counts."""

from __future__ import annotations

import threading
from abc import abstractmethod

from torch import Tensor

from speechdp.comm.base import PeerCommunicator
from speechdp.errors import CommunicationError

NUM_TAGS = 1000


class CheckedPeers(PeerCommunicator):
    """A channel that checks its arguments before a back-end sees them.

    Messages without elements are like any other: the receiver waits for them, and they carry 0 bytes.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._counting = threading.Lock()
        self._turns: dict[tuple[int, int], threading.Lock] = {}
        self._closed = False

    def send(self, x: Tensor, dest: int, *, tag: int = 0) -> None:
        self._check(f"send to rank {dest}", x, dest, tag)
        # A message may travel in several pieces; another thread's pieces must not come between them.
        with self._turns.setdefault((dest, tag), threading.Lock()):
            self._send(x, dest, tag)
        with self._counting:
            self.sent_bytes += x.nbytes

    def recv(self, x: Tensor, source: int | None = None, *, tag: int = 0) -> int:
        self._check(f"receive from {_name(source)}", x, source, tag)
        return self._recv(x, source, tag)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._close()

    def abandon(self) -> None:
        if not self._closed:
            self._closed = True
            self._abandon()

    def wrong_size(self, expected: int, received: int, source: int, tag: int) -> CommunicationError:
        """Return the error for a message whose size differs from that of the receiving tensor."""
        return CommunicationError(
            f"rank {self.rank} expected {expected} bytes with tag {tag} from rank {source}, which sent "
            f"{received}; both ranks must name a tensor of the same shape and dtype"
        )

    def _check(self, what: str, x: Tensor, other: int | None, tag: int) -> None:
        if self._closed:
            raise CommunicationError(f"rank {self.rank} cannot {what}: the channel is closed")
        if self.size == 1:
            raise CommunicationError(f"rank {self.rank} cannot {what}: it is the only rank")
        if other is not None and (other == self.rank or not 0 <= other < self.size):
            raise CommunicationError(
                f"rank {self.rank} cannot {what}: not one of the other ranks (of {self.size})"
            )
        if not 0 <= tag < NUM_TAGS:
            raise CommunicationError(
                f"rank {self.rank} cannot {what} with tag {tag}; tags are 0 to {NUM_TAGS - 1}"
            )
        if not x.is_contiguous():
            raise CommunicationError(f"rank {self.rank} cannot {what}: the tensor is not contiguous")

    @abstractmethod
    def _send(self, x: Tensor, dest: int, tag: int) -> None: ...

    @abstractmethod
    def _recv(self, x: Tensor, source: int | None, tag: int) -> int: ...

    @abstractmethod
    def _close(self) -> None: ...

    def _abandon(self) -> None:
        return None


def _name(source: int | None) -> str:
    return "any rank" if source is None else f"rank {source}"
