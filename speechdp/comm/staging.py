"""Lend CPU memory to an exchange of a CUDA tensor, for back-ends that cannot read the GPU's.

Copies run on a stream of their own, one a device: a copy between GPU and host beside kernels that compute
holds up neither.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

_streams: dict[int, torch.cuda.Stream] = {}
_streams_lock = threading.Lock()


class Staged:
    """A view of a tensor that the back-end can exchange: the tensor itself, or a pinned copy on the host.

    `fetch` before the exchange touches the memory; `store` once it is over.  Both order themselves against
    the stream that is current in the thread that calls: the one that made the object, and the one that
    calls `store` and goes on with `x`.

    Args:
        x: contiguous tensor; not written by anybody else until `store`.
        direct: the back-end reads and writes the GPU's memory itself; nothing is copied.
        load: the exchange reads the values of `x`; False when it only overwrites them.
    """

    def __init__(self, x: Tensor, *, direct: bool = False, load: bool = True) -> None:
        self._x = x.detach().view(-1)
        self._buffer = self._x
        self._ready: torch.cuda.Event | None = None
        self._copied = self._x.is_cuda and not direct
        if not self._x.is_cuda:
            return
        # `blocking` lets the waiting thread sleep, where it would spin.
        self._ready = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._ready.record(torch.cuda.current_stream(self._x.device))
        if self._copied:
            self._buffer = torch.empty(self._x.numel(), dtype=x.dtype, pin_memory=True)
            self._start_copy(self._ready, load)

    def fetch(self) -> Tensor:
        """Wait until the memory holds the tensor's values and return it, flat."""
        if self._ready is not None:
            self._ready.synchronize()
        return self._buffer

    def store(self) -> None:
        """Put the result into the tensor, ordered before whatever the current stream does next."""
        if not self._copied:
            return
        side = _side_stream(self._x.device)
        with torch.cuda.stream(side):
            # After whatever used `x` before this object was made: `side` has waited for that already.  The
            # allocator of pinned memory waits for this copy before it lends the buffer again.
            self._x.copy_(self._buffer, non_blocking=True)
        self._x.record_stream(side)
        torch.cuda.current_stream(self._x.device).wait_stream(side)

    def _start_copy(self, written: torch.cuda.Event, load: bool) -> None:
        """Copy the values to the host once the kernels before `written` have ended."""
        side = _side_stream(self._x.device)
        side.wait_event(written)
        if not load:
            # Nobody has used the host's buffer yet, so there is nothing `fetch` would wait for.
            self._ready = None
            return
        with torch.cuda.stream(side):
            self._buffer.copy_(self._x, non_blocking=True)
        # Freed while the copy runs, its memory is not lent to the current stream before the copy has ended.
        self._x.record_stream(side)
        copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        copied.record(side)
        self._ready = copied


def as_bytes(x: Tensor) -> Tensor:
    """Return contiguous `x` as a flat uint8 view: a broadcast moves bits, whatever the dtype."""
    return x.detach().view(-1).view(torch.uint8)


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream that carries the copies of `device`."""
    index = torch.cuda.current_device() if device.index is None else device.index
    with _streams_lock:
        if index not in _streams:
            _streams[index] = torch.cuda.Stream(device=index)  # type: ignore[no-untyped-call]
        return _streams[index]
