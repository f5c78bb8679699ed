"""Wait in tests until a condition holds, however slow the machine is."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

#: Time after which a wait counts as a hang, s; long, because other tests run beside this one.
LIMIT_S = 120.0


def wait_until(condition: Callable[[], object], what: str, limit_s: float = LIMIT_S) -> None:
    """Wait until `condition` holds; fail if it never does.

    Args:
        condition: polled condition.
        what: description of the condition, for the message.
        limit_s: time after which the wait counts as a hang, s.
    """
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s, f"waited in vain for {what}"
        time.sleep(0.005)


@contextmanager
def no_thread_left() -> Iterator[None]:
    """Fail if a thread that the block started outlives it; wait for one that is just ending.

    Earlier threads may end meanwhile: those of other tests that did not wait for them.
    """
    before = set(threading.enumerate())
    yield
    wait_until(lambda: set(threading.enumerate()) <= before, "the end of threads that the test has begun")
