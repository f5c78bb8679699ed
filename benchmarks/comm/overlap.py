"""How much of an exchange hides behind computing.

    python benchmarks/comm/overlap.py [--rounds 3] [--free-core] [--only peers] [--link 1gbit]

Two ranks; each contender, with 16 and with 64 MB, in processes of its own, in turn:

    iallreduce   plain MPI Iallreduce and Wait
    mpi, torch, horovod    our allreduce_async and wait on that back-end
    peers_mpi, peers_torch    each rank sends to the other and receives from it, in threads

For each, a rank times computing alone (matrix products on one core, 1.5 times as long as the exchange), the
exchange alone, and both: start the exchange, compute, wait.  Then

    hidden = (t_compute + t_exchange - t_both) / min(t_compute, t_exchange), between 0 and 1

is the share of the exchange that costs no time of its own: 1 when both take as long as computing alone, 0
when one comes after the other.  A time is that of the slower rank; a share is the median over repetitions,
in each of which the three are timed one after the other.

An exchange needs a core too: sums, copies through shared memory, TCP.  With as many computing ranks as cores
it can only take turns with them.  `--free-core` shows what it does with a core of its own on a machine with
two: rank 0 alone computes, on one core; whatever else there is, of both ranks, is kept to the other one, also
while the exchange is timed alone.  Times are then rank 0's.  `--link RATE` joins the ranks by a network with
that rate (namespaces; needs root); `--hostfile` and `--mpi-args` run them anywhere else.

Last line: JSON {"hidden_mpi_64mb": ..., ...}.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.comm.namespaces import Nodes, ended_by_signals, why_not
from benchmarks.strategies.paired import launch_ranks, run_job, run_rounds
from speechdp.comm.base import Communicator
from speechdp.comm.startup.create import create_communicator
from speechdp.comm.startup.failure import guard

CONTENDERS = ("iallreduce", "mpi", "torch", "horovod", "peers_mpi", "peers_torch")
SIZES_MB = (16, 64)
#: computing takes so much longer than the exchange.
COMPUTE_PER_EXCHANGE = 1.5
#: rows of the matrices: one product stays in the cache, so computing and copying share no memory bandwidth.
MATRIX = 256

#: Starts an exchange and returns what waits for it.
Start = Callable[[], Callable[[], Any]]


class Computing:
    """Matrix products on one core."""

    def __init__(self) -> None:
        self._x = torch.randn(MATRIX, MATRIX) / MATRIX**0.5
        self._y = torch.empty(MATRIX, MATRIX)

    def __call__(self, products: int) -> None:
        for _ in range(products):
            torch.mm(self._x, self._x, out=self._y)


@dataclass(frozen=True)
class Case:
    """What one job measures."""

    contender: str
    size_mb: int
    free_core: bool
    repetitions: int

    @property
    def backend(self) -> str:
        return "mpi" if self.contender == "iallreduce" else self.contender.removeprefix("peers_")


def exchange_of(case: Case, comm: Communicator, stack: ExitStack) -> Start:
    """Return what starts the exchange of a contender; `stack` releases it."""
    x = torch.ones(case.size_mb << 18)
    if case.contender == "iallreduce":
        return _plain(x.numpy())
    if not case.contender.startswith("peers"):
        return lambda: comm.allreduce_async(x, name="overlap").wait
    peers = comm.peers()
    stack.callback(peers.close)
    received = torch.empty_like(x)
    pool = stack.enter_context(ThreadPoolExecutor(2))
    other = 1 - comm.rank

    def start() -> Callable[[], Any]:
        parts: list[Future[Any]] = [
            pool.submit(peers.send, x, other),
            pool.submit(peers.recv, received, other),
        ]
        return lambda: [part.result() for part in parts]

    return start


def _plain(x: Any) -> Start:
    from mpi4py import MPI  # noqa: PLC0415  initialises MPI

    return lambda: MPI.COMM_WORLD.Iallreduce(MPI.IN_PLACE, x).Wait


def hidden_share(compute_s: float, exchange_s: float, both_s: float) -> float:
    """Return the share of the shorter of the two that took no time of its own."""
    return (compute_s + exchange_s - both_s) / min(compute_s, exchange_s)


def keep_to_cores(case: Case) -> Callable[[], None]:
    """Give one core to the threads made from now on; return what moves the calling thread to another."""
    cores = sorted(os.sched_getaffinity(0))
    if not case.free_core:
        return lambda: None
    if len(cores) < 2:
        raise SystemExit("--free-core needs two cores")
    os.sched_setaffinity(0, cores[-1:])  # of this thread; those it makes inherit it
    return lambda: os.sched_setaffinity(0, cores[:1])


def measure(case: Case, comm: Communicator, start: Start) -> dict[str, float]:
    """Time computing, exchange and both, in turn; collective."""
    compute = Computing()
    compute(100)
    computes = comm.rank == 0 or not case.free_core

    def timed(call: Callable[[], Any]) -> float:
        comm.barrier()
        begun = time.perf_counter()
        call()
        mine = time.perf_counter() - begun
        everyone: list[float] = comm.allgather_object(mine)
        return everyone[0] if case.free_core else max(everyone)

    def alone() -> None:
        start()()

    def beside() -> None:
        wait = start()
        if computes:
            compute(products)
        wait()

    exchange_s = statistics.median([timed(alone) for _ in range(4)][1:])
    product_s = timed(lambda: compute(200)) / 200
    products = comm.broadcast_object(round(COMPUTE_PER_EXCHANGE * exchange_s / product_s) + 1)
    kinds = {"compute": lambda: compute(products) if computes else None, "exchange": alone, "both": beside}
    rounds = [{name: timed(call) for name, call in kinds.items()} for _ in range(case.repetitions)]
    share = statistics.median(hidden_share(t["compute"], t["exchange"], t["both"]) for t in rounds)
    medians = {f"{name}_ms": 1e3 * statistics.median(t[name] for t in rounds) for name in kinds}
    return {"rate": 100 * min(1.0, max(0.0, share)), **medians}


def on_rank(comm: Communicator, case: Case, to_own_core: Callable[[], None]) -> None:
    """Measure one case; rank 0 prints the result."""
    torch.set_num_threads(1)
    with ExitStack() as stack:
        start = exchange_of(case, comm, stack)
        start()()  # makes the threads that carry it
        if comm.rank == 0:
            to_own_core()
        result = measure(case, comm, start)
    if comm.rank == 0:
        print(json.dumps(result), flush=True)


def launcher(arguments: argparse.Namespace, stack: ExitStack) -> Callable[[Sequence[str]], dict[str, float]]:
    """Return what runs a program on two ranks, where the arguments say."""
    if arguments.link:
        if reason := why_not():
            raise SystemExit(f"--link: {reason}")
        stack.enter_context(ended_by_signals())
        nodes = stack.enter_context(Nodes(2))
        nodes.limit(arguments.link)
        return lambda program: run_job(nodes.mpirun([sys.executable, *program]))
    if not arguments.hostfile and not arguments.mpi_args:
        return lambda program: launch_ranks(2, program)
    command = [str(Path(sys.prefix) / "bin" / "mpirun"), "--oversubscribe", "--bind-to", "none", "-n", "2"]
    command += ["--hostfile", arguments.hostfile] if arguments.hostfile else []
    command += shlex.split(arguments.mpi_args)
    return lambda program: run_job([*command, sys.executable, *program])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repetitions", type=int, default=9, help="of each timing within a round")
    parser.add_argument("--free-core", action="store_true", help="only rank 0 computes")
    parser.add_argument("--only", default="", help="contenders with this in their name")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES_MB, metavar="MB")
    parser.add_argument("--link", help="rate of a network between the ranks as tc writes it: 1gbit, 100mbit")
    parser.add_argument("--hostfile", help="where mpirun finds the two hosts")
    parser.add_argument("--mpi-args", default="", help="more options of mpirun, in one string")
    parser.add_argument("--rank-of", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    if arguments.rank_of:
        case = Case(
            arguments.rank_of, arguments.sizes[0], arguments.free_core, repetitions=arguments.repetitions
        )
        to_own_core = keep_to_cores(case)
        sys.exit(
            guard(lambda: create_communicator(case.backend), lambda comm: on_rank(comm, case, to_own_core))
        )
    with ExitStack() as stack:
        launch = launcher(arguments, stack)

        def run(job: str) -> float:
            contender, size, _ = job.split()
            program = [__file__, "--rank-of", contender, "--sizes", size]
            program += ["--repetitions", str(arguments.repetitions)]
            result = launch([*program, *["--free-core"] * arguments.free_core])
            share = result.pop("rate")
            print(", ".join(f"{name} {value:.1f}" for name, value in result.items()))
            return share

        jobs = [f"{c} {s} MB" for c in CONTENDERS if arguments.only in c for s in arguments.sizes]
        shares = run_rounds(jobs, run, arguments.rounds, "% hidden")
    results = {}
    for job in jobs:
        contender, size, _ = job.split()
        results[f"hidden_{contender}_{size}mb"] = round(statistics.median(shares[job]) / 100, 3)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
