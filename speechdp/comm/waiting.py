"""Wait without keeping a core busy: on a full node the core belongs to a rank that still computes."""

from __future__ import annotations

import time
from collections.abc import Callable

_NUM_TESTS_AT_ONCE = 10
_FIRST_SLEEP_S = 20e-6
_LONGEST_SLEEP_S = 1e-3


def sleep_until(
    done: Callable[[], bool], *, busy_s: float = 0.0, longest_sleep_s: float = _LONGEST_SLEEP_S
) -> None:
    """Call `done` until it returns true: a few times at once, then between sleeps that double in length.

    Args:
        done: the condition; must return at once.
        busy_s: time to poll without sleeping, s; the core is still yielded to whoever else wants it.
        longest_sleep_s: longest sleep, s.
    """
    for _ in range(_NUM_TESTS_AT_ONCE):
        if done():
            return
    busy_until = time.monotonic() + busy_s
    while time.monotonic() < busy_until:
        if done():
            return
        time.sleep(0)
    sleep_s = _FIRST_SLEEP_S
    while not done():
        time.sleep(sleep_s)
        sleep_s = min(2 * sleep_s, longest_sleep_s)
