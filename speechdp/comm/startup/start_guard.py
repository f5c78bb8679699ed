"""End a rank that waits in vain for the others when a job or a run begins: its watchdog comes with training.

A thread says so in a line.  While MPI itself starts no Python thread can run; there the interpreter's own
timer shows the stack and ends the process a little later.
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

#: Ranks may start minutes apart: their libraries come from a disk that all of them read at once.
_LEAST_S = 300.0
#: How much later than the thread the interpreter's timer comes, s.
_BACKSTOP_S = 5.0
#: Fraction of the time that the timer is given, s: by it launching/launcher_output.py knows the
#: timer's `Timeout (0:05:05.015625)!` from what a script prints that uses faulthandler as well.
_TIMER_MARK_S = 1 / 64


class StartGuard:
    """Guards a beginning on this rank until it is `over`; a process by itself needs none.

    One at a time: `with`, or from `waiting_for_all_ranks` on.

    Args:
        timeout_s: without progress, as of training; taken for at least some minutes; 0: no guard.
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
        """Return what `make` returns, guarded from here on; its name is what the stack shows."""
        self.__enter__()
        return make()

    def over(self) -> None:
        """All ranks have met: guard no more.  Safe to call twice."""
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
