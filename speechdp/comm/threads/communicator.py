"""N ranks as threads of one process: for tests, and the strictest of the back-ends.

One thread combines values in rank order, so every rank holds the same bits.  Exchanges are matched by their
number.  Ranks that disagree about what exchange number k is get an error, where MPI would hang or mix up
buffers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NoReturn, TypeVar

import torch
from torch import Tensor

from speechdp.comm.base import Communicator, PeerCommunicator, ReduceOp, Work
from speechdp.comm.packets import Allocate, PacketChannel, fresh
from speechdp.comm.sums import REDUCIBLE
from speechdp.comm.threads.job import ThreadJob, Vanished
from speechdp.comm.threads.packets import PacketBoxes, ThreadPackets
from speechdp.comm.threads.peers import Mailboxes, ThreadPeers
from speechdp.errors import CommunicationError

T = TypeVar("T")

#: How long after the time-out ranks that have not ended are considered hung, s: if a rank has failed, and if
#: none has.  The second is longer because on a busy machine a thread may get no core for a while.
_FAILED_S, _SILENT_S = 1.0, 20.0
#: Seconds between two checks whether a rank has failed.
_LOOK_S = 0.1


@dataclass
class _Exchange:
    """The ranks' contributions to one collective call.

    Attributes:
        what: description of the call, the same on every rank.
        description: `what` as messages show it, with the script's call in which the first rank made it.
    """

    what: str
    description: str
    parts: dict[int, Any] = field(default_factory=dict)
    result: Any = None
    num_read: int = 0
    alive: tuple[int, ...] = ()


class _Shared:
    """The exchanges of one group of ranks, guarded by the job's condition.

    Args:
        job: state shared by all ranks, in this group or not.
        members: rank in the job of every rank of the group; messages name these ranks.
    """

    def __init__(self, job: ThreadJob, members: Sequence[int]) -> None:
        self.job, self.members = job, members
        self.size = len(members)
        self.exchanges: dict[int, _Exchange] = {}

    def deposit(self, number: int, rank: int, what: str, part: Any, at: str = "") -> _Exchange:
        """Add one rank's part to exchange `number`; `at` names the script's call that makes it."""
        description = f"{what} at {at}" if at else what
        with self.job.changed:
            self.job.check_here(self.members[rank])
            exchange = self.exchanges.setdefault(number, _Exchange(what, description))
            if exchange.what != what:
                first, this = self.members[min(exchange.parts)], self.members[rank]
                raise CommunicationError(
                    f"exchange {number}: rank {first} calls {exchange.description}, but rank {this} "
                    f"calls {description}; every rank must make the same calls in the same order"
                )
            exchange.parts[rank] = part
            self.job.changed.notify_all()
            return exchange

    def collect(
        self, number: int, rank: int, exchange: _Exchange, combine: Callable[[list[Any]], Any]
    ) -> Any:
        """Wait for every rank's part and return the combined parts, which are combined only once."""
        with self.job.changed:
            while not exchange.alive and (missing := self._missing(exchange)):
                self.job.wait(exchange.what, self.members[rank], missing)
            if exchange.num_read == 0:
                exchange.alive = tuple(sorted(exchange.parts))
                exchange.result = combine([exchange.parts[r] for r in exchange.alive])
            exchange.num_read += 1
            if exchange.num_read == len(exchange.alive):
                del self.exchanges[number]
            return exchange.result

    def _missing(self, exchange: _Exchange) -> list[int]:
        """Return the ranks, numbered as in the job, whose parts are missing."""
        absent = [self.members[r] for r in range(self.size) if r not in exchange.parts]
        return [rank for rank in absent if rank not in self.job.lost]


class _ThreadsWork(Work):
    def __init__(self, comm: ThreadsCommunicator, number: int, exchange: _Exchange, x: Tensor, op: ReduceOp):
        self._comm, self._number, self._exchange, self._x, self._op = comm, number, exchange, x, op
        self._done = False

    def wait(self) -> None:
        if not self._done:
            self._x.copy_(self._comm.collect(self._number, self._exchange, lambda p: _reduce(p, self._op)))
            self._done = True


