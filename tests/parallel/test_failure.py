"""One rank fails while the others wait for it: all end, though they would wait on, and the rank is named."""

from __future__ import annotations

import importlib.util
import re

import pytest

from speechdp import exit_codes
from speechdp.comm.environment import host_name
from tests.helpers.mpi import Ended, run_horovodrun, run_mpi

PROGRAM = "-m", "tests.helpers.rank_programs.fail"
needs_horovod = pytest.mark.skipif(
    importlib.util.find_spec("horovod") is None, reason="Horovod is not installed; launch/setup builds it"
)
BACKENDS = ["mpi", "torch", pytest.param("horovod", marks=needs_horovod)]
RANK_1 = rf"speechdp: rank 1 on {re.escape(host_name())}: "


def failed(how: str, backend: str, size: int = 2) -> Ended:
    """Return how a job ended whose other ranks would wait for longer than it is waited for here."""
    return run_mpi(size, [*PROGRAM, how, backend])


def our_lines(ended: Ended) -> list[str]:
    return [line for line in ended.stderr.splitlines() if "speechdp: rank" in line]


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_error_of_the_users_making_is_one_line(backend: str) -> None:
    ended = failed("user_error", backend)
    assert ended.exit_code == 1, ended.output
    assert len(our_lines(ended)) == 1, ended.output
    assert re.search(RANK_1 + r"train-00003\.h5 is truncated; prepare the data again$", our_lines(ended)[0])
    assert "Traceback" not in ended.stderr, ended.output


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_defect_shows_its_traceback_first_and_names_the_rank(backend: str) -> None:
    ended = failed("defect", backend)
    assert ended.exit_code == exit_codes.CRASHED, ended.output
    assert len(our_lines(ended)) == 1, ended.output
    assert re.search(RANK_1 + "ended by an unexpected ValueError: a defect$", our_lines(ended)[0])
    assert "in defect" in ended.stderr.split("speechdp: rank")[0], ended.output


@pytest.mark.parametrize("backend", BACKENDS)
def test_sys_exit_ends_all_with_its_code(backend: str) -> None:
    ended = failed("exit", backend)
    assert ended.exit_code == 3, ended.output
    assert re.search(RANK_1 + "ended with exit code 3$", our_lines(ended)[0]), ended.output


@pytest.mark.parametrize("backend", BACKENDS)
def test_sigkill_of_one_rank_ends_all(backend: str) -> None:
    ended = failed("kill", backend)
    assert ended.exit_code == 137, ended.output
    assert re.search(r"process rank 1 .*on node .*exited on signal 9", ended.stderr), ended.output


def test_one_of_four_ranks_is_enough() -> None:
    ended = failed("user_error", "mpi", size=4)
    assert ended.exit_code == 1, ended.output
    assert len(our_lines(ended)) == 1 and "rank 3 on" in our_lines(ended)[0], ended.output


def test_an_exception_in_a_thread_ends_all() -> None:
    ended = failed("thread", "mpi")
    assert ended.exit_code == exit_codes.CRASHED, ended.output
    assert re.search(RANK_1 + "ended by an unexpected KeyError", ended.stderr), ended.output


def test_an_interrupt_ends_all() -> None:
    ended = failed("interrupt", "mpi")
    assert ended.exit_code == 130, ended.output
    assert re.search(RANK_1 + "interrupted$", our_lines(ended)[0]), ended.output


def test_what_all_ranks_have_to_say_is_said_once() -> None:
    ended = failed("seed", "mpi", size=2)
    assert ended.exit_code == 1, ended.output
    assert len(our_lines(ended)) == 1, ended.output
    assert "differ in the seed: 0 and 1; start every rank with the same command line" in our_lines(ended)[0]


def test_processes_that_do_not_know_of_each_other_are_refused() -> None:
    """As after `srun` without --mpi=pmix: the launcher says 4, each process is alone in its MPI."""
    srun = {"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4"}
    ended = run_mpi(1, ["-c", _AS_SRUN, "ok", "mpi"], env=srun)
    assert ended.exit_code == 1, ended.output
    assert "srun started 4 processes, but each is alone" in ended.stderr, ended.output
    assert "start with `srun --mpi=pmix`" in ended.stderr, ended.output


# mpirun's own variables are taken away again before speechdp looks: only those of srun are to be seen.
_AS_SRUN = """
import os, runpy
from mpi4py import MPI
for name in list(os.environ):
    if name.startswith("OMPI_COMM_WORLD"):
        del os.environ[name]
runpy.run_module("tests.helpers.rank_programs.fail", run_name="__main__")
"""


@needs_horovod
@pytest.mark.parametrize("how", ["user_error", "exit", "kill"])
def test_failures_under_horovodrun_without_mpi(how: str) -> None:
    ended = run_horovodrun(2, [*PROGRAM, how, "horovod"])
    assert ended.exit_code != 0, ended.output
    assert "Process name: 1" in ended.stderr, ended.output
    if how != "kill":
        assert re.search(RANK_1, ended.stderr), ended.output
