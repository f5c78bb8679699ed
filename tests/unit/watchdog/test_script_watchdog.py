"""The watchdog of scripts: a rank that waits in vain ends the job and says where all are; others wait on."""

from __future__ import annotations

import fcntl
import os
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from speechdp import exit_codes
from speechdp.comm.base import Communicator
from speechdp.comm.calls import Calls
from speechdp.comm.threads.communicator import run_threads
from speechdp.errors import RunError
from speechdp.watchdog import host_board, script_watchdog
from speechdp.watchdog.host_board import HostBoard
from speechdp.watchdog.script_watchdog import ScriptWatchdog
from speechdp.watchdog.status import RankStatus
from tests.helpers.waiting import wait_until

TIMEOUT_S = 1.0
#: Of a watchdog within its timeout.
LOOKS = 20
ONE_HOST = ("n1", "n1")


class Sighted(ScriptWatchdog):
    """Judges only once it has seen the other rank at something: on a busy machine that may take seconds."""

    sees, num_looks = "", 0

    def _is_due(self, own: RankStatus, still_s: float) -> bool:
        self.num_looks += 1
        doing = [seen.status.doing for seen in self._sightings.values() if seen.status is not None]
        has_seen = not self.sees or any(self.sees in each for each in doing)
        return has_seen and super()._is_due(own, still_s)


@dataclass
class Job:
    """Two ranks as threads, and what their watchdogs have said at the end, by rank.

    Attributes:
        sees: what each rank must have seen the other at before it may end the job; "": no matter what.
    """

    hosts: Sequence[str] = ONE_HOST
    sees: Sequence[str] = ("", "")
    calls: Callable[[], Calls] = Calls
    said: list[tuple[int, str, int]] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)
    watchdogs: dict[int, Sighted] = field(default_factory=dict)

    def run(self, script: Callable[[int, Calls, Job], None], *, timeout_s: Sequence[float]) -> None:
        """Let each rank do what `script` says, watched."""

        def rank(comm: Communicator) -> None:
            calls, board = self.calls(), HostBoard(comm, self.hosts)

            def end(line: str, exit_code: int) -> None:
                self.said.append((comm.rank, line, exit_code))
                self.over.set()

            watchdog = Sighted(comm, self.hosts, timeout_s[comm.rank], calls, board, end=end)
            watchdog.sees = self.sees[comm.rank]
            self.watchdogs[comm.rank] = watchdog
            watchdog.start()
            try:
                script(comm.rank, calls, self)
            finally:
                watchdog.stop()

        run_threads(2, rank)

    def wait_for_end(self) -> None:
        assert self.over.wait(300), "nobody has ended the job"

    def wait_for_looks(self, rank: int, num_looks: int) -> None:
        """Wait until a rank's watchdog has judged so often, or has ended the job."""
        wait_until(lambda: self.watchdogs[rank].num_looks >= num_looks or self.said, "looks of the watchdog")


def test_ranks_that_wait_at_different_calls_are_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script_watchdog, "FALLBACK_S", 600.0)  # for a busy machine: the first one ends both

    def script(rank: int, calls: Calls, job: Job) -> None:
        with calls.of("step 4"):
            pass
        with calls.of("run.save_checkpoint()" if rank == 0 else "step 5"):
            job.wait_for_end()

    job = Job(sees=("step 5", "run.save_checkpoint()"))
    job.run(script, timeout_s=(TIMEOUT_S, TIMEOUT_S))
    ((rank, line, exit_code),) = job.said
    assert exit_code == exit_codes.HUNG and line.endswith("\n") and line.count("\n") == 1
    own, other = ("run.save_checkpoint()", "step 5") if rank == 0 else ("step 5", "run.save_checkpoint()")
    waited = rf"speechdp: rank {rank} on n1: hung for \d+ s at {re.escape(own)}, waiting for other ranks; "
    assert re.match(waited, line)
    assert f"; rank {1 - rank} on n1 (at {other} for " in line
    assert "make the same collective calls on every rank" in line
    assert "raise SPEECHDP_HANG_TIMEOUT or run_ranks(hang_timeout=...)" in line


def test_a_rank_in_code_of_its_own_is_named_and_does_not_end_the_job() -> None:
    def script(rank: int, calls: Calls, job: Job) -> None:
        with calls.of("step 4"):
            pass
        if rank == 1:
            job.wait_for_end()  # long after its own timeout
            return
        with calls.of("run.evaluating()"):
            job.wait_for_end()

    job = Job(sees=("after step 4", ""))
    job.run(script, timeout_s=(3 * TIMEOUT_S, TIMEOUT_S / 2))
    ((rank, line, _),) = job.said
    assert rank == 0 and "; rank 1 on n1 (in the script's own code, after step 4, for " in line


def test_a_rank_that_is_done_waits_for_the_others_for_however_long() -> None:
    def script(rank: int, calls: Calls, job: Job) -> None:
        if rank == 1:
            calls.has_ended = True
            job.wait_for_end()
            return
        threading.Event().wait(3 * TIMEOUT_S)  # evaluates the model by itself, say
        with calls.of("run.evaluating()"):
            job.wait_for_end()

    job = Job(sees=("end of main", ""))
    job.run(script, timeout_s=(TIMEOUT_S, TIMEOUT_S))
    ((rank, line, _),) = job.said
    assert rank == 0 and "; rank 1 on n1 (at the end of main for " in line


