"""Where the ranks of torch.distributed meet: a file in memory on one host, else a store that rank 0 serves.

torch's TCPStore lets every process of the machine read and write what the ranks exchange through it.  So
ranks on one host do without it: they share a file without a name, which the kernel opens only for processes
of the same user and which disappears with rank 0.
"""

from __future__ import annotations

import datetime
import json
import os
import secrets
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from speechdp.comm import doors, environment, network
from speechdp.comm.base import Communicator
from speechdp.comm.device import refuse_mixed_kinds
from speechdp.errors import CommunicationError, one_line

T = TypeVar("T")

#: How long an exchange may take before torch considers the peers lost, including one rank's evaluations.
TIMEOUT = datetime.timedelta(minutes=30)


@dataclass(frozen=True)
class Rendezvous:
    """Where this rank met the others: its place among all ranks of the job, and the store they share.

    Attributes:
        connects_later: whether two ranks are connected only when they first exchange.
        listener: socket on which this rank serves the store; None: it does not serve it.
    """

    rank: int
    size: int
    local_rank: int
    store: Any
    over_mpi: bool
    connects_later: bool
    listener: socket.socket | None = None

    @contextmanager
    def connecting(self) -> Iterator[None]:
        """Let the block make a group; afterwards nobody else can connect, unless ranks connect later."""
        if self.connects_later:
            yield
            return
        with doors.close_new_listeners():
            yield
        # gloo has connected every two ranks of the group, so all of them have connected to the store.
        if self.listener is not None:
            doors.shut(self.listener)


def meet(part: Communicator | None, device: torch.device, *, connects_later: bool) -> Rendezvous:
    """Meet the other ranks.  Collective.

    Args:
        part: communicator over MPI of the ranks to join, if these are not all of the job's.
        device: device of this rank's tensors, of the same kind on all ranks: NCCL would wait in vain for a
            rank without a GPU.
        connects_later: see Rendezvous.

    Raises:
        CommunicationError: the ranks cannot reach one another, or only some have GPUs.
    """
    if part is None and environment.torchrun_rendezvous() is not None:
        return _meet_by_torchrun(device, connects_later)
    from speechdp.comm.mpi.communicator import MpiCommunicator  # noqa: PLC0415  initialises MPI

    mpi = MpiCommunicator() if part is None else part
    places: list[tuple[str, str]] = mpi.allgather_object([environment.host_name(), device.type])
    refuse_mixed_kinds(places)
    hosts = [host for host, _ in places]
    interface = network.interface_between(mpi.rank, hosts)
    environment.prefer_gloo_interface(interface.name)
    store = _share_file(mpi) if len(set(hosts)) == 1 else None
    listener: socket.socket | None = None
    if store is None:
        store, listener = _serve(mpi, interface.address)
    if part is None:
        mpi.close()
    return Rendezvous(mpi.rank, mpi.size, mpi.local_rank, store, True, connects_later, listener)


def _meet_by_torchrun(device: torch.device, connects_later: bool) -> Rendezvous:
    launch = environment.announced()
    rendezvous = environment.torchrun_rendezvous()
    assert launch is not None and rendezvous is not None
    # torchrun's agent already serves the store at this address.
    store = _store(*rendezvous, launch.size)
    store.set(_place_key(launch.rank), json.dumps([environment.host_name(), device.type]))
    refuse_mixed_kinds([json.loads(store.get(_place_key(rank))) for rank in range(launch.size)])
    local_rank = environment.torchrun_local_rank()
    return Rendezvous(
        launch.rank, launch.size, local_rank, store, over_mpi=False, connects_later=connects_later
    )


def _place_key(rank: int) -> str:
    """Return the store's key for a rank's host and kind of device."""
    return f"speechdp/place-{rank}"


def _share_file(mpi: Communicator) -> Any | None:
    """Return a store in a file in rank 0's memory; None if a rank cannot open it.  Collective."""
    path, name = "", ""
    if mpi.rank == 0:
        name = f"speechdp-{secrets.token_hex(8)}"
        # Open for the life of this process: channels opened later meet here too.
        path = f"/proc/{os.getpid()}/fd/{os.memfd_create(name)}"
    path, name = mpi.broadcast_object([path, name])
    # In a rank's own container, this process id may belong to another process, or to none.
    if not all(mpi.allgather_object(_is_file_in_memory(path, name))):
        return None
    return dist.FileStore(path, mpi.size)  # type: ignore[attr-defined]


def _is_file_in_memory(path: str, name: str) -> bool:
    try:
        return str(Path(path).readlink()) == f"/memfd:{name} (deleted)" and os.access(path, os.R_OK | os.W_OK)
    except OSError:
        return False


def _serve(mpi: Communicator, address: str) -> tuple[Any, socket.socket | None]:
    """Return the store that rank 0 serves at `address`, and on rank 0 its listener.  Collective."""
    listener: socket.socket | None = None
    if mpi.rank == 0:
        # One address, so that nothing listens on the others.
        listener = socket.create_server((address, 0), backlog=2 * mpi.size)
    address, port = mpi.broadcast_object([address, 0 if listener is None else listener.getsockname()[1]])
    if listener is not None:
        # The store takes over a copy of the bound socket.  A port that was only looked up could be taken by
        # another process meanwhile.
        return _store(address, port, mpi.size, listen_fd=os.dup(listener.fileno())), listener
    return checked(f"reaching rank 0 at {address}:{port}", lambda: _store(address, port, mpi.size)), None


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
    """Run `call`, turning a torch.distributed error into a CommunicationError that names `what`."""
    try:
        return call()
    except RuntimeError as error:  # torch.distributed's errors are all of this class
        reason = one_line(error)
        raise CommunicationError(f"{what} failed in torch.distributed: {reason}") from error
