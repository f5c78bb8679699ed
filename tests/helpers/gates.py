"""Steps at which a job waits for the test, so that a slow test does not come too late to break it."""

from __future__ import annotations

import os
from pathlib import Path

from tests.helpers.fork_server import STARTUP
from tests.helpers.mpi import REPOSITORY


class Gates:
    """Steps in which the ranks of a job wait until they are let through, asked to stop, or killed.

    A job that is to be interrupted is over in seconds, in which a busy machine may not run the test at all.

    Args:
        folder: on all hosts of the job; is made.
        steps: of the run, in order; each comes before the checkpoint that may be due after it.
    """

    def __init__(self, folder: Path, *steps: int) -> None:
        self._folder, self._steps = folder, steps
        folder.mkdir()

    @property
    def env(self) -> dict[str, str]:
        """The variables of a job that is to wait here."""
        return {
            "PYTHONPATH": f"{STARTUP}{os.pathsep}{REPOSITORY}",
            "SPEECHDP_TEST_GATES": f"{self._folder}:{','.join(map(str, self._steps))}",
        }

    def open(self, step: int | None = None) -> None:
        """Let the ranks through, now and when they come again: all gates, or the one at a step."""
        for number in self._steps if step is None else (step,):
            (self._folder / str(number)).touch()
