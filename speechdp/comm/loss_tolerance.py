"""Continue without lost ranks: errors, collectives through rank 0, repeated work."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import TypeVar

import torch
from torch import Tensor

from speechdp import remedies
from speechdp.comm.base import Communicator, PeerCommunicator, ReduceOp
from speechdp.errors import CommunicationError

T = TypeVar("T")

_PART, _RESULT, _GOODBYE = 0, 1, 2
_ABSENT = -1


class PeerLost(CommunicationError):  # noqa: N818 (what happened; not always an error)
    """Ranks that this rank waited for are lost; raised only where losses are tolerated.

    Attributes:
        ranks: all ranks known to be lost by now.
    """

    def __init__(self, ranks: Collection[int]) -> None:
        self.ranks = frozenset(ranks)
        named = ", ".join(str(rank) for rank in sorted(self.ranks))
        super().__init__(f"lost contact with rank {named}; {remedies.resuming()}")


def leader_lost() -> CommunicationError:
    """Return the error of ranks that have lost rank 0."""
    return CommunicationError(
        f"rank 0 is gone, and only it deals the batches, evaluates and saves; {remedies.resuming()}"
    )


class Star:
    """Collectives of a channel's remaining ranks, one at a time.

    Every rank sends its part to rank 0, and receives the result and the list of ranks whose parts are in it.
    So all agree on the list, whichever ranks are lost at whatever time, as long as rank 0 remains; nothing is
    ever repeated.  All bytes pass through rank 0, so this suits rare exchanges only.

    Args:
        peers: a channel that nothing else uses and whose calls raise PeerLost.

    Attributes:
        alive: ranks that took part in the last collective.
    """

    def __init__(self, peers: PeerCommunicator) -> None:
        self._peers = peers
        self.alive = tuple(range(peers.size))

    def barrier(self) -> None:
        """Return once every remaining rank has called it.  Collective."""
        self.allreduce(torch.empty(0), ReduceOp.SUM)

    def allreduce(self, x: Tensor, op: ReduceOp) -> None:
        """Combine `x`, on the CPU, over the remaining ranks, in place, in rank order.  Collective."""
        part = torch.empty_like(x)

        def take(rank: int) -> int:
            self._peers.recv(part, rank, tag=_PART)
            op.combine(x, part)
            return 0

        self._gather([x], take)
        self._share(x)

    def broadcast(self, x: Tensor, root: int) -> None:
        """Overwrite `x` with the `x` of `root`.  Collective.  Raises CommunicationError if `root` is lost."""
        none = x.new_empty(0)

        def take(rank: int) -> int:
            self._peers.recv(x if rank == root else none, rank, tag=_PART)
            return 0

        self._gather([x if self._peers.rank == root else none], take)
        if root not in self.alive:
            raise CommunicationError(
                f"rank {root} is gone, and the others need its values; {remedies.resuming()}"
            )
        self._share(x)

    def allgather(self, data: bytes) -> list[bytes]:
        """Return the bytes of every remaining rank, in rank order.  Collective."""
        own = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else _bytes(0)
        found = [own]

        def take(rank: int) -> int:
            size = torch.empty(1, dtype=torch.int64)
            self._peers.recv(size, rank, tag=_PART)
            part = _bytes(int(size))
            self._peers.recv(part, rank, tag=_PART)
            found.append(part)
            return part.numel()

        sizes = self._gather([torch.tensor([own.numel()]), own], take, own.numel())
        everything = torch.cat(found) if self._peers.rank == 0 else _bytes(sum(sizes))
        self._share(everything)
        return [part.numpy().tobytes() for part in torch.split(everything, sizes)]

    def part(self) -> None:
        """Let rank 0 leave last, so that no rank waiting for a result considers it lost.  Collective."""
        if self._peers.rank > 0:
            with contextlib.suppress(PeerLost):
                self._peers.send(_bytes(0), 0, tag=_GOODBYE)
            return
        for rank in self.alive[1:]:
            with contextlib.suppress(PeerLost):  # it left, but its goodbye did not arrive
                self._peers.recv(_bytes(0), rank, tag=_GOODBYE)

    def _gather(self, parts: list[Tensor], take: Callable[[int], int], own: int = 0) -> list[int]:
        """Send this rank's parts to rank 0, which combines them, and learn which ranks took part.

        Args:
            parts: tensors this rank sends.
            take: on rank 0, receives one rank's parts and returns a number that all ranks learn.
            own: rank 0's number.

        Returns:
            The number of each rank of `alive`.
        """
        numbers = torch.full((self._peers.size,), _ABSENT)
        if self._peers.rank == 0:
            numbers[0] = own
            for rank in self.alive[1:]:
                with contextlib.suppress(PeerLost):
                    numbers[rank] = take(rank)
            self.alive = _present(numbers)
        else:
            with _needing_the_leader():
                for part in parts:
                    self._peers.send(part, 0, tag=_PART)
        self._share(numbers)
        self.alive = _present(numbers)
        return [int(numbers[rank]) for rank in self.alive]

    def _share(self, x: Tensor) -> None:
        """Overwrite `x` with rank 0's on all ranks that took part."""
        if self._peers.rank > 0:
            with _needing_the_leader():
                self._peers.recv(x, 0, tag=_RESULT)
            return
        for rank in self.alive[1:]:
            with contextlib.suppress(PeerLost):  # the next collective leaves it out
                self._peers.send(x, rank, tag=_RESULT)


@contextlib.contextmanager
def _needing_the_leader() -> Iterator[None]:
    try:
        yield
    except PeerLost:
        raise leader_lost() from None


def _present(numbers: Tensor) -> tuple[int, ...]:
    return tuple(rank for rank, number in enumerate(numbers.tolist()) if number != _ABSENT)


def _bytes(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8)


def in_shares(comm: Communicator, work: Callable[[int, int], T]) -> T:
    """Run each rank's share of some work and return the combined result.  Collective.

    Args:
        work: called with this rank's share, 0 <= share < number, and the number of shares; must end with
            the collective that combines the shares.  Called again if a rank was lost with its share.
    """
    while True:
        alive = comm.alive
        result = work(alive.index(comm.rank), len(alive))
        if comm.alive == alive:
            return result
