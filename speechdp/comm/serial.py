"""The communicator of a single process: every exchange is the identity."""

from __future__ import annotations

from typing import ClassVar, NoReturn

import torch
from torch import Tensor

from speechdp.comm.base import Communicator, CompletedWork, ReduceOp, Work
from speechdp.comm.environment import end_process


class SerialCommunicator(Communicator):
    """One rank, no peers, no library behind it."""

    backend: ClassVar[str] = "serial"
    reducible: ClassVar[frozenset[torch.dtype]] = Communicator.reducible | {torch.float16, torch.bfloat16}

    def __init__(self) -> None:
        self.rank = 0
        self.size = 1
        self.local_rank = 0

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
