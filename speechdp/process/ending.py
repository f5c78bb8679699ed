"""End on a signal as on an error: clean up on the way, one line, the exit code of that signal."""

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

#: By these batch systems warn ahead of a time limit, and mpirun hands them on to all ranks.
WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)
_SIGNALS = (signal.SIGTERM, signal.SIGHUP, *WARNINGS)
#: Warnings that came before there was anybody to heed them.
_held: list[int] = []
#: Says that mpirun ends its ranks; None: it does not end this process.
_tell_end_by_mpirun: Callable[[], object] | None = None
#: mpirun kills the others as soon as it sees a rank's death, else all of them 1 s after SIGTERM: for that
#: second they clean up and speak.
_OTHERS_SPEAK_S = 1.5
#: Signals that came amid an import, and come again so much later, s; one that comes meanwhile is not put off.
_deferred: list[int] = []
_AGAIN_S = 0.1
#: What is said of a stop before there was anything to save.
STOPPED_BEFORE = "stopped as requested before it began; repeat the command"


class Ended(BaseException):
    """A signal asked for the end; no error, so that nothing takes it for one and goes on.

    Attributes:
        signum: the signal's number.
        exit_code: what a shell reports for a program that the signal has ended.
        is_warning: a batch system warns by this signal.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(f"ended by {signal.Signals(signum).name}")
        self.signum = signum
        self.is_warning = signum in WARNINGS
        self.exit_code = 128 + signum


class Stopped(Exception):  # noqa: N818 (not an error)
    """Work over ranks was asked to stop, which all have agreed on, and what can be gone on from is saved."""


class Paused(Stopped):
    """It has come to the step where it was told to stop (--pause-at)."""


class StoppedUnsaved(Stopped):
    """It was asked to stop and has done so, but nothing was saved: it can only begin anew."""


class StoppedBefore(Stopped):
    """It was asked to stop while it waited for a folder, in which nothing was begun.

    Attributes:
        folder: waited for.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(f"{folder}: stopped before it began")
        self.folder = folder


def describe_end(error: KeyboardInterrupt | Ended) -> tuple[str, int]:
    """Return what to say of an end by a signal, and the exit code."""
    if isinstance(error, Ended):
        return str(error), error.exit_code
    return "interrupted", 128 + signal.SIGINT


def hold_warnings(signals: Sequence[signal.Signals] = WARNINGS) -> None:
    """Only note a batch system's warnings from now on: nobody can heed them yet, and they would kill.

    To be called first of all, before what takes long to import.
    """
    for signum in signals:
        if signal.getsignal(signum) == signal.SIG_DFL:
            signal.signal(signum, _hold)


def hold_end_by_mpirun(tell: Callable[[], object]) -> None:
    """Hold SIGTERM as well: mpirun ends its ranks by it, and `tell` has to say so, if nobody else has."""
    global _tell_end_by_mpirun  # noqa: PLW0603 - of this process, as handlers are
    _tell_end_by_mpirun = tell
    hold_warnings((signal.SIGTERM,))


def is_ended_by_mpirun() -> bool:
    """Say whether SIGTERM would come from mpirun, which ends its ranks."""
    return _tell_end_by_mpirun is not None


def leave_if_ended_by_mpirun(end: BaseException) -> None:
    """Die of SIGTERM if mpirun has sent it, now that what was incomplete is removed; else return."""
    if _tell_end_by_mpirun is None or not isinstance(end, Ended) or end.signum != signal.SIGTERM:
        return
    _tell_end_by_mpirun()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    time.sleep(_OTHERS_SPEAK_S)
    give_up_handler(signal.SIGTERM, signal.SIG_DFL)
    signal.raise_signal(signal.SIGTERM)


def _hold(signum: int, _frame: FrameType | None) -> None:
    _held.append(signum)


