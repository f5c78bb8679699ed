"""Start a rank, wait for it, and say how it ended: `python rank_process.py PROGRAM ARGUMENT ...`.

Hydra kills all ranks when one has died, and does not say which died first, so every rank has a parent that
reports its end.  The parent imports only Python's own modules, which takes 20 ms and 10 MB for each rank.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Sequence

#: Hydra sends these signals to the whole process group; only the rank is to handle them.
_LEFT_TO_THE_RANK = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
#: Variable by which the rank knows that this process, its parent, reports how it ends (comm/environment.py).
_PARENT = "SPEECHDP_RANK_PARENT"
#: Exit code of a shell that does not find a program.
_NO_PROGRAM = 127


def run_rank(argv: Sequence[str]) -> int:
    """Run a rank to its end and return its exit code, 128 + signal if a signal killed it.

    Args:
        argv: the rank's program and its arguments.

    Example:
        >>> run_rank(["true"])
        0
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _LEFT_TO_THE_RANK)
    try:
        environ = {**os.environ, _PARENT: str(os.getpid())}
        pid = os.posix_spawnp(argv[0], list(argv), environ, setsigmask=[])
    except OSError as error:
        _print_line(f"{argv[0]} cannot be started: {error.strerror}")
        return _NO_PROGRAM
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code < 0:
        _print_line(f"killed by signal {-code}")
        return 128 - code
    if code > 0:
        _print_line(f"left with exit code {code}")
    return code


def _print_line(text: str) -> None:
    """Write a line that launcher_output.py recognises, in one piece."""
    host = socket.gethostname().split(".")[0]
    line = f"speechdp: rank {os.environ.get('PMI_RANK', '0')} on {host}: {text}\n"
    try:
        os.write(2, line.encode(errors="replace"))
    except OSError:  # nobody reads it; the exit code remains
        return


if __name__ == "__main__":
    sys.exit(run_rank(sys.argv[1:]))
