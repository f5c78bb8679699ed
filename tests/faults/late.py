"""Delays at random in what ranks that are threads do: exchanges, messages, operations on the run's files.

Every thread draws its delays from a generator of its own, seeded by the schedule and by who started it: a
schedule's delays are the same each time, whatever the other threads do meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import pytest
from torch import Tensor

from speechdp.comm.base import Communicator, PeerCommunicator, ReduceOp, Work
from speechdp.comm.packets import Allocate, Packet, PacketChannel, Sent, fresh

#: Audit events of operations on files that are delayed, and what they are called here.
_EVENTS = {
    "open": "open",
    "os.rename": "rename",
    "os.remove": "remove",
    "os.mkdir": "mkdir",
    "os.rmdir": "rmdir",
    "os.listdir": "list",
    "os.scandir": "list",
}
KINDS = ("collective", "wait", "message", "packet", "thread", "sync", "stat", *sorted({*_EVENTS.values()}))
_SWITCH_INTERVAL_S = 1e-6


@dataclass(frozen=True)
class Pace:
    """How late what is.

    Attributes:
        seed: of all delays.
        share: of the calls that are late.
        longest_s: delays are drawn from 0 to this, s; small ones are as likely as large ones by magnitude.
        slow: kinds of operation (KINDS) that are late by `slow_s` each time on `slow_rank`.
        slow_rank: None: on all ranks.
        slow_s: seconds.
    """

    seed: int
    share: float
    longest_s: float
    slow: frozenset[str] = frozenset()
    slow_rank: int | None = None
    slow_s: float = 0.0

    @classmethod
    def draw(cls, seed: int, size: int) -> Pace:
        """Return one of many: a few long delays or many short ones, something slow on a rank or all."""
        rng = random.Random(seed)
        kinds = rng.sample(KINDS, rng.choice((0, 1, 1, 2)))
        share = rng.choice((0.02, 0.1, 0.3))
        return cls(
            seed,
            share,
            0.001 / share,
            frozenset(kinds),
            rng.choice((None, *range(size))),
            rng.choice((0.001, 0.005, 0.02)),
        )


@dataclass
class _Self:
    """Who a thread is: its rank, and random numbers of its own."""

    rank: int
    rng: random.Random


class _Late:
    """The delays in force in this process."""

    def __init__(self, pace: Pace, folder: Path) -> None:
        self.pace, self.folder = pace, f"{folder}{os.sep}"

    def pause(self, kind: str) -> None:
        """Sleep as long as the pace has it for this thread's next operation."""
        who: _Self | None = getattr(threading.current_thread(), "speechdp_who", None)
        if who is None:
            return
        pace = self.pace
        seconds = 0.0
        if who.rng.random() < pace.share:
            seconds = pace.longest_s * 10 ** (-3 * who.rng.random())
        if kind in pace.slow and pace.slow_rank in {None, who.rank}:
            seconds += pace.slow_s * who.rng.random()
        if seconds > 0:
            time.sleep(seconds)

    def begin(self, rank: int) -> _Self:
        """Return who the first thread of a rank is."""
        return _Self(rank, random.Random(f"{self.pace.seed}/{rank}"))

    def adopt(self, thread: threading.Thread) -> None:
        """Give a thread about to start its rank and its random numbers: its starter's, or by its name."""
        starter: _Self | None = getattr(threading.current_thread(), "speechdp_who", None)
        if starter is not None:
            who = _Self(starter.rank, random.Random(starter.rng.random()))
        elif thread.name.startswith("rank "):
            who = self.begin(int(thread.name.removeprefix("rank ")))
        else:
            return
        thread.speechdp_who = who  # type: ignore[attr-defined]

    def is_here(self, path: Any) -> bool:
        """Tell whether a path is in the folder whose operations are late."""
        return isinstance(path, str | os.PathLike) and os.fspath(path).startswith(self.folder)


_late: _Late | None = None


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    late = _late
    if late is not None and event in _EVENTS and arguments and late.is_here(arguments[0]):
        late.pause(_EVENTS[event])


_hooked = threading.Event()


@contextlib.contextmanager
def late(pace: Pace, folder: Path, rank: int | None = None) -> Iterator[None]:
    """Delay what ranks do below `folder` and over late communicators.

    Args:
        pace: the delays.
        folder: whose files are late.
        rank: of this process; None: ranks are the threads named `rank N`, and those they start.
    """
    global _late  # noqa: PLW0603  audit hooks stay for ever: this one asks what is in force
    if not _hooked.is_set():
        _hooked.set()
        sys.addaudithook(_audit)
    interval_s = sys.getswitchinterval()
    with pytest.MonkeyPatch.context() as patch:
        force = _Late(pace, folder)

        def paused(kind: str, original: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **options: Any) -> Any:
                if kind != "stat" or force.is_here(arguments[0]):
                    force.pause(kind)
                return original(*arguments, **options)

            return call

        for name, kind in (("fsync", "sync"), ("fdatasync", "sync"), ("stat", "stat")):
            patch.setattr(os, name, paused(kind, getattr(os, name)))
        start, run = threading.Thread.start, threading.Thread.run

        def adopted(thread: threading.Thread) -> None:
            force.adopt(thread)
            start(thread)

        def begun_late(thread: threading.Thread) -> None:
            force.pause("thread")
            run(thread)

        patch.setattr(threading.Thread, "start", adopted)
        patch.setattr(threading.Thread, "run", begun_late)
        if rank is not None:
            patch.setattr(threading.current_thread(), "speechdp_who", force.begin(rank), raising=False)
        _late = force
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        try:
            yield
        finally:
            sys.setswitchinterval(interval_s)
            _late = None


