"""Let the fork server run the program of this new Python process, which then represents the fork.

It imports little: it takes the place of importing torch, 3 s of a core.  See tests/helpers/fork_server.py.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import sys
from types import FrameType
from typing import NoReturn

_NAMESPACES = ("net", "uts", "mnt", "pid", "ipc")
#: Handed on to the process that does the work.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT)
_LIMITS = ("AS", "CPU", "DATA", "FSIZE", "NOFILE", "STACK", "CORE")


def hand_over(address: str) -> None:
    """Let a fork of the server run this program and end with its exit status; return if it must run here."""
    arguments = sys.orig_argv[1:]
    is_program = arguments[:2] == ["-m", "speechdp"] or (
        arguments[:1] == ["-m"] and "".join(arguments[1:2]).startswith("tests.")
    )
    if not is_program and not "".join(arguments[:1]).endswith(".py"):  # a bare `python` has none
        return
    if None in (sys.stdin, sys.stdout, sys.stderr):  # closed, which a fork would not know
        return
    # First of all: once it is connected the server waits for it, and so does everybody else.
    request = json.dumps(_request(arguments)).encode() + b"\n"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        _Standing(connection, address, request).stand()


def _request(arguments: list[str]) -> dict[str, object]:
    """Return what the fork needs to take this process's identity."""
    return {
        "arguments": arguments,
        "orig_argv": sys.orig_argv,
        "prefix": sys.prefix,
        "folder": os.getcwd(),  # noqa: PTH109  pathlib is not imported yet
        "environment": dict(os.environ),
        "namespaces": namespaces(),
        "descriptors": sum(os.get_inheritable(fd) for fd in _descriptors()),
        "cores": sorted(os.sched_getaffinity(0)),
        "umask": _umask(),
        "limits": {name: resource.getrlimit(getattr(resource, f"RLIMIT_{name}")) for name in _LIMITS},
        "ignored": [number for number in SIGNALS if signal.getsignal(number) == signal.SIG_IGN],
    }


def namespaces() -> list[str]:
    """Return the namespaces of this process."""
    return [os.readlink(f"/proc/self/ns/{name}") for name in _NAMESPACES]  # noqa: PTH115


def _descriptors() -> list[int]:
    """Return the open file descriptors of this process besides the standard streams."""
    found = []
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        try:
            os.fstat(int(name))
        except OSError:  # that of the listing
            continue
        found.append(int(name))
    return [fd for fd in found if fd > 2]


def _umask() -> int:
    mask = os.umask(0o22)
    os.umask(mask)
    return mask


class _Standing:
    """Represents the fork: forwards signals to it, ends as it does, and the fork ends with this process."""

    def __init__(self, connection: socket.socket, address: str, request: bytes) -> None:
        self._connection, self._address, self._request = connection, address, request
        self._pid, self._early = 0, list[int]()

    def stand(self) -> None:
        """Request the work; return only if the server refuses it or does not exist."""
        before = {number: signal.getsignal(number) for number in SIGNALS}
        for number, handler in before.items():
            if handler != signal.SIG_IGN:
                signal.signal(number, self._forward)
        try:
            self._connection.connect(self._address)
            socket.send_fds(self._connection, [b"."], [0, 1, 2])
            self._connection.sendall(self._request)
            answers = self._connection.makefile("r")
            pid = int(answers.readline() or 0)
        except OSError:  # the session has ended
            pid = 0
        if not pid:
            for number, handler in before.items():
                signal.signal(number, handler)
            for number in self._early:
                os.kill(os.getpid(), number)
            return
        self._pid = pid
        for number in self._early:
            self._forward(number, None)
        _end(answers.readline())

    def _forward(self, number: int, frame: FrameType | None) -> None:
        if not self._pid:
            self._early.append(number)
            return
        try:
            os.kill(self._pid, number)
        except ProcessLookupError:  # it has just ended, which will be told
            return


def _end(answer: str) -> NoReturn:
    if not answer:
        os.write(2, b"the fork server of the tests has gone\n")
        os._exit(255)
    code = int(answer)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)
