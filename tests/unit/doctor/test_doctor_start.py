"""The doctor on hosts it cannot log in to, and on jobs that do not come to their end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from speechdp.doctor import job as doctor_job
from speechdp.doctor.finding import Finding
from speechdp.doctor.job import JobRecord, _end, run_probe
from speechdp.doctor.judge_start import judge_job, judge_reach
from speechdp.doctor.reach import Login, Reach, look_at
from speechdp.doctor.wire import ALL, Report
from speechdp.launching.mpi.hydra import Mpich
from speechdp.launching.mpi.open_mpi import OpenMpi
from tests.helpers.processes import is_running
from tests.helpers.waiting import wait_until

HOSTS = ("n1", "n2")
#: Seconds, long enough for whatever must happen.
DEADLINE_S = 240.0
SSH = [
    ("Host key verification failed.", "not known here", "ssh-keyscan -H n2"),
    (
        "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed",
        "not the one",
        "-R n2",
    ),
    ("me@n2: Permission denied (publickey).", "refuses the login", "ssh-copy-id n2"),
    ("ssh: Could not resolve hostname n2: Name or service not known", "not resolved", "hostfile"),
    ("ssh: connect to host n2 port 22: Connection refused", "nothing listens", "start sshd on n2"),
    ("ssh: connect to host n2 port 22: Connection timed out", "does not answer", "ping n2"),
    ("ssh: connect to host n2 port 22: No route to host", "does not answer", "ping n2"),
    ("something else", "something else", "without a prompt"),
]


@pytest.mark.parametrize(("said", "found", "remedy"), SSH)
def test_what_ssh_says_has_its_remedy(said: str, found: str, remedy: str) -> None:
    (finding,) = judge_reach(Reach("n2", exit_code=255, output=said))
    assert (finding.check, finding.status, finding.hosts) == ("reachable", "fail", ("n2",))
    assert found in finding.found
    assert remedy in finding.remedy


OTHERS = [
    (Reach("n2"), "reachable", "fail", "did not end in time", "ssh n2 true"),
    (Reach("n2", exit_code=0, missing=("/v/python",)), "programs", "fail", "/v/python", "same path"),
    (Reach("n2", exit_code=0, greeting="Welcome!\nx"), "login", "warn", "'Welcome!'", "~/.bashrc"),
    (Reach("n2", exit_code=0, address="127.0.1.1"), "reachable", "warn", "127.0.1.1", "/etc/hosts"),
    (Reach("n2", tried=False), "reachable", "warn", "not resolved", "DNS"),
]


@pytest.mark.parametrize(("reach", "check", "status", "found", "remedy"), OTHERS)
def test_other_troubles_of_a_host(reach: Reach, check: str, status: str, found: str, remedy: str) -> None:
    (finding,) = judge_reach(reach)
    assert (finding.check, finding.status, finding.hosts) == (check, status, ("n2",))
    assert found in finding.found
    assert remedy in finding.remedy


def test_a_good_host_is_not_mentioned() -> None:
    assert judge_reach(Reach("n2", address="10.0.0.2", exit_code=0)) == []


class _FakeSsh:
    """Stands for subprocess.run."""

    def __init__(self, stdout: str = "", stderr: str = "", returncode: int = 0) -> None:
        self.answer = (stdout, stderr, returncode)
        self.argv: list[str] = []

    def __call__(self, argv: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        self.argv = argv
        stdout, stderr, returncode = self.answer
        return subprocess.CompletedProcess(argv, returncode, stdout, stderr)


LOGIN = Login(("ssh", "-F", "f"), (Path("/v/bin/python; rm -rf ~"), Path("/v/bin/orted")))


def test_a_login_is_one_argv_that_never_asks() -> None:
    ssh = _FakeSsh("hello\nspeechdp-doctor-logged-in\nspeechdp-doctor-missing-1\n")
    reach = look_at("n2.invalid", LOGIN, ssh)
    assert ssh.argv[:3] == ["ssh", "-F", "f"]
    assert {"BatchMode=yes", "ConnectTimeout=5"} < set(ssh.argv)
    assert ssh.argv[-3:-1] == ["--", "n2.invalid"]
    assert "'/v/bin/python; rm -rf ~'" in ssh.argv[-1]
    assert (reach.missing, reach.greeting, reach.exit_code) == (("/v/bin/orted",), "hello", 0)
    assert not reach.is_reachable


def test_what_the_login_asks_is_understood_by_a_shell() -> None:
    login = Login(("sh", "-c", 'sh -c "$1"'), (Path(sys.executable), Path("/no/such program")))
    reach = look_at("n2.invalid", login, subprocess.run)
    assert (reach.exit_code, reach.missing) == (0, ("/no/such program",))


def test_a_login_without_our_mark_has_failed() -> None:
    reach = look_at("n2.invalid", LOGIN, _FakeSsh("Your account is locked.\n"))
    assert (reach.exit_code, reach.is_reachable) == (1, False)
    assert "locked" in reach.output


def test_no_login_to_this_machine_nor_under_srun() -> None:
    ssh = _FakeSsh()
    reach = look_at("localhost", Login(("ssh",), (Path(sys.executable),)), ssh)
    assert reach.is_local
    assert reach.is_reachable
    assert look_at("n2.invalid", None, ssh).is_reachable
    assert ssh.argv == []


def test_the_agent_of_open_mpi_is_taken() -> None:
    of_open_mpi = OpenMpi(Path("/v/bin/mpirun"), None, 4)
    words = ["--mca", "btl", "tcp", "--mca", "plm_rsh_agent", "ssh -F 'a b' : rsh"]
    assert of_open_mpi.login_agent(words, {}) == ("ssh", "-F", "a b")
    assert of_open_mpi.login_agent(["--prtemca", "plm_ssh_agent", "/x/ssh"], {}) == ("/x/ssh",)
    assert of_open_mpi.login_agent([], {"OMPI_MCA_plm_rsh_agent": "rsh"}) == ("rsh",)
    assert of_open_mpi.login_agent([], {}) == ("ssh",)


def test_the_agent_of_hydra_is_taken() -> None:
    hydra = Mpich(Path("/v/bin/mpiexec.hydra"), None, "4.3.2")
    assert hydra.login_agent(["-launcher", "ssh", "-launcher-exec", "ssh -F f"], {}) == ("ssh", "-F", "f")
    assert hydra.login_agent([], {"HYDRA_LAUNCHER_EXEC": "/x/ssh"}) == ("/x/ssh",)
    assert hydra.login_agent(["-iface", "eth0"], {}) == ("ssh",)


def job(*parts: tuple[str, ...], exit_code: int | None = None, **others: object) -> JobRecord:
    """Return the record of a job: of each rank the parts begun; one that ends in `.` has ended."""
    record = JobRecord(2, exit_code=exit_code, **others)  # type: ignore[arg-type]
    for rank, theirs in enumerate(parts):
        for part in theirs:
            record.note(Report(rank, part.rstrip("."), is_end=False))
            if part.endswith("."):
                record.note(Report(rank, part.rstrip("."), is_end=True))
    return record


def failed(record: JobRecord) -> Finding:
    finding = judge_job(record, HOSTS)
    assert finding.status == "fail"
    assert finding.remedy
    return finding


def test_a_job_that_came_to_its_end() -> None:
    assert judge_job(job(("node.", "clock."), ("node.", "clock."), exit_code=0), HOSTS).status == "ok"


@pytest.mark.parametrize("heard", [("node.", "clock"), ("node.",), ()])
def test_a_rank_whose_reports_were_torn_ended_if_the_first_rank_passes_on_its_facts(
    heard: tuple[str, ...],
) -> None:
    record = job(("node.", "clock."), heard, exit_code=0)
    record.note(Report(1, ALL, is_end=True, facts={"node": {}, "clock": {"offset_s": 0.0}}))
    assert judge_job(record, HOSTS).status == "ok"
    assert record.ranks[1].facts["clock"] == {"offset_s": 0.0}


def test_a_host_nothing_is_heard_of_is_named() -> None:
    # Open MPI 5 returns 0 when a host is lost.
    for exit_code in (None, 0, 1):
        finding = failed(job(("node.", "connect"), exit_code=exit_code))
        assert finding.hosts == ("n2",)
        assert "no rank came up" in finding.found


def test_a_late_host_is_named() -> None:
    finding = failed(job(("node.", "data.", "connect"), ("node.", "data")))
    assert finding.hosts == ("n2",)
    assert "`connect`" in finding.found
    assert "`data`" in finding.found
    assert "disks" in finding.remedy


def test_ranks_that_all_wait_cannot_exchange() -> None:
    finding = failed(job(("node.", "connect"), ("node.", "connect"), exit_code=1))
    assert finding.hosts == HOSTS
    assert "--interface" in finding.remedy


SAID = [
    ("python: No module named speechdp", "not installed there", "same speechdp"),
    ("bash: line 1: orted: command not found", "daemon", "Open MPI"),
    ("There are not enough slots available in the system", "fewer slots", "slots="),
    ("Host key verification failed.", "from host to host", "without a prompt"),
    ("None of the TCP networks specified to be included for ...", "lack the network", "--interface"),
]


@pytest.mark.parametrize(("line", "found", "remedy"), SAID)
def test_known_words_of_launchers(line: str, found: str, remedy: str) -> None:
    finding = failed(job(("node",), exit_code=1, output=["-----", line]))
    assert found in finding.found
    assert remedy in finding.remedy
    assert finding.hosts == ("n2",)


def test_own_words_of_a_rank_and_a_crash() -> None:
    said = [
        "noise",
        "speechdp: rank 1 on n2: the horovod back-end computes wrong sums; choose another back-end",
    ]
    assert failed(job(("node.",), ("node.",), exit_code=1, output=said)).found.startswith(
        "rank 1 on n2: the horovod"
    )
    crash = job(
        ("a.", "horovod"), ("a.", "horovod"), exit_code=139, cause="rank 1 on n2 was killed by SIGSEGV"
    )
    assert "was in part `horovod`" in failed(crash).found


def test_a_launcher_that_failed_for_no_known_reason() -> None:
    finding = failed(job(("a.",), ("a.",), exit_code=7, output=["----", "It is late."]))
    assert "exit code 7 (It is late.)" in finding.found


FAKE_LAUNCHER = """
import os, subprocess, sys, time
from speechdp.doctor.wire import Report, ReportWriter
ReportWriter(0).write(Report(0, "node", is_end=False, limit_s=0.2))
print("a word", file=sys.stderr)
if {hangs}:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print("child", child.pid, flush=True)
    time.sleep(600)
