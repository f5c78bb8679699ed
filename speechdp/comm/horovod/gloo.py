"""Start Horovod over Gloo in a job that mpirun or srun started: its ranks meet over MPI.

Horovod's background threads exchange messages every cycle.  Over MPI the thread that is early busy-waits for
the other.  As each keeps its own clock, it stays early for ever: that wasted up to a whole core, measured on
2 idle ranks.  Gloo waits in poll(), which takes 0.02 of a core.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import threading
from collections import Counter
from dataclasses import dataclass
from importlib.metadata import version
from ipaddress import ip_address
from typing import Any

from horovod.runner.common.util.hosts import SlotInfo
from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

from speechdp import remedies
from speechdp.comm import environment, network
from speechdp.comm.base import Communicator
from speechdp.errors import CommunicationError


def gloo_is_better(mpi: Communicator) -> bool:
    """Return whether Gloo should carry Horovod.  Collective.

    The user's HOROVOD_CONTROLLER or HOROVOD_CPU_OPERATIONS decides.  Otherwise the answer is Gloo, unless the
    ranks are on several hosts connected by InfiniBand that MPI uses: Gloo cannot use InfiniBand.
    """
    if mpi.size == 1:
        return False
    uses_infiniband = network.has_infiniband() and not environment.mpi_is_held_to_tcp()
    everyone = mpi.allgather_object(
        [environment.horovod_controller(), environment.host_name(), uses_infiniband]
    )
    chosen = everyone[0][0]
    if chosen is not None:
        return bool(chosen == "gloo")
    is_one_host = len({host for _, host, _ in everyone}) == 1
    return is_one_host or not all(infiniband for _, _, infiniband in everyone)


def check_own_name(reached_at: str | None = None) -> None:
    """Refuse to start if Horovod would direct other hosts' ranks to a wrong address for this rank.

    Horovod 0.28.1 as released uses HOROVOD_GLOO_IFACE for the first of its connections only
    (GlooContext::InitializeForProcessSet).  For the others it gives the address that the host's own name
    resolves to, e.g. 127.0.1.1 on Debian.  Then all ranks would end by a signal.

    Args:
        reached_at: address at which the others reach this host; None: any that is not loopback.

    Raises:
        CommunicationError: this Horovod does so, and the name resolves to a different address.
    """
    if _keeps_to_interface():
        return
    address = network.address_of_own_name()
    leads_here = address is not None and not ip_address(address.partition("%")[0]).is_loopback
    if leads_here and reached_at in (None, address):
        return
    name, stands = socket.gethostname(), "no address of its own" if address is None else address
    raise CommunicationError(
        f"on {environment.host_name()} its name {name} resolves to {stands}, and this build of Horovod over "
        "Gloo would send other hosts there for its ranks; rebuild it with launch/build_horovod --install, "
        f"or start with mpirun and choose {remedies.backend('mpi')}"
    )


def _keeps_to_interface() -> bool:
    """Return whether all connections of this Horovod use HOROVOD_GLOO_IFACE (launch/horovod_recipe)."""
    return "iface" in version("horovod").partition("+")[2].split(".")


@dataclass(frozen=True)
class _Place:
    """A rank's position in Horovod's view: on its host, and among the hosts."""

    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int


class _Handler(RendezvousHandler):  # type: ignore[misc]
    """Answers only requests whose path starts with the secret."""

    path: str

    def parse_request(self) -> bool:
        if not super().parse_request():
            return False
        expected: str = self.server.prefix
        if not hmac.compare_digest(self.path[: len(expected)].encode(), expected.encode()):
            self.send_error(403)
            return False
        self.path = self.path[len(expected) - 1 :]
        return True


class _Server(RendezvousHTTPServer):  # type: ignore[misc]
    def __init__(self, address: str, prefix: str) -> None:
        self.prefix = prefix
        super().__init__((address, 0), _Handler, 0)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing: a stranger's broken request does not matter, and a rank repeats its own."""


class GlooMeeting:
    """The rendezvous of Horovod's ranks, served by rank 0 only on the address at which the others reach it.

    Horovod's own server answers everybody; ours requires a secret that only the ranks know.

    Attributes:
        settings: environment variables to set while `hvd.init` runs.

    Args:
        mpi: communicator over all ranks; used only in the constructor.
    """

    def __init__(self, mpi: Communicator) -> None:
        hosts: list[str] = mpi.allgather_object(environment.host_name())
        places = _places(hosts)
        interface = network.interface_between(mpi.rank, hosts)
        if len(set(hosts)) > 1:
            check_own_name(interface.address)
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None
        secret = secrets.token_hex(16)
        if mpi.rank == 0:
            self._serve(_Server(interface.address, f"/{secret}:0/"), hosts, places)
        port = 0 if self._server is None else self._server.server_address[1]
        address, port, secret = mpi.broadcast_object([interface.address, port, secret])
        place = places[mpi.rank]
        self.settings = {
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
            # Horovod requests http://ADDR:PORT/SCOPE/KEY, so what follows a slash in ADDR begins the path.
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": f"{address}:{port}/{secret}",
            "HOROVOD_GLOO_RENDEZVOUS_PORT": "0",
            "HOROVOD_GLOO_IFACE": interface.name,
            "HOROVOD_HOSTNAME": hosts[mpi.rank],
            "HOROVOD_RANK": str(mpi.rank),
            "HOROVOD_SIZE": str(mpi.size),
            "HOROVOD_LOCAL_RANK": str(place.local_rank),
            "HOROVOD_LOCAL_SIZE": str(place.local_size),
            "HOROVOD_CROSS_RANK": str(place.cross_rank),
            "HOROVOD_CROSS_SIZE": str(place.cross_size),
        }

    def close(self) -> None:
        """Stop serving, once all ranks have met."""
        if self._server is not None and self._thread is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()

    def _serve(self, server: _Server, hosts: list[str], places: list[_Place]) -> None:
        self._server = server
        server.init(
            [
                SlotInfo(hosts[r], r, p.local_rank, p.cross_rank, len(hosts), p.local_size, p.cross_size)
                for r, p in enumerate(places)
            ]
        )
        self._thread = threading.Thread(target=server.serve_forever, name="horovod-rendezvous", daemon=True)
        self._thread.start()


def _places(hosts: list[str]) -> list[_Place]:
    """Number the ranks on each host, and the hosts that have a rank of each local number."""
    sizes = Counter(hosts)
    seen_on: Counter[str] = Counter()
    seen_as: Counter[int] = Counter()
    numbers: list[tuple[int, int]] = []
    for host in hosts:
        local_rank = seen_on[host]
        numbers.append((local_rank, seen_as[local_rank]))
        seen_on[host] += 1
        seen_as[local_rank] += 1
    return [
        _Place(local, sizes[host], cross, seen_as[local])
        for host, (local, cross) in zip(hosts, numbers, strict=True)
    ]
