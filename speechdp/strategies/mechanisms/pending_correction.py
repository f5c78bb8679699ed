"""Let one thread train parameters while another mixes them with other ranks' parameters.

What a mixing adds to a rank's parameters, its *correction*, waits in a separate buffer until the rank's next
step, because forward and backward must use the same parameters.  Parameters plus the waiting correction are
the *effective* parameters, those that other ranks see.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import torch
from torch import Tensor


class EffectiveParameters:
    """A rank's parameters x and the correction c that waits for its next step; x + c are effective.

    A mixing x_i, x_j <- (x_i + x_j) / 2 of two ranks is `snapshot` on both, an exchange of the snapshots s_i
    and s_j, and `correct` on both, which adds (s_j - s_i) / 2 here and its negative there.  Whatever else is
    added to either meanwhile, nothing is lost and the mean over ranks is kept.  The buffer holds twice the
    correction, the plain difference; halving it costs nothing when it is added.

    The exchange's thread calls `snapshot` and `correct`, inside `side`; the training thread calls `update`
    and `take`.  While one of them accesses x or c the other thread waits, at most for a few passes over
    memory and never for an exchange.

    Args:
        values: x, flat.  (n,)
        exchanging: whether this rank makes exchanges; otherwise it only takes corrections that others share
            with it.

    Attributes:
        incoming: buffer for the other rank's snapshot.  (n,)
        num_pending: number of mixings in the waiting correction.
        num_mixings: number of mixings so far.
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
        """Return the context for threads of the exchange: on a GPU, a stream beside training's."""
        return self._streams.side()

    def snapshot(self) -> Tensor:
        """Return a copy of the effective parameters, valid until the next snapshot.  (n,)"""
        with self._lock, self._streams.exchanging():
            if self.num_pending:
                torch.add(self._values, self._pending, alpha=0.5, out=self._own)
            else:
                self._own.copy_(self._values)
        return self._own

    def correct(self) -> None:
        """Mix: let half of `incoming` minus the last snapshot wait for the next step."""
        torch.sub(self.incoming, self._own, out=self.incoming)
        # Training must find a correction that is complete on the device, and not have its stream wait for it.
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
        """Hold off snapshots while the block changes the parameters."""
        with self._lock, self._streams.training():
            yield

    def take(self, share: Callable[[Tensor], object] | None = None, announced: int = 0) -> int:
        """Add the correction to the parameters; return the number of mixings in it.

        Args:
            share: called with twice the correction before it is added, to send it to the ranks that share
                these parameters, or to receive it.
            announced: number of mixings in a received correction; the sender may have added some since.
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
    """Order the kernels of the two threads on a GPU; does nothing on a CPU.

    Events mark when training's stream last wrote the parameters, and when the other one last read or
    corrected them: each stream waits only for copies within the GPU.
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
        """Block until the device has finished the work on the exchange's stream."""
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
    # `blocking` lets the waiting thread sleep instead of spin.
    return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
