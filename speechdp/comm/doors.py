"""Close a job's listening sockets once its ranks have met.

gloo and torch's store accept every connection, and listen as long as they exist: any process on the machine
could use up a rank's file descriptors, or write into the store.  Neither has a way to stop listening.
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
#: The BPF program `return 0`: it lets 0 bytes of every packet through.
_LET_NOTHING_IN = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))
_PROGRAM = struct.pack("HP", 1, ctypes.addressof(_LET_NOTHING_IN))


def shut(listener: socket.socket) -> None:
    """Keep new connections from reaching a listening socket or a copy of it; existing ones stay open."""
    try:
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, _PROGRAM)
    except OSError as error:
        # Kernels in user space (gVisor) have no filters; there a job is as exposed as without this module.
        if error.errno not in {errno.ENOPROTOOPT, errno.EOPNOTSUPP, errno.EPERM}:
            raise


@contextmanager
def close_new_listeners() -> Iterator[None]:
    """Shut the sockets that began to listen in the block: existing connections stay, new ones get no answer.

    The new sockets must have all their connections by the end of the block.  Only one block at a time.
    """
    before = {inode for inode, _ in _listening()}
    yield
    for inode, listener in _listening():
        if inode not in before:
            shut(listener)


def _listening() -> Iterator[tuple[int, socket.socket]]:
    """Yield the inode and a copy of every listening TCP socket of this process."""
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208  names only
        try:
            copy = os.dup(int(name))
        except OSError:
            continue  # closed since, like the descriptor that listed the folder
        status = os.fstat(copy)
        try:
            found = socket.socket(fileno=copy)
        except OSError:
            os.close(copy)  # not a socket, or one without an address
            continue
        with found:
            is_tcp = found.family in {socket.AF_INET, socket.AF_INET6} and found.type == socket.SOCK_STREAM
            if is_tcp and found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                yield status.st_ino, found
