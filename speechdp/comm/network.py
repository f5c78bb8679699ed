"""Find the network interface over which the ranks of a job reach one another."""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from speechdp import remedies
from speechdp.comm import environment
from speechdp.errors import CommunicationError

_SIOCGIFADDR = 0x8915


@dataclass(frozen=True)
class Interface:
    """A network interface of this host."""

    name: str
    address: str


def interface_between(rank: int, hosts: Sequence[str]) -> Interface:
    """Return the interface for this rank's traffic: the user's choice, else loopback on a single host.

    Args:
        rank: this rank.
        hosts: the host name of every rank, in rank order.

    Raises:
        CommunicationError: another host cannot be reached, or this one lacks the chosen interface.
    """
    others = [host for host in hosts if host != hosts[rank]]
    chosen = environment.chosen_interface()
    if chosen is not None and not (others and chosen == "lo"):
        chosen_address = address_of(chosen)
        if chosen_address is None:
            raise CommunicationError(
                f"rank {rank} on {hosts[rank]} has no interface {chosen} with an IPv4 address; "
                "choose another --interface (or GLOO_SOCKET_IFNAME)"
            )
        return Interface(chosen, chosen_address)
    if not others:
        return Interface("lo", "127.0.0.1")
    try:
        address = address_towards(others[0])
        name = interface_of(address)
    except OSError as error:
        raise CommunicationError(
            f"rank {rank} on {hosts[rank]} cannot reach {others[0]} ({error.strerror}); give the hosts names "
            f"that every node resolves, or choose {remedies.backend('mpi')}"
        ) from error
    if name is None:
        raise CommunicationError(
            f"rank {rank} on {hosts[rank]} has no interface with address {address}; choose "
            f"{remedies.backend('mpi')}"
        )
    return Interface(name, address)


def has_infiniband() -> bool:
    """Return whether this host has an InfiniBand or RoCE adapter, which MPI uses and Gloo cannot."""
    adapters = Path("/sys/class/infiniband")
    return adapters.is_dir() and any(adapters.iterdir())


def address_towards(host: str) -> str:
    """Return the source address of this host's packets to `host`.

    This host's own name is no help: on many systems it resolves to 127.0.1.1.

    Raises:
        OSError: `host` has no known address, or there is no route to it.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing, only consults the routing table
        return str(probe.getsockname()[0])


def address_of_own_name() -> str | None:
    """Return the address that this host's own name resolves to; None: none of this host's addresses.

    Gloo uses this address if it is given no interface.
    """
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return None
    for family, kind, _protocol, _name, address in found:
        with suppress(OSError), socket.socket(family, kind) as trial:
            trial.bind(address)
            return str(address[0])
    return None


def interface_of(address: str) -> str | None:
    """Return the name of the network interface that carries IPv4 `address`, None if there is none."""
    names = (name for _, name in socket.if_nameindex())
    return next((name for name in names if address_of(name) == address), None)


def address_of(interface: str) -> str | None:
    """Return the IPv4 address of a network interface, None if it has none or does not exist."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", interface.encode()[:15])
        try:
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
        except OSError:
            return None
