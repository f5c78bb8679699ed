"""Ranks over torch.distributed: gloo on CPU, nccl on CUDA.

mpirun alone starts it: the ranks meet over MPI, where rank 0 tells the others the port of its TCPStore.
Under torchrun its own rendezvous serves and no MPI is needed.
"""

from __future__ import annotations

import datetime
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore

from speechdp.comm import environment, network
from speechdp.comm.base import Communicator, PeerCommunicator, ReduceOp, Work
from speechdp.comm.staging import as_bytes
from speechdp.errors import CommunicationError, ConfigError

T = TypeVar("T")

_OPS = {ReduceOp.SUM: dist.ReduceOp.SUM, ReduceOp.MAX: dist.ReduceOp.MAX, ReduceOp.MIN: dist.ReduceOp.MIN}
#: how long an exchange may take before torch calls the peers lost; evaluations by one rank count too.
TIMEOUT = datetime.timedelta(minutes=30)


class _TorchWork(Work):
    def __init__(self, work: Any, name: str) -> None:
        self._work, self._name = work, name

    def wait(self) -> None:
        checked(f"allreduce of {self._name!r}", self._work.wait)


@dataclass(frozen=True)
class _Meeting:
    """How this rank found the others: its place among all ranks of the job, and the store they share."""

    rank: int
    size: int
    local_rank: int
    store: Any
    over_mpi: bool


class TorchGroup(Communicator):
    """The ranks of one process group, all or some of the job's.

    Args:
        meeting: where all ranks of the job met.
        group: process group of torch.distributed; None for the one of all ranks.
        ranks: rank in the job of every rank of the group.
        scope: what this group calls itself in the store; no other group does.
    """

    backend: ClassVar[str] = "torch"
    # gloo was measured right for both; bfloat16 is rounded at every hop.
    reducible: ClassVar[frozenset[torch.dtype]] = Communicator.reducible | {torch.float16, torch.bfloat16}

    def __init__(self, meeting: _Meeting, group: Any, ranks: Sequence[int], scope: str) -> None:
        self._meeting, self._group, self._ranks, self._scope = meeting, group, ranks, scope
        self.rank, self.size = ranks.index(meeting.rank), len(ranks)
        self.local_rank = meeting.local_rank
        self._num_channels = 0
        self._closed = False

    def peers(self) -> PeerCommunicator:
        from speechdp.comm.torch_peers import TorchPeers  # noqa: PLC0415  imports this module

        name = f"{self._scope}/peers-{self._num_channels}"
        self._num_channels += 1
        return TorchPeers(PrefixStore(name, self._meeting.store), self.rank, self.size)

    def split(self, color: int) -> Communicator:
        # torch.distributed makes a group only if all ranks of the job are there, or else names it by its
        # members: made, released and made again, such a group would find the old one's traces in the store.
        raise ConfigError(
            "the torch back-end cannot split a group once more; split the communicator of all ranks, "
            "or choose --backend mpi"
        )

    def barrier(self) -> None:
        # On the CPU: gloo waits in poll() and does not spin.
        checked("barrier", lambda: dist.all_reduce(torch.zeros(1), group=self._group))

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.barrier()
        dist.destroy_process_group(self._group)

    def abort(self, exit_code: int) -> NoReturn:
        if self._meeting.over_mpi:
            from speechdp.comm.mpi import abort_world  # noqa: PLC0415

            abort_world(exit_code)
        environment.end_process(exit_code or 1)

    def _allreduce_async(self, x: Tensor, name: str, op: ReduceOp) -> Work:
        def start() -> Any:
            return dist.all_reduce(x.detach(), op=_OPS[op], group=self._group, async_op=True)

        return _TorchWork(checked(f"allreduce of {name!r}", start), name)

    def _broadcast(self, x: Tensor, name: str, root: int) -> None:
        source = self._ranks[root]
        checked(f"broadcast of {name!r}", lambda: dist.broadcast(as_bytes(x), src=source, group=self._group))

    def _allgather_bytes(self, data: bytes) -> list[bytes]:
        part = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0).byte()
        sizes = [int(s) for s in self._allgather(torch.tensor([part.numel()]))]
        padded = torch.zeros(max(1, *sizes), dtype=torch.uint8)
        padded[: part.numel()] = part
        gathered = self._allgather(padded)
        return [g[:n].numpy().tobytes() for g, n in zip(gathered, sizes, strict=True)]

    def _allgather(self, x: Tensor) -> list[Tensor]:
        gathered = [torch.empty_like(x) for _ in range(self.size)]
        checked("allgather", lambda: dist.all_gather(gathered, x, group=self._group))
        return gathered


