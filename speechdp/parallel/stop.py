"""Stop on request: after SIGTERM, SIGHUP, SIGUSR1 or SIGUSR2 to any rank, all save and end at the same step.

SIGINT does the same in a `train` or `sweep` of one rank that was started without a launcher.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Protocol

import torch

from speechdp.comm.base import Communicator, ReduceOp, Work
from speechdp.errors import ConfigError
from speechdp.launching.variables import PAUSE
from speechdp.process.ending import is_interrupt_raised
from speechdp.process.notices import warn
from speechdp.process.output import STDERR
from speechdp.timing.timeline import Span, Timeline

#: Seconds between two agreements on whether to stop.
_INTERVAL_S = 1.0
_EVALUATION, _CUT = "evaluation:", "cut:"
_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_ON_INTERRUPT = b"\nspeechdp: interrupted: ends as soon as it can be resumed; Ctrl-C again: at once\n"


class StopRequest:
    """Remember the signal; installed around a run, in the main thread.

    Schedulers send SIGTERM, SIGUSR1 or SIGUSR2 before they end a job, Grid Engine on each host; mpirun
    forwards SIGUSR1 and SIGUSR2 to every rank.  SIGHUP comes when a terminal closes; if it is ignored
    (nohup), it remains ignored.  Ctrl-C (SIGINT) reaches no rank under a launcher, which forwards it in
    another way.  It does reach a process that was started alone, where the first one may also be a request to
    stop.

    Args:
        by_interrupt: the first SIGINT asks to stop; the next ends the process at once, as any does otherwise.
    """

    def __init__(self, *, by_interrupt: bool = False) -> None:
        self.received: str | None = None
        self._by_interrupt = by_interrupt
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopRequest:
        for number in _SIGNALS:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue
            self._previous[number] = signal.signal(number, self._note)
        if self._by_interrupt and is_interrupt_raised():
            self._previous[signal.SIGINT] = signal.getsignal(signal.SIGINT)
            signal.signal(signal.SIGINT, self._note_interrupt)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number).name

    def _note_interrupt(self, number: int, frame: FrameType | None) -> None:
        self._note(number, frame)
        signal.signal(signal.SIGINT, self._previous[signal.SIGINT])  # type: ignore[arg-type]
        with suppress(OSError):  # not print: the signal may have interrupted a print
            os.write(STDERR, _ON_INTERRUPT)


class StopSource(Protocol):
    """An object that knows of a request to stop: a StopRequest or a LoneStop."""

    @property
    def received(self) -> str | None:
        """Name of the signal; None: no signal so far."""
        ...


class LoneStop:
    """Tell rank 0, which works while the others wait for it, of a signal that any rank has received.

    Args:
        request: request of this rank; None: it has none.
        comm: all ranks.

    Example::

        lone = LoneStop(request, comm)
        with lone.while_others_wait():
            if comm.rank == 0:
                train(stop=lone)
    """

    def __init__(self, request: StopSource | None, comm: Communicator) -> None:
        self._request, self._comm = request, comm
        self._elsewhere: str | None = None
        #: The thread whose reads of `received` may exchange; None: the others are not waiting.
        self._thread: int | None = None
        self._last_s = time.monotonic()

    @property
    def received(self) -> str | None:
        """Name of the signal that a rank received, known after about a second; None: no signal so far."""
        is_due = time.monotonic() - self._last_s >= _INTERVAL_S and self._own is None
        if is_due and self._elsewhere is None and self._thread == threading.get_ident():
            self._exchange(is_over=False)
        return self._own or self._elsewhere

    @contextmanager
    def while_others_wait(self) -> Iterator[None]:
        """Run the block on all ranks; the others then wait until rank 0 has left it.  Collective."""
        if self._comm.rank > 0:
            yield
            while not self._exchange(is_over=False):
                pass
            return
        self._thread = threading.get_ident()
        try:
            yield
        finally:
            self._thread = None
        self._exchange(is_over=True)

    @property
    def _own(self) -> str | None:
        return None if self._request is None else self._request.received

    def _exchange(self, *, is_over: bool) -> bool:
        """Share signals and whether rank 0 has finished its work; return the latter."""
        number = 0 if self._own is None else int(signal.Signals[self._own])
        values = torch.tensor([number, is_over], dtype=torch.float64)
        self._comm.allreduce(values, name="lone.stop", op=ReduceOp.MAX)
        self._last_s = time.monotonic()
        if number := int(values[0]):
            self._elsewhere = signal.Signals(number).name
        return bool(values[1])


class StopAgreement:
    """Let all ranks learn at the same step that one of them was asked to stop.

    About once a second of training, an allreduce of two numbers starts; its result is read at the next such
    step, so a rank waits only if it is further ahead of another than that.  Every rank computes the same
    interval between these steps, because it follows from the exchanged values.

    Args:
        request: request of this rank; None: it has none.
        comm: the ranks.
        timeline: records this rank's wait as communication of the following step; None: nothing is timed.
    """

    def __init__(
        self, request: StopSource | None, comm: Communicator, timeline: Timeline | None = None
    ) -> None:
        self._request = request
        self._comm = comm
        self._timeline = timeline
        self._work: Work | None = None
        self._values = torch.zeros(2, dtype=torch.float64)
        self._interval = 1
        self._countdown = 1
        self._last_s = time.monotonic()

    def reached(self) -> bool:
        """Return whether to stop after this step.  Collective: call once per step."""
        self._countdown -= 1
        if self._countdown > 0:
            return False
        now = time.monotonic()
        step_s = (now - self._last_s) / self._interval
        self._last_s = now
        stop = False
        if self._work is not None:
            with nullcontext() if self._timeline is None else self._timeline.span(Span.COMM):
                self._work.wait()
            asked, slowest_step_s = self._values.tolist()
            stop = asked > 0
            self._interval = max(1, min(2 * self._interval, int(_INTERVAL_S / max(slowest_step_s, 1e-6))))
        self._values[0] = float(self._request is not None and self._request.received is not None)
        self._values[1] = step_s
        self._work = None if stop else self._comm.allreduce_async(self._values, name="stop", op=ReduceOp.MAX)
        self._countdown = self._interval
        return stop

    def drain(self) -> None:
        """Wait for the exchange under way.  Collective; call when training ends."""
        if self._work is not None:
            self._work.wait()
            self._work = None


@dataclass(frozen=True)
class Pause:
    """Where a script's own loop must stop without a signal.

    Attributes:
        step: stop only after each rank has taken this many steps.
        evaluated: and only after the model has been evaluated, at that step or later.
        cut: training ends with that step, whether or not the loop asks, and nothing is saved.
    """

    step: int
    evaluated: bool = False
    cut: bool = False

    @classmethod
    def of_environment(cls) -> Pause | None:
        """Return the pause in SPEECHDP_PAUSE_AT; None: not set.  Raises ConfigError."""
        text = os.environ.get(PAUSE, "")
        number = text.removeprefix(_EVALUATION).removeprefix(_CUT)
        if not text:
            return None
        if not number.isascii() or not number.isdigit() or int(number) < 1:
            raise ConfigError(
                f"{PAUSE}={text}: write the number of a step, from 1, or {_EVALUATION}STEP, or {_CUT}STEP"
            )
        return cls(int(number), evaluated=text.startswith(_EVALUATION), cut=text.startswith(_CUT))

    def __str__(self) -> str:
        return f"{_EVALUATION if self.evaluated else _CUT if self.cut else ''}{self.step}"


class StopWatch:
    """Tell a script's own loop whether to stop: the same on all ranks after the same number of steps.

    Signals are noted from now until `close`, but not if ranks are threads: signals reach only the main
    thread.

    Args:
        comm: the ranks.
        together: whether ranks take their steps together.  Otherwise they agree where they meet: the code
            that makes them meet sums `is_asked` over the ranks, and sets `is_agreed`.
        timeline: records a rank's wait for others.
        pause: where to stop in any case; all ranks have the same, so they need not agree on a step.
    """

    def __init__(
        self, comm: Communicator, timeline: Timeline, *, together: bool, pause: Pause | None = None
    ) -> None:
        self.pause = pause
        self._request = StopRequest()
        if threading.current_thread() is threading.main_thread():
            self._request.__enter__()
        self._agreement = StopAgreement(self._request, comm, timeline) if together else None
        self._step = -1
        #: Whether all ranks know that they must stop, and whether the loop knows it.
        self.is_agreed = self.is_reported = False
        self._has_warned = False

    @property
    def is_asked(self) -> bool:
        """Whether this rank has received a signal."""
        return self._request.received is not None

    def has_paused(self, step: int) -> bool:
        """Return whether the loop, stopped at `step`, reached its pause; False if a signal came before."""
        return self.pause is not None and step >= self.pause.step

    def is_due(self, step: int) -> bool:
        """Return whether to stop as soon as the model has been evaluated at `step`."""
        return self.pause is not None and self.pause.evaluated and step >= self.pause.step

    def look(self, step: int) -> bool:
        """Return whether to stop after `step`.  Collective, the first time it is called for a step."""
        if self.pause is not None and not self.pause.evaluated and step >= self.pause.step:
            self.is_reported = True
            return True
        if self._agreement is not None and not self.is_agreed and step != self._step:
            self._step = step
            self.is_agreed = self._agreement.reached()
        if self._agreement is None and self.is_asked and not self._has_warned:
            self._has_warned = True
            warn(
                f"{self._request.received}: will stop at the next call that all ranks make together "
                "(evaluating, state_dict, save_checkpoint)"
            )
        self.is_reported |= self.is_agreed
        return self.is_reported

    def drain(self) -> None:
        """Wait for the exchange under way.  Collective; call when training ends."""
        if self._agreement is not None:
            self._agreement.drain()

    def close(self) -> None:
        """Restore the previous signal handlers."""
        self._request.__exit__(None, None, None)
