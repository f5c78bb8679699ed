"""Waiting in tests: until something has come true, however slow the machine is."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

#: A hang is waited for so long: other tests run beside this one.
LIMIT_S = 120.0


def wait_until(condition: Callable[[], object], what: str, limit_s: float = LIMIT_S) -> None:
    """Wait until `condition` holds; fail if it never does.

    Args:
        condition: looked at again and again.
        what: is waited for, for the message.
        limit_s: after which it counts as a hang, s.
    """
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s, f"waited in vain for {what}"
        time.sleep(0.005)


@contextmanager
def no_thread_left() -> Iterator[None]:
    """Fail if a thread that the block has begun outlives it; one that is just ending is waited for.

    Threads of before may end meanwhile: those of other tests, for which nobody has waited.
    """
    before = set(threading.enumerate())
    yield
    wait_until(lambda: set(threading.enumerate()) <= before, "the end of threads that the test has begun")