class TorchCommunicator(TorchGroup):
    """All ranks of the job, or of a part of it.

    Args:
        device: where the tensors live; CUDA selects nccl.
        part: communicator over MPI of the ranks to be joined, where these are not all of the job.

    Raises:
        CommunicationError: the ranks cannot meet.
    """

    def __init__(self, device: torch.device, part: Communicator | None = None) -> None:
        by_torchrun = part is None and environment.torchrun_rendezvous() is not None
        meeting = _meet_by_torchrun() if by_torchrun else _meet_over_mpi(part)
        super().__init__(meeting, None, range(meeting.size), "speechdp")
        self._num_splits = 0
        if device.type == "cuda" and device.index is None:
            # Which GPU is ours is known only now that the ranks of this host have been counted.
            device = torch.device("cuda", self.local_rank % torch.cuda.device_count())
        options: dict[str, Any] = {"device_id": device} if device.type == "cuda" else {}
        checked(
            "init_process_group",
            lambda: dist.init_process_group(
                # Counters and objects live on the CPU whatever the model's device.
                "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
                store=meeting.store,
                rank=self.rank,
                world_size=self.size,
                timeout=TIMEOUT,
                **options,
            ),
        )

    def split(self, color: int) -> Communicator:
        colors: list[int] = self.allgather_object(color)
        self._num_splits += 1
        members = {c: [r for r, other in enumerate(colors) if other == c] for c in sorted(set(colors))}
        # Every rank makes every group: torch.distributed waits for all of them.
        groups = checked("split", lambda: {c: dist.new_group(m, timeout=TIMEOUT) for c, m in members.items()})
        scope = f"{self._scope}/split-{self._num_splits}-{color}"
        return TorchGroup(self._meeting, groups[color], members[color], scope)

    def leave(self, exit_code: int) -> None:
        # Now and then torch.distributed ends a process that exits in the ordinary way with "terminate called
        # without an active exception": a thread of its own that nobody has joined by then.
        if self._meeting.over_mpi:
            from speechdp.comm.mpi import finalise  # noqa: PLC0415

            finalise()
        environment.end_process(exit_code)


def _meet_over_mpi(part: Communicator | None) -> _Meeting:
    from speechdp.comm.mpi import MpiCommunicator  # noqa: PLC0415  initialises MPI

    mpi = MpiCommunicator() if part is None else part
    interface = network.interface_between(mpi.rank, mpi.allgather_object(environment.host_name()))
    environment.prefer_gloo_interface(interface.name)
    address = interface.address
    store: Any | None = None
    port = 0
    if mpi.rank == 0:
        store, port = _listen(address, mpi.size)
    address, port = mpi.broadcast_object([address, port])
    if store is None:
        store = checked(
            f"reaching rank 0 at {address}:{port}",
            lambda: _store(address, port, mpi.size),
        )
    if part is None:
        mpi.close()
    return _Meeting(mpi.rank, mpi.size, mpi.local_rank, store, over_mpi=True)


def _meet_by_torchrun() -> _Meeting:
    launch = environment.announced()
    rendezvous = environment.torchrun_rendezvous()
    assert launch is not None and rendezvous is not None
    # torchrun's agent already serves the store at this address.
    store = _store(*rendezvous, launch.size)
    return _Meeting(launch.rank, launch.size, environment.torchrun_local_rank(), store, over_mpi=False)


def _listen(address: str, size: int) -> tuple[Any, int]:
    """Open rank 0's store on a free port of one address, so that nothing listens on the others."""
    listener = socket.create_server((address, 0), backlog=2 * size)
    port = int(listener.getsockname()[1])
    # The store takes the socket over; a port merely looked up could be taken by somebody else meanwhile.
    return _store(address, port, size, listen_fd=listener.detach()), port


def _store(address: str, port: int, size: int, listen_fd: int | None = None) -> Any:
    return dist.TCPStore(  # type: ignore[attr-defined]
        address,
        port,
        size,
        is_master=listen_fd is not None,
        timeout=TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listen_fd,
    )


def checked(what: str, call: Callable[[], T]) -> Any:
    """Call, and turn torch.distributed's error into a CommunicationError that says what was called."""
    try:
        return call()
    except RuntimeError as error:  # torch.distributed's errors are all of this class
        reason = " ".join(str(error).split())
        raise CommunicationError(f"{what} failed in torch.distributed: {reason}") from error
