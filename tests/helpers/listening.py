"""Find which ports a job listens on, and which connections it accepts."""

from __future__ import annotations

import socket
import time

import psutil

_SYN_SENT, _ESTABLISHED = 2, 1
#: So long a busy kernel may take for a connection within the machine, s.
_PATIENCE_S = 3.0


def is_let_in(address: tuple[str, int]) -> bool:
    """Return whether a listener of this machine accepts a connection from outside.

    A stranger's packets are dropped without a word, so its connection is never made: that is waited for.
    """
    deadline_s = time.monotonic() + _PATIENCE_S
    with socket.socket() as stranger:
        stranger.setblocking(False)
        stranger.connect_ex(address)
        while (state := _state(stranger)) == _SYN_SENT and time.monotonic() < deadline_s:
            time.sleep(0.01)
    assert state in {_SYN_SENT, _ESTABLISHED}, f"nobody listens at {address} (state {state})"
    return state == _ESTABLISHED


def _state(connection: socket.socket) -> int:
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]


def listening(process: psutil.Process) -> set[tuple[str, int]]:
    """Return the addresses and ports that a process listens on; none where it has just ended."""
    try:
        connections = process.net_connections("inet")
    except psutil.Error:
        return set()
    return {(c.laddr.ip, c.laddr.port) for c in connections if c.status == psutil.CONN_LISTEN}
