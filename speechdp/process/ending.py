"""End on a signal as on an error: clean up, print one line, exit with that signal's code."""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

#: Signals by which batch systems warn ahead of a time limit; mpirun forwards them to all ranks.
WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)
_SIGNALS = (signal.SIGTERM, signal.SIGHUP, *WARNINGS)
#: Warnings that came before anything could handle them.
_held: list[int] = []
#: Prints that mpirun ends its ranks; None: SIGTERM to this process would not be mpirun's.
_announce_end_by_mpirun: Callable[[], object] | None = None
#: How long a rank delays its death, s.  mpirun kills the others as soon as it sees a rank die, else 1 s after
#: SIGTERM: in that second they clean up and print their messages.
_OTHERS_SPEAK_S = 1.5
#: Signals that came during an import and were deferred, and the delay after which they are sent again, s.  A
#: signal that arrives once more meanwhile is not deferred.
_deferred: list[int] = []
_AGAIN_S = 0.1
#: Message about a stop before there was anything to save.
STOPPED_BEFORE = "stopped as requested before it began; repeat the command"


class Ended(BaseException):
    """A signal asked to end.  Not an `Exception`, so that nothing handles it as an error and continues.

    Attributes:
        signum: the signal's number.
        exit_code: exit code that a shell reports for a program ended by the signal.
        is_warning: whether batch systems warn by this signal.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(f"ended by {signal.Signals(signum).name}")
        self.signum = signum
        self.is_warning = signum in WARNINGS
        self.exit_code = 128 + signum


class Stopped(Exception):  # noqa: N818 (not an error)
    """The ranks stop their work as asked: all have agreed, and what is needed to resume is saved."""


class Paused(Stopped):
    """Training has reached the step at which it was to stop (--pause-at)."""


class StoppedUnsaved(Stopped):
    """Work stopped as asked, but nothing was saved: it must start over."""


class StoppedBefore(Stopped):
    """The process was asked to stop while it waited for a folder, in which nothing was begun.

    Attributes:
        folder: the folder that was waited for.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(f"{folder}: stopped before it began")
        self.folder = folder


def describe_end(error: KeyboardInterrupt | Ended) -> tuple[str, int]:
    """Return the message and the exit code for an end by a signal."""
    if isinstance(error, Ended):
        return str(error), error.exit_code
    return "interrupted", 128 + signal.SIGINT


def hold_warnings(signals: Sequence[signal.Signals] = WARNINGS) -> None:
    """Only record a batch system's warnings from now on: nothing handles them yet, and they would kill.

    Call it first of all, before slow imports.
    """
    for signum in signals:
        if signal.getsignal(signum) == signal.SIG_DFL:
            signal.signal(signum, _hold)


def hold_end_by_mpirun(announce: Callable[[], object]) -> None:
    """Hold SIGTERM as well, by which mpirun ends its ranks; `announce` reports it if no rank has said why."""
    global _announce_end_by_mpirun  # noqa: PLW0603 - of this process, as handlers are
    _announce_end_by_mpirun = announce
    hold_warnings((signal.SIGTERM,))


def is_ended_by_mpirun() -> bool:
    """Return whether SIGTERM would come from mpirun, which ends its ranks."""
    return _announce_end_by_mpirun is not None


def leave_if_ended_by_mpirun(end: BaseException) -> None:
    """Die of SIGTERM if mpirun sent it, after incomplete files have been removed; else return."""
    if _announce_end_by_mpirun is None or not isinstance(end, Ended) or end.signum != signal.SIGTERM:
        return
    _announce_end_by_mpirun()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    time.sleep(_OTHERS_SPEAK_S)
    give_up_handler(signal.SIGTERM, signal.SIG_DFL)
    signal.raise_signal(signal.SIGTERM)


def _hold(signum: int, _frame: FrameType | None) -> None:
    _held.append(signum)


