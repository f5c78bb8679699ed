"""Asynchronous strategies end without a hang, however often, and with the cause when an exchange fails."""

from __future__ import annotations

import pytest

from tests.helpers.mpi import run_mpi

PROGRAM = "-m", "tests.helpers.rank_programs.termination"


@pytest.mark.parametrize("backend", ["mpi", "torch"])
def test_200_rounds_of_four_ranks_end(backend: str) -> None:
    ended = run_mpi(4, [*PROGRAM, backend, "200"], timeout_s=500)
    assert ended.exit_code == 0, ended.output
    assert "200 rounds" in ended.stdout, ended.output


@pytest.mark.parametrize("backend", ["mpi", "torch"])
def test_a_failing_exchange_ends_the_job_with_its_own_error(backend: str) -> None:
    ended = run_mpi(4, [*PROGRAM, backend, "fails"], timeout_s=500)
    assert ended.exit_code != 0, ended.output
    assert "rank 1 on" in ended.stderr, ended.output
    assert "OSError: the cable is gone" in ended.stderr, ended.output
