"""A communicator all of whose calls, messages and packets are late now and then (late.py says when)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, NoReturn

from torch import Tensor

from speechdp.comm.base import Communicator, PeerCommunicator, ReduceOp, Work
from speechdp.comm.packets import Allocate, Packet, PacketChannel, Sent, fresh
from tests.faults.late import pause


class LateCommunicator(Communicator):
    """Another communicator, all of whose calls begin and end late now and then.

    Args:
        inner: does the work.
    """

    backend: ClassVar[str] = "late"

    def __init__(self, inner: Communicator) -> None:
        self._inner = inner
        self.rank, self.size, self.local_rank = inner.rank, inner.size, inner.local_rank
        self.role, self.has_peers = inner.role, inner.has_peers

    @property
    def sent_bytes(self) -> float:  # type: ignore[override]
        return self._inner.sent_bytes

    @sent_bytes.setter
    def sent_bytes(self, value: float) -> None:  # what is not of training is taken out again
        self._inner.sent_bytes = value

    @property
    def alive(self) -> tuple[int, ...]:
        return self._inner.alive

    @property
    def gone(self) -> frozenset[int]:
        return self._inner.gone

    def check_loss_tolerance(self) -> None:
        self._inner.check_loss_tolerance()

    def tolerate_loss(self) -> None:
        self._inner.tolerate_loss()

    def allreduce_async(self, x: Tensor, *, name: str, op: ReduceOp = ReduceOp.SUM) -> Work:
        pause("collective")
        return _LateWork(self._inner.allreduce_async(x, name=name, op=op))

    def broadcast(self, x: Tensor, *, name: str, root: int = 0) -> Tensor:
        with _around("collective"):
            return self._inner.broadcast(x, name=name, root=root)

    def allgather_object(self, value: Any) -> list[Any]:
        with _around("collective"):
            return self._inner.allgather_object(value)

    def peers(self) -> PeerCommunicator:
        with _around("collective"):
            return _LatePeers(self._inner.peers())

    def packets(self, allocate: Allocate = fresh) -> PacketChannel:
        with _around("collective"):
            return _LatePackets(self._inner.packets(allocate))

    def _split(self, color: int) -> Communicator:
        with _around("collective"):
            return LateCommunicator(self._inner.split(color))

    def barrier(self) -> None:
        with _around("collective"):
            self._inner.barrier()

    def close(self) -> None:
        with _around("collective"):
            self._inner.close()

    def leave(self, exit_code: int) -> None:
        self._inner.leave(exit_code)

    def abort(self, exit_code: int) -> NoReturn:
        self._inner.abort(exit_code)

    def _allreduce_async(self, x: Tensor, name: str, op: ReduceOp) -> Work:
        raise NotImplementedError

    def _broadcast(self, x: Tensor, name: str, root: int) -> None:
        raise NotImplementedError

    def _allgather_bytes(self, data: bytes) -> list[bytes]:
        raise NotImplementedError


@contextlib.contextmanager
def _around(kind: str) -> Iterator[None]:
    pause(kind)
    yield
    pause(kind)


class _LateWork(Work):
    def __init__(self, inner: Work) -> None:
        self._inner = inner

    def wait(self) -> None:
        with _around("wait"):
            self._inner.wait()


class _LatePeers(PeerCommunicator):
    def __init__(self, inner: PeerCommunicator) -> None:
        self._inner, self.rank, self.size = inner, inner.rank, inner.size

    @property
    def sent_bytes(self) -> int:  # type: ignore[override]
        return self._inner.sent_bytes

    @property
    def lost(self) -> frozenset[int]:  # type: ignore[override]
        return self._inner.lost

    def send(self, x: Tensor, dest: int, *, tag: int = 0) -> None:
        with _around("message"):
            self._inner.send(x, dest, tag=tag)

    def recv(self, x: Tensor, source: int | None = None, *, tag: int = 0) -> int:
        with _around("message"):
            return self._inner.recv(x, source, tag=tag)

    def close(self) -> None:
        with _around("collective"):
            self._inner.close()


class _LatePackets(PacketChannel):
    def __init__(self, inner: PacketChannel) -> None:
        self._inner, self.rank, self.size = inner, inner.rank, inner.size

    @property
    def sent_bytes(self) -> int:  # type: ignore[override]
        return self._inner.sent_bytes

    def send(
        self, dest: int, head: dict[str, Any], tensors: Sequence[Tensor] = (), sent: Sent | None = None
    ) -> None:
        with _around("packet"):
            self._inner.send(dest, head, tensors, sent)

    def receive(self) -> Packet | None:
        with _around("packet"):
            return self._inner.receive()

    @property
    def is_moving(self) -> bool:
        return self._inner.is_moving

    def close(self) -> None:
        with _around("collective"):
            self._inner.close()
