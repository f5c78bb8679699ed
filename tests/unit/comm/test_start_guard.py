"""A job whose ranks do not all arrive: the ranks that wait end and say for what."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from speechdp import exit_codes
from speechdp.comm import environment
from speechdp.comm.environment import host_name
from speechdp.comm.startup import start_guard
from speechdp.comm.startup.start_guard import StartGuard
from speechdp.launching.launcher_output import LauncherOutput
from tests.helpers.mpi import REPOSITORY, job_environment

DEADLINE_S = 60.0
#: Of a guard that is to be called off: on a busy machine the start may be over only after a while.
LONG_S = 3600.0

#: sleep() of the C library by PyDLL keeps the interpreter's lock, as the start of MPI does.  The guard's
#: thread is due long after the interpreter's timer: a program that gets no core for a while would be too late
#: to keep the lock from it.
PROGRAM = """
import ctypes
from speechdp.comm.startup import start_guard
start_guard._LEAST_S, start_guard._BACKSTOP_S = 3600.0, 1.0 - 3600.0
sleep = ctypes.PyDLL(None).sleep
start_guard.StartGuard(0.1).waiting_for_all_ranks(lambda: sleep(60))
"""


class Ending:
    """Takes the place of the end of the process."""

    def __init__(self) -> None:
        self.text = ""
        self.exit_code = 0
        self.has_come = threading.Event()

    def __call__(self, text: str, exit_code: int) -> None:
        self.text, self.exit_code = text, exit_code
        self.has_come.set()


@pytest.fixture
def ending(monkeypatch: pytest.MonkeyPatch) -> Ending:
    """Let this process be rank 1 of 2, and return how it would end."""
    ending = Ending()
    for name, value in (("OMPI_COMM_WORLD_RANK", "1"), ("OMPI_COMM_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(environment, "end_process_with", ending)
    monkeypatch.setattr(start_guard, "_LEAST_S", 0.2)
    monkeypatch.setattr(start_guard, "_BACKSTOP_S", LONG_S)  # it would end pytest
    return ending


def assert_has_been_called_off(guard: StartGuard, ending: Ending) -> None:
    """Join the guard's timer: one that has been called off ends at once, and any other by its ending."""
    if guard._timer.ident is not None:  # it was started
        guard._timer.join(DEADLINE_S)
        assert not guard._timer.is_alive()
    assert not ending.has_come.is_set()


def test_it_says_what_it_has_waited_for(ending: Ending) -> None:
    guard = StartGuard(0.1)
    assert guard.waiting_for_all_ranks(lambda: ending.has_come.wait(DEADLINE_S))
    guard.over()
    assert ending.text.startswith(f"speechdp: rank 1 on {host_name()}: waited 0 s for all ranks to start; ")
    assert ending.text.count("\n") == 1 and ending.exit_code == exit_codes.HUNG


def test_a_block_is_guarded_until_its_beginning_is_over(
    ending: Ending, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(start_guard, "_LEAST_S", LONG_S)
        with StartGuard(0.1, "begin the run") as guard:
            guard.over()
            assert_has_been_called_off(guard, ending)
    with StartGuard(0.1, "begin the run"):
        assert ending.has_come.wait(DEADLINE_S)
    assert "waited 0 s for all ranks to begin the run; " in ending.text


@pytest.mark.parametrize("timeout_s", [0.1, 0.0])
def test_it_says_nothing_once_all_have_met_or_where_it_is_off(
    ending: Ending, monkeypatch: pytest.MonkeyPatch, timeout_s: float
) -> None:
    monkeypatch.setattr(start_guard, "_LEAST_S", LONG_S)
    guard = StartGuard(timeout_s)
    assert guard.waiting_for_all_ranks(lambda: 5) == 5
    if timeout_s:
        guard.over()
    assert (guard._timer.ident is not None) == (timeout_s > 0)
    assert_has_been_called_off(guard, ending)
    guard.over()


def test_a_process_by_itself_waits_for_nobody(ending: Ending, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "1")
    assert not StartGuard(0.1).waiting_for_all_ranks(lambda: ending.has_come.wait(0.5))


def test_while_no_python_thread_can_run_the_stack_is_shown() -> None:
    environment = {**job_environment(), "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == exit_codes.FAILED, ended.stderr
    assert "in waiting_for_all_ranks" in ended.stderr
    output = LauncherOutput()
    output.feed(ended.stderr.encode())
    assert [fault.kind for fault in output.faults] == ["start hung"]
