"""The console script `speechdp`: run the subcommand, end by signals, turn errors into one line."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

from speechdp import __version__, exit_codes, remedies
from speechdp.cli.support.command_line import error_line, read_command
from speechdp.cli.support.subcommands import SUBCOMMANDS, overview
from speechdp.comm.environment import announced, wait_to_report
from speechdp.counting import did_you_mean
from speechdp.errors import SpeechDPError
from speechdp.files import cannot_be_used
from speechdp.process.ending import (
    STOPPED_BEFORE,
    WARNINGS,
    Ended,
    describe_end,
    end_by_exception,
    end_by_held_warning,
    heed_put_off,
    ignore_signals,
    interrupts_raise,
    is_ended_by_mpirun,
    leave,
    leave_if_ended_by_mpirun,
)
from speechdp.process.garbage import collect_garbage_less_often
from speechdp.process.notices import print_message
from speechdp.process.output import STDERR, is_read, keep_standard_streams, lost_output
from speechdp.process.shortage import shortage
from speechdp.process.utf8 import use_utf8

#: Those that go on where they were stopped, if the same command is given again.
_GOING_ON = ("train", "sweep", "compare", "tune", "profile")
#: Other ranks tell so much later than rank 0 what has stopped them before they met, s.
_AFTER_RANK_0_S = 5.0
#: What a shell reports for a program ended by SIGPIPE: the reader of its output has gone.
_BROKEN_PIPE = 141


def main() -> None:
    """Run the subcommand in sys.argv and exit with its code."""
    collect_garbage_less_often()
    use_utf8()
    keep_standard_streams()
    launch = announced()
    try:  # from here on, signals raise
        if sys.argv[1:2] == ["launch"]:  # which heeds warnings once it can tell ranks and batch system
            end_by_exception((signal.SIGTERM, signal.SIGHUP))
        elif launch is None or launch.size == 1:
            end_by_exception()
        elif is_ended_by_mpirun():
            end_by_exception((signal.SIGTERM, *WARNINGS))
        else:  # by others the launcher ends its ranks, and tells of it
            end_by_exception(WARNINGS)
        interrupts_raise()
        try:
            exit_code = run(sys.argv[1:])
        except SystemExit as stop:  # of an argument parser, also after --help
            exit_code = _exit_code_of(stop)
        ignore_signals()
    except (KeyboardInterrupt, Ended) as end:  # while `run` told of something else
        ignore_signals()
        leave_if_ended_by_mpirun(end)
        text, exit_code = describe_end(end)
        print_message(text)
    sys.stdout.flush()
    exit_code = _report_lost_output(exit_code)
    if exit_code in (0, exit_codes.STOPPED):
        leave(exit_code)
    sys.exit(exit_code)


def _exit_code_of(end: SystemExit) -> int:
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    print(end.code, file=sys.stderr)
    return exit_codes.FAILED


def _report_lost_output(exit_code: int) -> int:
    """Report lost output, unless that is done elsewhere; return the exit code for it."""
    lost = lost_output()
    if lost is None or exit_code != 0:
        return exit_code
    text, reader_has_gone = lost
    if reader_has_gone:  # `speechdp ... | head`
        return _BROKEN_PIPE
    if is_read(STDERR):
        print_message(f"{text}; free some space there, or send it elsewhere")
    return exit_codes.FAILED


def run(arguments: Sequence[str]) -> int:
    """Run a command line without the program's name; return the exit code."""
    name, *rest = arguments or ["--help"]
    if name in ("-h", "--help"):
        print(overview())
        return 0
    if name == "--version":
        print(f"speechdp {__version__}")
        return 0
    if name not in SUBCOMMANDS:
        meant = did_you_mean(name, SUBCOMMANDS)
        print_message(f"unknown command {name!r}{meant}\n\n{overview()}")
        return exit_codes.USAGE
    # OpenMP's threads spin while they wait: beside another busy process a rank would crawl.  Read by torch.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    options = set[str]()
    try:
        if name != "launch":
            end_by_held_warning()
        command = read_command(name, rest)
        heed_put_off()
        options = _options_of(command)
        with remedies.of_command(options):
            exit_code: int = command.run()
    except SpeechDPError as error:
        text, exit_code = error_line(error, name, rest), error.exit_code
        _let_rank_0_report()
    except OSError as error:
        line = cannot_be_used(error)
        if line is None:
            raise
        text, exit_code = line, exit_codes.FAILED
    except (KeyboardInterrupt, Ended) as end:
        leave_if_ended_by_mpirun(end)
        text, exit_code = describe_end(end)
        if name in _GOING_ON and isinstance(end, Ended) and end.is_warning and announced() is None:
            text, exit_code = STOPPED_BEFORE, exit_codes.STOPPED
        _let_rank_0_report()
    except (MemoryError, RuntimeError) as error:  # torch's are RuntimeErrors
        with remedies.of_command(options):
            line = shortage(error)
        if line is None:
            raise
        text, exit_code = line, exit_codes.CRASHED
    else:
        return exit_code
    print_message(text)
    return exit_code


def _let_rank_0_report() -> None:
    """Wait on other ranks, in a job, until rank 0 has told what is wrong and the launcher has ended them.

    What stops a command before its ranks have met is mostly so on all of them, and one line says it.
    """
    launch = announced()
    wait_to_report(_AFTER_RANK_0_S if launch is not None and launch.rank > 0 else 0.0)


def _options_of(command: Any) -> set[str]:
    """Return the names of a command's options, those in its groups of options too."""
    names: set[str] = set()
    for field in dataclasses.fields(command):
        value = getattr(command, field.name)
        names |= _options_of(value) if dataclasses.is_dataclass(value) else {field.name}
    return names
