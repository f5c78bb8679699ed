"""Run jobs over many utterances, in separate processes if that pays or is needed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import closing, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

from speechdp.errors import RunError, SpeechDPError
from speechdp.process.running import RunningPrograms

#: Called with what is being done, how much of it is done, and how much there is.
Progress = Callable[[str, int, int], None]

Result_co = TypeVar("Result_co", covariant=True)

_FEWEST_FOR_PROCESSES = 64
#: Gives the new process this process's module search path, whatever folder it was started in.
_PROGRAM = "import sys; sys.path[:] = {path}; from speechdp.data.prepare import jobs; jobs.work({pipe})"


class Job(Protocol[Result_co]):
    """Work on one file, done in this process or pickled and sent to another."""

    @property
    def path(self) -> Path:
        """The file that the job writes, for messages."""
        ...

    @property
    def num_utterances(self) -> int:
        """Number of utterances to process."""
        ...

    def run(self, advance: Callable[[], None]) -> Result_co:
        """Do the job; call `advance` after each utterance."""
        ...


def run_jobs(
    jobs: Sequence[Job[Result_co]],
    stage: str,
    num_workers: int | None,
    progress: Progress,
    *,
    always_apart: bool = False,
) -> list[Result_co]:
    """Run all jobs, in parallel processes if that pays.

    Args:
        jobs: the jobs; results have the same order.
        stage: description of the jobs, for messages.
        num_workers: processes at a time; None: one per core.
        progress: called with the number of utterances done.
        always_apart: start a new process for each job, however little there is to do.

    Raises:
        ConfigError, ShardError, OSError: from the first job that failed; the others are stopped.
        RunError: a process was killed, or failed otherwise.
    """
    total, done, lock = sum(job.num_utterances for job in jobs), 0, threading.Lock()
    num_workers = min(num_workers or len(os.sched_getaffinity(0)), len(jobs))
    progress(stage, 0, total)

    def advance() -> None:
        nonlocal done
        with lock:
            done += 1
            progress(stage, done, total)

    if always_apart or (num_workers > 1 and total >= _FEWEST_FOR_PROCESSES):
        return _run_apart(jobs, stage, num_workers, advance, one_each=always_apart)
    return [job.run(advance) for job in jobs]


def _run_apart(
    jobs: Sequence[Job[Result_co]],
    stage: str,
    num_workers: int,
    advance: Callable[[], None],
    *,
    one_each: bool,
) -> list[Result_co]:
    results: dict[int, Any] = {}
    running = RunningPrograms()
    waiting = enumerate(jobs)  # processes that share this iterator take jobs from it in turn
    shares = [iter([numbered]) for numbered in waiting] if one_each else [waiting] * num_workers
    with ThreadPoolExecutor(num_workers) as threads:
        futures: list[Future[None]] = []
        try:
            futures.extend(
                threads.submit(_run_in_process, share, results, stage, advance, running) for share in shares
            )
            for future in as_completed(futures):
                future.result()  # raises the job's exception
            return [results[number] for number in range(len(jobs))]
        finally:
            for future in futures:
                future.cancel()
            running.kill_all()  # else leaving the block would wait for files no longer needed


def _run_in_process(
    jobs: Iterator[tuple[int, Job[Any]]],
    results: dict[int, Any],
    stage: str,
    advance: Callable[[], None],
    running: RunningPrograms,
) -> None:
    """Start a process, let it run one job after the other, and put the return values into `results`."""
    # Ctrl-C goes to all processes of the terminal.  This one ends its workers, which inherit the blocked
    # signal.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    ours, theirs = Pipe()
    with closing(ours):
        with closing(theirs):
            program = _PROGRAM.format(path=sys.path, pipe=theirs.fileno())
            process = running.start([sys.executable, "-c", program], pass_fds=[theirs.fileno()])
        try:
            for number, job in jobs:
                with suppress(ConnectionError):  # it has died; receiving reports that
                    ours.send(job)
                while (message := _receive(ours, process, f"{job.path}: its process, {stage},")) is None:
                    advance()
                results[number], failure = message
                if failure is not None:
                    raise failure
        finally:
            running.end(process)


def _receive(connection: Connection[Any, Any], process: subprocess.Popen[bytes], who: str) -> Any:
    try:
        return connection.recv()
    except (EOFError, ConnectionError) as error:
        if process.wait() < 0:
            raise RunError(f"{who} was killed (out of memory?); run again with fewer --workers") from error
        raise RunError(f"{who} has failed; what is printed above says why") from error


def work(pipe: int) -> None:
    """Run the jobs that the parent process sends, and send back their results.

    This process ends with its parent, however that ends: the next `prepare` may write to the same folder.
    """
    connection: Connection[Any, Job[Any]] = Connection(pipe)
    jobs: SimpleQueue[Job[Any]] = SimpleQueue()
    threading.Thread(target=_take_jobs, args=(connection, jobs), daemon=True).start()
    while True:
        job = jobs.get()
        try:
            message: tuple[Any, Exception | None] = (job.run(lambda: connection.send(None)), None)
        except (SpeechDPError, OSError) as error:
            message = (None, error)
        try:
            connection.send(message)
        except ConnectionError:
            os._exit(1)  # the parent has gone, which the other thread is about to notice


def _take_jobs(connection: Connection[Any, Job[Any]], jobs: SimpleQueue[Job[Any]]) -> None:
    try:
        while True:
            jobs.put(connection.recv())
    finally:
        os._exit(1)
