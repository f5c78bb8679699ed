"""Ranks over torch.distributed: gloo on CPU, nccl on CUDA.

mpirun alone starts it: the ranks meet over MPI, where rank 0 tells the others the port of its TCPStore.
Under torchrun its own rendezvous serves and no MPI is needed.
"""

from __future__ import annotations

import datetime
import socket
from collections.abc import Callable
from typing import Any, ClassVar, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from speechdp.comm import environment, network
from speechdp.comm.base import Communicator, ReduceOp, Work
from speechdp.comm.staging import as_bytes
from speechdp.errors import CommunicationError

T = TypeVar("T")

_OPS = {ReduceOp.SUM: dist.ReduceOp.SUM, ReduceOp.MAX: dist.ReduceOp.MAX, ReduceOp.MIN: dist.ReduceOp.MIN}
#: how long an exchange may take before torch calls the peers lost; evaluations by one rank count too.
_TIMEOUT = datetime.timedelta(minutes=30)


class _TorchWork(Work):
    def __init__(self, work: Any, name: str) -> None:
        self._work, self._name = work, name

    def wait(self) -> None:
        _checked(f"allreduce of {self._name!r}", self._work.wait)


class TorchCommunicator(Communicator):
    """All ranks of one process group.

    Args:
        device: where the tensors live; CUDA selects nccl.

    Raises:
        CommunicationError: the ranks cannot meet.
    """

    backend: ClassVar[str] = "torch"
    # gloo was measured right for both; bfloat16 is rounded at every hop.
    reducible: ClassVar[frozenset[torch.dtype]] = Communicator.reducible | {torch.float16, torch.bfloat16}

    def __init__(self, device: torch.device) -> None:
        self._over_mpi = environment.torchrun_rendezvous() is None
        self._closed = False
        store = self._meet_over_mpi() if self._over_mpi else self._meet_by_torchrun()
        if device.type == "cuda" and device.index is None:
            # Which GPU is ours is known only now that the ranks of this host have been counted.
            device = torch.device("cuda", self.local_rank % torch.cuda.device_count())
        options: dict[str, Any] = {"device_id": device} if device.type == "cuda" else {}
        _checked(
            "init_process_group",
            lambda: dist.init_process_group(
                # Counters and objects live on the CPU whatever the model's device.
                "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
                store=store,
                rank=self.rank,
                world_size=self.size,
                timeout=_TIMEOUT,
                **options,
            ),
        )

    def barrier(self) -> None:
        # On the CPU: gloo waits in poll() and does not spin.
        _checked("barrier", lambda: dist.all_reduce(torch.zeros(1)))

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.barrier()
        dist.destroy_process_group()

    def leave(self, exit_code: int) -> None:
        # Now and then torch.distributed ends a process that exits in the ordinary way with "terminate called
        # without an active exception": a thread of its own that nobody has joined by then.
        if self._over_mpi:
            from speechdp.comm.mpi import finalise  # noqa: PLC0415

            finalise()
        environment.end_process(exit_code)

    def abort(self, exit_code: int) -> NoReturn:
        if self._over_mpi:
            from speechdp.comm.mpi import abort_world  # noqa: PLC0415

            abort_world(exit_code)
        environment.end_process(exit_code or 1)

    def _meet_over_mpi(self) -> Any:
        from speechdp.comm.mpi import MpiCommunicator  # noqa: PLC0415  initialises MPI

        mpi = MpiCommunicator()
        self.rank, self.size, self.local_rank = mpi.rank, mpi.size, mpi.local_rank
        interface = network.interface_between(self.rank, mpi.allgather_object(environment.host_name()))
        environment.prefer_gloo_interface(interface.name)
        address = interface.address
        store: Any | None = None
        port = 0
        if self.rank == 0:
            store, port = _listen(address, self.size)
        address, port = mpi.broadcast_object([address, port])
        if store is None:
            store = _checked(
                f"reaching rank 0 at {address}:{port}",
                lambda: _store(address, port, self.size),
            )
        mpi.close()
        return store

    def _meet_by_torchrun(self) -> Any:
        launch = environment.announced()
        rendezvous = environment.torchrun_rendezvous()
        assert launch is not None and rendezvous is not None
        self.rank, self.size = launch.rank, launch.size
        self.local_rank = environment.torchrun_local_rank()
        # torchrun's agent already serves the store at this address.
        return _store(*rendezvous, self.size)

    def _allreduce_async(self, x: Tensor, name: str, op: ReduceOp) -> Work:
        call = f"allreduce of {name!r}"
        work = _checked(call, lambda: dist.all_reduce(x.detach(), op=_OPS[op], async_op=True))
        return _TorchWork(work, name)

    def _broadcast(self, x: Tensor, name: str, root: int) -> None:
        _checked(f"broadcast of {name!r}", lambda: dist.broadcast(as_bytes(x), src=root))

    def _allgather_bytes(self, data: bytes) -> list[bytes]:
        part = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0).byte()
        size = torch.tensor([part.numel()])
        all_sizes = [torch.empty_like(size) for _ in range(self.size)]
        _checked("allgather", lambda: dist.all_gather(all_sizes, size))
        sizes = [int(s) for s in all_sizes]
        padded = torch.zeros(max(1, *sizes), dtype=torch.uint8)
        padded[: part.numel()] = part
        gathered = [torch.empty_like(padded) for _ in range(self.size)]
        _checked("allgather", lambda: dist.all_gather(gathered, padded))
        return [g[:n].numpy().tobytes() for g, n in zip(gathered, sizes, strict=True)]


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
        timeout=_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listen_fd,
    )


def _checked(what: str, call: Callable[[], T]) -> Any:
    try:
        return call()
    except RuntimeError as error:  # torch.distributed's errors are all of this class
        reason = " ".join(str(error).split())
        raise CommunicationError(f"{what} failed in torch.distributed: {reason}") from error
