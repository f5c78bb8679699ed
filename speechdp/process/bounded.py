"""Calls with a time limit: a disk, a terminal or a lock must not keep a process from ending."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

#: So long a call may take, s.
_PATIENCE_S = 1.0
#: So long its thread may wait for a core before that, s: no disk holds it up yet, only a busy machine.
_START_S = 10.0


def bounded(function: Callable[[], T], *, default: T) -> T:
    """Return what `function` returns, or `default` if it fails or takes longer than a second.

    The second is counted from when it has begun; it is given up, too, where that takes 10 s, or where the
    system has no more threads.

    Example:
        >>> bounded(lambda: 1 // 0, default=7)
        7
    """
    results: list[T] = []
    begun = threading.Event()

    def call() -> None:
        begun.set()
        with contextlib.suppress(Exception):  # nothing may keep this process from ending
            results.append(function())

    thread = threading.Thread(target=call, name="speechdp-last-words", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no more threads: whoever calls goes on to the end of this process
        return default
    begun.wait(_START_S)
    thread.join(_PATIENCE_S)
    return results[0] if results else default
