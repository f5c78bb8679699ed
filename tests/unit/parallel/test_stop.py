"""Stopping on request: one rank is asked, all stop at the same step."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest
import torch

from speechdp.comm.base import Communicator, ReduceOp, Work
from speechdp.comm.serial import SerialCommunicator
from speechdp.comm.threads.communicator import run_threads
from speechdp.parallel import stop
from speechdp.parallel.stop import StopAgreement, StopRequest, StopWatch
from speechdp.timing.timeline import Timeline


class Asked(StopRequest):
    """A request that comes by itself once `reached` has been called so often on this rank."""

    def __init__(self, after_step: int) -> None:
        super().__init__()
        self.after_step = after_step


def steps_until_stop(comm: Communicator, request: Asked | None, num_steps: int = 200) -> int:
    """Take steps until the ranks agree to stop; return how many."""
    agreement = StopAgreement(request, comm)
    for step in range(1, num_steps + 1):
        if request is not None and step >= request.after_step:
            request.received = "SIGTERM"
        if agreement.reached():
            agreement.drain()
            break
    else:
        agreement.drain()
    comm.allreduce(torch.ones(1), name="after")  # nothing of the agreement is under way any more
    return step


class Clock:
    """Time that passes by `step_s` a look."""

    def __init__(self, step_s: float) -> None:
        self.now_s, self.step_s = 0.0, step_s

    def monotonic(self) -> float:
        self.now_s += self.step_s
        return self.now_s


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("asked", [0, -1])
def test_all_ranks_stop_at_the_same_step(size: int, asked: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop, "time", Clock(1.0))  # an agreement a step

    def run(comm: Communicator) -> int:
        return steps_until_stop(comm, Asked(5) if comm.rank == asked % size else Asked(10**6))

    steps = run_threads(size, run)
    assert len(set(steps)) == 1 and 5 <= steps[0] <= 7


def test_nobody_asks_nobody_stops() -> None:
    assert run_threads(2, lambda comm: steps_until_stop(comm, None, 40)) == [40, 40]
    assert steps_until_stop(SerialCommunicator(), Asked(10**6), 40) == 40


class Counting(SerialCommunicator):
    """Counts exchanges."""

    def __init__(self) -> None:
        super().__init__()
        self.num_exchanges = 0

    def allreduce_async(self, x: torch.Tensor, *, name: str, op: ReduceOp = ReduceOp.SUM) -> Work:
        self.num_exchanges += 1
        return super().allreduce_async(x, name=name, op=op)


def test_ranks_talk_about_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    comm, clock = Counting(), Clock(0.0)
    monkeypatch.setattr(stop, "time", clock)
    agreement = StopAgreement(None, comm)
    for _ in range(5000):  # 50 s of training
        clock.now_s += 0.01
        agreement.reached()
    assert 50 <= comm.num_exchanges <= 62  # some more while it finds the pace
    comm.num_exchanges = 0
    for _ in range(400):  # steps have become slow: after two intervals of the old length it is every step
        clock.now_s += 2.0
        agreement.reached()
    assert comm.num_exchanges >= 190
    agreement.drain()


class Watched(SerialCommunicator):
    """Notes what a timeline says of a wait for an exchange."""

    def __init__(self, timeline: Timeline) -> None:
        super().__init__()
        self._timeline = timeline
        self.spans: list[str | None] = []

    def allreduce_async(self, x: torch.Tensor, *, name: str, op: ReduceOp = ReduceOp.SUM) -> Work:
        comm = self

        class Waited(Work):
            def wait(self) -> None:
                span = comm._timeline.open_span()
                comm.spans.append(None if span is None else span[0])

        return Waited()


def test_waiting_for_a_rank_that_is_behind_is_communication() -> None:
    """It was what a loop does beside its steps, and the rank that waited seemed the slow one."""
    timeline = Timeline(None, rank=0, device=torch.device("cpu"), warmup_steps=0)
    comm = Watched(timeline)
    agreement = StopAgreement(None, comm, timeline)
    for step in (1, 2, 3):
        timeline.end_step(step, 0, 1)
        agreement.reached()
    assert comm.spans and set(comm.spans) == {"comm"}
    watch = StopWatch(comm, timeline, together=True)
    comm.spans.clear()
    for step in (1, 2, 3):
        watch.look(step)
    watch.close()
    assert comm.spans and set(comm.spans) == {"comm"}


def test_signals_are_noted_and_handlers_put_back() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)}
    for number in before:
        with StopRequest() as request:
            assert request.received is None
            os.kill(os.getpid(), number)
            assert request.received == number.name
        assert {n: signal.getsignal(n) for n in before} == before


def test_the_second_signal_is_noted_like_the_first() -> None:
    with StopRequest() as request:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGUSR1)
        assert request.received == "SIGUSR1"


def test_the_first_interrupt_may_ask_to_stop_and_the_second_ends(capfd: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        with StopRequest(by_interrupt=True) as request:
            signal.raise_signal(signal.SIGINT)
            assert request.received == "SIGINT"
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) == signal.default_int_handler
    assert capfd.readouterr().err.count("ends as soon as it can be resumed; Ctrl-C again: at once") == 2
    with StopRequest() as request, pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert request.received is None


def test_an_interrupt_that_is_ignored_stays_ignored() -> None:
    """As in the background of a shell, where Ctrl-C is meant for others."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with StopRequest(by_interrupt=True) as request:
        signal.raise_signal(signal.SIGINT)
    assert request.received is None and signal.getsignal(signal.SIGINT) == signal.SIG_IGN


def test_a_signal_reaches_the_main_thread_while_another_works() -> None:
    done = threading.Event()
    worker: Any = threading.Thread(target=done.wait)
    worker.start()
    with StopRequest() as request:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert request.received == "SIGUSR1"
    done.set()
    worker.join()
