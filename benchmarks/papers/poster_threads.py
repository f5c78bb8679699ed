"""What scales when replicas are threads of one process, as nn.DataParallel runs them, and when processes.

    python benchmarks/papers/poster_threads.py [--replicas 1,2] [--rounds 7] [--seconds 0.4]
        [--preset tacotron-tiny]

Each function of the poster's model (encoder, decoder, postproc) is computed by 1, 2, ... replicas at once,
each with a batch of its own of constant size, one torch thread each: forward, and when all replicas have
done it, backward.

    threads     nn.DataParallel's way: one process, a Python thread a replica, started for each forward pass
                and joined; backward in a thread a replica, too, as autograd does with a thread a GPU
    processes   a process a replica, as the ranks of a job

Efficiency is the time of one replica over the time of N: 1 where N replicas take as long as one, 1/N where
they might as well take turns.  "Cores busy" is the CPU time of the process over wall time.  "Launches only"
is the plain loop on tensors of an element or two, where a call costs what it costs the host of a GPU: Python
and PyTorch's dispatcher.  There the interpreter's lock (GIL) is all that threads can get in each other's way.

What is measured is the functions alone: copying parameters to the replicas, scattering, gathering and adding
gradients up come on top of nn.DataParallel's way, and an allreduce on top of the processes'.

All cases take turns in every round; the medians over rounds are quoted.  Last line: JSON
{"threads": {"encoder": {"2": {"efficiency": ..., "forward": ..., "backward": ..., "cores_busy": ...}}, ...},
"processes": {...}, "ms": {function: [forward, backward] of one replica}, "one_busy": {function: cores that
one replica keeps busy; well below 1 something else was running, and the figures are worth little}}.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from rich import box
from rich.table import Table

from benchmarks.papers import poster_model
from benchmarks.papers.poster_model import CONFIGS, FUNCTIONS, LAUNCHES, Function, synchronise
from benchmarks.strategies.paired import REPOSITORY
from speechdp.cli.support.console import make_console

WAYS = ("threads", "processes")


@dataclass(frozen=True)
class Timing:
    """A function's mean over steps, computed by some replicas at once.

    Attributes:
        forward_s, backward_s: wall seconds.
        cores_busy: CPU time of the process over wall time.
    """

    forward_s: float
    backward_s: float
    cores_busy: float

    @property
    def total_s(self) -> float:
        return self.forward_s + self.backward_s


def in_threads(calls: Sequence[Callable[[], None]]) -> None:
    """Make the calls at once, in threads that are started for them, as torch.nn.parallel.parallel_apply does.

    One call is made by the caller itself.
    """
    if len(calls) == 1:
        calls[0]()
        return
    failed: list[BaseException] = []

    def keep(call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:  # raised again below
            failed.append(error)

    threads = [threading.Thread(target=keep, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def measure(replicas: Sequence[Function], seconds: float, device: torch.device) -> Timing:
    """Return the timing of steps of all replicas at once, for about `seconds`, of two steps at least."""
    forward_s = backward_s = 0.0
    num_steps, cpu_s, begin = 0, time.process_time(), time.perf_counter()
    while num_steps < 2 or time.perf_counter() - begin < seconds:
        start = time.perf_counter()
        in_threads([replica.forward for replica in replicas])
        synchronise(device)
        middle = time.perf_counter()
        in_threads([replica.backward for replica in replicas])
        synchronise(device)
        forward_s += middle - start
        backward_s += time.perf_counter() - middle
        num_steps += 1
    busy = (time.process_time() - cpu_s) / (time.perf_counter() - begin)
    return Timing(forward_s / num_steps, backward_s / num_steps, busy)


def work(given: argparse.Namespace) -> None:
    """Measure what is asked for on standard input, a line of JSON each, until it ends."""
    torch.set_num_threads(1)
    device = torch.device(given.device)
    sizes = poster_model.sizes_of(given.preset)
    made: dict[str, list[Function]] = {}
    for line in sys.stdin:
        name, num_replicas, seconds = json.loads(line)
        replicas = made.setdefault(name, [])
        while len(replicas) < num_replicas:
            replicas.append(poster_model.make_function(name, given.preset, sizes, device))
        timing = measure(replicas[:num_replicas], seconds, device)
        print(json.dumps([timing.forward_s, timing.backward_s, timing.cores_busy]), flush=True)


class Worker:
    """A process of ours that measures functions."""

    def __init__(self, given: argparse.Namespace) -> None:
        program = [sys.executable, __file__, "--worker", "--preset", given.preset, "--device", given.device]
        self._process = subprocess.Popen(
            program,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)},
        )

    def ask(self, name: str, num_replicas: int, seconds: float) -> None:
        """Let it measure; `answer` waits for the result."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([name, num_replicas, seconds]) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Timing:
        """Return what was asked for."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a worker ended with {self._process.wait()}; its message stands above")
        return Timing(*json.loads(line))

    def close(self) -> None:
        """End the process and wait for it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@contextmanager
