"""Wait without keeping a core busy: on a full node the core belongs to a rank that still computes."""

from __future__ import annotations

import time
from collections.abc import Callable

_NUM_TESTS_AT_ONCE = 10
_FIRST_SLEEP_S = 20e-6
_LONGEST_SLEEP_S = 1e-3


def sleep_until(done: Callable[[], bool]) -> None:
    """Call `done` until it is true: a few times at once, then between sleeps that double up to 1 ms."""
    for _ in range(_NUM_TESTS_AT_ONCE):
        if done():
            return
    sleep_s = _FIRST_SLEEP_S
    while not done():
        time.sleep(sleep_s)
        sleep_s = min(2 * sleep_s, _LONGEST_SLEEP_S)
