"""Start a program on several ranks, and kill all of it on a time-out, because most failures are hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.fork_server import environment_of_forks

REPOSITORY = Path(__file__).resolve().parents[2]
#: the launchers of the environment that runs the tests, by absolute path: from PATH the Open MPI wheel
#: could not start its daemons on other hosts, and another MPI might come first.
BIN = Path(sys.prefix) / "bin"
#: time after which a job counts as hung, s; long, because other tests run beside this one.
TIMEOUT_S = 240.0


@dataclass(frozen=True)
class Ended:
    """How a job of several ranks ended."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def output(self) -> str:
        """The whole output, for the message of a failing assertion."""
        return f"exit code {self.exit_code}\n--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"


def run_mpi(
    size: int,
    program: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Ended:
    """Run `python PROGRAM` under `mpirun -n size`, each line of output marked with its rank."""
    launcher = [str(BIN / "mpirun"), "--oversubscribe", "--tag-output", "-n", str(size)]
    return run_job([*launcher, sys.executable, *map(str, program)], env=env, timeout_s=timeout_s)


def run_horovodrun(size: int, program: Sequence[str | Path], *, timeout_s: float = TIMEOUT_S) -> Ended:
    """Run `python PROGRAM` under `horovodrun --gloo`, which needs no MPI."""
    launcher = [str(BIN / "horovodrun"), "--gloo", "-np", str(size), "-H", f"localhost:{size}"]
    return run_job([*launcher, sys.executable, *map(str, program)], timeout_s=timeout_s)


def start_job(
    command: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: Path = REPOSITORY
) -> subprocess.Popen[str]:
    """Start `command` in its own session, so that it stays together, apart from pytest."""
    return subprocess.Popen(
        command,
        cwd=cwd,
        env={**job_environment(), **(env or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )


def run_job(
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    timeout_s: float = TIMEOUT_S,
    cwd: Path = REPOSITORY,
) -> Ended:
    """Run `command` in its own session; on a time-out kill the session and fail with its output."""
    with start_job(command, env=env, cwd=cwd) as process:
        try:
            stdout, stderr = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            _kill_session(process.pid)
            stdout, stderr = process.communicate()
            ended = Ended(-signal.SIGKILL, stdout, stderr)
            raise AssertionError(f"{' '.join(command)} hung for {timeout_s:g} s\n{ended.output}") from None
        return Ended(process.returncode, stdout, stderr)


def job_environment() -> dict[str, str]:
    """Return the environment of a job: this process's, without variables of another launcher."""
    foreign = ("OMPI_COMM_WORLD_", "PMIX_", "PMI_", "HOROVOD_RANK", "HOROVOD_SIZE", "SLURM_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    environment = {
        **kept,
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMP_NUM_THREADS": "1",  # the ranks share the cores; more threads would only compete for them
        "PYTHONPATH": str(REPOSITORY),
        "PYTHONFAULTHANDLER": "1",
    }
    return {**environment, **environment_of_forks(environment)}


def _kill_session(session: int) -> None:
    """Kill every process of a session: mpirun gives each rank a process group of its own."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if os.getsid(int(entry.name)) == session:
                os.kill(int(entry.name), signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue
