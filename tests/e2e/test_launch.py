"""`speechdp launch` with real launchers and small stand-ins for the ranks: ends, signals, leftovers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from speechdp.comm.environment import host_name
from speechdp.errors import ConfigError
from speechdp.launching.programs import find_horovodrun, find_mpirun
from tests.helpers.processes import is_running
from tests.helpers.waiting import wait_until

REPOSITORY = Path(__file__).resolve().parents[2]
DEADLINE_S = 180.0

#: Run as every rank instead of speechdp; gets the forwarded arguments, of which the third is the run.
RANK = """
import os, pathlib, signal, sys, time
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("HOROVOD_RANK", "-1")))
how, run = sys.argv[1], pathlib.Path(sys.argv[3])
run.mkdir(parents=True, exist_ok=True)

def save_and_leave(signum, frame):
    (run / "checkpoints" / "step-00000042").mkdir(parents=True, exist_ok=True)
    (run / f"saved-{rank}").write_text(signal.Signals(signum).name)
    sys.exit(0)

behaviour = sys.argv[4] if len(sys.argv) > 4 else "complete"
for signum in (signal.SIGUSR1, signal.SIGTERM):
    if behaviour != "die":
        signal.signal(signum, signal.SIG_IGN if behaviour == "stubborn" else save_and_leave)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
(run / f"pid-{rank}").write_text(str(os.getpid()))
(run / f"arguments-{rank}").write_text(repr(sys.argv[1:]))
(run / f"threads-{rank}").write_text(os.environ["OMP_NUM_THREADS"])
if behaviour in ("complete", "lost"):
    if rank == 0 and behaviour == "complete":
        (run / "completed.json").write_text("{}")
    sys.exit(0)
if behaviour == "die" and rank == 1:
    if "OMPI_COMM_WORLD_RANK" in os.environ:
        # Open MPI does not name a rank that is killed while mpirun is still starting ranks: wait until mpirun
        # hands on a signal.
        while not (run / "threads-0").exists():
            time.sleep(0.01)
        os.kill(os.getppid(), signal.SIGUSR2)
        signal.sigwait([signal.SIGUSR2])
    os.kill(os.getpid(), signal.SIGKILL)
while True:  # a signal that comes just before a sleep begins is handled only after it
    time.sleep(0.1)
