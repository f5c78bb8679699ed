"""The pure parts of benchmarks/comm/overlap.py."""

from __future__ import annotations

import os

import pytest

from benchmarks.comm.overlap import CONTENDERS, Case, hidden_share, keep_to_cores


@pytest.mark.parametrize(
    ("compute_s", "exchange_s", "both_s", "share"),
    [
        (1.5, 1.0, 1.5, 1.0),  # as long as computing alone
        (1.0, 1.5, 1.5, 1.0),  # as long as the exchange alone: all of the computing is hidden
        (1.5, 1.0, 2.5, 0.0),  # one after the other
        (1.5, 1.0, 2.0, 0.5),
        (1.5, 1.0, 3.0, -0.5),  # each in the other's way; the median over repetitions is clipped, not this
    ],
)
def test_hidden_share(compute_s: float, exchange_s: float, both_s: float, share: float) -> None:
    assert hidden_share(compute_s, exchange_s, both_s) == pytest.approx(share)


def test_every_contender_names_a_backend() -> None:
    backends = {c: Case(c, 16, free_core=False, repetitions=1).backend for c in CONTENDERS}
    assert backends == {
        "iallreduce": "mpi",
        "mpi": "mpi",
        "torch": "torch",
        "horovod": "horovod",
        "peers_mpi": "mpi",
        "peers_torch": "torch",
    }


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_a_free_core_is_another_one() -> None:
    cores = os.sched_getaffinity(0)
    try:
        keep_to_cores(Case("mpi", 16, free_core=False, repetitions=1))()
        assert os.sched_getaffinity(0) == cores
        move = keep_to_cores(Case("mpi", 16, free_core=True, repetitions=1))
        exchange = os.sched_getaffinity(0)
        move()
        compute = os.sched_getaffinity(0)
    finally:
        os.sched_setaffinity(0, cores)
    assert len(exchange) == len(compute) == 1 and not exchange & compute
