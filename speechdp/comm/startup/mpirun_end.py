"""Print a line when mpirun ends its ranks: an interrupted mpirun prints nothing and exits with code 1.

mpirun sends each rank SIGTERM, and SIGKILL a second later.  `speechdp launch` stops ranks in another way and
prints its own line.
"""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from functools import partial

from speechdp.comm import environment
from speechdp.process import ending
from speechdp.process.output import STDERR

_ENDED = "ended by SIGTERM, which mpirun sends its ranks when it is interrupted or one of them has failed"
_ASKED = (
    "asked to stop by SIGTERM, which mpirun sends its ranks when it is interrupted or one of them has failed"
    ": it kills them a second later, saved or not, while speechdp launch gives them time to save"
)


def handle_mpirun_end() -> None:
    """Let SIGTERM end this rank of an unsupervised mpirun, and let rank 0 say so.

    Call it in the main thread, before `end_by_exception`.
    """
    launch = environment.announced()
    if launch is None:
        return
    if launch.rank > 0:
        ending.hold_end_by_mpirun(lambda: None)
        return
    announcer = _Announcer()
    ending.hold_end_by_mpirun(announcer.announce)
    announcer.start()


class _Announcer:
    """Writes the line once, as soon as SIGTERM arrives.

    A separate thread writes it, as the main thread may wait inside MPI for another rank until it is killed.
    The thread learns of signals that have a Python handler.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._has_reported = False

    def start(self) -> None:
        """Begin to watch for the signal."""
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        # A forked worker inherits the pipe; signals to it say nothing about this rank.
        os.register_at_fork(after_in_child=partial(signal.set_wakeup_fd, -1))
        threading.Thread(target=self._watch, args=(reading,), name="speechdp-mpirun-end", daemon=True).start()

    def announce(self) -> None:
        """Write the line, unless it was written before or a rank has said why the job ends."""
        with self._lock:
            if self._has_reported or environment.has_reported():
                return
            self._has_reported = True
            text = f"speechdp: rank 0 on {environment.host_name()}: {_what_follows()}\n"
            with suppress(OSError):  # the reader is gone
                os.write(STDERR, text.encode(errors="replace"))

    def _watch(self, reading: int) -> None:
        while signal.SIGTERM not in os.read(reading, 64):
            pass
        self.announce()


def _what_follows() -> str:
    """Return what the signal leads to: training stops in an orderly way, anything else is ended by it."""
    is_training = hasattr(signal.getsignal(signal.SIGTERM), "__self__")  # a method of its StopRequest
    return _ASKED if is_training else _ENDED
