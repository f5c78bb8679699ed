"""Who listens in a job, and who is let in."""

from __future__ import annotations

import socket

import psutil

_SYN_SENT, _ESTABLISHED = 2, 1


def is_let_in(address: tuple[str, int]) -> bool:
    """Return whether a stranger's connection to a listener of this machine is taken.

    On one machine the connection is made, or its first packet dropped, before connect returns.
    """
    with socket.socket() as stranger:
        stranger.setblocking(False)
        stranger.connect_ex(address)
        state = stranger.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
    assert state in {_SYN_SENT, _ESTABLISHED}, f"nobody listens at {address} (state {state})"
    return state == _ESTABLISHED


def listening(process: psutil.Process) -> set[tuple[str, int]]:
    """Return the addresses and ports that a process listens on; none where it has just ended."""
    try:
        connections = process.net_connections("inet")
    except psutil.Error:
        return set()
    return {(c.laddr.ip, c.laddr.port) for c in connections if c.status == psutil.CONN_LISTEN}
