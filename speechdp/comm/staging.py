"""Lend CPU memory to an exchange of a CUDA tensor, for back-ends that cannot read GPU memory.

The copies of a device run on a separate stream, so that they and the computing kernels do not delay each
other.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

_streams: dict[int, torch.cuda.Stream] = {}
_streams_lock = threading.Lock()


class Staged:
    """A view of a tensor that the back-end can exchange: the tensor itself, or a pinned copy on the host.

    Call `fetch` before the exchange touches the memory, and `store` once it is over.  The copy to the host is
    ordered after the current stream of the thread that makes the object; the copy back is ordered before
    later work on the current stream of the thread that calls `store` and then uses `x`.

    Args:
        x: contiguous tensor; nothing else may write to it until `store`.
        direct: whether the back-end reads and writes GPU memory itself, so that nothing is copied.
        load: whether the exchange reads the values of `x`; False if it only overwrites them.
    """

    def __init__(self, x: Tensor, *, direct: bool = False, load: bool = True) -> None:
        self._x = x.detach().view(-1)
        self._buffer = self._x
        self._ready: torch.cuda.Event | None = None
        self._copied = self._x.is_cuda and not direct
        if not self._x.is_cuda:
            return
        # `blocking` lets the waiting thread sleep instead of spin.
        self._ready = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._ready.record(torch.cuda.current_stream(self._x.device))
        if self._copied:
            self._buffer = torch.empty(self._x.numel(), dtype=x.dtype, pin_memory=True)
            self._start_copy(self._ready, load)

    def fetch(self) -> Tensor:
        """Wait until the memory holds the tensor's values; return that memory as a flat tensor."""
        if self._ready is not None:
            self._ready.synchronize()
        return self._buffer

    def store(self) -> None:
        """Copy the result into the tensor, ordered before whatever the current stream does next."""
        if not self._copied:
            return
        side = _side_stream(self._x.device)
        with torch.cuda.stream(side):
            # This runs after everything that used `x` before this object was made: `side` has waited for
            # that already.  The pinned-memory allocator waits for this copy before it reuses the buffer.
            self._x.copy_(self._buffer, non_blocking=True)
        self._x.record_stream(side)
        torch.cuda.current_stream(self._x.device).wait_stream(side)

    def _start_copy(self, written: torch.cuda.Event, load: bool) -> None:
        """Copy the values to the host once the kernels before `written` have ended."""
        side = _side_stream(self._x.device)
        side.wait_event(written)
        if not load:
            # Nothing has used the host's buffer yet, so `fetch` has nothing to wait for.
            self._ready = None
            return
        with torch.cuda.stream(side):
            self._buffer.copy_(self._x, non_blocking=True)
        # If `x` is freed while the copy runs, the allocator does not reuse its memory before the copy ends.
        self._x.record_stream(side)
        copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        copied.record(side)
        self._ready = copied


def as_bytes(x: Tensor) -> Tensor:
    """Return contiguous `x` as a flat uint8 view, since a broadcast moves bits whatever the dtype."""
    return x.detach().view(-1).view(torch.uint8)


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream that carries the copies of `device`."""
    index = torch.cuda.current_device() if device.index is None else device.index
    with _streams_lock:
        if index not in _streams:
            _streams[index] = torch.cuda.Stream(device=index)  # type: ignore[no-untyped-call]
        return _streams[index]
