"""The identities of every strategy on real ranks, on every back-end: one start of mpirun runs them all."""

from __future__ import annotations

import pytest

from tests.helpers.mpi import run_horovodrun, run_mpi
from tests.helpers.strategy_checks import CHECKS, PEER_CHECKS
from tests.parallel.test_communicator_backends import BACKENDS, needs_horovod

PROGRAM = "-m", "tests.helpers.rank_programs.strategies"


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("backend", BACKENDS)
def test_identities_under_mpirun(backend: str, size: int) -> None:
    ended = run_mpi(size, [*PROGRAM, backend, str(size)], timeout_s=500)
    assert ended.exit_code == 0, ended.output
    assert f"{len(CHECKS + PEER_CHECKS)} identities hold on {size} ranks" in ended.stdout, ended.output


@needs_horovod
def test_identities_under_horovodrun_without_mpi() -> None:
    ended = run_horovodrun(2, [*PROGRAM, "horovod", "2", "collectives"], timeout_s=500)
    assert ended.exit_code == 0, ended.output
    assert f"{len(CHECKS)} identities hold on 2 ranks" in ended.stdout, ended.output
