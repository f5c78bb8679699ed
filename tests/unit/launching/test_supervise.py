"""Supervision of a job: an unwritable stderr, ignored signals, ends after faults, stops between starts."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from speechdp.cli import launch
from speechdp.cli.main import run
from speechdp.launching import processes
from speechdp.launching.faults import Fault
from speechdp.launching.hostfile import Host, Hostfile
from speechdp.launching.outcome import Target
from speechdp.launching.processes import kill
from speechdp.launching.requeue import is_to_be_resumed
from speechdp.launching.restarts import RestartPolicy, Restarts
from speechdp.launching.supervise import JobEnd, StopPolicy, SupervisorStop, noted_signals, run_job

RUN = """
import os, sys
from speechdp.launching.supervise import StopPolicy, run_job
from speechdp.process.output import lost_output
end = run_job([sys.executable, "-c", sys.argv[2]], os.environ, StopPolicy())
with open(sys.argv[1], "w") as file:
    print(end.exit_code, end.stop_signal, lost_output(), file=file)
"""
#: Seconds, long enough for whatever must happen.
DEADLINE_S = 300.0
#: Prints more than any pipe holds, and minds that it cannot.
CHATTY = "import sys; sys.stdout.write('x' * 300_000); sys.stdout.flush(); sys.stderr.write('y' * 300_000)"


def run_beside(program: str, told: Path, *, stdout: int | None = None, stderr: int | None = None) -> str:
    """Supervise `program` in a process of its own; return what run_job made of it."""
    command = [sys.executable, "-c", RUN, str(told), program]
    subprocess.run(command, stdout=stdout, stderr=stderr, text=True, timeout=DEADLINE_S, check=True)
    return told.read_text().strip()


def test_a_launcher_reads_nothing_that_was_meant_for_launch(tmp_path: Path) -> None:
    told = tmp_path / "told"
    program = "import sys; sys.exit(len(sys.stdin.read()))"
    command = [sys.executable, "-c", RUN, str(told), program]
    subprocess.run(command, input="typed", text=True, timeout=DEADLINE_S, check=True)
    assert told.read_text().strip() == "0 None None"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_full_streams_end_nobody(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        told = run_beside(CHATTY, tmp_path / "told", stdout=full.fileno(), stderr=full.fileno())
    lost = "standard output: cannot be written (No space left on device), lines are lost"
    assert told == f"0 None {(lost, False)}"


def test_a_reader_that_goes_ends_nobody_and_one_that_is_slow_gets_all(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    assert run_beside(CHATTY, tmp_path / "told", stdout=writing).startswith("0 None ('standard output: its")
    os.close(writing)
    slow = [sys.executable, "-c", "import sys, time; time.sleep(1.5); print(len(sys.stdin.read()))"]
    reader = subprocess.Popen(slow, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert reader.stdin is not None
    told = run_beside(CHATTY, tmp_path / "told", stdout=reader.stdin.fileno(), stderr=subprocess.DEVNULL)
    assert told == "0 None None" and reader.communicate()[0] == b"300000\n"


@pytest.mark.parametrize("asked", [False, True])
def test_a_reader_that_takes_nothing_keeps_no_launch(tmp_path: Path, *, asked: bool) -> None:
    """As in `launch ... | tee /hung/log`: the ranks have ended, and what is left is dropped."""
    reading, writing = os.pipe()
    program = "import os, signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    program += "sys.stdout.write('x' * 100_000); sys.stdout.flush()\n"
    program += "os.kill(os.getppid(), signal.SIGUSR2)" if asked else ""
    limits = "shown_output._READER_PATIENCE_S, shown_output._ASKED_PATIENCE_S = "
    limits += "(1000.0, 0.2)" if asked else "(0.2, 1000.0)"
    run = f"from speechdp.launching import shown_output\n{limits}\n{RUN}"
    command = [sys.executable, "-c", run, str(tmp_path / "told"), program]
    subprocess.run(command, stdout=writing, timeout=DEADLINE_S, check=True)
    for descriptor in (reading, writing):
        os.close(descriptor)
    lost = "standard output: cannot be written (nobody reads it), lines are lost"
    assert (tmp_path / "told").read_text() == f"0 {12 if asked else None} {(lost, False)}\n"


def test_a_signal_that_comes_twice_at_once_is_no_haste() -> None:
    now = [100.0]
    request = SupervisorStop(clock=lambda: now[0])
    for now[0] in (100.0, 100.4):
        request.note(signal.SIGTERM, None)
    assert request.again is None and request.since == 100.0
    now[0] = 101.5
    request.note(signal.SIGTERM, None)
    assert request.again == 101.5 and len(request.signals) == 3


@pytest.mark.parametrize(
    "signals",
    [
        (signal.SIGUSR1, signal.SIGTERM),  # Slurm: a pre-emption, and the end of its GraceTime
        (signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT),  # LSF: the warning, and the limit
    ],
)
def test_what_a_batch_system_sends_after_its_warning_is_no_haste(signals: Sequence[signal.Signals]) -> None:
    now = [100.0]
    request = SupervisorStop(clock=lambda: now[0])
    for signum in signals:
        request.note(signum, None)
        now[0] += 10.0
    assert request.again is None and request.since == 100.0
    request.note(signal.SIGTERM, None)
    assert request.again == now[0]


def test_a_launcher_that_is_killed_is_told_from_one_that_returns_so() -> None:
    end = run_job(["sh", "-c", "kill -9 $$"], os.environ, StopPolicy())
    assert (end.exit_code, end.killed_by) == (137, signal.SIGKILL)
    end = run_job(["sh", "-c", "exit 137"], os.environ, StopPolicy())
    assert (end.exit_code, end.killed_by) == (137, None)


def test_what_runs_beside_the_job_keeps_what_it_starts_meanwhile(tmp_path: Path) -> None:
    """As the warning of a batch script does, a loop with a new `sleep` every two seconds."""
    later = 'sh -c "touch later; until [ -e over ]; do sleep 0.1; done"'
    loop = f"set -e; until [ -e begun ]; do sleep 0.1; done; {later}; exit 7"
    beside = subprocess.Popen(["sh", "-c", loop], cwd=tmp_path)
    job = 'cd "$0"; touch begun; until [ -e later ]; do sleep 0.1; done'
    assert run_job(["sh", "-c", job, str(tmp_path)], os.environ, StopPolicy()).exit_code == 0
    (tmp_path / "over").touch()
    assert beside.wait(timeout=DEADLINE_S) == 7


def test_what_a_process_starts_just_before_it_is_killed_is_killed_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank may start another process between the look at all of them and its own end."""
    started: list[subprocess.Popen[bytes]] = []

    def start_another(pid: int, signum: signal.Signals) -> None:
        if len(started) < 3:
            started.append(subprocess.Popen(["sleep", "5000"]))
        kill(pid, signum)

    monkeypatch.setattr(processes, "kill", start_another)
    first = subprocess.Popen(["sleep", "5000"])
    processes.kill_descendants(os.getpid(), frozenset())
    assert {process.wait(DEADLINE_S) for process in [first, *started]} == {-signal.SIGKILL}