ReportWriter(0).write(Report(0, "node", is_end=True, facts={{"host": "n1"}}))
sys.exit(3)
"""


@pytest.mark.filterwarnings("always::ResourceWarning")
def test_a_job_is_heard_to_its_end(recwarn: pytest.WarningsRecorder) -> None:
    argv = [sys.executable, "-c", FAKE_LAUNCHER.format(hangs=False)]
    record = run_probe(argv, os.environ, 1, DEADLINE_S)
    assert (record.exit_code, record.ranks[0].facts) == (3, {"node": {"host": "n1"}})
    assert record.output == ["a word"]
    assert [str(warning.message) for warning in recwarn] == []  # such as a pipe that was left open


def test_a_job_nothing_more_comes_from_is_ended_with_all_below_it(monkeypatch: pytest.MonkeyPatch) -> None:
    keep = doctor_job._keep

    def keep_and_lose_patience(record: JobRecord, shown: bytes) -> None:
        keep(record, shown)
        if shown.startswith(b"child"):  # all has come that will
            monkeypatch.setattr(doctor_job, "_MARGIN_S", 0.5)

    monkeypatch.setattr(doctor_job, "_MARGIN_S", DEADLINE_S)
    monkeypatch.setattr(doctor_job, "_keep", keep_and_lose_patience)
    argv = [sys.executable, "-c", FAKE_LAUNCHER.format(hangs=True)]
    record = run_probe(argv, os.environ, 1, 0.5)
    assert (record.exit_code, record.ranks[0].open_part) == (None, "node")
    (child,) = (int(line.split()[1]) for line in record.output if line.startswith("child"))
    wait_until(lambda: not is_running(child), "the end of what the launcher has started")


def test_a_job_that_no_thread_can_read_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if a signal comes just after its start."""
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def start(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(popen(*args, **options))
        return started[0]

    def refuses(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(threading.Thread, "start", refuses)
    with pytest.raises(RuntimeError, match="start new thread"):
        run_probe(["sleep", "5000"], os.environ, 1, DEADLINE_S)
    assert started[0].returncode == -signal.SIGTERM


def test_a_launcher_that_is_not_there() -> None:
    record = run_probe(["/no/such/mpirun"], {}, 1, 1.0)
    assert "cannot be started" in failed(record).found


def test_a_process_that_ends_by_itself_meanwhile_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = subprocess.Popen(["sleep", "600"])
    child = psutil.Process(ended.pid)
    monkeypatch.setattr(psutil.Process, "children", lambda _, recursive: [child])
    monkeypatch.setattr(doctor_job, "_ENDING_S", DEADLINE_S)  # of a launcher that gets a core late
    launcher = subprocess.Popen(["sleep", "600"])
    ended.kill()
    ended.wait()
    _end(launcher)
    assert launcher.returncode == -signal.SIGTERM
