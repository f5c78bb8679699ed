"""Reusable memory for batches, page-locked where a GPU reads it."""

from __future__ import annotations

import functools
import math
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

#: Buffers are allocated this much larger than requested, so that a slightly longer batch fits as well.
_SPARE = 1.25
#: A buffer more than this many times as large as the request is kept for another request ...
_LARGER = 4
#: ... unless it is smaller than this.
_SMALL_BYTES = 1 << 16
#: Free buffers kept; the others go back to the system.
_KEPT = 24

_Bytes = npt.NDArray[np.uint8]


class _Loan(weakref.ref[npt.NDArray[Any]]):
    """Notices when nobody uses an array any more."""

    __slots__ = ("memory",)
    memory: _Bytes


class BufferPool:
    """Lends tensors whose memory returns to the pool when nobody refers to them any more.

    The kernel hands out fresh memory page by page and zeroes each page: for batches of megabytes that costs
    about as much as filling them.  Thread-safe.

    Args:
        pin: allocate page-locked memory, from which copies to a GPU overlap with computation.
    """

    def __init__(self, *, pin: bool = False) -> None:
        self._pin = pin
        self._free: list[_Bytes] = []
        self._loans: dict[int, _Loan] = {}
        self._lock = threading.Lock()

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor of this shape and dtype, its values undefined."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes == 0:
            return torch.empty(*shape, dtype=dtype)
        memory = self._find(num_bytes)
        # Torch holds on to this array for as long as any tensor uses the memory.
        array = memory[:num_bytes].view(_numpy_dtype(dtype)).reshape(shape)
        loan = _Loan(array, self._give_back)
        loan.memory = memory
        self._loans[id(loan)] = loan
        return torch.from_numpy(array)

    def _find(self, num_bytes: int) -> _Bytes:
        with self._lock:
            free = self._free
            del free[:-_KEPT]  # the least recently used
            # Prefer the buffer that came back last: it may still be in the CPU cache.
            for place in range(len(free) - 1, -1, -1):
                if num_bytes <= free[place].size <= max(_LARGER * num_bytes, _SMALL_BYTES):
                    return free.pop(place)
        memory: _Bytes = torch.empty(int(num_bytes * _SPARE), dtype=torch.uint8, pin_memory=self._pin).numpy()
        return memory

    def _give_back(self, loan: _Loan) -> None:
        # Do nothing else here: garbage collection may call this in the middle of this thread's own search.
        self._free.append(loan.memory)
        del self._loans[id(loan)]


@functools.cache
def _numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    return torch.empty(0, dtype=dtype).numpy().dtype
