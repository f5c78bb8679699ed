"""Packets over MPI, without blocking.  Imported by communicator.py, which initialises MPI."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from speechdp.comm.mpi.library import MPI, checked, close_channel, parts
from speechdp.comm.packets import Allocate, Packet, PacketChannel, Sent, describe, make_room
from speechdp.comm.staging import as_bytes

_HEAD, _TENSOR = 0, 1


@dataclass
class _Leaving:
    """A packet being sent; keeps its memory alive until MPI has read it."""

    requests: list[Any]
    held: tuple[object, ...]
    sent: Sent | None
    begun_s: float = field(default_factory=time.monotonic)


@dataclass
class _Arriving:
    """A packet whose head has arrived and whose tensors are being received."""

    packet: Packet
    requests: list[Any]


class MpiPackets(PacketChannel):
    """A channel over an mpi4py communicator of its own.

    A head is matched (Improbe) before it is received, so it may have any size.  It says which tensors follow,
    and these are received (Irecv) straight into memory from `allocate`.  A packet that arrives while
    another's tensors are still in flight has memory of its own: the double buffer.

    Args:
        comm: mpi4py communicator that nothing else uses; `close` frees it.
        allocate: returns memory for arriving tensors.
    """

    def __init__(self, comm: Any, allocate: Allocate) -> None:
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self._comm, self._allocate = comm, allocate
        # A packet's tensors directly follow its head; no other thread's packet may come between.
        self._lock = threading.Lock()
        self._leaving: list[_Leaving] = []
        self._left_s = 0.0
        self._arriving: list[_Arriving] = []
        self._head: tuple[int, Any, bytearray] | None = None
        self._closed = False

    def send(
        self, dest: int, head: dict[str, Any], tensors: Sequence[Tensor] = (), sent: Sent | None = None
    ) -> None:
        self.check(dest, tensors)
        encoded = json.dumps([head, describe(tensors)]).encode()

        def run() -> None:
            requests = [self._comm.Isend(encoded, dest, _HEAD)]
            requests += [self._comm.Isend(piece, dest, _TENSOR) for piece in _pieces(tensors)]
            self._leaving.append(_Leaving(requests, (encoded, tuple(tensors)), sent))

        with self._lock:
            checked(f"send to rank {dest}", run)
            self.sent_bytes += len(encoded) + sum(tensor.nbytes for tensor in tensors)

    def receive(self) -> Packet | None:
        with self._lock:
            return checked("receive", self._move)

    @property
    def is_moving(self) -> bool:
        return bool(self._leaving or self._arriving or self._head)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        close_channel(self._comm)

    def _move(self) -> Packet | None:
        self._test_leaving()
        while self._next_head():
            pass
        unfinished: set[int] = set()
        for number, arriving in enumerate(self._arriving):
            source = arriving.packet.source
            # A rank's packets are returned in order, though a short one may be complete before a long one.
            if source not in unfinished and MPI.Request.Testall(arriving.requests):
                return self._arriving.pop(number).packet
            unfinished.add(source)
        return None

    def _test_leaving(self) -> None:
        still: list[_Leaving] = []
        for leaving in self._leaving:
            if not MPI.Request.Testall(leaving.requests):
                still.append(leaving)
                continue
            now_s = time.monotonic()
            if leaving.sent is not None:
                leaving.sent(now_s - max(leaving.begun_s, self._left_s))
            self._left_s = now_s
        self._leaving = still

    def _next_head(self) -> bool:
        """Receive the next head, if one has arrived, and post receives for its tensors; return whether so."""
        if self._head is None:
            status = MPI.Status()
            message = self._comm.Improbe(MPI.ANY_SOURCE, _HEAD, status)
            if message is None:
                return False
            memory = bytearray(status.Get_count(MPI.BYTE))
            self._head = (int(status.Get_source()), message.Irecv(memory), memory)
        source, request, memory = self._head
        if not request.Test():
            return False
        self._head = None
        head, description = json.loads(bytes(memory))
        tensors = make_room(description, self._allocate)
        # Posted in the order of the heads, which the tensors follow: MPI preserves each sender's order.
        requests = [self._comm.Irecv(piece, source, _TENSOR) for piece in _pieces(tensors)]
        self._arriving.append(_Arriving(Packet(source, head, tensors), requests))
        return True


def _pieces(tensors: Sequence[Tensor]) -> list[Any]:
    """Return the tensors' memory in pieces that one MPI call can count; none for an empty tensor."""
    return [piece.numpy() for tensor in tensors if tensor.numel() > 0 for piece in parts(as_bytes(tensor))]
