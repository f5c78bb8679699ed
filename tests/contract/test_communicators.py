"""The communicator contract, in one process: a single rank, and ranks as threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch

from speechdp.comm import Communicator
from speechdp.comm.serial import SerialCommunicator
from speechdp.comm.threads import run_threads
from speechdp.errors import CommunicationError, ShardError
from tests.helpers.communicator_checks import CHECKS

Check = Callable[[Communicator], None]


@pytest.fixture(autouse=True)
def no_thread_left() -> object:
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + 2
    while set(threading.enumerate()) - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert set(threading.enumerate()) - before == set()


@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
def test_serial(check: Check) -> None:
    comm = SerialCommunicator()
    check(comm)
    comm.close()
    comm.close()


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
def test_threads(check: Check, size: int) -> None:
    run_threads(size, check, timeout_s=20)


def test_run_threads_returns_results_in_rank_order() -> None:
    assert run_threads(4, lambda comm: 10 * comm.rank) == [0, 10, 20, 30]


@pytest.mark.parametrize("failing", [0, 2])
def test_the_first_failure_wakes_the_others_and_is_raised_with_its_rank(failing: int) -> None:
    seen: dict[int, str] = {}

    def work(comm: Communicator) -> None:
        comm.barrier()
        if comm.rank == failing:
            raise ShardError("train-00000.h5 is truncated")
        try:
            comm.allreduce(torch.ones(3), name="waits")
        except CommunicationError as error:
            seen[comm.rank] = str(error)
            raise

    start_s = time.monotonic()
    with pytest.raises(ShardError, match="truncated") as caught:
        run_threads(3, work)
    assert time.monotonic() - start_s < 5
    assert caught.value.__notes__ == [f"raised on rank {failing} of 3"]
    assert set(seen) == {0, 1, 2} - {failing}
    assert all(
        f"rank {failing} failed (ShardError) before allreduce('waits'" in text for text in seen.values()
    )


def test_a_failure_reaches_ranks_that_wait_for_an_exchange_under_way() -> None:
    def work(comm: Communicator) -> None:
        if comm.rank == 1:
            raise ValueError("a defect")
        comm.allreduce_async(torch.ones(3), name="under way").wait()

    with pytest.raises(ValueError, match="a defect"):
        run_threads(2, work)


def test_a_rank_that_leaves_early_is_named() -> None:
    def work(comm: Communicator) -> None:
        if comm.rank != 1:
            comm.barrier()

    with pytest.raises(CommunicationError, match=r"rank 1 has ended; rank [02] waits for it in barrier"):
        run_threads(3, work)


def test_ranks_that_call_different_exchanges_are_told() -> None:
    def work(comm: Communicator) -> None:
        name = "encoder" if comm.rank == 0 else "decoder"
        comm.allreduce(torch.ones(3), name=name)

    with pytest.raises(
        CommunicationError, match=r"exchange 0: rank \d calls .*coder.* but rank \d calls .*coder"
    ):
        run_threads(2, work)


def test_ranks_that_bring_different_shapes_are_told() -> None:
    def work(comm: Communicator) -> None:
        comm.allreduce(torch.ones(3 + comm.rank), name="gradients")

    with pytest.raises(
        CommunicationError, match=r"float32\[\d\].*float32\[\d\].*same calls in the same order"
    ):
        run_threads(2, work)


def test_ranks_that_hang_are_named() -> None:
    release = threading.Event()

    def work(comm: Communicator) -> None:
        if comm.rank == 1:
            release.wait(10)
        comm.barrier()

    with pytest.raises(CommunicationError, match=r"rank 0 timed out in barrier, waiting for ranks \[1\]"):
        try:
            run_threads(2, work, timeout_s=0.3)
        finally:
            release.set()


def test_abort_ends_all_ranks_with_the_code() -> None:
    def work(comm: Communicator) -> None:
        if comm.rank == 1:
            comm.abort(7)
        comm.barrier()

    with pytest.raises(SystemExit) as caught:
        run_threads(2, work)
    assert caught.value.code == 7
