"""A rank of an mpirun that nobody supervises says that it is being ended, unless another has said why."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

#: A rank of two, as `python -m speechdp` begins it.
BEGIN = """
import os, signal, sys, threading, time, warnings
from speechdp.comm import environment
from speechdp.comm.startup.mpirun_end import handle_mpirun_end
from speechdp.parallel.stop import StopRequest
from speechdp.process.ending import Ended, end_by_exception, leave_if_ended_by_mpirun
handle_mpirun_end()
end_by_exception((signal.SIGTERM,))
"""
#: Waits as for another rank amid MPI, where Python runs no handler: what it says comes from there already.
WAIT_IN_C = """
os.system("echo waits; read end")
"""
#: What `main` does with a signal.
ENDED_HERE = """
try:
    signal.raise_signal(signal.SIGTERM)
except Ended as end:
    leave_if_ended_by_mpirun(end)
"""
WHO = "which mpirun sends its ranks when it is interrupted or one of them has failed"
ENDED = f": ended by SIGTERM, {WHO}\n"


def rank(program: str, folder: Path, number: int = 0) -> subprocess.Popen[str]:
    names = {"OMPI_COMM_WORLD_RANK": str(number), "OMPI_COMM_WORLD_SIZE": "2"}
    return subprocess.Popen(
        [sys.executable, "-c", BEGIN + program],
        env={**os.environ, **names, "PMIX_SERVER_TMPDIR": str(folder)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def end_of(program: str, folder: Path, number: int = 0) -> tuple[int, str]:
    process = rank(program, folder, number)
    _, said = process.communicate(timeout=240)
    return process.returncode, said


def test_rank_0_says_so_and_dies_of_the_signal(tmp_path: Path) -> None:
    code, said = end_of(ENDED_HERE, tmp_path)
    assert code == -signal.SIGTERM
    assert said.startswith("speechdp: rank 0 on ") and said.endswith(ENDED) and said.count("\n") == 1, said


def test_the_other_ranks_leave_that_to_it(tmp_path: Path) -> None:
    assert end_of(ENDED_HERE, tmp_path, number=1) == (-signal.SIGTERM, "")


def test_it_is_said_where_the_main_thread_waits_for_another_rank(tmp_path: Path) -> None:
    process = rank(WAIT_IN_C, tmp_path)
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline() == "waits\n"
    process.terminate()
    try:
        assert process.stderr.readline().endswith(ENDED)
        assert process.poll() is None  # mpirun kills it
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [0, 1])
def test_nothing_is_said_where_a_rank_has_said_why(tmp_path: Path, number: int) -> None:
    assert end_of("environment.note_reported()", tmp_path, number=1) == (0, "")
    assert end_of(ENDED_HERE, tmp_path, number) == (-signal.SIGTERM, "")


def test_training_is_told_that_it_has_little_time(tmp_path: Path) -> None:
    program = """
(teller,) = [each for each in threading.enumerate() if each.name == "speechdp-mpirun-end"]
with StopRequest() as stop:
    signal.raise_signal(signal.SIGTERM)
    teller.join()
"""
    code, said = end_of(program, tmp_path)
    assert code == 0
    assert said.endswith(
        f": asked to stop by SIGTERM, {WHO}: it kills them a second later, saved or not, while "
        "speechdp launch gives them time to save\n"
    )


def test_what_a_worker_is_sent_is_no_news(tmp_path: Path) -> None:
    program = """
warnings.simplefilter("ignore")  # since Python 3.12 os.fork warns of the thread
child = os.fork()
if child == 0:
    try:
        signal.raise_signal(signal.SIGTERM)
    except Ended:
        os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
time.sleep(0.3)
assert [each.name for each in threading.enumerate()][1:] == ["speechdp-mpirun-end"]
"""
    assert end_of(program, tmp_path) == (0, "")