def _pause(kind: str) -> None:
    if _late is not None:
        _late.pause(kind)


class LateCommunicator(Communicator):
    """Another communicator, all of whose calls begin and end late now and then.

    Args:
        inner: does the work.
    """

    backend: ClassVar[str] = "late"

    def __init__(self, inner: Communicator) -> None:
        self._inner = inner
        self.rank, self.size, self.local_rank = inner.rank, inner.size, inner.local_rank
        self.role, self.has_peers = inner.role, inner.has_peers

    @property
    def sent_bytes(self) -> float:  # type: ignore[override]
        return self._inner.sent_bytes

    @property
    def alive(self) -> tuple[int, ...]:
        return self._inner.alive

    @property
    def gone(self) -> frozenset[int]:
        return self._inner.gone

    def tolerate_loss(self) -> None:
        self._inner.tolerate_loss()

    def allreduce_async(self, x: Tensor, *, name: str, op: ReduceOp = ReduceOp.SUM) -> Work:
        _pause("collective")
        return _LateWork(self._inner.allreduce_async(x, name=name, op=op))

    def broadcast(self, x: Tensor, *, name: str, root: int = 0) -> Tensor:
        with _around("collective"):
            return self._inner.broadcast(x, name=name, root=root)

    def allgather_object(self, value: Any) -> list[Any]:
        with _around("collective"):
            return self._inner.allgather_object(value)

    def peers(self) -> PeerCommunicator:
        with _around("collective"):
            return _LatePeers(self._inner.peers())

    def packets(self, allocate: Allocate = fresh) -> PacketChannel:
        with _around("collective"):
            return _LatePackets(self._inner.packets(allocate))

    def split(self, color: int) -> Communicator:
        with _around("collective"):
            return LateCommunicator(self._inner.split(color))

    def barrier(self) -> None:
        with _around("collective"):
            self._inner.barrier()

    def close(self) -> None:
        with _around("collective"):
            self._inner.close()

    def leave(self, exit_code: int) -> None:
        self._inner.leave(exit_code)

    def abort(self, exit_code: int) -> NoReturn:
        self._inner.abort(exit_code)

    def _allreduce_async(self, x: Tensor, name: str, op: ReduceOp) -> Work:
        raise NotImplementedError

    def _broadcast(self, x: Tensor, name: str, root: int) -> None:
        raise NotImplementedError

    def _allgather_bytes(self, data: bytes) -> list[bytes]:
        raise NotImplementedError


@contextlib.contextmanager
def _around(kind: str) -> Iterator[None]:
    _pause(kind)
    yield
    _pause(kind)


class _LateWork(Work):
    def __init__(self, inner: Work) -> None:
        self._inner = inner

    def wait(self) -> None:
        with _around("wait"):
            self._inner.wait()


class _LatePeers(PeerCommunicator):
    def __init__(self, inner: PeerCommunicator) -> None:
        self._inner, self.rank, self.size = inner, inner.rank, inner.size

    @property
    def sent_bytes(self) -> int:  # type: ignore[override]
        return self._inner.sent_bytes

    @property
    def lost(self) -> frozenset[int]:  # type: ignore[override]
        return self._inner.lost

    def send(self, x: Tensor, dest: int, *, tag: int = 0) -> None:
        with _around("message"):
            self._inner.send(x, dest, tag=tag)

    def recv(self, x: Tensor, source: int | None = None, *, tag: int = 0) -> int:
        with _around("message"):
            return self._inner.recv(x, source, tag=tag)

    def close(self) -> None:
        with _around("collective"):
            self._inner.close()


class _LatePackets(PacketChannel):
    def __init__(self, inner: PacketChannel) -> None:
        self._inner, self.rank, self.size = inner, inner.rank, inner.size

    @property
    def sent_bytes(self) -> int:  # type: ignore[override]
        return self._inner.sent_bytes

    def send(
        self, dest: int, head: dict[str, Any], tensors: Sequence[Tensor] = (), sent: Sent | None = None
    ) -> None:
        with _around("packet"):
            self._inner.send(dest, head, tensors, sent)

    def receive(self) -> Packet | None:
        with _around("packet"):
            return self._inner.receive()

    @property
    def is_moving(self) -> bool:
        return self._inner.is_moving

    def close(self) -> None:
        with _around("collective"):
            self._inner.close()
