"""Threads in which strategies exchange while training goes on; their failures are never lost."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable

_made: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def exchanging() -> set[threading.Thread]:
    """Return the strategies' threads of this process that have not ended: their exchanges may go on."""
    return {thread for thread in list(_made) if thread.is_alive()}


class ExchangeThread:
    """Runs `function` from the start on; an error ends the job, or is raised by `check` and `join`.

    Args:
        name: of the thread.
        function: what to do; returns when the strategy is to pause.
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
            # `comm.failure.guard` ends all ranks from the thread's hook: this rank's training thread may be
            # waiting for an exchange that will never come.
            raise

    def check(self) -> None:
        """Raise what the function raised, if it has."""
        if self._error is not None:
            raise self._error

    def join(self) -> None:
        """Wait for the function to return; raise what it raised."""
        self._thread.join()
        self.check()


class JobThread:
    """Calls `job` in a thread of its own, once for every `start`.

    Args:
        name: of the thread.
        job: what to do each time.
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
        """Let the thread begin."""
        self._orders.put(True)

    def wait(self) -> None:
        """Wait until the job is done; raise what it raised."""
        if not self._results.get():
            self._thread.join()

    def dismiss(self) -> None:
        """Let the thread end, without waiting: its job may never come to an end."""
        self._orders.put(False)

    def close(self) -> None:
        """Let the thread end and wait for it; raise what a job raised."""
        self.dismiss()
        self._thread.join()
