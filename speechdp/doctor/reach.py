"""Check hosts that a launcher will reach by ssh: name, login without a prompt, Python at its path."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from speechdp.launching.hostfile import is_this_machine

_LOGGED_IN = "speechdp-doctor-logged-in"
_MOST_AT_ONCE = 32


@dataclass(frozen=True)
class Reach:
    """The state of one host as seen from here.

    Attributes:
        host: name in the hostfile.
        is_local: whether it is this machine; then no login is tried, and `exit_code` is 0.
        address: IPv4 address that the name resolves to; "": none.
        exit_code: exit code of the login; None: it did not end in time, or was not tried.
        output: what ssh printed to stderr; if the login failed, also what came from the host.
        missing: programs that cannot be run there.
        tried: False if the launcher needs no login to this host.
        greeting: what the host printed to stdout before our command ran.
    """

    host: str
    is_local: bool = False
    address: str = ""
    exit_code: int | None = None
    output: str = ""
    missing: tuple[str, ...] = ()
    tried: bool = True
    greeting: str = ""

    @property
    def is_reachable(self) -> bool:
        """Whether the launcher can start ranks there, as far as can be told from here."""
        return not self.tried or (self.exit_code == 0 and not self.missing)


@dataclass(frozen=True)
class Login:
    """How to log in to a host.

    Attributes:
        agent: program with options: ("ssh",), or what the user gave the MPI.
        programs: absolute paths that must be executable there.
        time_limit_s: time limit for the whole login, s.
    """

    agent: tuple[str, ...]
    programs: tuple[Path, ...]
    time_limit_s: float = 20.0

    def command(self, host: str) -> list[str]:
        """Return the argv that logs in to `host` and looks for the programs."""
        tests = [
            f"test -x {shlex.quote(str(path))} || echo speechdp-doctor-missing-{i}"
            for i, path in enumerate(self.programs)
        ]
        # Any kind of shell may read this, so it uses only what all of them know.
        remote = "; ".join([f"echo {_LOGGED_IN}", *tests, "true"])
        if Path(self.agent[0]).name != "ssh":
            return [*self.agent, host, remote]
        return [*self.agent, "-o", "BatchMode=yes", "-o", "ConnectTimeout=5", "--", host, remote]


def look_at_hosts(hosts: Sequence[str], login: Login | None) -> list[Reach]:
    """Check every host, many at a time.

    Args:
        hosts: names from a hostfile.
        login: how to log in; None if the launcher needs no ssh (srun): then names are only resolved.
    """
    with ThreadPoolExecutor(min(_MOST_AT_ONCE, len(hosts))) as pool:
        return list(pool.map(lambda host: look_at(host, login, subprocess.run), hosts))


def look_at(host: str, login: Login | None, run: Callable[..., subprocess.CompletedProcess[str]]) -> Reach:
    """Check one host.

    Args:
        run: subprocess.run, or a replacement in tests.
    """
    address = _address(host)
    if is_this_machine(host):
        missing = [] if login is None else [str(p) for p in login.programs if not os.access(p, os.X_OK)]
        return Reach(host, is_local=True, address=address, exit_code=0, missing=tuple(missing))
    if login is None:
        return Reach(host, address=address, tried=False)
    try:
        ended = run(
            login.command(host),
            stdin=subprocess.DEVNULL,  # no prompt for a password
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=login.time_limit_s,
            check=False,
            env={**os.environ, "LC_ALL": "C"},
            start_new_session=True,  # without the terminal, on which ssh would prompt all the same
        )
    except subprocess.TimeoutExpired:
        return Reach(host, address=address)
    except OSError as error:
        output = f"{login.agent[0]}: {error.strerror}"
        return Reach(host, address=address, exit_code=127, output=output)
    before, logged_in, after = ended.stdout.partition(_LOGGED_IN)
    missing = [
        str(p) for i, p in enumerate(login.programs) if f"speechdp-doctor-missing-{i}" in after.split()
    ]
    exit_code = ended.returncode or (0 if logged_in else 1)
    output = ended.stderr.strip() if logged_in else f"{ended.stderr} {ended.stdout}".strip()
    greeting = before.strip() if logged_in else ""
    return Reach(host, False, address, exit_code, output, tuple(missing), greeting=greeting)


def _address(host: str) -> str:
    try:
        return socket.gethostbyname(host)
    except (OSError, UnicodeError):
        return ""
