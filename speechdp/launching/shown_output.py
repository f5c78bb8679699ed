"""Show what a launcher prints while it runs, and learn from it that something has failed."""

from __future__ import annotations

import os
import select
import time

from speechdp.launching.faults import Fault, ends_job
from speechdp.launching.launcher_output import LauncherOutput

_PIPE_BYTES = 65_536
#: A pipe or terminal that can take anything takes so much without blocking (PIPE_BUF).
_WRITTEN_AT_ONCE = 4096
#: A process that left the job's session may hold the pipe for ever.
_PIPE_END_S = 1.0
_POLL_S = 0.2


class ShownOutput:
    """Shows what a launcher writes to its stderr, and notes when the first fault was read.

    In the main thread, by and by: when this process is killed, the launcher gets a signal for each thread of
    it that dies (PR_SET_PDEATHSIG), and mpirun crashes on the second before it has ended the ranks.

    Args:
        pipe: reading end; None: there is nothing to show.
    """

    def __init__(self, pipe: int | None) -> None:
        self._pipe = pipe
        self._output = LauncherOutput()
        self._pending = b""
        self.fault_since: float | None = None

    @property
    def faults(self) -> tuple[Fault, ...]:
        """What was learnt so far."""
        return tuple(self._output.faults)

    def pump(self, timeout_s: float) -> bool:
        """Read and show what there is, waiting so long for it; return whether the pipe may give more."""
        reading = [] if self._pipe is None or len(self._pending) > _PIPE_BYTES else [self._pipe]
        writing = [2] if self._pending else []
        if not reading and not writing:
            time.sleep(timeout_s)
            return False
        readable, writable, _ = select.select(reading, writing, [], timeout_s)
        if writable:
            self._write()
        if readable and self._pipe is not None:
            data = os.read(self._pipe, _PIPE_BYTES)
            self._pending += self._output.feed(data) if data else self._close()
            if self.fault_since is None and any(map(ends_job, self._output.faults)):
                self.fault_since = time.monotonic()
        return bool(readable)

    def finish(self) -> None:
        """Show what is left; the launcher has ended."""
        deadline = time.monotonic() + _PIPE_END_S  # a process of nobody's may hold the pipe for ever
        while self._pipe is not None and self.pump(0.0) and time.monotonic() < deadline:
            pass
        self._pending += self._close()
        while self._pending and time.monotonic() < deadline:
            self.pump(_POLL_S)

    def _close(self) -> bytes:
        """Close the pipe; return what was held back."""
        if self._pipe is None:
            return b""
        os.close(self._pipe)
        self._pipe = None
        return self._output.end()

    def _write(self) -> None:
        try:
            self._pending = self._pending[os.write(2, self._pending[:_WRITTEN_AT_ONCE]) :]
        except BlockingIOError:
            return
        except OSError:  # full, closed or gone: no reason to leave the ranks blocked
            self._pending = b""
