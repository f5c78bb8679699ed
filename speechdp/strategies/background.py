"""A thread in which an asynchronous strategy exchanges; its failure is never lost."""

from __future__ import annotations

import threading
from collections.abc import Callable


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
