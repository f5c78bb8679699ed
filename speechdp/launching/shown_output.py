"""Pass on a launcher's output while it runs, and notice failures in it."""

from __future__ import annotations

import math
import os
import select
import time
from collections.abc import Callable
from dataclasses import dataclass

from speechdp.launching.faults import Fault, ends_job, is_gone
from speechdp.launching.launcher_output import LauncherOutput
from speechdp.process.output import STDERR, STDOUT, give_up, is_read, write_standard

_PIPE_BYTES = 65_536
#: A pipe or terminal that can take anything takes so much without blocking (PIPE_BUF).
_WRITTEN_AT_ONCE = 4096
#: A process that left the job's session may hold the pipe for ever.
_PIPE_END_S = 1.0
#: So long whoever reads our output may take nothing of what is left at the end, s.
_READER_PATIENCE_S = 60.0
#: So long what is left is written once this process is asked to end, s.
_ASKED_PATIENCE_S = 2.0
_POLL_S = 0.2


@dataclass
class _Relay:
    """One stream of the launcher on its way to ours.

    Attributes:
        descriptor: ours.
        pipe: reading end; None: it is at its end.
        take: what becomes of what was read, before it is shown.
        end: returns what was held back.
        pending: what is to be written.
        most_pending: how much of that there may be before the launcher has to wait, bytes.
    """

    descriptor: int
    pipe: int | None
    take: Callable[[bytes], bytes]
    end: Callable[[], bytes]
    pending: bytes = b""
    most_pending: float = _PIPE_BYTES

    @property
    def readable(self) -> list[int]:
        """The pipe, where there is more to come and room for it."""
        return [self.pipe] if self.pipe is not None and len(self.pending) <= self.most_pending else []

    def read(self) -> None:
        assert self.pipe is not None
        data = os.read(self.pipe, _PIPE_BYTES)
        if data:
            self.pending += self.take(data)
        else:
            self.close()

    def write(self) -> None:
        try:
            done = write_standard(self.descriptor, self.pending[:_WRITTEN_AT_ONCE])
        except BlockingIOError:
            return
        self.pending = self.pending[done:]

    def close(self) -> None:
        if self.pipe is not None:
            os.close(self.pipe)
            self.pipe = None
            self.pending += self.end()


class ShownOutput:
    """Shows what a launcher writes to its stdout and stderr, and notes when the first fault was read.

    Its stdout is passed on, too, and not handed to it: mpirun ends the job where it cannot write there.

    In the main thread, by and by: when this process is killed, the launcher gets a signal for each thread of
    it that dies (PR_SET_PDEATHSIG), and mpirun crashes on the second before it has ended the ranks.

    Args:
        stdout, stderr: reading ends of pipes; None: there is nothing to show.
        tolerates_loss: a rank that is gone is no fault to be noticed (see ends_job).

    Attributes:
        fault_since: when the first fault was read after which no rank can go on, by the monotonic clock;
            infinite: none yet.
        gone_since: when the first of these was read that tells of a rank's process that is gone.
    """

    def __init__(self, stdout: int | None, stderr: int | None, *, tolerates_loss: bool = False) -> None:
        self._tolerates_loss = tolerates_loss
        self._output = LauncherOutput()
        self._relays = (
            _Relay(STDOUT, stdout, lambda data: data, lambda: b""),
            _Relay(STDERR, stderr, self._output.feed, self._output.end),
        )
        self.fault_since = self.gone_since = math.inf

    @property
    def faults(self) -> tuple[Fault, ...]:
        """What was learnt so far."""
        return tuple(self._output.faults)

    @property
    def is_over(self) -> bool:
        """Whether there is nothing left to read or to show."""
        return not any(relay.readable or relay.pending for relay in self._relays)

    def pump(self, timeout_s: float) -> bool:
        """Read and show what there is, waiting so long for it; return whether the pipes may give more."""
        reading = {pipe: relay for relay in self._relays for pipe in relay.readable}
        writing = {relay.descriptor: relay for relay in self._relays if relay.pending}
        if self.is_over:
            return False
        readable, writable, _ = select.select([*reading], [*writing], [], timeout_s)
        for descriptor in writable[-1:]:  # both may be one pipe, whose room is that for one
            writing[descriptor].write()
        for pipe in readable:
            reading[pipe].read()
        self._note_faults(time.monotonic())
        return bool(readable)

    def _note_faults(self, now_s: float) -> None:
        faults = [
            fault for fault in self._output.faults if ends_job(fault, tolerates_loss=self._tolerates_loss)
        ]
        if faults:
            self.fault_since = min(self.fault_since, now_s)
        if any(map(is_gone, faults)):
            self.gone_since = min(self.gone_since, now_s)

    def finish(self, asked: Callable[[], bool]) -> None:
        """Show what is left, as long as somebody reads it; the launcher has ended.

        Args:
            asked: tells whether this process was asked to end.
        """
        deadline = time.monotonic() + _PIPE_END_S  # a process of nobody's may hold a pipe for ever
        for relay in self._relays:
            relay.most_pending = math.inf  # no more than the pipes hold
        while self.pump(0.0) and time.monotonic() < deadline:
            pass
        for relay in self._relays:
            relay.close()
        self._write_pending(asked)

    def _write_pending(self, asked: Callable[[], bool]) -> None:
        left, written_at, asked_at = self._num_pending, time.monotonic(), math.inf
        while self._num_pending:
            self.pump(_POLL_S)
            now = time.monotonic()
            if self._num_pending < left:
                left, written_at = self._num_pending, now
            if asked():
                asked_at = min(asked_at, now)
            if now - written_at > _READER_PATIENCE_S or now - asked_at > _ASKED_PATIENCE_S:
                for relay in self._relays:
                    if relay.pending or not is_read(relay.descriptor, 0.0):  # both may be one pipe
                        give_up(relay.descriptor)
                    relay.pending = b""

    @property
    def _num_pending(self) -> int:
        return sum(len(relay.pending) for relay in self._relays)