def interrupts_end() -> None:
    """Let Ctrl-C end this process silently, as nothing has begun yet; call it with `hold_warnings`."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def interrupts_raise() -> None:
    """Let Ctrl-C raise KeyboardInterrupt; for callers that print a line about it."""
    if signal.getsignal(signal.SIGINT) in (signal.SIG_DFL, signal.default_int_handler):
        signal.signal(signal.SIGINT, _interrupt)
    _lose_none()


def is_interrupt_raised() -> bool:
    """Return whether Ctrl-C raises KeyboardInterrupt: it is not ignored, and has no other handler."""
    return signal.getsignal(signal.SIGINT) in (_interrupt, signal.default_int_handler)


def take_held_warnings() -> list[int]:
    """Return the signals held since `hold_warnings`, in order; for code that handles them from now on."""
    taken = _held[:]
    del _held[: len(taken)]
    return taken


def end_by_exception(signals: Sequence[signal.Signals] = _SIGNALS) -> None:
    """Let these signals raise `Ended` in the main thread; ignored ones (nohup) stay ignored.

    Further signals do not disturb the clean-up after the first.
    """
    for signum in signals:
        if signal.getsignal(signum) in (signal.SIG_DFL, _hold):
            signal.signal(signum, _raise)
    _lose_none()


def _lose_none() -> None:
    """Raise a signal's exception again if Python drops it, as it does in finalisers and callbacks.

    Otherwise Python would print a traceback ("Exception ignored in"), and the command would continue.
    """
    if isinstance(sys.unraisablehook, _RaisesAnew):
        return
    sys.unraisablehook = _RaisesAnew(sys.unraisablehook)


class _RaisesAnew:
    """Receives exceptions that Python drops; passes on those that no signal raised."""

    def __init__(self, others: Callable[[sys.UnraisableHookArgs], object]) -> None:
        self._others = others

    def __call__(self, dropped: sys.UnraisableHookArgs, /) -> None:
        end = dropped.exc_value
        signum = end.signum if isinstance(end, Ended) else signal.SIGINT
        is_raised = isinstance(end, (Ended, KeyboardInterrupt))
        is_here = threading.current_thread() is threading.main_thread()
        if not (is_raised and is_here and _comes_again(signum)):
            self._others(dropped)
        elif isinstance(end, Ended):
            signal.signal(signum, _raise)  # raising the dropped exception has made the signals ignored


def end_by_held_warning() -> None:
    """Raise `Ended` for a warning that came while warnings were held."""
    for signum in take_held_warnings():
        _raise(signum, None)


def ignore_signals() -> None:
    """Let signals raise no longer: the work is done, and a process that exits must not count as stopped.

    A warning then has no effect; of other signals, the second ends a process that takes long to exit.
    """
    for signum in WARNINGS:
        if signal.getsignal(signum) == _raise:
            signal.signal(signum, _do_nothing)
    for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        if signal.getsignal(signum) in (_raise, _interrupt):
            signal.signal(signum, _let_the_next_end)


def _let_the_next_end(signum: int, _frame: FrameType | None) -> None:
    signal.signal(signum, signal.SIG_DFL)


def _raise(signum: int, frame: FrameType | None) -> None:
    if _is_put_off(signum, frame):
        return
    for other in _SIGNALS:
        give_up_handler(other, signal.SIG_IGN)
    raise Ended(signum)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    if not _is_put_off(signum, frame):
        signal.default_int_handler(signum, frame)


def _is_put_off(signum: int, frame: FrameType | None) -> bool:
    """Defer a signal if it came during an import, but only the first time, as an import may hang."""
    if _is_importing(frame) and signum not in _deferred and _comes_again(signum):
        return True
    while signum in _deferred:  # handled now, it must not come once more during the clean-up
        _deferred.remove(signum)
    return False


def _is_importing(frame: FrameType | None) -> bool:
    """Return whether a module is being imported: raising inside a library's C++ would abort (SIGABRT)."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def _comes_again(signum: int) -> bool:
    """Send a signal again a little later, to its handler at that time; False: the alarm is in other use."""
    if signal.getsignal(signal.SIGALRM) not in (signal.SIG_DFL, _send_again):
        return False
    _deferred.append(signum)
    if signal.signal(signal.SIGALRM, _send_again) is signal.SIG_DFL:
        atexit.register(signal.setitimer, signal.ITIMER_REAL, 0)  # an alarm without a handler would kill
    signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)
    return True


def heed_put_off() -> None:
    """Send a signal deferred by an import now that the import has ended, not during what begins next."""
    _send_again(signal.SIGALRM, None)


def _send_again(_signum: int, _frame: FrameType | None) -> None:
    due = list(dict.fromkeys(_deferred))
    _deferred.clear()
    for signum in due:
        signal.raise_signal(signum)


def give_up_handler(signum: signal.Signals, disposition: signal.Handlers) -> None:
    """Leave a signal to the system from now on: SIG_IGN or SIG_DFL.  Only in the main thread.

    signal.signal would print a traceback ("ignored due to race condition") if the signal came meanwhile.
    """
    signal.signal(signum, _do_nothing)  # for a signal that has come but that Python has not yet handled
    set_disposition = ctypes.CDLL(None).signal
    set_disposition.argtypes, set_disposition.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    set_disposition(signum, int(disposition))


def _do_nothing(_signum: int, _frame: FrameType | None) -> None:
    pass


def _is_observed() -> bool:
    """Return whether a profiler, debugger or coverage tool is active."""
    monitoring = getattr(sys, "monitoring", None)  # from Python 3.12 on; it has six places
    tools = [] if monitoring is None else [monitoring.get_tool(number) for number in range(6)]
    return any(each is not None for each in (sys.getprofile(), sys.gettrace(), *tools))


def leave(exit_code: int) -> NoReturn:
    """End this process like sys.exit, but without shutting down the interpreter.

    With torch loaded, the shutdown would take every rank 0.7 s, and a job ends with its last rank.  Exit
    handlers are run, and MPI is finalised.
    """
    threads = [thread for thread in threading.enumerate() if not thread.daemon]
    if threads != [threading.main_thread()] or _is_observed():
        sys.exit(exit_code)  # threads, or a profiler, need an ordinary exit
    atexit._run_exitfuncs()
    library = sys.modules.get("speechdp.comm.mpi.library")
    if library is not None:
        library.finalise()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    ctypes.CDLL(None).fflush(None)  # output of C libraries
    end_finalised(exit_code)


def end_finalised(exit_code: int) -> NoReturn:
    """End this process at once, with MPI finalised or never initialised, and all output flushed.

    MPICH reports a rank's success to its launcher not in MPI_Finalize but in an exit handler of the C
    library. Hydra kills all other ranks as soon as one exits without that report.
    """
    if "PMI_RANK" in os.environ:
        ctypes.PyDLL(None).exit(exit_code)  # holds the GIL, so that no Python thread continues
    os._exit(exit_code)
