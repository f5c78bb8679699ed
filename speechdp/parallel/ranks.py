"""Turn the processes of a script into the ranks of a job: `run_ranks` (docs/api.md)."""

from __future__ import annotations

import math
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TypeVar

from speechdp import exit_codes
from speechdp.comm import environment
from speechdp.comm.base import Communicator
from speechdp.comm.calls import END_OF_MAIN, Calls
from speechdp.comm.device import choose_device, exchange_device
from speechdp.comm.startup.create import create_communicator
from speechdp.comm.startup.failure import guard
from speechdp.comm.startup.start_guard import StartGuard
from speechdp.comm.startup.world import check_devices, check_world
from speechdp.comm.threads.communicator import run_threads
from speechdp.errors import ConfigError
from speechdp.launching.cores import share_cores
from speechdp.parallel.script_checks import check_same_call
from speechdp.process.ending import Stopped, StoppedUnsaved
from speechdp.process.notices import print_message, warn
from speechdp.watchdog.host_board import HostBoard
from speechdp.watchdog.script_watchdog import HANG_TIMEOUT, ScriptWatchdog

#: Overrides the script's back-end.
BACKEND = "SPEECHDP_BACKEND"
#: How long ranks may take to start, s.
_START_S = 600.0
#: How long ranks that are threads may wait for each other, s.
_THREADS_S = 7 * 86400.0
#: How long a rank may wait for others, s; the default of `--hang-timeout` of `speechdp train`, too.
_HANG_S = 600.0
#: torch's error when DistributedDataParallel wraps a model without init_process_group.
_NO_GROUP = "Default process group has not been initialized"

T = TypeVar("T")


def run_ranks(
    main: Callable[[Communicator], T],
    *,
    backend: str = "auto",
    device: str = "auto",
    hang_timeout: float = _HANG_S,
) -> T:
    """Run `main(comm)` in this process, as one rank of the job that a launcher started.

    Under mpirun, horovodrun, srun, torchrun or `speechdp launch` every process is a rank; a process started
    directly is the only rank.  If one rank raises an exception, all ranks end, with its message first and a
    non-zero return code.  The same happens if a rank waits in a call of `DataParallel` for others that do not
    come.

    Example::

        def main(comm):
            print(f"rank {comm.rank} of {comm.size} computes on {comm.device}")

        if __name__ == "__main__":
            speechdp.run_ranks(main)

    Args:
        main: called with the communicator: `comm.rank`, `comm.size`, `comm.device`.
        backend: `auto`, `horovod`, `mpi`, `torch` or `serial` as in docs/communicators.md; `threads:N` runs N
            ranks as threads of this process, for tests and notebooks.  SPEECHDP_BACKEND overrides it.
        device: `auto` (a GPU for each rank if there are any; the CPU with `threads:N`), `cpu` or `cuda`.
        hang_timeout: longest wait for other ranks in one call while none of them makes progress, s; 0: no
            limit.  SPEECHDP_HANG_TIMEOUT overrides it.  Ranks that are threads need none: they compare their
            calls.

    Returns:
        What `main` returned on this rank; with `threads:N`, on rank 0.

    Raises:
        ConfigError: unknown back-end, negative timeout, or `main` relies on torch's process group.
        SystemExit: this rank runs alone and has failed; with several ranks a failure does not return.  With
            exit code 75: the ranks were asked to stop and have saved (`DataParallel.should_stop`); with 76:
            they have saved nothing.  With 1: a worker of multiprocessing imports the script, whose call is
            not under `if __name__ == "__main__":`.
    """
    _refuse_in_worker()
    name = os.environ.get(BACKEND) or backend
    results: dict[int, T] = {}

    def run(comm: Communicator) -> int:
        comm.device = choose_device(device, comm.local_rank)
        check_devices(comm, comm.device)
        try:
            with _explain_missing_group():
                results[comm.rank] = main(comm)
        except StoppedUnsaved as stop:
            if comm.rank == 0:
                warn(str(stop))
            return exit_codes.STOPPED_UNSAVED
        except Stopped:
            return exit_codes.STOPPED
        return 0

    if name.startswith("threads"):
        device = "cpu" if device == "auto" else device
        exit_code = run_threads(_num_threads(name), run, _THREADS_S)[0]
    else:
        exit_code = _run_launched(name, device, hang_timeout, run)
    if exit_code != 0 or not results:  # sys.exit in `main` leaves no result
        sys.exit(exit_code)
    return results[min(results)]


def _refuse_in_worker() -> None:
    """Refuse to run in a worker process that imports the script: it would become a rank itself.

    DataLoader workers that are not forked import it.  Raises SystemExit.
    """
    # multiprocessing itself uses this flag to refuse to start processes meanwhile.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        print_message(
            "a worker process (of a DataLoader, say) imported the script and called run_ranks(main), which "
            'only ranks may call; put the call under `if __name__ == "__main__":`'
        )
        sys.exit(exit_codes.FAILED)


@contextmanager
def _explain_missing_group() -> Iterator[None]:
    """Say what to do if the block relies on torch's process group.  Raises ConfigError."""
    try:
        yield
    except ValueError as error:
        if _NO_GROUP not in str(error):
            raise
        raise ConfigError(
            "the script uses a process group of torch.distributed, as DistributedDataParallel does, but "
            "there is none: give the module itself to speechdp.DataParallel, which replaces "
            "DistributedDataParallel"
        ) from error


def _run_launched(backend: str, device: str, hang_timeout: float, run: Callable[[Communicator], int]) -> int:
    """Run `run(comm)` in this process as the rank that its launcher started; return its exit code."""
    start = StartGuard(_START_S)
    watching, hang_s = ExitStack(), 0.0

    def create() -> Communicator:
        nonlocal hang_s
        hang_s = _hang_timeout(hang_timeout)
        return start.waiting_for_all_ranks(lambda: create_communicator(backend, exchange_device(device)))

    def begin(comm: Communicator) -> int:
        check_world(comm, {})
        hosts = comm.allgather_object(environment.host_name())
        share_cores(hosts, environment.host_name())
        comm.calls = calls = Calls()
        if hang_s > 0 and comm.size > 1:
            watchdog = ScriptWatchdog(comm, hosts, hang_s, calls, HostBoard(comm, hosts))
            watchdog.start()
            watching.callback(watchdog.stop)
        start.over()
        exit_code = run(comm)
        calls.has_ended = True
        check_same_call(END_OF_MAIN, comm)  # another rank's call would be taken for the end of the job
        return exit_code

    with watching:
        return guard(create, begin)


def _hang_timeout(timeout_s: float) -> float:
    """Return how long a rank may wait for others, s; 0: for ever.  Raises ConfigError."""
    given = os.environ.get(HANG_TIMEOUT) or timeout_s
    try:
        timeout_s = float(given)
    except (TypeError, ValueError):
        timeout_s = math.nan
    if not 0 <= timeout_s < math.inf:
        name = HANG_TIMEOUT if os.environ.get(HANG_TIMEOUT) else "hang_timeout"
        raise ConfigError(f"{name}={given}: write a number of seconds, 0 for no limit")
    return timeout_s


def _num_threads(name: str) -> int:
    _, _, number = name.partition(":")
    if name.partition(":")[0] != "threads" or not number.isdigit() or int(number) < 1:
        raise ConfigError(f"back-end {name!r}: write threads:N, N the number of ranks, e.g. threads:2")
    return int(number)