def test_a_rank_waits_on_while_another_gets_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other takes a step before each look: by the clock it might get no core for the whole timeout."""
    read, others, looks = HostBoard.read, list[Calls](), list[int]()
    timeout_s = TIMEOUT_S / 2

    def read_news(board: HostBoard, rank: int) -> RankStatus | None:
        if rank == 1:
            looks.append(len(looks))
            with others[0].of(f"step {len(looks)}"):
                beats = others[0].beats
            wait_until(lambda: (seen := read(board, 1)) is not None and seen.beats >= beats, "the step")
        return read(board, rank)

    def script(rank: int, calls: Calls, job: Job) -> None:
        if rank == 1:
            others.append(calls)
            job.wait_for_end()
            return
        wait_until(lambda: others, "the other rank")
        with calls.of("run.evaluating()"):
            # A look every twentieth of the timeout: for three times as long.
            wait_until(lambda: len(looks) > 60 or job.said, "looks at the other")
        job.over.set()

    monkeypatch.setattr(HostBoard, "read", read_news)
    job = Job()
    job.run(script, timeout_s=(timeout_s, timeout_s))
    assert job.said == []


@pytest.mark.parametrize("together", [True, False])
def test_ranks_on_other_hosts_are_not_seen(together: bool) -> None:
    """Where each takes its steps at its own pace, one that is not seen may be getting on."""

    def script(rank: int, calls: Calls, job: Job) -> None:
        calls.begin(job, together=together)
        calls.begin(calls, together=True)  # a second run changes nothing
        if rank == 1:
            job.wait_for_end()
            return
        with calls.of("run.evaluating()"):
            if together:
                job.wait_for_end()
            job.wait_for_looks(0, 3 * LOOKS)
            job.over.set()

    job = Job(("n1", "n2"))
    job.run(script, timeout_s=(TIMEOUT_S, TIMEOUT_S))
    assert len(job.said) == together
    if together:
        assert "; what ranks on other hosts do cannot be seen from here; make" in job.said[0][1]


class SuddenCalls(Calls):
    """Enters a call just when its beats have been read, and leaves it a few looks later.

    By the watchdog's own looks: a script that gets no core meanwhile would be in the call for too long.
    """

    #: Looks before the call, in it, and after it.
    BEFORE, WITHIN, AFTER = 2 * LOOKS, LOOKS // 4, LOOKS // 4

    def __init__(self) -> None:
        super().__init__()
        self.num_reads = 0

    @property
    def num_looks(self) -> int:
        """How often the watchdog has looked: each time it reads the beats twice."""
        return self.num_reads // 2

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name == "beats" and threading.current_thread().name == "speechdp-watchdog":
            self.num_reads += 1
            if self.num_reads == 2 * self.BEFORE + 1:
                self._move("run.evaluating()")
            elif self.num_reads == 2 * (self.BEFORE + self.WITHIN) + 1:
                self._move("")
        return value

    def _move(self, call: str) -> None:
        before = self.num_reads
        self._go_to(call)  # which reads the beats, too
        self.num_reads = before


def test_a_call_that_begins_while_the_watchdog_looks_has_not_been_waited_in_before() -> None:
    """After code of the script's own, which may take longer than the limit, that ended healthy jobs."""

    def script(rank: int, calls: Calls, job: Job) -> None:
        assert isinstance(calls, SuddenCalls)
        enough = calls.BEFORE + calls.WITHIN + calls.AFTER
        wait_until(lambda: calls.num_looks >= enough or job.said, "looks of the watchdog")

    job = Job(calls=SuddenCalls)
    job.run(script, timeout_s=(TIMEOUT_S, TIMEOUT_S))
    assert job.said == []


def test_of_ranks_that_claim_the_end_at_once_one_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    boards: dict[int, HostBoard] = {}

    def make(comm: Communicator) -> None:
        boards[comm.rank] = HostBoard(comm, ONE_HOST)

    run_threads(2, make)
    pread, claims = os.pread, list[bool]()

    def read_late(descriptor: int, length: int, offset: int) -> bytes:
        """Let the other rank claim it between this one's look at the mark and its own mark."""
        found = pread(descriptor, length, offset)
        monkeypatch.setattr(host_board.os, "pread", pread)
        claims.append(boards[1].claim_end())
        return found

    monkeypatch.setattr(host_board.os, "pread", read_late)
    claims.append(boards[0].claim_end())
    assert claims == [False, True]
    for board in boards.values():
        board.close()


def test_the_board_leaves_nothing_and_one_rank_claims_the_end() -> None:
    boards: dict[int, HostBoard] = {}

    def make(comm: Communicator) -> None:
        boards[comm.rank] = HostBoard(comm, ONE_HOST)

    run_threads(2, make)
    assert boards[0].ranks == [0, 1] and boards[0].read(1) is None
    wait_until(lambda: [boards[rank].claim_end() for rank in (0, 1, 0)] == [True, False, False], "one claim")
    for board in boards.values():
        board.close()
        assert board.read(0) is None


def test_a_board_that_a_rank_never_comes_to_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_board, "_MEMORY", tmp_path)

    def make(comm: Communicator) -> None:
        if comm.rank == 0:
            HostBoard(comm, ONE_HOST)
        raise RunError("this rank fails")

    with pytest.raises(RunError):
        run_threads(2, make)
    assert list(tmp_path.iterdir()) == []


def test_a_forked_worker_that_outlives_its_rank_keeps_no_claim() -> None:
    boards: dict[int, HostBoard] = {}

    def make(comm: Communicator) -> None:
        boards[comm.rank] = HostBoard(comm, ONE_HOST)

    run_threads(2, make)
    reading, writing = os.pipe()
    descriptor = boards[0]._descriptor
    assert descriptor is not None
    fcntl.flock(descriptor, fcntl.LOCK_EX)  # and ends before it has marked the file
    worker = os.fork()
    if worker == 0:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    boards[0].close()  # as the kernel does at its end
    try:
        wait_until(boards[1].claim_end, "the lock of a rank that has ended is free")
    finally:
        os.close(writing)
        os.waitpid(worker, 0)
        os.close(reading)
        boards[1].close()