"""

#: Starts `launch` with the stand-in above in the place of `python -m speechdp`.
STARTER = """
import sys, tyro
from speechdp.cli.launch import LaunchCommand, launch
stub, *arguments = sys.argv[1:]
sys.exit(launch(tyro.cli(LaunchCommand, args=arguments), (sys.executable, stub)))
"""

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a launch in the background; whatever is left of it is killed in the end."""
    stub = tmp_path / "rank.py"
    stub.write_text(textwrap.dedent(RANK))
    started: list[subprocess.Popen[str]] = []

    def begin(*arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", STARTER, str(stub), *arguments],
            cwd=REPOSITORY,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def needs_mpirun() -> None:
    try:
        find_mpirun(Path(sys.prefix), os.environ.get("PATH", ""))
    except ConfigError as error:
        pytest.skip(str(error))


def needs_horovodrun() -> None:
    needs_mpirun()
    try:
        find_horovodrun(Path(sys.prefix), os.environ.get("PATH", ""))
    except ConfigError as error:
        pytest.skip(str(error))


def finish(process: subprocess.Popen[str]) -> tuple[int, list[str]]:
    """Wait for the end; return exit code and the lines of stderr."""
    _, errors = process.communicate(timeout=DEADLINE_S)
    return process.returncode, errors.strip().splitlines()


def wait_for_ranks(run: Path, process: subprocess.Popen[str], num_ranks: int = 2) -> list[int]:
    """Wait until all ranks have noted their pid; return them."""
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end and process.poll() is None:
        pids = [path.read_text() for path in run.glob("threads-*") if path.read_text()]
        if len(pids) == num_ranks:
            return [int(path.read_text()) for path in sorted(run.glob("pid-*"))]
        time.sleep(0.05)
    raise AssertionError(f"the ranks did not come up: {process.poll()}")


def assert_gone(pids: list[int]) -> None:
    wait_until(lambda: not any(map(is_running, pids)), "the end of the ranks", DEADLINE_S)


LAUNCHERS = [
    pytest.param([], id="mpirun"),
    pytest.param(["--launcher", "horovodrun"], id="horovodrun-mpi"),
    pytest.param(["--launcher", "horovodrun", "--controller", "gloo"], id="horovodrun-gloo"),
]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_job_that_completes(start: Start, tmp_path: Path, launcher: list[str]) -> None:
    needs_horovodrun() if launcher else needs_mpirun()
    run = tmp_path / "a run"
    hostfile = str(REPOSITORY / "hostfiles" / "local2")
    odd = ["--note", "$(id) 'q' \"d\" a_b", "--period=16", "-np", "--", "*"]
    code, errors = finish(
        start("--hostfile", hostfile, *launcher, "--", "train", "DATA", str(run), "complete", *odd)
    )
    assert code == 0, errors
    assert not [line for line in errors if "speechdp launch:" in line]
    for rank in range(2):
        # Every word arrives as it was given, through Horovod's shell as well.
        expected = repr(["train", "DATA", str(run), "complete", *odd])
        assert (run / f"arguments-{rank}").read_text() == expected


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_killed_rank_ends_the_job_with_one_last_line(
    start: Start, tmp_path: Path, launcher: list[str]
) -> None:
    needs_horovodrun() if launcher else needs_mpirun()
    run = tmp_path / "run"
    checkpoint = run / "checkpoints" / "step-00000007"
    checkpoint.mkdir(parents=True)
    process = start("-np", "2", *launcher, "--", "train", "DATA", str(run), "die")
    code, errors = finish(process)
    assert code == 137, "\n".join(errors)
    where = "" if "gloo" in launcher else f" on {host_name()}"  # which horovodrun does not tell
    said = [line for line in errors if line and not line.startswith("[")]  # horovodrun's "[1]<stderr>:Killed"
    assert said == errors[-1:]
    assert errors[-1].startswith(f"speechdp launch: rank 1{where} was killed by SIGKILL")
    assert errors[-1].endswith(f"(exit code 137); last checkpoint: {checkpoint}; start again with --resume")
    assert_gone([int(path.read_text()) for path in run.glob("pid-*")])


def test_a_machine_without_ssh(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_mpirun()
    programs = tmp_path / "bin"
    programs.mkdir()
    monkeypatch.setenv("PATH", str(programs))
    run = tmp_path / "run"
    code, errors = finish(start("-np", "2", "--", "train", "DATA", str(run)))
    assert code == 0, errors


def test_exit_code_0_without_a_marker_is_a_failure(start: Start, tmp_path: Path) -> None:
    needs_mpirun()
    run = tmp_path / "run"
    code, errors = finish(start("-np", "2", "--", "train", "DATA", str(run), "lost"))
    assert code == 1
    assert "left no completion marker" in errors[-1]


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_lets_the_ranks_save(
    start: Start, tmp_path: Path, launcher: list[str], signum: signal.Signals
) -> None:
    needs_horovodrun() if launcher else needs_mpirun()
    run = tmp_path / "run"
    patient = ["--grace-s", f"{DEADLINE_S:g}"]
    process = start("-np", "2", *patient, *launcher, "--", "train", "DATA", str(run), "sleep")
    pids = wait_for_ranks(run, process)
    os.kill(process.pid, signum)
    code, errors = finish(process)
    assert code == 128 + signum
    assert errors[-1].startswith(f"speechdp launch: the job was stopped by {signum.name}; last checkpoint: ")
    # Over Gloo, too: on one machine the ranks are asked themselves, whom horovodrun would kill 5 s later.
    assert [(run / f"saved-{rank}").read_text() for rank in range(2)] == ["SIGUSR1"] * 2
    assert_gone(pids)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_ranks_that_do_not_leave_are_killed_after_the_grace_period(
    start: Start, tmp_path: Path, launcher: list[str]
) -> None:
    needs_horovodrun() if launcher else needs_mpirun()
    run = tmp_path / "run"
    arguments = ["-np", "2", "--grace-s", "1", *launcher, "--", "train", "DATA", str(run), "stubborn"]
    process = start(*arguments)
    pids = wait_for_ranks(run, process)
    os.kill(process.pid, signal.SIGTERM)
    code, _ = finish(process)  # the ranks sleep for longer than it is waited for here
    assert code == 143
    assert_gone(pids)


def test_a_second_signal_cuts_the_grace_period_short(start: Start, tmp_path: Path) -> None:
    needs_mpirun()
    run = tmp_path / "run"
    process = start("-np", "2", "--grace-s", "600", "--", "train", "DATA", str(run), "stubborn")
    pids = wait_for_ranks(run, process)
    end = time.monotonic() + DEADLINE_S
    while process.poll() is None and time.monotonic() < end:
        os.kill(process.pid, signal.SIGINT)
        time.sleep(1.5)  # at once they would be one request, as they are where launch gets no core meanwhile
    assert finish(process)[0] == 130
    assert_gone(pids)


def test_a_killed_launch_leaves_no_ranks_behind(start: Start, tmp_path: Path) -> None:
    needs_mpirun()
    run = tmp_path / "run"
    process = start("-np", "2", "--", "train", "DATA", str(run), "sleep")
    pids = wait_for_ranks(run, process)
    process.kill()
    assert_gone(pids)


def test_too_few_slots_is_said_before_anything_starts(start: Start, tmp_path: Path) -> None:
    run = tmp_path / "run"
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost slots=2\n")
    code, errors = finish(start("--hostfile", str(hosts), "-np", "3", "--", "train", "DATA", str(run)))
    assert code != 0
    assert f"{hosts}: 3 ranks wanted, but it has only 2 slots" in errors[-1]
    assert not run.exists()
