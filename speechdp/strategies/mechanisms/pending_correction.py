"""Parameters that one thread trains while another mixes them with other ranks'.

What a mixing adds to a rank's parameters, its *correction*, waits in a buffer of its own until the rank's
next step, because forward and backward must see one set of parameters.  Parameters and waiting correction
together are the *effective* parameters: what other ranks get to see.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import torch
from torch import Tensor


class EffectiveParameters:
    """A rank's parameters x and the correction c that waits for its next step: effective are x + c.

    A mixing x_i, x_j <- (x_i + x_j) / 2 of two ranks is `snapshot` on both, an exchange of the snapshots
    s_i and s_j, and `correct` on both, which adds (s_j - s_i) / 2 here and its negative there: whatever else
    is added to either meanwhile, nothing is lost and the mean over ranks stays.  Twice the correction is
    kept, the bare difference; halving it costs nothing when it is added.

    `snapshot` and `correct` belong to the exchange's thread, inside `side`; `update` and `take` to the
    training thread.  While one of them touches x or c the other thread waits, at most for a few passes over
    memory and never for an exchange.

    Args:
        values: x, flat.  (n,)
        exchanging: this rank makes exchanges; one that does not only takes what others share with it.

    Attributes:
        incoming: where the other rank's snapshot is received.  (n,)
        num_pending: mixings in the correction that waits.
        num_mixings: mixings so far.
    """

    def __init__(self, values: Tensor, *, exchanging: bool) -> None:
        self._values = values
        self._own = torch.empty_like(values) if exchanging else values.new_empty(0)
        self.incoming = torch.empty_like(self._own)
        self._pending = torch.empty_like(values)
        self._lock = threading.Lock()
        self._streams = _Streams(values.device)
        self.num_pending = 0
        self.num_mixings = 0

    def side(self) -> AbstractContextManager[object]:
        """Return the context in which threads of the exchange run: on a GPU, a stream beside training's."""
        return self._streams.side()

    def snapshot(self) -> Tensor:
        """Return a copy of the effective parameters, good until the next snapshot.  (n,)"""
        with self._lock, self._streams.exchanging():
            if self.num_pending:
                torch.add(self._values, self._pending, alpha=0.5, out=self._own)
            else:
                self._own.copy_(self._values)
        return self._own

    def correct(self) -> None:
        """Mix: half of `incoming` minus the last snapshot waits for the next step."""
        torch.sub(self.incoming, self._own, out=self.incoming)
        # Training must find a correction that is there, not one on which its stream would have to wait.
        self._streams.finish_side()
        with self._lock, self._streams.exchanging():
            if self.num_pending:
                self._pending.add_(self.incoming)
            else:
                self._pending, self.incoming = self.incoming, self._pending
            self.num_pending += 1
            self.num_mixings += 1

    @contextlib.contextmanager
    def update(self) -> Iterator[None]:
        """Keep snapshots away while the parameters are changed inside the block."""
        with self._lock, self._streams.training():
            yield

    def take(self, share: Callable[[Tensor], object] | None = None, announced: int = 0) -> int:
        """Add the correction to the parameters; return how many mixings it held.

        Args:
            share: called with twice the correction before it is added, to hand it to the ranks that share
                these parameters, or to receive it.
            announced: mixings in it where it is received; the sender may have added some since.
        """
        num_mixings = max(announced, self.num_pending)
        if num_mixings:
            with self.update():
                if share is not None:
                    share(self._pending)
                self._values.add_(self._pending, alpha=0.5)
                num_mixings, self.num_pending = max(announced, self.num_pending), 0
        return num_mixings


class _Streams:
    """Order the kernels of the two threads on a GPU; nothing is to be done on a CPU.

    Events say up to where the parameters were last written by training's stream, and read or corrected by
    the other: each stream waits for copies within the GPU only.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._trained, self._exchanged = _event(), _event()
            self._trained.record(torch.cuda.current_stream(device))

    def side(self) -> AbstractContextManager[object]:
        return contextlib.nullcontext() if self._side is None else torch.cuda.stream(self._side)

    def finish_side(self) -> None:
        """Sleep until the device has done what the exchange's stream holds."""
        if self._side is not None:
            reached = _event()
            reached.record(self._side)
            reached.synchronize()

    @contextlib.contextmanager
    def exchanging(self) -> Iterator[None]:
        if self._side is None:
            yield
            return
        self._side.wait_event(self._trained)
        yield
        self._exchanged.record(self._side)

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        if self._side is None:
            yield
            return
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(self._exchanged)
        yield
        self._trained.record(stream)


def _event() -> torch.cuda.Event:
    # `blocking` lets the waiting thread sleep, where it would spin.
    return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