def workers(given: argparse.Namespace, number: int) -> Iterator[list[Worker]]:
    """Yield processes that measure."""
    started: list[Worker] = []
    try:
        for _ in range(number):
            started.append(Worker(given))
        yield started
    finally:
        for worker in started:
            worker.close()


#: A way, a function and a number of replicas.
Case = tuple[str, str, int]


def run_case(case: Case, pool: Sequence[Worker], seconds: float) -> Timing:
    """Measure a case; processes that run at once are averaged."""
    way, name, num_replicas = case
    if way == "threads":
        pool[0].ask(name, num_replicas, seconds)
        return pool[0].answer()
    for worker in pool[:num_replicas]:
        worker.ask(name, 1, seconds)
    timings = [worker.answer() for worker in pool[:num_replicas]]
    return Timing(
        statistics.mean(t.forward_s for t in timings),
        statistics.mean(t.backward_s for t in timings),
        sum(t.cores_busy for t in timings),
    )


def run_rounds(given: argparse.Namespace, pool: Sequence[Worker]) -> dict[Case, list[Timing]]:
    """Measure every case once a round, forwards and backwards in turn; one round before is left out."""
    several = [n for n in given.replicas if n > 1]
    cases: list[Case] = []
    for name in given.functions:
        cases += [("threads", name, 1), *((way, name, n) for n in several for way in WAYS)]
    for case in cases:
        run_case(case, pool, 0.0)
    found: dict[Case, list[Timing]] = {case: [] for case in cases}
    for number in range(given.rounds):
        for case in cases if number % 2 == 0 else cases[::-1]:
            found[case].append(run_case(case, pool, given.seconds))
        print(f"round {number + 1}/{given.rounds} of threads and processes", flush=True)
    return found


def efficiency(one: Sequence[Timing], several: Sequence[Timing]) -> dict[str, float]:
    """Return the medians over rounds of the time of one replica over that of several, and of cores busy."""
    pairs = list(zip(one, several, strict=True))
    return {
        "efficiency": statistics.median(a.total_s / b.total_s for a, b in pairs),
        "forward": statistics.median(a.forward_s / b.forward_s for a, b in pairs),
        "backward": statistics.median(a.backward_s / b.backward_s for a, b in pairs),
        "cores_busy": statistics.median(b.cores_busy for b in several),
    }


def conclude(found: dict[Case, list[Timing]]) -> dict[str, Any]:
    """Return the last line."""
    result: dict[str, Any] = {way: {} for way in WAYS}
    result["ms"], result["one_busy"] = {}, {}
    for (way, name, num_replicas), timings in found.items():
        if num_replicas == 1:
            result["one_busy"][name] = round(statistics.median(t.cores_busy for t in timings), 3)
            phases = ([t.forward_s for t in timings], [t.backward_s for t in timings])
            result["ms"][name] = [round(1e3 * statistics.median(phase), 3) for phase in phases]
            continue
        figures = efficiency(found["threads", name, 1], timings)
        rounded = {key: round(value, 3) for key, value in figures.items()}
        result[way].setdefault(name, {})[str(num_replicas)] = rounded
    return result


def show(result: dict[str, Any]) -> None:
    """Print the table."""
    table = Table(title="Efficiency at a constant batch a replica", title_justify="left", box=box.SIMPLE_HEAD)
    for title in ("function", "one: forward + backward, ms", "replicas"):
        table.add_column(title)
    for way in WAYS:
        for title in (way, "forward", "backward", "cores busy"):
            table.add_column(title, justify="right")
    for name, by_number in result["threads"].items():
        forward, backward = result["ms"][name]
        for number in by_number:
            cells = [f"{result[way][name][number][key]:.2f}" for way in WAYS for key in _KEYS]
            table.add_row(name, f"{forward:.1f} + {backward:.1f}", number, *cells)
    make_console().print(table)
    for name, by_number in result["processes"].items():
        for number, figures in by_number.items():
            if figures["cores_busy"] < 0.9 * min(int(number), _cores()):
                print(f"{name}: something else used the cores of {number} processes; measure again")


def _cores() -> int:
    return len(os.sched_getaffinity(0))


_KEYS = ("efficiency", "forward", "backward", "cores_busy")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--replicas", type=lambda text: [int(n) for n in text.split(",")], default="1,2")
    parser.add_argument("--functions", type=lambda text: text.split(","), default=[*FUNCTIONS, LAUNCHES])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.4, help="of each case in each round")
    parser.add_argument("--preset", choices=list(CONFIGS), default="tacotron-tiny")
    parser.add_argument("--device", default="cpu", help="cuda: the replicas share one GPU")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main() -> None:
    given = parse(sys.argv[1:])
    if given.worker:
        work(given)
        return
    most = max(given.replicas)
    if most > _cores():
        print(f"{most} replicas on {_cores()} cores: no efficiency can be above {_cores() / most:.2f}")
    with workers(given, most) as pool:
        result = conclude(run_rounds(given, pool))
    show(result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
