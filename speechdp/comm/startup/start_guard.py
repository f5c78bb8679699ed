"""End a rank that waits in vain for the others when a job or a run begins, before its watchdog is started.

A thread prints a line that says so.  While MPI itself starts, no Python thread can run; then the
interpreter's own timer prints the stack and ends the process a little later.
"""

from __future__ import annotations

import faulthandler
import math
import threading
from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

from speechdp import exit_codes, remedies
from speechdp.comm import environment

T = TypeVar("T")

#: Shortest time-out, s.  Ranks may start minutes apart: all read their libraries from one disk at once.
_LEAST_S = 300.0
#: How much later than the thread the interpreter's timer fires, s.
_BACKSTOP_S = 5.0
#: Fractional part of the timer's time-out, s: by it launching/launcher_output.py distinguishes the timer's
#: `Timeout (0:05:05.015625)!` from the output of a script that uses faulthandler as well.
_TIMER_MARK_S = 1 / 64


class StartGuard:
    """Guards the start of a job or run on this rank until `over`; does nothing for a single process.

    Only one guard at a time; it begins with `with`, or with `waiting_for_all_ranks`.

    Args:
        timeout_s: time without progress, as for training, s; at least `_LEAST_S` is waited; 0: no guard.
        awaited: what all ranks are to do, for the message.
    """

    def __init__(self, timeout_s: float, awaited: str = "start") -> None:
        launch = environment.announced()
        is_alone = launch is None or launch.size == 1
        self._timeout_s = 0.0 if is_alone or timeout_s == 0 else max(timeout_s, _LEAST_S)
        self._awaited = awaited
        self._rank = 0 if launch is None else launch.rank
        self._timer = threading.Timer(self._timeout_s, self._end)
        self._timer.daemon = True

    def waiting_for_all_ranks(self, make: Callable[[], T]) -> T:
        """Begin to guard, and return what `make` returns; the stack shows this method's name."""
        self.__enter__()
        return make()

    def over(self) -> None:
        """Stop guarding, as all ranks have met.  Safe to call twice."""
        if self._timeout_s > 0:
            self._timer.cancel()
            faulthandler.cancel_dump_traceback_later()

    def __enter__(self) -> StartGuard:
        if self._timeout_s > 0:
            self._timer.start()
            whole_s = math.ceil(self._timeout_s + _BACKSTOP_S)
            faulthandler.dump_traceback_later(whole_s + _TIMER_MARK_S, exit=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.over()

    def _end(self) -> None:
        name = f"rank {self._rank} on {environment.host_name()}"
        environment.end_process_with(
            f"speechdp: {name}: waited {self._timeout_s:.0f} s for all ranks to {self._awaited}; "
            "check with speechdp doctor that every host can be reached and sees the same disks"
            f"{remedies.longer_wait()}\n",
            exit_codes.HUNG,
        )
