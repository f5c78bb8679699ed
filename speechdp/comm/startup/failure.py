"""End all ranks when one fails; print the first cause first, with its rank and host.

Under plain mpirun an exception or sys.exit on one rank leaves the job hanging: the failing rank waits in
MPI_Finalize for the others, and they wait for it in their next exchange.
"""

from __future__ import annotations

import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from speechdp import exit_codes, remedies
from speechdp.comm import environment
from speechdp.errors import CommunicationError, SpeechDPError
from speechdp.files import cannot_be_used
from speechdp.process.ending import Ended, describe_end, give_up_handler, leave_if_ended_by_mpirun
from speechdp.process.shortage import shortage

if TYPE_CHECKING:
    from speechdp.comm.base import Communicator

#: How long a rank whose exchange failed waits for the rank at fault to print its message and end the job.
_CONSEQUENCE_DELAY_S = 3.0
#: How long ranks other than 0 wait before they print a message that probably all ranks have.  By then rank 0,
#: even on a busy machine, has printed it, has given its checkpoint time to be completed, and has ended the
#: job.
_OTHERS_DELAY_S = 2.0
#: How long a rank ended by a signal lets the others, ended by it as well, remove incomplete files.
_CLEANING_UP_S = 0.5


@dataclass(frozen=True)
class _Report:
    """What to print about a failure, when, and the exit code of the job."""

    text: str
    exit_code: int
    delay_s: float


def guard(make: Callable[[], Communicator], function: Callable[[Communicator], int | None]) -> int:
    """Make a communicator, run `function` with it, close it, and return the process's exit code.

    With several ranks, a failure of this one ends all of them and `guard` does not return.  It prints one
    line for user errors and lack of memory, and the traceback and one line for anything else.  A single rank
    prints the same and returns, but passes `Ended` on to the caller, which has let signals raise it.

    Args:
        make: returns the communicator; collective.
        function: what every rank runs; returns None or an exit code that all ranks have agreed on (a rank
            that wants to end the others raises).
    """
    comm: Communicator | None = None
    try:
        comm = make()
        with _thread_failures_end_all(comm):
            exit_code = function(comm) or 0
            comm.close()
            comm.leave(exit_code)
            return exit_code
    except SystemExit as error:
        if _is_success(error) and _is_alone(comm):
            return 0
        return _end(comm, error)
    except Ended as end:
        if _is_alone(comm):
            raise
        return _end(comm, end)
    except BaseException as error:  # every way out of a rank must end the others
        return _end(comm, error)


def _end(comm: Communicator | None, error: BaseException) -> int:
    """Print what happened and end all ranks; with a single rank, return the exit code."""
    leave_if_ended_by_mpirun(error)
    report = _describe(comm, error)
    if _is_alone(comm):
        _print(report.text)
        return report.exit_code
    if threading.current_thread() is threading.main_thread():
        # Another rank's abort begins with SIGTERM; a handler that saves a checkpoint would only delay it.
        give_up_handler(signal.SIGTERM, signal.SIG_DFL)
    environment.wait_to_report(report.delay_s)
    _print(report.text)
    if comm is not None:
        comm.abort(report.exit_code)
    _abort_without_communicator(report.exit_code)
    return report.exit_code


def _describe(comm: Communicator | None, error: BaseException) -> _Report:
    rank, name = rank_and_name(comm)
    delay_s = _OTHERS_DELAY_S if rank > 0 else 0.0
    if isinstance(error, CommunicationError) and error.__cause__ is not None:
        # Most likely raised by the back-end because a peer is gone: let the peer print its message first.
        delay_s = _CONSEQUENCE_DELAY_S
    if isinstance(error, SpeechDPError):
        exit_code = error.exit_code if delay_s < _CONSEQUENCE_DELAY_S else exit_codes.CRASHED
        return _Report(f"{name}: {error}\n", exit_code, delay_s)
    if isinstance(error, (KeyboardInterrupt, Ended)):
        text, exit_code = describe_end(error)
        if isinstance(error, Ended):  # all ranks have got the signal
            delay_s = max(delay_s, _CLEANING_UP_S)
        return _Report(f"{name}: {text}\n", exit_code, delay_s)
    line = cannot_be_used(error) if isinstance(error, OSError) else None
    if line is not None:
        return _Report(f"{name}: {line}\n", exit_codes.FAILED, delay_s)
    if isinstance(error, SystemExit):
        return _describe_exit(name, error, delay_s)
    trace = "".join(traceback.format_exception(error))
    lacking = shortage(error)
    if lacking is not None:  # not a defect; in a script the stack shows which line needs so much
        text = f"{trace if remedies.is_script() else ''}{name}: {lacking}\n"
    else:
        text = f"{trace}{name}: ended by an unexpected {type(error).__name__}: {error}\n"
    return _Report(text, exit_codes.CRASHED, delay_s)


def _describe_exit(name: str, error: SystemExit, delay_s: float) -> _Report:
    if _is_success(error):
        text = f"{name}: left by sys.exit with success, but the other ranks would wait for this one\n"
        return _Report(text, exit_codes.CRASHED, delay_s)
    if isinstance(error.code, int):
        # The system keeps only the last 8 bits: a job that one rank ends with 256 would seem successful.
        exit_code = error.code & 0xFF or exit_codes.FAILED
        return _Report(f"{name}: ended with exit code {error.code}\n", exit_code, delay_s)
    return _Report(f"{name}: {error.code}\n", exit_codes.FAILED, delay_s)


def _is_success(error: SystemExit) -> bool:
    return error.code is None or error.code == 0


def rank_and_name(comm: Communicator | None) -> tuple[int, str]:
    """Return this rank's number and the beginning of its messages; `comm` None: no communicator (yet)."""
    launch = environment.announced()
    rank = comm.rank if comm is not None else launch.rank if launch is not None else 0
    if _is_alone(comm):
        return rank, "speechdp"
    role = f" ({comm.role})" if comm is not None and comm.role else ""
    return rank, f"speechdp: rank {rank}{role} on {environment.host_name()}"


def _is_alone(comm: Communicator | None) -> bool:
    if comm is not None:
        return comm.size == 1
    launch = environment.announced()
    return launch is None or launch.size == 1


def _print(text: str) -> None:
    """Write `text` in one piece, so that the ranks' messages do not mix."""
    environment.flush_output()
    with suppress(OSError):  # a message that cannot be written must not keep the others waiting
        sys.stderr.write(text)
        sys.stderr.flush()


def _abort_without_communicator(exit_code: int) -> None:
    """End the job after a back-end failed to start; MPI may be initialised by then."""
    if "mpi4py.MPI" in sys.modules and sys.modules["mpi4py.MPI"].Is_initialized():
        from speechdp.comm.mpi.library import abort_world  # noqa: PLC0415

        abort_world(exit_code)
    environment.end_process(exit_code)


@contextmanager
def _thread_failures_end_all(comm: Communicator) -> Iterator[None]:
    """End all ranks when an exception ends a thread of this one: others would wait for the thread's work."""
    if comm.size == 1:
        yield
        return
    previous = threading.excepthook

    def end(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is None or isinstance(args.exc_value, SystemExit):
            previous(args)
            return
        _end(comm, args.exc_value)

    threading.excepthook = end
    try:
        yield
    finally:
        threading.excepthook = previous
