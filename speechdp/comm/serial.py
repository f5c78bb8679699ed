"""The communicator of a single process, where every exchange is the identity."""

from __future__ import annotations

from typing import ClassVar, NoReturn

import torch
from torch import Tensor

from speechdp.comm.base import Communicator, CompletedWork, PeerCommunicator, ReduceOp, Work
from speechdp.comm.environment import end_process
from speechdp.comm.peers import CheckedPeers
from speechdp.comm.sums import REDUCIBLE


class SerialPeers(CheckedPeers):
    """The channel of a single rank: sending and receiving are errors."""

    def __init__(self) -> None:
        super().__init__(0, 1)

    # The base class refuses every message of a single rank; these keep the contract complete.

    def _send(self, x: Tensor, dest: int, tag: int) -> None:
        raise AssertionError("a message of a single rank")

    def _recv(self, x: Tensor, source: int | None, tag: int) -> int:
        raise AssertionError("a message of a single rank")

    def _close(self) -> None:
        return None


class SerialCommunicator(Communicator):
    """One rank without peers or a communication library."""

    backend: ClassVar[str] = "serial"
    reducible: ClassVar[frozenset[torch.dtype]] = REDUCIBLE["serial"]

    def __init__(self) -> None:
        self.rank = 0
        self.size = 1
        self.local_rank = 0

    def peers(self) -> PeerCommunicator:
        return SerialPeers()

    def _split(self, color: int) -> Communicator:
        return self

    def barrier(self) -> None:
        return None

    def close(self) -> None:
        return None

    def abort(self, exit_code: int) -> NoReturn:
        end_process(exit_code)

    # The base class answers every exchange of a single rank itself; these keep the contract complete.

    def _allreduce_async(self, x: Tensor, name: str, op: ReduceOp) -> Work:
        return CompletedWork()

    def _broadcast(self, x: Tensor, name: str, root: int) -> None:
        return None

    def _allgather_bytes(self, data: bytes) -> list[bytes]:
        return [data]
