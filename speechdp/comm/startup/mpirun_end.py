"""Say in a line that mpirun ends its ranks: interrupted, it says nothing itself, and ends with exit code 1.

It sends each rank SIGTERM, and SIGKILL a second later.  `speechdp launch` asks ranks otherwise, and tells it
itself.
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


def heed_mpirun_end() -> None:
    """Let SIGTERM end this rank of an mpirun that nobody supervises, and rank 0 tell so.

    To be called in the main thread, before `end_by_exception`.
    """
    launch = environment.announced()
    if launch is None:
        return
    if launch.rank > 0:
        ending.hold_end_by_mpirun(lambda: None)
        return
    teller = _Teller()
    ending.hold_end_by_mpirun(teller.tell)
    teller.start()


class _Teller:
    """Writes the line as soon as SIGTERM comes, once.

    A thread does, as the main thread may wait for another rank, amid MPI, until it is killed.  It learns of
    signals that have a handler in Python.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._has_told = False

    def start(self) -> None:
        """Begin to watch for the signal."""
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        # What a worker is sent is no news of this rank; it has the same pipe.
        os.register_at_fork(after_in_child=partial(signal.set_wakeup_fd, -1))
        threading.Thread(target=self._watch, args=(reading,), name="speechdp-mpirun-end", daemon=True).start()

    def tell(self) -> None:
        """Write the line, unless it is written or a rank has said why the job ends."""
        with self._lock:
            if self._has_told or environment.has_told():
                return
            self._has_told = True
            text = f"speechdp: rank 0 on {environment.host_name()}: {_what_follows()}\n"
            with suppress(OSError):  # a reader that has gone
                os.write(STDERR, text.encode(errors="replace"))

    def _watch(self, reading: int) -> None:
        while signal.SIGTERM not in os.read(reading, 64):
            pass
        self.tell()


def _what_follows() -> str:
    """Return what the signal means here: training heeds it, and everything else ends by it."""
    is_training = hasattr(signal.getsignal(signal.SIGTERM), "__self__")  # a method of its StopRequest
    return _ASKED if is_training else _ENDED