def interrupts_end() -> None:
    """Let Ctrl-C end this process without a word, as nothing has begun; to be called with `hold_warnings`."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def interrupts_raise() -> None:
    """Let Ctrl-C raise KeyboardInterrupt, to be called by who tells of it in a line."""
    if signal.getsignal(signal.SIGINT) in (signal.SIG_DFL, signal.default_int_handler):
        signal.signal(signal.SIGINT, _interrupt)
    _lose_none()


def is_interrupt_raised() -> bool:
    """Say whether Ctrl-C raises KeyboardInterrupt: it is not ignored, and no one else heeds it."""
    return signal.getsignal(signal.SIGINT) in (_interrupt, signal.default_int_handler)


def take_held_warnings() -> list[int]:
    """Return what has come since `hold_warnings`, in order; to be called by who heeds it from now on."""
    taken = _held[:]
    del _held[: len(taken)]
    return taken


def end_by_exception(signals: Sequence[signal.Signals] = _SIGNALS) -> None:
    """Let these signals raise `Ended` in the main thread; where they are ignored (nohup) they stay so.

    More of them do not disturb the cleaning up after the first.
    """
    for signum in signals:
        if signal.getsignal(signum) in (signal.SIG_DFL, _hold):
            signal.signal(signum, _raise)
    _lose_none()


def _lose_none() -> None:
    """Let what a signal raises where Python drops exceptions, in a finaliser or callback, be raised anew.

    Else it would be printed with a traceback ("Exception ignored in"), and the command would go on.
    """
    if isinstance(sys.unraisablehook, _RaisesAnew):
        return
    sys.unraisablehook = _RaisesAnew(sys.unraisablehook)


class _RaisesAnew:
    """Takes what Python has dropped; hands on what no signal has raised."""

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
            signal.signal(signum, _raise)  # that one has let signals be ignored


def end_by_held_warning() -> None:
    """Raise `Ended` for a warning that came while they were held."""
    for signum in take_held_warnings():
        _raise(signum, None)


def outlast_signals() -> None:
    """Let signals raise no more as they do here: all is done, and what leaves is not to be told as stopped.

    A warning changes nothing; of others, the second ends what takes long to leave.
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
    """Have a signal come again if it came amid an import, for the first time: an import may hang."""
    if _is_importing(frame) and signum not in _deferred and _comes_again(signum):
        return True
    while signum in _deferred:  # heeded now, it must not come once more into the cleaning up
        _deferred.remove(signum)
    return False


def _is_importing(frame: FrameType | None) -> bool:
    """Say whether a module is being imported: what raises amid a library's C++ ends the process (SIGABRT)."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def _comes_again(signum: int) -> bool:
    """Have a signal come once more a little later, to who heeds it then; False: another has the alarm."""
    if signal.getsignal(signal.SIGALRM) not in (signal.SIG_DFL, _send_again):
        return False
    _deferred.append(signum)
    if signal.signal(signal.SIGALRM, _send_again) is signal.SIG_DFL:
        atexit.register(signal.setitimer, signal.ITIMER_REAL, 0)  # an alarm that nobody takes would kill
    signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)
    return True


def heed_put_off() -> None:
    """Let a signal that came amid an import come now, as that has ended, and not into what begins next."""
    _send_again(signal.SIGALRM, None)


def _send_again(_signum: int, _frame: FrameType | None) -> None:
    due = list(dict.fromkeys(_deferred))
    _deferred.clear()
    for signum in due:
        signal.raise_signal(signum)


def give_up_handler(signum: signal.Signals, disposition: signal.Handlers) -> None:
    """Leave a signal to the system from now on: SIG_IGN or SIG_DFL.  In the main thread alone.

    signal.signal prints a traceback ("ignored due to race condition") where the signal comes meanwhile.
    """
    signal.signal(signum, _do_nothing)  # with one that has come, and that Python has not yet handled
    set_disposition = ctypes.CDLL(None).signal
    set_disposition.argtypes, set_disposition.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    set_disposition(signum, int(disposition))


def _do_nothing(_signum: int, _frame: FrameType | None) -> None:
    pass


def _is_observed() -> bool:
    """Say whether a profiler, debugger or measurer of coverage is at work."""
    monitoring = getattr(sys, "monitoring", None)  # from Python 3.12 on; it has six places
    tools = [] if monitoring is None else [monitoring.get_tool(number) for number in range(6)]
    return any(each is not None for each in (sys.getprofile(), sys.gettrace(), *tools))


def leave(exit_code: int) -> NoReturn:
    """End this process as sys.exit does, but without taking the interpreter down.

    That takes 0.7 s where torch is loaded, of every rank, and a job ends with the last of them.  What is
    registered to be done at the end is done, MPI's own end with it.
    """
    threads = [thread for thread in threading.enumerate() if not thread.daemon]
    if threads != [threading.main_thread()] or _is_observed():
        sys.exit(exit_code)  # others wait for the end: threads, or who has started a profiler
    atexit._run_exitfuncs()
    library = sys.modules.get("speechdp.comm.mpi.library")
    if library is not None:
        library.finalise()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    ctypes.CDLL(None).fflush(None)  # what libraries have printed
    end_finalised(exit_code)


def end_finalised(exit_code: int) -> NoReturn:
    """Leave at once, where MPI has been started and ended or never was; what is to be written, has been.

    MPICH tells its launcher not in MPI_Finalize but in an exit handler of the C library that a rank has ended
    well.  Hydra kills all others as soon as one has left without that.
    """
    if "PMI_RANK" in os.environ:
        ctypes.PyDLL(None).exit(exit_code)  # keeps the interpreter's lock: no thread of Python's goes on
    os._exit(exit_code)
