"""Take this rank's batches from a source in the background, so that loading overlaps with compute."""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType

from speechdp.data.loading.batch import Batch
from speechdp.data.loading.loader_threads import keep_to_one_thread
from speechdp.data.loading.source import Pending, Ready, SplitSource
from speechdp.data.plan.assignment import Assignment
from speechdp.data.plan.orders import GROUP_BATCHES

#: Batches that wait on the GPU; one more is being copied.
_ON_DEVICE = 1


@dataclass(frozen=True)
class Step:
    """A batch and its place in training.

    Attributes:
        batch: what this rank trains on; 0 frames where it only joins the others.
        at: the assignment it was read for.
    """

    batch: Batch
    at: Assignment

    @property
    def epoch(self) -> int:
        """Epoch of the step: 0, 1, ..."""
        return self.at.place.epoch

    @property
    def ends_epoch(self) -> bool:
        """Whether this is the epoch's last step; asynchronous ranks learn that from a meeting."""
        return self.at.index == self.at.num_steps - 1


class StepLoader(Iterator[Step]):
    """Yields the steps of this rank's assignments; a context manager that closes itself on exit."""

    @abstractmethod
    def __next__(self) -> Step: ...

    @abstractmethod
    def close(self) -> None:
        """Stop reading and join the threads; safe to call twice."""

    def __enter__(self) -> StepLoader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Loader(StepLoader):
    """The batches of this rank's assignments, made ahead of time.

    A thread starts batches in order, at most `read_ahead` beyond the last one handed out; the source may make
    several at a time.  With `to_device` a second thread copies each batch in turn, so that the next batch is
    on the GPU before the step ends.  `next` raises an error at the batch that it belongs to; `close` joins
    the threads.  No process is started: forking after MPI_Init corrupts memory on some fabrics.

    Args:
        source: makes the batches.
        assignments: what to read, in order; iterated in the thread.
        read_ahead: most batches held at a time, including those being made.
        to_device: starts copying a batch to the GPU and returns the copy.
    """

    def __init__(
        self,
        source: SplitSource,
        assignments: Iterator[Assignment],
        *,
        read_ahead: int = 4,
        to_device: Callable[[Batch], Batch] | None = None,
    ) -> None:
        self._source = source
        self._assignments = assignments
        self._to_device = to_device
        self._stop = threading.Event()
        # A token is taken before a batch is started, so that no more batches hold memory than are allowed.
        self._room: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(read_ahead):
            self._room.put(None)
        started: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._queue: queue.Queue[_Item] | queue.SimpleQueue[_Item] = started
        threads = [threading.Thread(target=self._start_batches, args=(started,), name="speechdp-loader")]
        if to_device is not None and read_ahead > 1:
            self._queue = queue.Queue(_ON_DEVICE)
            threads.append(threading.Thread(target=self._move, args=(started,), name="speechdp-to-device"))
        self._threads = threads
        for thread in threads:
            thread.daemon = True
            thread.start()

    def __next__(self) -> Step:
        if self._stop.is_set():
            raise StopIteration
        item = self._queue.get()
        if len(self._threads) == 1:
            self._room.put(None)
        if not isinstance(item, _Started):
            self._stop.set()
            if item is None:
                raise StopIteration
            raise item
        try:
            return Step(item.pending.result(), item.at)
        except BaseException:
            self._stop.set()
            raise

    def close(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        while not self._queue.empty():
            self._queue.get_nowait()

    def _start_batches(self, into: queue.SimpleQueue[_Item]) -> None:
        alone = self._to_device is not None and len(self._threads) == 1
        keep_to_one_thread()
        try:
            for at in self._assignments:
                if not self._wait_for_room():
                    return
                pending = self._source.start(at.segments, at.place)
                into.put(self._moved(pending, at) if alone else _Started(pending, at))
                del pending  # its memory must return to the pool as soon as the batch has been used
        except BaseException as error:  # the training thread raises it
            into.put(error)
            if not isinstance(error, Exception):
                raise
            return
        into.put(None)

    def _wait_for_room(self) -> bool:
        while not self._stop.is_set():
            with contextlib.suppress(queue.Empty):
                self._room.get(timeout=0.1)
                return True
        return False

    def _move(self, started: queue.SimpleQueue[_Item]) -> None:
        try:
            while not self._stop.is_set():
                try:
                    item = started.get(timeout=0.1)
                except queue.Empty:
                    continue
                self._room.put(None)
                if isinstance(item, _Started):
                    item = self._moved(item.pending, item.at)
                if not self._put(item) or not isinstance(item, _Started):
                    return
        except BaseException as error:  # the training thread raises it
            self._put(error)
            if not isinstance(error, Exception):
                raise

    def _moved(self, pending: Pending, at: Assignment) -> _Started:
        assert self._to_device is not None
        return _Started(Ready(self._to_device(pending.result())), at)

    def _put(self, item: _Item) -> bool:
        while not self._stop.is_set():
            with contextlib.suppress(queue.Full):
                self._queue.put(item, timeout=0.1)
                return True
        return False


@dataclass(frozen=True)
class _Started:
    """A batch that is being made, and its place in training."""

    pending: Pending
    at: Assignment


#: None: there are no more batches.
_Item = _Started | BaseException | None


class BlockingLoader(StepLoader):
    """The poster's trainloader: reads a whole group of batches when the first of them is requested.

    The order `blocking-sort` sorts such groups; training stands still meanwhile.  Kept as a baseline for
    measurements.

    Source: Zhang, Cui et al., IBM/NTU poster; the groups of 32 batches are those of public Tacotron code.

    Args: as for Loader.
    """

    def __init__(
        self,
        source: SplitSource,
        assignments: Iterator[Assignment],
        *,
        to_device: Callable[[Batch], Batch] | None = None,
    ) -> None:
        self._source = source
        self._assignments = assignments
        self._to_device = to_device
        self._group: deque[Step] = deque()

    def __next__(self) -> Step:
        if not self._group:
            self._read_group()
        if not self._group:
            raise StopIteration
        step = self._group.popleft()
        if self._to_device is None:
            return step
        return Step(self._to_device(step.batch), step.at)

    def close(self) -> None:
        self._group.clear()

    def _read_group(self) -> None:
        started = []
        for at in itertools.islice(self._assignments, GROUP_BATCHES):
            started.append(_Started(self._source.start(at.segments, at.place), at))
            if at.index % GROUP_BATCHES == GROUP_BATCHES - 1 or at.index == at.num_steps - 1:
                break
        self._group.extend(Step(item.pending.result(), item.at) for item in started)
