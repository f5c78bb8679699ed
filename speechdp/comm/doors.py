"""Close a job's listening sockets once its ranks have met.

gloo and torch's store take everybody who connects, and listen as long as they live: any process of the
machine could use up a rank's file descriptors, or write into the store.  Neither can be told to stop.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager

_SO_ATTACH_FILTER = 26
#: the BPF program `return 0`: of every packet 0 bytes are let through.
_LET_NOTHING_IN = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))
_PROGRAM = struct.pack("HP", 1, ctypes.addressof(_LET_NOTHING_IN))


def shut(listener: socket.socket) -> None:
    """Let no new connection reach a listening socket, nor a copy of it; those there are stay."""
    try:
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, _PROGRAM)
    except OSError as error:
        # Kernels in user space (gVisor) have no filters; a job is no worse there than without this module.
        if error.errno not in {errno.ENOPROTOOPT, errno.EOPNOTSUPP, errno.EPERM}:
            raise


@contextmanager
def shut_behind_us() -> Iterator[None]:
    """Shut what has begun to listen in the block: connections there are stay, new ones get no answer.

    In the block all connections of this process' new sockets must have been made.  One block at a time.
    """
    before = {inode for inode, _ in _listening()}
    yield
    for inode, listener in _listening():
        if inode not in before:
            shut(listener)


def _listening() -> Iterator[tuple[int, socket.socket]]:
    """Yield inode and a copy of every TCP socket of this process that listens."""
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208  names only
        try:
            copy = os.dup(int(name))
        except OSError:
            continue  # closed meanwhile, as the folder's own descriptor is
        status = os.fstat(copy)
        try:
            found = socket.socket(fileno=copy)
        except OSError:
            os.close(copy)  # no socket, or none with an address
            continue
        with found:
            is_tcp = found.family in {socket.AF_INET, socket.AF_INET6} and found.type == socket.SOCK_STREAM
            if is_tcp and found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                yield status.st_ino, found
