"""Start-up of commands that use a trained model over ranks, without the parts that only training needs."""

from __future__ import annotations

from collections.abc import Callable

from speechdp.comm.base import Communicator
from speechdp.comm.device import exchange_device
from speechdp.comm.environment import FEW_CYCLE_MS, expect_rare_exchanges, host_name
from speechdp.comm.startup.create import create_communicator
from speechdp.comm.startup.failure import guard
from speechdp.comm.startup.start_guard import StartGuard
from speechdp.launching.cores import share_cores
from speechdp.options.faults import FaultOptions
from speechdp.process.file_limit import raise_file_limit
from speechdp.process.garbage import look_for_garbage_as_usual


def over_ranks(backend: str, device: str, function: Callable[[Communicator], int | None]) -> int:
    """Run `function` on this rank, so that its failure ends all ranks; return the exit code.

    A time limit guards the start of the ranks, but not their work, whose longest wait is unknown.
    """
    look_for_garbage_as_usual()
    expect_rare_exchanges(FEW_CYCLE_MS)
    start = StartGuard(FaultOptions().hang_timeout)

    def run(comm: Communicator) -> int | None:
        if comm.size > 1:
            share_cores(comm.allgather_object(host_name()), host_name())
        raise_file_limit()
        start.over()
        return function(comm)

    exchanged_on = exchange_device(device)
    return guard(lambda: start.waiting_for_all_ranks(lambda: create_communicator(backend, exchanged_on)), run)
