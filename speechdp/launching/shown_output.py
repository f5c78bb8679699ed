"""Show a launcher's output while it runs, and detect failures in it."""

from __future__ import annotations

import array
import fcntl
import math
import os
import select
import termios
import time
from collections.abc import Callable
from dataclasses import dataclass

from speechdp.launching.faults import Fault, ends_job, is_gone
from speechdp.launching.launcher_output import LauncherOutput
from speechdp.process.output import STDERR, STDOUT, give_up, is_read, write_standard

_PIPE_BYTES = 65_536
#: Bytes that a writable pipe or terminal accepts without blocking (PIPE_BUF).
_WRITTEN_AT_ONCE = 4096
#: Longest time in which the reader of our output may accept nothing of what is left at the end, s.
_READER_PATIENCE_S = 60.0
#: Longest time for writing what is left once this process is asked to end, s.
_ASKED_PATIENCE_S = 2.0
_POLL_S = 0.2


@dataclass
class _Relay:
    """Relays one of the launcher's streams to one of ours.

    Attributes:
        descriptor: descriptor of our stream.
        pipe: reading end of the launcher's stream; None: the stream has ended.
        take: takes data read and returns what to show of it.
        end: returns what was held back.
        pending: data still to be written.
    """

    descriptor: int
    pipe: int | None
    take: Callable[[bytes], bytes]
    end: Callable[[], bytes]
    pending: bytes = b""

    @property
    def readable(self) -> list[int]:
        """The pipe, if it has not ended and there is room for its data."""
        return [self.pipe] if self.pipe is not None and len(self.pending) <= _PIPE_BYTES else []

    def read(self) -> None:
        assert self.pipe is not None
        data = os.read(self.pipe, _PIPE_BYTES)
        if data:
            self.pending += self.take(data)
        else:
            self.close()

    def read_rest(self) -> None:
        """Read what the pipe holds now, and no more: a stray process may write to it for ever."""
        left = 0 if self.pipe is None else _num_readable(self.pipe)
        while self.pipe is not None and left:
            data = os.read(self.pipe, left)
            left -= len(data)
            self.pending += self.take(data)
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


def _num_readable(pipe: int) -> int:
    """Return the number of bytes that a pipe holds."""
    held = array.array("i", [0])
    fcntl.ioctl(pipe, termios.FIONREAD, held)
    return held[0]


class ShownOutput:
    """Shows what a launcher writes to its stdout and stderr, and records when the first fault was read.

    The launcher does not get our stdout directly, because mpirun ends the job if it cannot write there.
    The main thread relays it piece by piece, without further threads: when this process is killed, the
    launcher gets one signal for each thread of this process (PR_SET_PDEATHSIG), and mpirun crashes on the
    second before it has ended the ranks.

    Args:
        stdout, stderr: reading ends of pipes; None: there is nothing to show.
        tolerates_loss: whether a lost rank does not count as a fault (see `ends_job`).

    Attributes:
        fault_since: time at which the first fault was read that ends the job, by the monotonic clock, s;
            infinite: none yet.
        gone_since: the same for the first of these faults by which a rank process is gone (`is_gone`).
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
        """The faults found so far."""
        return tuple(self._output.faults)

    @property
    def is_over(self) -> bool:
        """Whether there is nothing left to read or to show."""
        return not any(relay.readable or relay.pending for relay in self._relays)

    def pump(self, timeout_s: float) -> bool:
        """Read and show data, waiting for it up to `timeout_s`; return whether a pipe gave data or ended."""
        reading = {pipe: relay for relay in self._relays for pipe in relay.readable}
        writing = {relay.descriptor: relay for relay in self._relays if relay.pending}
        if self.is_over:
            return False
        readable, writable, _ = select.select([*reading], [*writing], [], timeout_s)
        for descriptor in writable[-1:]:  # both may be one pipe, which has room for one write only
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
            asked: returns whether this process was asked to end.
        """
        for relay in self._relays:
            relay.read_rest()
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
