"""N ranks as threads of one process: for tests, and the strictest of the back-ends.

Values are combined in rank order by one thread, so every rank holds the same bits.  Exchanges are matched
by their number, and ranks that disagree about what exchange number k is are told so, where MPI would hang
or mix up buffers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, NoReturn, TypeVar

import torch
from torch import Tensor

from speechdp.comm.base import Communicator, ReduceOp, Work
from speechdp.errors import CommunicationError

T = TypeVar("T")


@dataclass
class _Exchange:
    """Contributions of the ranks to one collective call."""

    what: str
    parts: dict[int, Any] = field(default_factory=dict)
    result: Any = None
    num_read: int = 0


class _Shared:
    """What the ranks have in common, guarded by one condition."""

    def __init__(self, size: int, timeout_s: float) -> None:
        self.size = size
        self.changed = threading.Condition()
        self.deadline = time.monotonic() + timeout_s
        self.failure: tuple[int, BaseException] | None = None
        self.ended: set[int] = set()
        self.exchanges: dict[int, _Exchange] = {}

    def fail(self, rank: int, error: BaseException) -> None:
        """Note the first failure and wake everybody."""
        with self.changed:
            if self.failure is None:
                self.failure = (rank, error)
            self.changed.notify_all()

    def end(self, rank: int) -> None:
        """Note that `rank` takes part in nothing any more."""
        with self.changed:
            self.ended.add(rank)
            self.changed.notify_all()

    def deposit(self, number: int, rank: int, what: str, part: Any) -> _Exchange:
        """Add one rank's part to exchange `number`."""
        with self.changed:
            exchange = self.exchanges.setdefault(number, _Exchange(what))
            if exchange.what != what:
                first = min(exchange.parts)
                raise CommunicationError(
                    f"exchange {number}: rank {first} calls {exchange.what}, but rank {rank} calls {what}; "
                    "every rank must make the same calls in the same order"
                )
            exchange.parts[rank] = part
            self.changed.notify_all()
            return exchange

    def collect(
        self, number: int, rank: int, exchange: _Exchange, combine: Callable[[list[Any]], Any]
    ) -> Any:
        """Wait for every rank's part and return the parts combined, which is done once."""
        with self.changed:
            while len(exchange.parts) < self.size:
                self._check(rank, exchange)
                self.changed.wait(max(0.0, self.deadline - time.monotonic()))
            if exchange.num_read == 0:
                exchange.result = combine([exchange.parts[r] for r in range(self.size)])
            exchange.num_read += 1
            if exchange.num_read == self.size:
                del self.exchanges[number]
            return exchange.result

    def _check(self, rank: int, exchange: _Exchange) -> None:
        if self.failure is not None:
            failed, error = self.failure
            raise CommunicationError(f"rank {failed} failed ({type(error).__name__}) before {exchange.what}")
        missing = sorted(set(range(self.size)) - set(exchange.parts))
        gone = [r for r in missing if r in self.ended]
        if gone:
            raise CommunicationError(f"rank {gone[0]} has ended; rank {rank} waits for it in {exchange.what}")
        if time.monotonic() >= self.deadline:
            raise CommunicationError(f"rank {rank} timed out in {exchange.what}, waiting for ranks {missing}")


class _ThreadsWork(Work):
    def __init__(self, comm: ThreadsCommunicator, number: int, exchange: _Exchange, x: Tensor, op: ReduceOp):
        self._comm, self._number, self._exchange, self._x, self._op = comm, number, exchange, x, op
        self._done = False

    def wait(self) -> None:
        if not self._done:
            self._x.copy_(self._comm.collect(self._number, self._exchange, lambda p: _reduce(p, self._op)))
            self._done = True


