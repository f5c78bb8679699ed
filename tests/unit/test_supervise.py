"""Supervision of a job: an unwritable stderr, ignored signals, ends after faults, stops between starts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from speechdp.cli import launch
from speechdp.launching.faults import Fault
from speechdp.launching.hostfile import Host, Hostfile
from speechdp.launching.outcome import Target
from speechdp.launching.restarts import RestartPolicy, Restarts
from speechdp.launching.supervise import JobEnd, StopPolicy, StopRequest, noted_signals, run_job

RUN = """
import os, sys
from speechdp.launching.supervise import StopPolicy, run_job
end = run_job([sys.executable, "-c", sys.argv[1]], os.environ, StopPolicy())
print(end.exit_code, end.stop_signal)
"""


def run_beside(program: str, *, stderr: int) -> str:
    """Supervise `program` in a process of its own; return what run_job made of it."""
    done = subprocess.run(
        [sys.executable, "-c", RUN, program],
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout.strip()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_full_stderr_blocks_nobody() -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        assert run_beside("import sys; sys.stderr.write('x' * 300_000)", stderr=full) == "0 None"
    finally:
        os.close(full)


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
    program = "import sys, time; sys.stderr.write('speechdp: rank 1 on n2: a fault\\n'); time.sleep(60)"
    begun = time.monotonic()
    end = run_job([sys.executable, "-c", program], os.environ, StopPolicy(fault_grace_s=0.5))
    assert end == JobEnd(128 + signal.SIGKILL, None, (Fault("said", 1, "n2"),))
    assert time.monotonic() - begun < 30


def test_where_losses_are_tolerated_it_is_not() -> None:
    program = "import sys, time; sys.stderr.write('srun: error: Node failure on n3\\n'); time.sleep(1)"
    end = run_job([sys.executable, "-c", program], os.environ, StopPolicy(fault_grace_s=None))
    assert end == JobEnd(0, None, (Fault("host lost", host="n3"),))


class KilledRank:
    """A starter whose jobs all end by a killed rank; a warning of the batch system comes after the first."""

    def __init__(self, request: StopRequest) -> None:
        self.starts = 0
        self._request = request

    def run(self, hosts: Sequence[Host], arguments: Sequence[str], reason: str) -> JobEnd:
        self.starts += 1
        return JobEnd(137, None, (Fault("killed", 1, "n1", signal=9),))

    def reachable(self, hosts: Sequence[Host]) -> list[Host]:
        self._request.note(signal.SIGUSR1, None)
        return list(hosts)


def test_a_stop_between_two_starts_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_RESTART_DELAY_S", 0.0)
    request = StopRequest()
    starter = KilledRank(request)
    hosts = Hostfile("F", (Host("n1", 2),))
    restarts = Restarts(RestartPolicy(3), hosts, 2, Target("train", tmp_path, None), starter.reachable)
    end, result = launch._run_until_done(starter, restarts, ("train", "D", "R"), request)  # type: ignore[arg-type]
    assert starter.starts == 1
    assert end.stop_signal == signal.SIGUSR1 and result.exit_code == 128 + signal.SIGUSR1
    assert "stopped by SIGUSR1" in str(result.reason)
