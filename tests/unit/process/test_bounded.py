"""Calls with a time limit: what a disk holds up is given up, and what gets no core for a while is not."""

from __future__ import annotations

import threading

import pytest

from speechdp.process import bounded as module
from speechdp.process.bounded import bounded


@pytest.fixture(autouse=True)
def little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PATIENCE_S", 0.1)


def test_a_call_that_hangs_is_given_up() -> None:
    unplugged = threading.Event()
    assert bounded(unplugged.wait, default=None) is None
    unplugged.set()


def test_a_call_that_fails_has_the_default() -> None:
    assert bounded(lambda: 1 // 0, default=7) == 7


def test_where_there_are_no_more_threads_a_process_ends_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert bounded(lambda: "said", default="unsaid") == "unsaid"


def test_a_call_that_begins_late_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank's last line was lost where its thread got no core within the second that a disk is given."""
    run, join = threading.Thread.run, threading.Thread.join
    is_timed = threading.Event()
    was_timed_before: list[bool] = []

    def run_late(thread: threading.Thread) -> None:
        was_timed_before.append(is_timed.wait(0.5))
        run(thread)

    def note_and_join(thread: threading.Thread, timeout: float | None = None) -> None:
        is_timed.set()
        join(thread, timeout)

    monkeypatch.setattr(threading.Thread, "run", run_late)
    monkeypatch.setattr(threading.Thread, "join", note_and_join)
    for name in ("_START_S", "_PATIENCE_S"):
        monkeypatch.setattr(module, name, 300.0)
    assert bounded(lambda: "the last line", default="") == "the last line"
    assert was_timed_before == [False]