class ThreadsCommunicator(Communicator):
    """One of `size` ranks that live in this process; made by `run_threads`."""

    backend: ClassVar[str] = "threads"
    reducible: ClassVar[frozenset[torch.dtype]] = Communicator.reducible | {torch.float16, torch.bfloat16}

    def __init__(self, rank: int, shared: _Shared) -> None:
        self.rank = rank
        self.size = shared.size
        self.local_rank = rank
        self._shared = shared
        self._lock = threading.Lock()
        self._num_exchanges = 0

    def collect(self, number: int, exchange: _Exchange, combine: Callable[[list[Any]], Any]) -> Any:
        """Wait for exchange `number` and return its parts combined."""
        return self._shared.collect(number, self.rank, exchange, combine)

    def barrier(self) -> None:
        self._exchange("barrier", None, lambda parts: None)

    def close(self) -> None:
        return None

    def abort(self, exit_code: int) -> NoReturn:
        error = SystemExit(exit_code)
        self._shared.fail(self.rank, error)
        raise error

    def _allreduce_async(self, x: Tensor, name: str, op: ReduceOp) -> Work:
        what = f"allreduce({name!r}, {op.value}, {str(x.dtype).removeprefix('torch.')}{list(x.shape)})"
        # A copy, so that a rank which breaks the contract and writes early harms only itself.
        number, exchange = self._deposit(what, x.detach().clone())
        return _ThreadsWork(self, number, exchange, x.detach(), op)

    def _broadcast(self, x: Tensor, name: str, root: int) -> None:
        what = f"broadcast({name!r}, root {root}, {str(x.dtype).removeprefix('torch.')}{list(x.shape)})"
        part = x.detach().clone() if self.rank == root else None
        x.detach().copy_(self._exchange(what, part, lambda parts: parts[root]))

    def _allgather_bytes(self, data: bytes) -> list[bytes]:
        return list(self._exchange("allgather", data, lambda parts: parts))

    def _deposit(self, what: str, part: Any) -> tuple[int, _Exchange]:
        with self._lock:
            number, self._num_exchanges = self._num_exchanges, self._num_exchanges + 1
        return number, self._shared.deposit(number, self.rank, what, part)

    def _exchange(self, what: str, part: Any, combine: Callable[[list[Any]], Any]) -> Any:
        number, exchange = self._deposit(what, part)
        return self.collect(number, exchange, combine)


def run_threads(size: int, function: Callable[[Communicator], T], timeout_s: float = 60.0) -> list[T]:
    """Run `function(communicator)` on `size` ranks, each a thread, and return their results in rank order.

    Args:
        size: number of ranks.
        function: what every rank does; called once a rank with that rank's communicator.
        timeout_s: seconds after which ranks that wait for one another give up.

    Raises:
        CommunicationError: the ranks hang, or disagree about the next exchange.
        Exception: the first that a rank raised, with a note naming the rank.  The others are woken from
            their exchange with a CommunicationError of their own.
    """
    shared = _Shared(size, timeout_s)
    results: dict[int, T] = {}

    def work(rank: int) -> None:
        try:
            results[rank] = function(ThreadsCommunicator(rank, shared))
        except BaseException as error:  # handed to the caller, who raises it again
            shared.fail(rank, error)
        finally:
            shared.end(rank)

    threads = [threading.Thread(target=work, args=(r,), name=f"rank {r}", daemon=True) for r in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        # One second more than the exchanges get, so that their message, which says more, comes first.
        thread.join(max(0.0, shared.deadline + 1.0 - time.monotonic()))
    if shared.failure is not None:
        rank, error = shared.failure
        notes = [*getattr(error, "__notes__", []), f"raised on rank {rank} of {size}"]
        error.__notes__ = notes
        raise error
    hanging = [thread.name for thread in threads if thread.is_alive()]
    if hanging:
        raise CommunicationError(f"{', '.join(hanging)} of {size} did not end within {timeout_s:g} s")
    return [results[r] for r in range(size)]


def _reduce(parts: list[Tensor], op: ReduceOp) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        if op is ReduceOp.SUM:
            total += part
        elif op is ReduceOp.MAX:
            torch.maximum(total, part, out=total)
        else:
            torch.minimum(total, part, out=total)
    return total
