"""Delays at random in what ranks do, and ranks that die or whose disk fails at one of their operations.

Operations are exchanges and messages (late_communicator.py) and what is done to the run's files.  Every
thread draws its delays from a generator of its own, seeded by the schedule and by who started it: they are
the same each time, whatever the other threads do meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import queue
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from speechdp.comm.threads.job import Vanished
from speechdp.train.trainer import Stopped

#: Audit events of operations on files, and what they are called here.
_EVENTS = {
    "open": "open",
    "os.rename": "rename",
    "os.remove": "remove",
    "os.mkdir": "mkdir",
    "os.rmdir": "rmdir",
    "os.listdir": "list",
    "os.scandir": "list",
}
#: What changes a disk; opening does where it is for writing.
_WRITING = frozenset({"rename", "remove", "mkdir", "rmdir", "sync"})
KINDS = ("collective", "wait", "message", "packet", "thread", "sync", "stat", *sorted({*_EVENTS.values()}))
_SWITCH_INTERVAL_S = 1e-6
#: Seconds for threads of a killed rank to end of themselves, however few cores there are.
_LEFT_S = 60.0
#: The file in which a thread waits for another; one that is anywhere else is in an operation, or on its way.
_WAITING = threading.__file__


class Killed(BaseException):
    """What every operation of a rank raises that is gone."""


@dataclass(frozen=True)
class Fault:
    """A rank dies, or its disk fails from some operation on.

    Attributes:
        rank: which.
        at: number of the operation, from 1; of those that write, where the disk fails.
        number: errno of its disk; 0: the rank dies.
    """

    rank: int
    at: int
    number: int = 0


@dataclass(frozen=True)
class Pace:
    """How late what is.

    Attributes:
        seed: of all delays.
        share: of the operations that are late.
        longest_s: delays are drawn from 0 to this, s; small ones are as likely as large ones by magnitude.
        slow: kinds of operation (KINDS) that are late by up to `slow_s` each time on `slow_rank`.
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
class _Life:
    """A rank from its start to its end.

    Attributes:
        num_operations: so far, those that write or all, whichever the fault counts.
        is_over: it is gone: none of its threads does anything any more.
    """

    rank: int
    num_operations: int = 0
    is_over: bool = False


@dataclass
class _Self:
    """Who a thread is: a rank's, with random numbers of its own."""

    life: _Life
    rng: random.Random


@dataclass
class Lateness:
    """The delays in force in this process, and the fault.

    Attributes:
        pace: the delays.
        folder: whose files are late.
        fault: of one rank; may be set and taken away between two jobs.
    """

    pace: Pace
    folder: str
    fault: Fault | None = None
    #: Wakes all ranks, whatever they wait for, with an error.
    wake: Callable[[BaseException], None] = lambda error: None
    _lives: list[_Life] = field(default_factory=list)
    _threads: list[threading.Thread] = field(default_factory=list)

    def operate(self, kind: str, *, writes: bool) -> None:
        """Sleep as long as this thread's next operation is late, then let it fail or not."""
        who: _Self | None = getattr(threading.current_thread(), "speechdp_who", None)
        if who is None:
            return
        pace, seconds = self.pace, 0.0
        if who.rng.random() < pace.share:
            seconds = pace.longest_s * 10 ** (-3 * who.rng.random())
        if kind in pace.slow and pace.slow_rank in {None, who.life.rank}:
            seconds += pace.slow_s * who.rng.random()
        if seconds > 0:
            time.sleep(seconds)
        self._fail(who.life, writes=writes)

    def _fail(self, life: _Life, *, writes: bool) -> None:
        fault = self.fault
        if fault is not None and fault.rank == life.rank and (writes or not fault.number):
            life.num_operations += 1
            if life.num_operations >= fault.at:
                if fault.number:
                    raise OSError(fault.number, os.strerror(fault.number))
                self.end_job(Killed())
        if life.is_over:
            raise Killed

    def end_if_over(self) -> None:
        """Raise `Killed` in a thread of a rank that is gone."""
        who: _Self | None = getattr(threading.current_thread(), "speechdp_who", None)
        if who is not None and who.life.is_over:
            raise Killed

    def begin(self, rank: int) -> _Self:
        """Return who the first thread of a rank is."""
        life = _Life(rank)
        self._lives.append(life)
        return _Self(life, random.Random(f"{self.pace.seed}/{rank}"))

    def adopt(self, thread: threading.Thread) -> None:
        """Give a thread about to start its rank and its random numbers: its starter's, or by its name."""
        starter: _Self | None = getattr(threading.current_thread(), "speechdp_who", None)
        if starter is not None:
            who = _Self(starter.life, random.Random(starter.rng.random()))
        elif thread.name.startswith("rank "):
            who = self.begin(int(thread.name.removeprefix("rank ")))
        else:
            return
        thread.speechdp_who = who  # type: ignore[attr-defined]
        self._threads.append(thread)

    def end_job(self, error: BaseException) -> None:
        """End all ranks for an error of one of them, as a launcher does."""
        self.wake(error)
        for life in self._lives:
            life.is_over = True

    def end_all(self) -> None:
        """Kill what is left of all ranks, and wait until it is gone, or waits for what never comes."""
        for life in self._lives:
            life.is_over = True
        deadline_s = time.monotonic() + _LEFT_S
        while any(map(_is_busy, self._threads)) and time.monotonic() < deadline_s:
            time.sleep(0.005)
        self._lives.clear()
        self._threads.clear()

    def is_here(self, path: Any) -> bool:
        """Tell whether a path is in the folder whose files are late."""
        return isinstance(path, str | os.PathLike) and os.fspath(path).startswith(self.folder)