def test_a_child_whose_parent_is_killed_before_it_asks_for_the_signal_ends() -> None:
    program = (
        "import os, time\n"
        "from speechdp.launching.processes import at_our_death\n"
        "ask, us = at_our_death(), os.getpid()\n"
        "if os.fork():\n"
        "    os._exit(0)\n"
        "while os.getppid() == us:\n"
        "    time.sleep(0.01)\n"
        "ask()\n"
        "print('goes on', flush=True)\n"
    )
    command = [sys.executable, "-c", program]
    assert subprocess.run(command, stdout=subprocess.PIPE, timeout=DEADLINE_S, check=True).stdout == b""


def test_signals_that_are_ignored_stay_ignored() -> None:
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with noted_signals() as request:
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGUSR1)
        assert request.signals == [signal.SIGUSR1]
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, former)


def test_after_a_fault_what_is_left_is_killed() -> None:
    program = "import sys, time; sys.stderr.write('speechdp: rank 1 on n2: a fault\\n'); time.sleep(5000)"
    end = run_job([sys.executable, "-c", program], os.environ, StopPolicy(fault_grace_s=0.5))
    assert end == JobEnd(128 + signal.SIGKILL, None, (Fault("reported", 1, "n2"),), signal.SIGKILL)


@pytest.mark.parametrize(
    ("how", "is_waited_for"), [("killed by signal 9", False), ("left with exit code 75", True)]
)
def test_once_a_rank_is_known_to_be_gone_less_time_is_left(how: str, *, is_waited_for: bool) -> None:
    """Hydra lets others wait for one that died before MPI had started; one that has saved, has not died."""
    program = f"import sys, time; sys.stderr.write('speechdp: rank 1 on n2: {how}\\n'); sys.stderr.flush()\n"
    program += f"time.sleep({1.0 if is_waited_for else 5000.0})"
    policy = StopPolicy(fault_grace_s=DEADLINE_S, gone_grace_s=0.1)
    end = run_job([sys.executable, "-c", program], os.environ, policy)
    assert end.killed_by == (None if is_waited_for else signal.SIGKILL)


