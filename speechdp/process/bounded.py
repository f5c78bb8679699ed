"""Calls with a time limit: a disk, a terminal or a lock must not keep a process from ending."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_PATIENCE_S = 1.0


def bounded(function: Callable[[], T], *, default: T) -> T:
    """Return what `function` returns, or `default` if it fails or takes longer than a second."""
    results: list[T] = []

    def call() -> None:
        with contextlib.suppress(Exception):  # nothing may keep this process from ending
            results.append(function())

    thread = threading.Thread(target=call, name="speechdp-last-words", daemon=True)
    thread.start()
    thread.join(_PATIENCE_S)
    return results[0] if results else default
