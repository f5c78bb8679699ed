"""The communicator contract on real ranks: one start of the launcher runs all checks."""

from __future__ import annotations

import importlib.util

import pytest

from tests.helpers.communicator_checks import CHECKS
from tests.helpers.mpi import run_horovodrun, run_mpi
from tests.helpers.peer_checks import PEER_CHECKS

PROGRAM = "-m", "tests.helpers.rank_programs.contract"
needs_horovod = pytest.mark.skipif(
    importlib.util.find_spec("horovod") is None, reason="Horovod is not installed; launch/setup builds it"
)
BACKENDS = ["mpi", "torch", pytest.param("horovod", marks=needs_horovod)]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("backend", BACKENDS)
def test_contract_under_mpirun(backend: str, size: int) -> None:
    ended = run_mpi(size, [*PROGRAM, backend, str(size)])
    assert ended.exit_code == 0, ended.output
    assert f"{len(CHECKS) + len(PEER_CHECKS)} checks passed on {size} ranks" in ended.stdout, ended.output


def test_what_mpi_cannot_count_goes_in_pieces() -> None:
    ended = run_mpi(2, [*PROGRAM, "mpi", "2", "--in-pieces"])
    assert ended.exit_code == 0, ended.output


@pytest.mark.parametrize("size", [2, 4])
def test_mpi_sums_between_hosts_as_well_as_on_one(size: int) -> None:
    ended = run_mpi(size, [*PROGRAM, "mpi", str(size), "--between-hosts"])
    assert ended.exit_code == 0, ended.output


def test_torch_meets_between_hosts_and_lets_nobody_else_in() -> None:
    ended = run_mpi(2, [*PROGRAM, "torch", "2", "--between-hosts"])
    assert ended.exit_code == 0, ended.output


@needs_horovod
def test_contract_under_horovodrun_without_mpi() -> None:
    ended = run_horovodrun(2, [*PROGRAM, "horovod", "2", "--without-peers"])
    assert ended.exit_code == 0, ended.output
    assert f"{len(CHECKS) + 1} checks passed on 2 ranks" in ended.stdout, ended.output


def test_a_failing_check_fails_the_job() -> None:
    """Guard the guards: were a rank's failure lost on its way out, every test here would pass."""
    ended = run_mpi(2, [*PROGRAM, "mpi", "3"])
    assert ended.exit_code != 0, ended.output
    assert "AssertionError" in ended.stderr, ended.output
