"""Ranks over Horovod: collectives by its background thread, over Gloo or MPI.

Horovod matches exchanges by name, so their order may differ between ranks.  Fusion is off by default
(`comm/environment.py`): what is fused depends on what happened to be ready, and with it the last bit.
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
    """A reduction that Horovod has been given.

    Args:
        staged: what is reduced.
        name: as messages have it.
        op: how.
        under_way: names that Horovod is at work on; this one is added until it has been waited for.
    """

    def __init__(self, staged: Staged, name: str, op: ReduceOp, under_way: set[str]) -> None:
        self._staged, self._name, self._under_way = staged, name, under_way
        self._done = False
        # Horovod refuses a name that it is at work on, as two runs of a script may have it there.
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
    """All ranks that Horovod knows of.

    Attributes:
        controller: `gloo` or `mpi`; what carries Horovod's messages and sums.

    Args:
        part: communicator over MPI of the ranks that Horovod is to know of, where these are not all of the
            job; to be closed after this one.

    Raises:
        CommunicationError: Horovod cannot start, or has been started, and ended, in this process before.
    """

    backend: ClassVar[str] = "horovod"
    #: Whether Horovod has been shut down in this process: started again, it ends in a segmentation fault.
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
        # Without NCCL in this build Horovod would refuse, or copy behind our back, what is on a GPU.
        self._reads_cuda = bool(hvd.nccl_built())
        # Horovod itself has collectives only; the MPI that started its ranks is still there.
        self.has_peers = not environment.started_by_horovodrun()
        self._closed = False
        #: The same ranks over MPI, for messages and groups, once one has been asked for.
        self._mpi: Communicator | None = None
        #: Names of reductions that have not been waited for.
        self._under_way: set[str] = set()

    def _start_over_mpi(self) -> None:
        # mpi4py first: Horovod joins an MPI that is already there, and leaves it to mpi4py to end it.
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
        # Not hvd.barrier, which spins.
        _checked("barrier", lambda: _finish(hvd.allreduce_async_(torch.zeros(1), name="speechdp.barrier")))

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        # A rank that shuts down while others still exchange would fail their exchange.
        self.barrier()
        if self._mpi is not None:
            self._mpi.close()
        HorovodCommunicator._has_ended = True
        hvd.shutdown()

    def abort(self, exit_code: int) -> NoReturn:
        if not environment.started_by_horovodrun():
            from speechdp.comm.mpi.library import abort_world  # noqa: PLC0415

            abort_world(exit_code)
        # horovodrun ends the other ranks as soon as one has left with a failure.
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
    """Wait for an exchange and return its result; hvd.synchronize alone would spin until then."""
    sleep_until(lambda: bool(hvd.poll(handle)))
    return hvd.synchronize(handle)


def _checked(what: str, call: Callable[[], T]) -> Any:
    try:
        return call()
    except HorovodInternalError as error:
        reason = one_line(error)
        raise CommunicationError(f"{what} failed in Horovod: {reason}") from error
