"""Let ranks with unequal numbers of batches pass through their loops equally often."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from speechdp.comm.base import Communicator, ReduceOp, Work
from speechdp.comm.calls import Calls
from speechdp.errors import ConfigError
from speechdp.parallel.batch_statistics import load_buffers
from speechdp.parallel.script_checks import check_same_call
from speechdp.parallel.strategy import Strategy
from speechdp.process.ending import WARNINGS
from speechdp.timing.timeline import Span, Timeline

Batch = TypeVar("Batch")
_END: Any = object()
#: Name of the call in messages.
_CALL = "run.batches()"


class BatchJoiner:
    """Show a rank that has run out its last batch again, as one that does not count.

    Args:
        model: the model; what such a batch changes in its running statistics is undone.
        comm: the ranks.
        timeline: timeline of this rank, which records the wait for batches.
        calls: calls of this rank, which its watchdog watches.

    Attributes:
        joins_only: whether the current batch does not count.
    """

    def __init__(self, model: nn.Module, comm: Communicator, timeline: Timeline, calls: Calls) -> None:
        self._model, self._comm, self._timeline, self._calls = model, comm, timeline, calls
        self.joins_only = False
        self._has_run_out = False
        self._kept: dict[str, Tensor] = {}  # buffers as they were before the batch that does not count
        self._under_way: Work | None = None

    def join(self, loader: Iterable[Batch], strategy: Strategy) -> Iterator[Batch]:
        """Yield the batches of a loader; see `DataParallel.batches`.  Collective."""
        with self._calls.of(_CALL):
            check_same_call(_CALL, self._comm)
            lengths = self._comm.allgather_object(_length(loader))
        known = [n for n in lengths if n is not None]
        if len(known) < len(lengths) and not strategy.traits.synchronous:
            raise ConfigError(
                f"{strategy.name}: ranks take steps at their own pace, so batches() must know how many "
                "batches there are; give it something with a length, such as a list, or a torch DataLoader "
                "of a dataset with a length"
            )
        if known and max(known) > 0 and min(known) == 0:
            raise ConfigError(
                f"rank {lengths.index(0)} has no batch, rank {lengths.index(max(known))} has {max(known)}; "
                "share out the data so that every rank has one"
            )
        self.complete()  # the message of a loop that all ranks left before its end
        with _without_warnings():
            source = iter(loader)
        yield from self._counted(source, max(known)) if len(known) == len(lengths) else self._agreed(source)

    def _counted(self, source: Iterator[Batch], count: int) -> Iterator[Batch]:
        """Yield `count` batches."""
        last: list[Batch] = []
        for _ in range(count):
            last = self._next(source) or last
            yield from self._shown(last, joins_only=self._has_run_out)

    def _agreed(self, source: Iterator[Batch]) -> Iterator[Batch]:
        """Yield batches as long as any rank has one."""
        last: list[Batch] = []
        joins = False
        found = self._next(source)
        while True:
            here = torch.tensor([float(bool(found))])
            self._under_way = self._comm.allreduce_async(here, name="batches", op=ReduceOp.MAX)
            if last:
                yield from self._shown(last, joins_only=joins)
            self.complete()
            if not here.item():
                return
            joins, last = not found, found or last
            if not last:
                raise ConfigError(f"rank {self._comm.rank} has no batch, others have; every rank needs one")
            found = self._next(source)

    def complete(self) -> None:
        """Wait for the message under way, as a loop may be left before its end.  Collective."""
        if self._under_way is not None:
            with self._calls.of(_CALL):
                self._under_way.wait()
        self._under_way = None

    def _next(self, source: Iterator[Batch]) -> list[Batch]:
        """Return the next batch in a list; an empty list if there is none."""
        # Generators, and objects that chain several loaders, start workers here.
        with self._timeline.span(Span.DATA_WAIT), _without_warnings():
            found = [batch for batch in [next(source, _END)] if batch is not _END]
        self._has_run_out = not found
        return found

    def _shown(self, batch: list[Batch], *, joins_only: bool) -> Iterator[Batch]:
        """Yield a batch; for one that does not count, first save the buffers it must not change."""
        if not batch:
            raise ConfigError(f"rank {self._comm.rank} has fewer batches than its loader's length says: none")
        self._kept = {k: v.clone() for k, v in self._model.named_buffers()} if joins_only else {}
        self.joins_only = joins_only
        try:
            yield batch[0]
        finally:
            self.joins_only = False
            self.take_back()

    def take_back(self) -> None:
        """Undo what a batch that does not count changed in the model, before the model is used or saved."""
        load_buffers(self._model, self._kept)


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Block stop signals inside the block, so that processes started in it, loaders' workers, inherit that.

    Launchers and batch systems send these signals to all processes of a rank.  They would end a worker, and
    with it the rank that is about to save.  SIGTERM is not blocked: a loader itself ends its workers with it.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP, *WARNINGS})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _length(loader: Iterable[Any]) -> int | None:
    """Return how many batches a loader has; None if it does not know."""
    try:
        return len(loader)  # type: ignore[arg-type]
    # TypeError: torch's DataLoader of a dataset without a length; some datasets raise NotImplementedError.
    except (TypeError, NotImplementedError):
        return None