def test_where_losses_are_tolerated_a_killed_rank_ends_nobody() -> None:
    banner = "srun: error: n3: task 2: Killed\\n"
    program = f"import sys, time; sys.stderr.write('{banner}'); time.sleep(1)"
    tolerant = StopPolicy(fault_grace_s=0.1, tolerates_loss=True)
    end = run_job([sys.executable, "-c", program], os.environ, tolerant)
    assert end == JobEnd(0, None, (Fault("killed", 2, "n3", signal=signal.SIGKILL),))


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("speechdp: rank 1 on n2: rank 0 is gone", Fault("reported", 1, "n2")),
        ("srun: error: Node failure on n3", Fault("host lost", host="n3")),
    ],
)
def test_what_no_rank_can_go_on_after_ends_the_job_all_the_same(line: str, fault: Fault) -> None:
    program = f"import sys, time; sys.stderr.write({line!r} + chr(10)); time.sleep(5000)"
    tolerant = StopPolicy(fault_grace_s=0.5, tolerates_loss=True)
    end = run_job([sys.executable, "-c", program], os.environ, tolerant)
    assert end == JobEnd(128 + signal.SIGKILL, None, (fault,), signal.SIGKILL)


#: As `horovodrun --gloo`: starts a rank by a shell; asked to end by SIGTERM it leaves the rank no time.
_HOROVODRUN = """
import os, signal, subprocess, sys
rank = subprocess.Popen(["sh", "-c", f"env HOROVOD_RANK=0 {sys.executable} -c '{sys.argv[1]}'; exit $?"])
signal.signal(signal.SIGTERM, lambda *_: (rank.kill(), os._exit(1)))
sys.exit(rank.wait())
"""
#: Saves, and then leaves, when it is asked; starts a process that is no rank, though it has the variable.
_SAVING_RANK = """
import os, signal, subprocess, sys, time
other = subprocess.Popen(["sleep", "600"])
def save(*_):
    time.sleep(0.5)
    alive = other.poll() is None
    other.kill()
    os._exit(75 if alive else 1)
signal.signal(signal.SIGUSR1, save)
os.kill(int(os.environ["SUPERVISOR"]), signal.SIGTERM)
while True:  # a signal that comes just before a sleep begins is handled only after it
    time.sleep(0.1)
"""


def test_ranks_of_horovodrun_on_this_machine_have_the_time_they_are_given(tmp_path: Path) -> None:
    told = tmp_path / "told"
    asked = f"StopPolicy(signal.SIGTERM, grace_s={DEADLINE_S}, ranks_have='HOROVOD_RANK')"
    program = f"""
import os, signal, sys
from speechdp.launching.supervise import StopPolicy, run_job
environ = {{**os.environ, "SUPERVISOR": str(os.getpid())}}
end = run_job([sys.executable, "-c", {_HOROVODRUN!r}, {_SAVING_RANK!r}], environ, {asked})
with open({str(told)!r}, "w") as file:
    print(end.exit_code, end.stop_signal, file=file)
"""
    subprocess.run([sys.executable, "-c", program], timeout=DEADLINE_S, check=True)
    assert told.read_text() == f"75 {int(signal.SIGTERM)}\n"


