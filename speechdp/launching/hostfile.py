"""Read hostfiles: which hosts, and how many ranks each may take."""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass, replace
from functools import lru_cache
from ipaddress import AddressValueError, IPv4Address
from pathlib import Path

import psutil

from speechdp.counting import counted
from speechdp.errors import ConfigError
from speechdp.files import disk_reason

#: Letters, digits, dots, dashes and underscores, with a letter or digit first and last: nothing that ssh or
#: mpirun could take for an option (`-oProxyCommand=...`) or a second host.
_HOST_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,253}[A-Za-z0-9])?")
_SLOTS = re.compile(r"slots=([1-9][0-9]{0,4})")
_EXAMPLE = "node01 slots=2"


@dataclass(frozen=True)
class Host:
    """One host of a job.

    Attributes:
        name: host name or IPv4 address; checked, so it cannot be taken for an option.
        slots: number of ranks it takes.
    """

    name: str
    slots: int


@dataclass(frozen=True)
class Hostfile:
    """Hosts, in the order in which they are filled with ranks.

    Attributes:
        source: name in error messages: the path of the file.
        hosts: at least one host, each name once.
    """

    source: str
    hosts: tuple[Host, ...]

    @property
    def num_slots(self) -> int:
        """Number of ranks all hosts take together."""
        return sum(host.slots for host in self.hosts)

    def allocate(self, num_ranks: int, *, option: str = "-np") -> tuple[Host, ...]:
        """Return the hosts that carry `num_ranks` ranks, filled in order; their `slots` are the ranks placed.

        Args:
            option: option that gives the number of ranks, for messages.

        Raises:
            ConfigError: fewer than one rank is requested, or more than there are slots.
        """
        if num_ranks < 1:
            raise ConfigError(f"{option} {num_ranks}: at least 1 rank is needed")
        if num_ranks > self.num_slots:
            wanted, slots = counted(num_ranks, "rank"), counted(self.num_slots, "slot")
            raise ConfigError(
                f"{self.source}: {wanted} wanted, but it has only {slots}; "
                f"lower {option}, raise slots=, add hosts or ask the scheduler for more"
            )
        left = num_ranks
        placed: list[Host] = []
        for host in self.hosts:
            ranks = min(left, host.slots)
            if ranks > 0:
                placed.append(replace(host, slots=ranks))
            left -= ranks
        return tuple(placed)


def read_hostfile(path: Path) -> Hostfile:
    """Read lines of the form `host slots=N`; `#` begins a comment, blank lines are ignored.

    Raises:
        ConfigError: the file is unreadable or has no hosts, a line has no slots, or a host name is invalid or
            repeated; the message names file, line and remedy.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")  # editors on Windows begin a file with a mark
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: the hostfile is no text file; see hostfiles/ for examples") from error
    except OSError as error:
        raise ConfigError(
            f"{path}: the hostfile cannot be read ({disk_reason(error)}); see hostfiles/ for examples"
        ) from error
    first_line: dict[str, int] = {}
    hosts: list[Host] = []
    for number, line in enumerate(text.splitlines(), start=1):
        content = line.split("#", maxsplit=1)[0].split()
        if not content:
            continue
        host = _parse_line(content, f"{path}:{number}")
        previous = first_line.setdefault(host.name.lower(), number)
        if previous != number:
            raise ConfigError(
                f"{path}:{number}: host {host.name!r} is already on line {previous}; "
                f"keep one line and add up its slots"
            )
        hosts.append(host)
    if not hosts:
        raise ConfigError(f"{path}: no hosts; write one line per host, e.g. `{_EXAMPLE}`")
    return Hostfile(str(path), tuple(hosts))


def local_hosts(num_ranks: int) -> Hostfile:
    """Return this machine alone, with `num_ranks` slots, for jobs without a hostfile."""
    return Hostfile("localhost", (Host("localhost", max(num_ranks, 0)),))


def is_this_machine(name: str) -> bool:
    """Return whether a hostfile's host name or IPv4 address means this machine."""
    name, own = name.lower(), socket.gethostname().lower()
    first_label = own.split(".")[0]
    if name in {"localhost", own, first_label}:
        return True
    if is_address(name):
        return _is_own_address(IPv4Address(name))
    # Only names that look like ours are resolved: a name server may take long to answer.
    return name.split(".")[0] == first_label and _resolves_to_this_machine(name)


def is_host_name(name: str) -> bool:
    """Return whether a word is a host name or IPv4 address that no program takes for something else."""
    return _HOST_NAME.fullmatch(name) is not None


def is_address(name: str) -> bool:
    """Return whether a host is given by its IPv4 address."""
    try:
        IPv4Address(name)
    except AddressValueError:
        return False
    return True


@lru_cache(maxsize=64)
def _resolves_to_this_machine(name: str) -> bool:
    try:
        return _is_own_address(IPv4Address(socket.gethostbyname(name)))
    except (OSError, UnicodeError):
        return False


def _is_own_address(address: IPv4Address) -> bool:
    if address.is_loopback:
        return True
    interfaces = psutil.net_if_addrs().values()
    return any(own.address == str(address) for addresses in interfaces for own in addresses)


def _parse_line(content: list[str], where: str) -> Host:
    """Turn the words of one line into a Host; `where` is file:line."""
    name, *rest = content
    if not is_host_name(name):
        raise ConfigError(
            f"{where}: {name!r} is not a host name or IPv4 address (letters, digits, . - _); "
            f"write e.g. `{_EXAMPLE}`"
        )
    if not rest:
        # Open MPI would use the number of the host's cores, which is seldom intended.
        raise ConfigError(
            f"{where}: host {name!r} has no slots; write `{name} slots=N`, N ranks on that host"
        )
    slots = _SLOTS.fullmatch(rest[0])
    if slots is None or len(rest) > 1:
        raise ConfigError(
            f"{where}: {' '.join(rest)!r} is not understood; write `{name} slots=N` with N from 1 to 99999"
        )
    return Host(name, int(slots.group(1)))
