"""Calls with a time limit: a disk, a terminal or a lock must not keep a process from ending."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

#: Longest time for a call, s.
_PATIENCE_S = 1.0
#: Longest time for its thread to get a core, s: before the call only a busy machine can delay it, not a disk.
_START_S = 10.0


def bounded(function: Callable[[], T], *, default: T) -> T:
    """Return what `function` returns, or `default` if it fails or takes longer than a second.

    The second counts from the start of the call.  The result is also `default` if the call does not start
    within 10 s, or if the system has no more threads.

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
    except RuntimeError:  # no more threads; the caller must still be able to end this process
        return default
    begun.wait(_START_S)
    thread.join(_PATIENCE_S)
    return results[0] if results else default
