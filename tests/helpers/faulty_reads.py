"""A disk that is unplugged, or returns too little, after some reads."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from typing import Literal


class FaultyReads:
    """Stands for `speechdp.data.shards.contiguous.preadv`: fails after `num_good` reads.

    `kind`: "eio" raises as the kernel does for an unplugged disk, "end" reads nothing as behind the end of a
    truncated file, "short" hands over at most 5 bytes a call, which is no failure.
    """

    def __init__(self, num_good: int, kind: Literal["eio", "end", "short"] = "eio") -> None:
        self.num_reads = 0
        self._num_good = num_good
        self._kind = kind

    def __call__(self, fd: int, buffers: Sequence[memoryview], position: int) -> int:
        self.num_reads += 1
        if self.num_reads <= self._num_good:
            return os.preadv(fd, buffers, position)
        if self._kind == "eio":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if self._kind == "end":
            return 0
        assert len(buffers) == 1
        return os.preadv(fd, [memoryview(buffers[0].cast("B"))[:5]], position)