class ThreadsCommunicator(Communicator):
    """One of `size` ranks in this process; made by `run_threads`, or by splitting another communicator."""

    backend: ClassVar[str] = "threads"
    reducible: ClassVar[frozenset[torch.dtype]] = REDUCIBLE["threads"]

    def __init__(self, rank: int, shared: _Shared) -> None:
        self.rank = rank
        self.size = shared.size
        self.local_rank = shared.members[rank]
        self._shared = shared
        self._lock = threading.Lock()
        self._num_exchanges = 0
        self._alive = tuple(range(self.size))

    @property
    def alive(self) -> tuple[int, ...]:
        return self._alive

    @property
    def gone(self) -> frozenset[int]:
        lost = self._shared.job.lost
        return frozenset(rank for rank, member in enumerate(self._shared.members) if member in lost)

    def check_loss_tolerance(self) -> None:
        return None  # this back-end always continues without vanished ranks

    def collect(self, number: int, exchange: _Exchange, combine: Callable[[list[Any]], Any]) -> Any:
        """Wait for exchange `number` and return its parts combined."""
        result = self._shared.collect(number, self.rank, exchange, combine)
        self._alive = exchange.alive
        return result

    def peers(self) -> PeerCommunicator:
        shared = self._shared
        boxes = self._exchange("peers", None, lambda parts: Mailboxes(shared.job, shared.members))
        return ThreadPeers(self.rank, boxes, self.barrier)

    def packets(self, allocate: Allocate = fresh) -> PacketChannel:
        shared = self._shared
        boxes = self._exchange("packets", None, lambda parts: PacketBoxes(shared.job, shared.members))
        return ThreadPackets(self.rank, boxes, allocate, self.barrier)

    def _split(self, color: int) -> Communicator:
        shared = self._shared

        def group(colors: list[int]) -> dict[int, _Shared]:
            members = {c: [m for m, d in zip(shared.members, colors, strict=True) if d == c] for c in colors}
            return {c: _Shared(shared.job, ours) for c, ours in members.items()}

        mine: _Shared = self._exchange("split", color, group)[color]
        return ThreadsCommunicator(mine.members.index(shared.members[self.rank]), mine)

    def barrier(self) -> None:
        self._exchange("barrier", None, lambda parts: None)

    def close(self) -> None:
        return None

    def abort(self, exit_code: int) -> NoReturn:
        error = SystemExit(exit_code)
        self._shared.job.fail(self._shared.members[self.rank], error)
        raise error

    def _allreduce_async(self, x: Tensor, name: str, op: ReduceOp) -> Work:
        what = f"allreduce({name!r}, {op.value}, {str(x.dtype).removeprefix('torch.')}{list(x.shape)})"
        # A copy, so that a rank that breaks the contract by writing early harms only itself.
        number, exchange = self._deposit(what, x.detach().clone())
        return _ThreadsWork(self, number, exchange, x.detach(), op)

    def _broadcast(self, x: Tensor, name: str, root: int) -> None:
        what = f"broadcast({name!r}, root {root}, {str(x.dtype).removeprefix('torch.')}{list(x.shape)})"
        part = x.detach().clone() if self.rank == root else None
        x.detach().copy_(self._exchange(what, part, lambda parts: next(p for p in parts if p is not None)))

    def _allgather_bytes(self, data: bytes) -> list[bytes]:
        return list(self._exchange("allgather", data, lambda parts: parts))

    def _deposit(self, what: str, part: Any) -> tuple[int, _Exchange]:
        with self._lock:
            number, self._num_exchanges = self._num_exchanges, self._num_exchanges + 1
        at = "" if self.calls is None else self.calls.at
        return number, self._shared.deposit(number, self.rank, what, part, at)

    def _exchange(self, what: str, part: Any, combine: Callable[[list[Any]], Any]) -> Any:
        number, exchange = self._deposit(what, part)
        return self.collect(number, exchange, combine)


def run_threads(size: int, function: Callable[[Communicator], T], timeout_s: float = 240.0) -> list[T]:
    """Run `function(communicator)` on `size` ranks, each a thread, and return their results in rank order.

    A rank that vanishes (`Vanished`) has no result.

    Args:
        size: number of ranks.
        function: what every rank runs; called once per rank, with that rank's communicator.
        timeout_s: seconds after which ranks that wait for one another give up.

    Raises:
        CommunicationError: the ranks hang, or disagree about the next exchange.
        Exception: the first exception that a rank raised, with a note naming the rank.  The other ranks get
            a CommunicationError in their exchange.
    """
    job = ThreadJob(timeout_s)
    shared = _Shared(job, range(size))
    results: dict[int, T] = {}

    def work(rank: int) -> None:
        try:
            results[rank] = function(ThreadsCommunicator(rank, shared))
        except Vanished:
            job.lose(rank)
        except BaseException as error:  # the caller raises it again
            job.fail(rank, error)
        finally:
            if rank not in job.lost:
                job.end(rank)

    threads = [threading.Thread(target=work, args=(r,), name=f"rank {r}", daemon=True) for r in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        _join(thread, job)
    hanging = ", ".join(thread.name for thread in threads if thread.is_alive())
    if job.failure is not None:
        rank, error = job.failure
        notes = [*getattr(error, "__notes__", []), f"raised on rank {rank} of {size}"]
        notes += [f"{hanging} did not end within {timeout_s:g} s"] if hanging else []
        error.__notes__ = notes
        raise error
    if hanging:
        raise CommunicationError(f"{hanging} of {size} did not end within {timeout_s:g} s")
    return [results[r] for r in range(size) if r not in job.lost]


def _join(thread: threading.Thread, job: ThreadJob) -> None:
    """Wait for a rank to end, but not for ever."""
    while thread.is_alive():
        # Ranks that wait for one another give up by themselves; their message says more and must come first.
        patience_s = _SILENT_S if job.failure is None else _FAILED_S
        left_s = job.deadline + patience_s - time.monotonic()
        if left_s <= 0:
            return
        thread.join(min(left_s, _LOOK_S))


def _reduce(parts: list[Tensor], op: ReduceOp) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        op.combine(total, part)
    return total
