"""Batches of ranks that have unequal numbers of them: all pass through their loops equally often."""

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
#: As messages have it.
_CALL = "run.batches()"


class BatchJoiner:
    """Shows a rank that has run out its last batch again, as one that does not count.

    Args:
        model: what such a batch leaves in its running statistics is taken back.
        comm: the ranks.
        timeline: of this rank, which notes the waiting for batches.
        calls: of this rank, where its watchdog looks.

    Attributes:
        joins_only: the batch shown now does not count.
    """

    def __init__(self, model: nn.Module, comm: Communicator, timeline: Timeline, calls: Calls) -> None:
        self._model, self._comm, self._timeline, self._calls = model, comm, timeline, calls
        self.joins_only = False
        self._has_run_out = False
        self._kept: dict[str, Tensor] = {}  # buffers as they were before the batch that does not count
        self._under_way: Work | None = None

    def join(self, loader: Iterable[Batch], strategy: Strategy) -> Iterator[Batch]:
        """Yield the batches of a loader, see `DataParallel.batches`.  Collective."""
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
        self.complete()  # of a loop that all ranks have left before its end
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
        """Yield batches as long as a rank has one."""
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
        """Wait for the message under way: a loop may be left before its end.  Collective."""
        if self._under_way is not None:
            with self._calls.of(_CALL):
                self._under_way.wait()
        self._under_way = None

    def _next(self, source: Iterator[Batch]) -> list[Batch]:
        """Return the next batch in a list; an empty one where there is none."""
        # Generators, and what passes several loaders' batches on, start workers here.
        with self._timeline.span(Span.DATA_WAIT), _without_warnings():
            found = [batch for batch in [next(source, _END)] if batch is not _END]
        self._has_run_out = not found
        return found

    def _shown(self, batch: list[Batch], *, joins_only: bool) -> Iterator[Batch]:
        """Yield a batch; note before one that does not count what it must leave in the model as it is."""
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
        """Take back what a batch that does not count has left in the model, before it is seen or saved."""
        load_buffers(self._model, self._kept)


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Keep the signals that ask ranks to stop from processes that are started in the block: loaders' workers.

    Launchers and batch systems send them to all processes of a rank.  They would end a worker, and thereby
    the rank that is about to save.  Not SIGTERM, by which a loader ends its workers itself.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP, *WARNINGS})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _length(loader: Iterable[Any]) -> int | None:
    """Return how many batches a loader has; None where it does not know."""
    try:
        return len(loader)  # type: ignore[arg-type]
    # It has none, as torch's DataLoader of a dataset without one; the second some datasets raise themselves.
    except (TypeError, NotImplementedError):
        return None
