"""Lend CPU memory to an exchange of a CUDA tensor, for back-ends that cannot read the GPU's."""

from __future__ import annotations

import torch
from torch import Tensor


class Staged:
    """A view of a tensor that the back-end can exchange: the tensor itself, or a pinned copy on the host.

    `fetch` before the exchange touches the memory; `store` once it is over, from the thread that owns `x`.

    Args:
        x: contiguous tensor.
        direct: the back-end reads and writes the GPU's memory itself; nothing is copied.
    """

    def __init__(self, x: Tensor, *, direct: bool = False) -> None:
        self._x = x.detach().view(-1)
        self._buffer = self._x
        self._ready: torch.cuda.Event | None = None
        self._copied = self._x.is_cuda and not direct
        if self._copied:
            self._buffer = torch.empty(self._x.numel(), dtype=x.dtype, pin_memory=True)
            self._buffer.copy_(self._x, non_blocking=True)
        if self._x.is_cuda:
            # Kernels that are still writing `x`, or the copy just started, end before `fetch` returns.
            self._ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._ready.record(torch.cuda.current_stream(self._x.device))

    def fetch(self) -> Tensor:
        """Wait until the memory holds the tensor's values and return it, flat."""
        if self._ready is not None:
            self._ready.synchronize()
        return self._buffer

    def store(self) -> None:
        """Put the result into the tensor, ordered before whatever the current stream does next."""
        if self._copied:
            # The allocator of pinned memory waits for this copy before it lends the buffer again.
            self._x.copy_(self._buffer, non_blocking=True)


def as_bytes(x: Tensor) -> Tensor:
    """Return contiguous `x` as a flat uint8 view: a broadcast moves bits, whatever the dtype."""
    return x.detach().view(-1).view(torch.uint8)
