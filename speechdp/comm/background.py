"""Threads in which strategies exchange while training continues; no failure in them goes unnoticed."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable

_made: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def exchanging() -> set[threading.Thread]:
    """Return the strategies' threads of this process that are still alive and may still exchange."""
    return {thread for thread in list(_made) if thread.is_alive()}


class ExchangeThread:
    """A thread that runs `function` at once.  An error in it ends the job, or `check` and `join` raise it.

    Args:
        name: name of the thread.
        function: what to run; returns when the strategy is to pause.
    """

    def __init__(self, name: str, function: Callable[[], None]) -> None:
        self._function = function
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        _made.add(self._thread)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._function()
        except BaseException as error:
            self._error = error
            # `guard` (comm/startup/failure.py) ends all ranks from the threads' hook: this rank's training
            # thread may be waiting for an exchange that will never come.
            raise

    def check(self) -> None:
        """Raise the function's error, if there was one."""
        if self._error is not None:
            raise self._error

    def join(self) -> None:
        """Wait for the function to return; raise its error, if there was one."""
        self._thread.join()
        self.check()


class JobThread:
    """A thread that calls `job` once for every `start`.

    Args:
        name: name of the thread.
        job: what to run each time.
    """

    def __init__(self, name: str, job: Callable[[], None]) -> None:
        self._job = job
        self._orders: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._thread = ExchangeThread(name, self._run)

    def _run(self) -> None:
        try:
            while self._orders.get():
                self._job()
                self._results.put(True)
        finally:
            self._results.put(False)

    def start(self) -> None:
        """Let the thread run the job once."""
        self._orders.put(True)

    def wait(self) -> None:
        """Wait until the job is done; raise its error, if there was one."""
        if not self._results.get():
            self._thread.join()

    def dismiss(self) -> None:
        """Tell the thread to end, without waiting for it: its job may never return."""
        self._orders.put(False)

    def close(self) -> None:
        """Tell the thread to end and wait for it; raise a job's error, if there was one."""
        self.dismiss()
        self._thread.join()
