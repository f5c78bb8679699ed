"""The communicator contract, in one process: a single rank, and ranks as threads."""

from __future__ import annotations

import ast
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch

import speechdp
from speechdp.comm.base import Communicator
from speechdp.comm.serial import SerialCommunicator
from speechdp.comm.startup.create import _MODULES
from speechdp.comm.sums import REDUCIBLE
from speechdp.comm.threads.communicator import ThreadsCommunicator, run_threads
from speechdp.errors import CommunicationError, ShardError
from tests.helpers import waiting
from tests.helpers.communicator_checks import CHECKS
from tests.helpers.peer_checks import PEER_CHECKS
from tests.helpers.waiting import LIMIT_S

Check = Callable[[Communicator], None]
ALL_CHECKS = (*CHECKS, *PEER_CHECKS)
_CLASSES = {
    **_MODULES,
    **{
        name: (made.__module__, made.__name__)
        for name, made in (("serial", SerialCommunicator), ("threads", ThreadsCommunicator))
    },
}


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    with waiting.no_thread_left():
        yield


@pytest.mark.parametrize("check", ALL_CHECKS, ids=lambda c: c.__name__)
def test_serial(check: Check) -> None:
    comm = SerialCommunicator()
    check(comm)
    comm.close()
    comm.close()


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("check", ALL_CHECKS, ids=lambda c: c.__name__)
def test_threads(check: Check, size: int) -> None:
    run_threads(size, check, timeout_s=LIMIT_S)


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

    with pytest.raises(ShardError, match="truncated") as caught:
        run_threads(3, work, timeout_s=3600)  # who is not woken waits for so long
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
            release.wait(LIMIT_S)
        comm.barrier()

    with pytest.raises(CommunicationError, match=r"rank 0 timed out in barrier, waiting for ranks \[1\]"):
        try:
            run_threads(2, work, timeout_s=0.3)
        finally:
            release.set()


def test_ranks_that_hang_are_named_beside_the_failure_of_another() -> None:
    release = threading.Event()

    def work(comm: Communicator) -> None:
        if comm.rank == 1:
            raise ValueError("rank 1 is ill")
        release.wait(LIMIT_S)

    try:
        with pytest.raises(ValueError, match="rank 1 is ill") as caught:
            run_threads(2, work, timeout_s=0.3)
    finally:
        release.set()
    assert caught.value.__notes__ == ["raised on rank 1 of 2", "rank 0 did not end within 0.3 s"]


def test_abort_ends_all_ranks_with_the_code() -> None:
    def work(comm: Communicator) -> None:
        if comm.rank == 1:
            comm.abort(7)
        comm.barrier()

    with pytest.raises(SystemExit) as caught:
        run_threads(2, work)
    assert caught.value.code == 7


def test_a_failure_wakes_who_waits_for_a_message() -> None:
    seen: dict[int, str] = {}

    def work(comm: Communicator) -> None:
        group, peers = comm.split(comm.rank % 2), comm.peers()
        if comm.rank == 3:
            raise ShardError("broken")
        try:
            if comm.rank == 2:
                group.barrier()  # a group that the failed rank is not in
            peers.recv(torch.zeros(1), 3 if comm.rank == 0 else None)
        except CommunicationError as error:
            seen[comm.rank] = str(error)
            raise

    with pytest.raises(ShardError):
        run_threads(4, work)
    assert set(seen) == {0, 1, 2}
    assert all("rank 3 failed (ShardError) before" in text for text in seen.values())


@pytest.mark.parametrize("source", [1, None])
def test_a_message_that_nobody_can_send_any_more_is_not_waited_for(source: int | None) -> None:
    def work(comm: Communicator) -> None:
        peers = comm.peers()
        if comm.rank == 1:
            peers.send(torch.ones(1), 0)
        if comm.rank == 0:
            peers.recv(torch.zeros(1), source)  # sent before it ended
            peers.recv(torch.zeros(1), source)

    with pytest.raises(CommunicationError, match=r"rank 1 has ended; rank 0 waits for it in recv\(tag 0\)"):
        run_threads(3, work)


def test_any_source_waits_while_one_rank_is_left() -> None:
    def work(comm: Communicator) -> int:
        peers = comm.peers()
        if comm.rank == 2:
            time.sleep(0.2)
            peers.send(torch.ones(1), 0)
        return peers.recv(torch.zeros(1)) if comm.rank == 0 else -1

    assert run_threads(3, work)[0] == 2


def test_who_waits_for_a_message_in_vain_is_named() -> None:
    def work(comm: Communicator) -> None:
        peers = comm.peers()
        assert isinstance(comm, ThreadsCommunicator)
        comm._shared.job.deadline = time.monotonic() + 0.3  # from here on: all have the channel
        if comm.rank < 2:
            peers.recv(torch.zeros(1), 1 - comm.rank, tag=8)

    with pytest.raises(
        CommunicationError, match=r"rank \d timed out in recv\(tag 8\), waiting for ranks \[\d\]"
    ):
        run_threads(2, work)


def test_messages_of_a_group_name_the_ranks_of_the_job() -> None:
    def work(comm: Communicator) -> None:
        group = comm.split(comm.rank % 2)
        if comm.rank != 3:
            group.barrier()

    with pytest.raises(CommunicationError, match="rank 3 has ended; rank 1 waits for it in barrier"):
        run_threads(4, work)


def test_what_each_back_end_sums_is_known_without_it() -> None:
    assert set(REDUCIBLE) == set(_CLASSES)


@pytest.mark.parametrize("backend", _CLASSES)
def test_a_back_end_sums_what_is_known_of_it(backend: str) -> None:
    module, name = _CLASSES[backend]
    text = (Path(speechdp.__file__).parents[1] / f"{module.replace('.', '/')}.py").read_text()
    classes = {one.name: one for one in ast.parse(text).body if isinstance(one, ast.ClassDef)}
    assert _assigned("reducible", classes, name) == f"REDUCIBLE['{backend}']"


def _assigned(attribute: str, classes: Mapping[str, ast.ClassDef], name: str) -> str:
    """Return what a class of a file, or a base of it there, sets an attribute to; "": nothing.

    Read, not imported: that would initialise MPI, and Horovod may be missing.
    """
    if name not in classes:
        return ""
    for one in classes[name].body:
        if isinstance(one, ast.Assign | ast.AnnAssign) and one.value is not None:
            targets = one.targets if isinstance(one, ast.Assign) else [one.target]
            if attribute in map(ast.unparse, targets):
                return ast.unparse(one.value)
    bases = (_assigned(attribute, classes, ast.unparse(base)) for base in classes[name].bases)
    return next(filter(None, bases), "")