def test_ranks_on_several_hosts_are_told_that_horovodrun_gives_them_no_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch, "find_horovodrun", lambda *_: Path("/v/bin/horovodrun"))
    hostfile = tmp_path / "hosts"
    hostfile.write_text("localhost slots=1\nnode-7.invalid slots=1\n")
    begin = ["launch", "--launcher", "horovodrun", "--hostfile", str(hostfile), "--dry-run"]
    for options, is_warned in (
        (["--controller", "gloo", "--grace-s", "60"], True),
        (["--controller", "gloo"], False),  # nobody has asked for another time
        (["--controller", "gloo", "--grace-s", "60", "-np", "1"], False),  # on this machine
        (["--controller", "mpi", "--grace-s", "60"], False),
    ):
        assert run([*begin, *options, "--", "train", "D", "R"]) == 0
        said = capsys.readouterr().err
        assert ("warning: horovodrun over Gloo kills ranks" in said) == is_warned, said


class KilledRank:
    """A starter whose jobs all end by a killed rank; a warning of the batch system comes after the first.

    Args:
        answers: whether the hosts are found to answer all the same: the warning ends the search for them.
    """

    def __init__(self, request: SupervisorStop, *, answers: bool) -> None:
        self.starts = 0
        self._request, self._answers = request, answers

    def run(self, hosts: Sequence[Host], arguments: Sequence[str], reason: str) -> JobEnd:
        self.starts += 1
        return JobEnd(137, None, (Fault("killed", 1, "n1", signal=9),))

    def reachable(self, hosts: Sequence[Host]) -> list[Host]:
        self._request.note(signal.SIGUSR1, None)
        return list(hosts) if self._answers else []


@pytest.mark.parametrize(("answers", "requeue"), [(True, False), (False, False), (True, True)])
def test_a_stop_between_two_starts_ends_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *,
    answers: bool,
    requeue: bool,
) -> None:
    monkeypatch.setattr(launch, "_RESTART_DELAY_S", 0.0)
    request = SupervisorStop()
    starter = KilledRank(request, answers=answers)
    hosts = Hostfile("F", (Host("n1", 2),))
    restarts = Restarts(RestartPolicy(3), hosts, 2, Target("train", tmp_path, None), starter.reachable)
    end, result = launch._run_until_done(
        starter,  # type: ignore[arg-type]
        restarts,
        ("train", "D", "R"),
        request,
        requeued_by="slurm" if requeue else None,
    )
    assert starter.starts == 1
    assert end.stop_signal == signal.SIGUSR1 and result.exit_code == 128 + signal.SIGUSR1
    said = capsys.readouterr().err.splitlines()[-2:]
    assert "was killed by SIGKILL" in said[0] and "the job was stopped by SIGUSR1" in said[1], said
    # Who started by hand what its queue starts again would have two jobs that wait for one folder.
    assert ("; give the same command again, with --resume" in said[1]) != requeue, said
    assert is_to_be_resumed(end, result.exit_code)


def test_only_gpus_are_waited_for_before_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device, here = tmp_path / "gpu", Host("localhost", 2)
    monkeypatch.setattr(launch, "_GPU_DEVICES", (device,))
    assert launch._restart_delay_s([here]) == 0.0
    assert launch._restart_delay_s([here, Host("node-7.invalid", 2)]) > 0.0
    device.touch()
    assert launch._restart_delay_s([here]) > 0.0


def _launch_with_files(limits: tuple[int, int]) -> subprocess.CompletedProcess[str]:
    """Let a child print its limit, under one of our own."""
    shown = "import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE))"
    program = (
        f"import os, resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, {limits})\n"
        "from speechdp.errors import ConfigError\n"
        "from speechdp.launching.supervise import StopPolicy, run_job\n"
        f"run_job([sys.executable, '-c', {shown!r}], os.environ, StopPolicy())"
    )
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )


def test_a_launcher_may_open_files_enough_but_not_without_end() -> None:
    """Open MPI with too few waits for ever; it closes as many numbers as there may be for each rank."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert _launch_with_files((32, most)).stdout == f"{(min(4096, most), most)}\n"
    assert _launch_with_files((most, most)).stdout == f"{(most, most)}\n"


def test_a_launcher_that_may_open_too_few_files_is_not_started() -> None:
    ended = _launch_with_files((40, 40))
    assert ended.stdout == "" and ended.returncode != 0
    assert (
        "ConfigError: 40 files may be open at a time here, and mpirun with its ranks needs 64" in ended.stderr
    )
