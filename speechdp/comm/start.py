"""End a rank that waits in vain for the others when a job starts: it has no watchdog before it trains.

A thread says so in a line.  While MPI itself starts no Python thread can run; there the interpreter's own
timer shows the stack and ends the process a little later.
"""

from __future__ import annotations

import faulthandler
import threading
from collections.abc import Callable
from typing import TypeVar

from speechdp import exit_codes
from speechdp.comm import environment

T = TypeVar("T")

#: Ranks may start minutes apart: their libraries come from a disk that all of them read at once.
_LEAST_S = 300.0
#: How much later than the thread the interpreter's timer comes, s.
_BACKSTOP_S = 5.0


class StartGuard:
    """Guards the start of this rank, from `waiting_for_all_ranks` to `over`; a process by itself needs none.

    Args:
        timeout_s: without progress, as of training; taken for at least some minutes; 0: no guard.
    """

    def __init__(self, timeout_s: float) -> None:
        launch = environment.announced()
        is_alone = launch is None or launch.size == 1
        self._timeout_s = 0.0 if is_alone or timeout_s == 0 else max(timeout_s, _LEAST_S)
        self._rank = 0 if launch is None else launch.rank
        self._timer = threading.Timer(self._timeout_s, self._end)
        self._timer.daemon = True

    def waiting_for_all_ranks(self, make: Callable[[], T]) -> T:
        """Return what `make` returns, guarded from here on; its name is what the stack shows."""
        if self._timeout_s > 0:
            self._timer.start()
            faulthandler.dump_traceback_later(self._timeout_s + _BACKSTOP_S, exit=True)
        return make()

    def over(self) -> None:
        """All ranks have met: guard no more."""
        if self._timeout_s > 0:
            self._timer.cancel()
            faulthandler.cancel_dump_traceback_later()

    def _end(self) -> None:
        name = f"rank {self._rank} on {environment.host_name()}"
        environment.end_process_with(
            f"speechdp: {name}: waited {self._timeout_s:.0f} s for all ranks to start; "
            "see with speechdp doctor that every host can be reached and reads the same disks\n",
            exit_codes.HUNG,
        )