def _is_busy(thread: threading.Thread) -> bool:
    """Return whether a thread has not ended and does not wait for another."""
    frame = sys._current_frames().get(thread.ident or 0)
    return thread.is_alive() and frame is not None and frame.f_code.co_filename != _WAITING


_late: Lateness | None = None
_hooked = threading.Event()


def pause(kind: str) -> None:
    """Be as late with an exchange or a message as the pace in force has it."""
    if _late is not None:
        _late.operate(kind, writes=False)


@contextlib.contextmanager
def rank_of_job(wake: Callable[[BaseException], None]) -> Iterator[None]:
    """Do what a rank does; an error ends all of the job, as comm/startup/failure.py has it.

    Args:
        wake: wakes all ranks, whatever exchange they wait in, with an error.
    """
    if _late is not None:
        _late.wake = wake
    try:
        yield
    except (Stopped, Vanished):
        raise
    except BaseException as error:
        if _late is not None:
            _late.end_job(error)
        raise


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    late = _late
    if late is not None and event in _EVENTS and arguments and late.is_here(arguments[0]):
        kind = _EVENTS[event]
        opened_to_write = event == "open" and bool(arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
        late.operate(kind, writes=opened_to_write or kind in _WRITING)


@contextlib.contextmanager
def late(pace: Pace, folder: Path, rank: int | None = None) -> Iterator[Lateness]:
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
    interval_s, force = sys.getswitchinterval(), Lateness(pace, f"{folder}{os.sep}")
    with pytest.MonkeyPatch.context() as patch:
        for name, kind in (("fsync", "sync"), ("fdatasync", "sync"), ("stat", "stat")):
            patch.setattr(os, name, _before(force, kind, getattr(os, name)))
        start, run, sleep = threading.Thread.start, threading.Thread.run, time.sleep

        def slept(seconds: float) -> None:
            # A rank of an asynchronous run may ask for work again and again, without an exchange or a file.
            sleep(seconds)
            force.end_if_over()

        def adopted(thread: threading.Thread) -> None:
            force.adopt(thread)
            start(thread)

        def begun_late(thread: threading.Thread) -> None:
            # A killed process has no thread that has ended and another that waits for it: it dies at what
            # it does next, where that hands its end on.
            with contextlib.suppress(Killed):
                force.operate("thread", writes=False)
            run(thread)

        def ended(args: threading.ExceptHookArgs) -> None:
            if args.exc_value is not None and not isinstance(args.exc_value, Killed | SystemExit):
                force.end_job(args.exc_value)

        patch.setattr(time, "sleep", slept)
        patch.setattr(queue, "SimpleQueue", queue._PySimpleQueue)  # type: ignore[attr-defined]  waits there
        patch.setattr(threading.Thread, "start", adopted)
        patch.setattr(threading.Thread, "run", begun_late)
        patch.setattr(threading, "excepthook", ended)
        if rank is not None:
            patch.setattr(threading.current_thread(), "speechdp_who", force.begin(rank), raising=False)
        _late = force
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        try:
            yield force
        finally:
            sys.setswitchinterval(interval_s)
            _late = None


def _before(force: Lateness, kind: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of `os` that is late: with a file of the folder, or any descriptor."""

    def call(*arguments: Any, **options: Any) -> Any:
        if kind != "stat" or force.is_here(arguments[0]):
            force.operate(kind, writes=kind in _WRITING)
        return original(*arguments, **options)

    return call
