"""Ranks over Horovod: collectives in its background thread, over Gloo or MPI.

Horovod matches exchanges by name, so their order may differ between ranks.  Fusion is off by default
(`comm/environment.py`): what Horovod fuses depends on what happens to be ready, and with it the last bit of a
sum.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, ClassVar, NoReturn, TypeVar

import torch
from torch import Tensor

from speechdp import remedies
from speechdp.comm import environment
from speechdp.comm.base import Communicator, PeerCommunicator, ReduceOp, Work
from speechdp.comm.horovod.gloo import GlooMeeting, check_own_name, gloo_is_better
from speechdp.comm.staging import Staged, as_bytes
from speechdp.comm.sums import REDUCIBLE
from speechdp.comm.waiting import sleep_until
from speechdp.errors import CommunicationError, one_line

environment.prepare_horovod()

import horovod.torch as hvd  # noqa: E402  reads the settings above
from horovod.common.exceptions import HorovodInternalError  # noqa: E402

T = TypeVar("T")

_OPS = {ReduceOp.SUM: hvd.Sum, ReduceOp.MAX: hvd.Max, ReduceOp.MIN: hvd.Min}


class _HorovodWork(Work):
    """A reduction submitted to Horovod.

    Args:
        staged: tensor to reduce.
        name: name of the exchange in messages.
        op: how values are combined.
        under_way: names of reductions in progress; contains this one's name until `wait` has returned.
    """

    def __init__(self, staged: Staged, name: str, op: ReduceOp, under_way: set[str]) -> None:
        self._staged, self._name, self._under_way = staged, name, under_way
        self._done = False
        # Horovod refuses a name that is in progress; two runs of a script may use the same one.
        numbered = (f"{name}#{number}" for number in itertools.count(2))
        self._own_name = next(n for n in itertools.chain([name], numbered) if n not in under_way)
        self._handle: int = _checked(
            f"allreduce of {name!r}",
            lambda: hvd.allreduce_async_(staged.fetch(), name=self._own_name, op=_OPS[op]),
        )
        under_way.add(self._own_name)

    def wait(self) -> None:
        if not self._done:
            _checked(f"allreduce of {self._name!r}", lambda: _finish(self._handle))
            self._staged.store()
            self._done = True
            self._under_way.discard(self._own_name)


class HorovodCommunicator(Communicator):
    """All ranks that Horovod knows.

    Attributes:
        controller: `gloo` or `mpi`: what Horovod's messages and sums travel over.

    Args:
        part: communicator over MPI of the ranks that Horovod is to know, if these are not all of the job's;
            closed by the caller after this one.

    Raises:
        CommunicationError: Horovod cannot start, or was already started and shut down in this process.
    """

    backend: ClassVar[str] = "horovod"
    #: Whether Horovod has been shut down in this process; starting it again would cause a segmentation fault.
    _has_ended: ClassVar[bool] = False
    reducible: ClassVar[frozenset[torch.dtype]] = REDUCIBLE["horovod"]

    def __init__(self, part: Communicator | None = None) -> None:
        if HorovodCommunicator._has_ended:
            raise CommunicationError(
                "Horovod cannot start a second time in a process: call run_ranks once (in a module that "
                'others import, under `if __name__ == "__main__":`), or choose ' + remedies.backend("mpi")
            )
        self._part = part
        if environment.started_by_horovodrun():
            if environment.is_spread_by_horovodrun():
                check_own_name()
            _checked("hvd.init", hvd.init)
        else:
            self._start_over_mpi()
        self.rank = int(hvd.rank())
        self.size = int(hvd.size())
        self.local_rank = int(hvd.local_rank())
        self.controller = "mpi" if hvd.mpi_enabled() else "gloo"
        # A Horovod built without NCCL would refuse tensors on a GPU, or copy them without our knowledge.
        self._reads_cuda = bool(hvd.nccl_built())
        # Horovod itself has collectives only; messages use the MPI that started its ranks.
        self.has_peers = not environment.started_by_horovodrun()
        self._closed = False
        #: The same ranks over MPI, for messages and groups; made when one is first requested.
        self._mpi: Communicator | None = None
        #: Names of reductions that have not been waited for.
        self._under_way: set[str] = set()

    def _start_over_mpi(self) -> None:
        # mpi4py first: Horovod uses an MPI that is already initialised, and leaves finalising it to mpi4py.
        # Abort and the comparison of the two worlds need mpi4py anyway.
        from speechdp.comm.mpi.communicator import MpiCommunicator  # noqa: PLC0415
        from speechdp.comm.mpi.library import world_rank  # noqa: PLC0415

        mpi = MpiCommunicator() if self._part is None else self._part
        if gloo_is_better(mpi) and hvd.gloo_built():
            meeting = GlooMeeting(mpi)
            with environment.set_meanwhile(meeting.settings):
                _checked("hvd.init", hvd.init)
            mpi.barrier()
            meeting.close()
        elif self._part is None:
            _checked("hvd.init", hvd.init)
        else:
            ranks = mpi.allgather_object(world_rank())
            _checked("hvd.init", lambda: hvd.init(comm=ranks))
        if self._part is None:
            mpi.close()

    def peers(self) -> PeerCommunicator:
        if not self.has_peers:
            return super().peers()
        if self._part is not None:
            return self._part.peers()
        return self._over_mpi().peers()

    def _split(self, color: int) -> Communicator:
        if not self.has_peers:
            return super()._split(color)
        if self._part is not None:
            return self._part.split(color)
        return self._over_mpi().split(color)

    def _over_mpi(self) -> Communicator:
        """Return the communicator of the same ranks over MPI, which `close` closes.  Collective."""
        if self._mpi is not None:
            return self._mpi
        from speechdp.comm.mpi.communicator import MpiCommunicator  # noqa: PLC0415

        mpi = MpiCommunicator()
        if (mpi.rank, mpi.size) != (self.rank, self.size):
            raise CommunicationError(
                f"rank {self.rank} of {self.size} in Horovod is rank {mpi.rank} of {mpi.size} in MPI, so "
                f"they cannot exchange messages over MPI; choose {remedies.backend('mpi')}"
            )
        self._mpi = mpi
        return mpi

    def barrier(self) -> None:
        # Not hvd.barrier, which busy-waits.
        _checked("barrier", lambda: _finish(hvd.allreduce_async_(torch.zeros(1), name="speechdp.barrier")))

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        # If a rank shut down while others still exchange, their exchange would fail.
        self.barrier()
        if self._mpi is not None:
            self._mpi.close()
        HorovodCommunicator._has_ended = True
        hvd.shutdown()

    def abort(self, exit_code: int) -> NoReturn:
        if not environment.started_by_horovodrun():
            from speechdp.comm.mpi.library import abort_world  # noqa: PLC0415

            abort_world(exit_code)
        # horovodrun ends the other ranks as soon as one has exited with a failure.
        environment.end_process(exit_code or 1)

    def _allreduce_async(self, x: Tensor, name: str, op: ReduceOp) -> Work:
        return _HorovodWork(Staged(x, direct=self._reads_cuda), name, op, self._under_way)

    def _broadcast(self, x: Tensor, name: str, root: int) -> None:
        staged = Staged(as_bytes(x), direct=self._reads_cuda)
        _checked(
            f"broadcast of {name!r}", lambda: _finish(hvd.broadcast_async_(staged.fetch(), root, name=name))
        )
        staged.store()

    def _allgather_bytes(self, data: bytes) -> list[bytes]:
        part = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0).byte()
        sizes = self._allgather(torch.tensor([part.numel()]), "speechdp.object_sizes").tolist()
        everything = self._allgather(part, "speechdp.objects")
        return [piece.numpy().tobytes() for piece in torch.split(everything, sizes)]

    def _allgather(self, x: Tensor, name: str) -> Tensor:
        gathered: Tensor = _checked("allgather", lambda: _finish(hvd.allgather_async(x, name=name)))
        return gathered


def _finish(handle: int) -> Any:
    """Wait for an exchange and return its result; hvd.synchronize alone would busy-wait."""
    sleep_until(lambda: bool(hvd.poll(handle)))
    return hvd.synchronize(handle)


def _checked(what: str, call: Callable[[], T]) -> Any:
    try:
        return call()
    except HorovodInternalError as error:
        reason = one_line(error)
        raise CommunicationError(f"{what} failed in Horovod: {reason}") from error
