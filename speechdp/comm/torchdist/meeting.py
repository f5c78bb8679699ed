"""Where the ranks of torch.distributed meet: a file in memory on one host, else a store that rank 0 serves.

torch's TCPStore lets every process of the machine read and write what the ranks tell one another.  So where
the ranks are on one host there is none: they share a file without a name, which the kernel opens for
processes of the same user only and which is gone with rank 0.
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

#: how long an exchange may take before torch calls the peers lost; evaluations by one rank count too.
TIMEOUT = datetime.timedelta(minutes=30)


@dataclass(frozen=True)
class Rendezvous:
    """How this rank found the others: its place among all ranks of the job, and the store they share.

    Attributes:
        connects_later: whether two ranks are connected only when they first exchange something.
        listener: where this rank serves the store, for the others to connect; None: it does not.
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
        """Make a group in the block; afterwards nobody else can connect to this rank, where that can be."""
        if self.connects_later:
            yield
            return
        with doors.shut_behind_us():
            yield
        # gloo has connected every two ranks of the group, so all of them have been in the store.
        if self.listener is not None:
            doors.shut(self.listener)


def meet(part: Communicator | None, device: torch.device, *, connects_later: bool) -> Rendezvous:
    """Meet the other ranks.  Collective.

    Args:
        part: communicator over MPI of the ranks to be joined, where these are not all of the job.
        device: where this rank's tensors live: NCCL would wait in vain for ranks without a GPU.
        connects_later: as of Meeting.

    Raises:
        CommunicationError: they cannot be reached, or some have GPUs and others not.
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
    """Return under which key a rank tells the others its host and kind of device."""
    return f"speechdp/place-{rank}"


def _share_file(mpi: Communicator) -> Any | None:
    """Return a store in a file in rank 0's memory, None where not all ranks can open it.  Collective."""
    path, name = "", ""
    if mpi.rank == 0:
        name = f"speechdp-{secrets.token_hex(8)}"
        # Open as long as this process lives: channels that are opened later meet here too.
        path = f"/proc/{os.getpid()}/fd/{os.memfd_create(name)}"
    path, name = mpi.broadcast_object([path, name])
    # In containers of their own, ranks see other processes, if any, under this number.
    if not all(mpi.allgather_object(_is_file_in_memory(path, name))):
        return None
    return dist.FileStore(path, mpi.size)  # type: ignore[attr-defined]


def _is_file_in_memory(path: str, name: str) -> bool:
    try:
        return str(Path(path).readlink()) == f"/memfd:{name} (deleted)" and os.access(path, os.R_OK | os.W_OK)
    except OSError:
        return False


def _serve(mpi: Communicator, address: str) -> tuple[Any, socket.socket | None]:
    """Return the store that rank 0 serves at its `address`, and there its listener.  Collective."""
    listener: socket.socket | None = None
    if mpi.rank == 0:
        # One address, so that nothing listens on the others.
        listener = socket.create_server((address, 0), backlog=2 * mpi.size)
    address, port = mpi.broadcast_object([address, 0 if listener is None else listener.getsockname()[1]])
    if listener is not None:
        # The store takes a copy over; a port merely looked up could be taken by somebody else meanwhile.
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
    """Call, and turn torch.distributed's error into a CommunicationError that says what was called."""
    try:
        return call()
    except RuntimeError as error:  # torch.distributed's errors are all of this class
        reason = one_line(error)
        raise CommunicationError(f"{what} failed in torch.distributed: {reason}") from error
