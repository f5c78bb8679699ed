"""Start `speechdp` as users do (alone, under mpirun, by `speechdp launch`); watch and signal its ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from speechdp.launching.mpi import rank_process
from tests.helpers.gates import Gates
from tests.helpers.mpi import BIN, Ended, run_job, start_job
from tests.helpers.processes import is_running
from tests.helpers.waiting import wait_until

SPEECHDP = (sys.executable, "-m", "speechdp")
#: Only a job that hangs takes this long, s, although others run beside it.
DEADLINE_S = 240.0


def under_mpirun(size: int, *arguments: str | Path) -> list[str]:
    """Return the command line of `speechdp ARGUMENTS` over `size` ranks."""
    return [str(BIN / "mpirun"), "--oversubscribe", "-n", str(size), *SPEECHDP, *map(str, arguments)]


def by_launch(size: int, *arguments: str | Path) -> list[str]:
    """Return the command line of `speechdp launch -np SIZE -- ARGUMENTS`; ranks may take long to save."""
    grace = ("--grace-s", f"{DEADLINE_S:g}")
    return [*SPEECHDP, "launch", "-np", str(size), *grace, "--", *map(str, arguments)]


def alone(*arguments: str | Path) -> list[str]:
    """Return the command line of `speechdp ARGUMENTS` as one process."""
    return [*SPEECHDP, *map(str, arguments)]


def ended_within(seconds: float, command: Sequence[str]) -> Ended:
    """Run a command that must end in time, whatever its exit code."""
    return run_job(command, timeout_s=seconds)


def our_lines(ended: Ended) -> list[str]:
    """Return the lines of stderr that speechdp wrote on purpose."""
    return [line for line in ended.stderr.splitlines() if line.startswith("speechdp")]


class Job:
    """A job that runs while the test observes it.

    Args:
        command: command to start.
        mark: word in the ranks' command lines that no other process has, e.g. the path of the run.
        env: additional environment variables.
    """

    def __init__(self, command: Sequence[str], mark: str, env: Mapping[str, str] | None = None) -> None:
        self._mark = mark
        self._command = command
        self._process = start_job(command, env=env)

    @property
    def pid(self) -> int:
        """The started process: the launcher, or the only rank."""
        return self._process.pid

    def wait_until(self, condition: Callable[[], object], what: str) -> None:
        """Wait until a condition holds; fail if the job ends first."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            has_ended = self._process.poll() is not None
            if condition():
                return
            if has_ended or time.monotonic() > deadline:
                why = "the job ended" if has_ended else f"not in {DEADLINE_S:g} s"
                raise AssertionError(f"waited in vain for {what}: {why}\n{self._killed().output}")
            time.sleep(0.01)

    def rank_pid(self, rank: int) -> int:
        """Return the process of a rank."""
        for pid in self._marked():
            # horovodrun with gloo and Hydra set their own; below Hydra, `rank_process` is the ranks' parent.
            names = {f"{name}={rank}" for name in ("OMPI_COMM_WORLD_RANK", "HOROVOD_RANK", "PMI_RANK")}
            if names & set(_words(pid, "environ")) and rank_process.__file__ not in _words(pid, "cmdline"):
                return pid
        raise AssertionError(f"there is no rank {rank}\n{self._killed().output}")

    def signal(self, number: signal.Signals, pid: int | None = None) -> None:
        """Send a signal to a process of the job, by default to the one that was started."""
        os.kill(self.pid if pid is None else pid, number)

    def kill_rank(self, rank: int) -> None:
        """Kill the process of a rank; return when it is gone, so that it does nothing more in training."""
        pid = self.rank_pid(rank)
        self.signal(signal.SIGKILL, pid)
        wait_until(lambda: not is_running(pid), f"the death of rank {rank}")

    def finish(self, within_s: float = DEADLINE_S) -> Ended:
        """Wait for the end of the job; on a time-out kill it and fail."""
        try:
            stdout, stderr = self._process.communicate(timeout=within_s)
        except subprocess.TimeoutExpired:
            output = self._killed().output
            raise AssertionError(f"{self._command} did not end in {within_s:g} s\n{output}") from None
        return Ended(self._process.returncode, stdout, stderr)

    def _killed(self) -> Ended:
        """Kill the rest of the job; return its output."""
        self.kill()
        stdout, stderr = self._process.communicate()
        return Ended(self._process.returncode, stdout, stderr)

    def kill(self) -> None:
        """Kill the rest of the job, including ranks in their own sessions."""
        for pid in {self.pid, *self._marked()} if self._process.poll() is None else self._marked():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue

    def _marked(self) -> list[int]:
        pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
        return [pid for pid in pids if self._mark in _words(pid, "cmdline") and pid != os.getpid()]


def _words(pid: int, file: str) -> list[str]:
    try:
        return Path(f"/proc/{pid}/{file}").read_text(errors="replace").split("\0")
    except OSError:
        return []


@contextmanager
def started(
    command: Sequence[str],
    mark: str | Path,
    gates: Gates | None = None,
    env: Mapping[str, str] | None = None,
) -> Iterator[Job]:
    """Start a job, which waits at its gates; kill the rest of it at the end of the block."""
    job = Job(command, str(mark), {**(env or {}), **({} if gates is None else gates.env)})
    try:
        yield job
    finally:
        job.kill()
