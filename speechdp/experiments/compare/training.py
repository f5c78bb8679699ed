"""Interface to the trainings that a comparison runs: our own, or a user's script."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from speechdp.experiments.compare.record import RunRecord
from speechdp.experiments.jobs import LOGS


class ComparedTraining(ABC):
    """How to make a run of a comparison."""

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Return the settings that all runs share; a folder with other settings is refused."""

    def begin(self) -> None:
        """Prepare what all runs need, before the first run.  Raises RunError on failure."""
        return

    def race(self, ranks: int, runs: Sequence[RunRecord]) -> str | None:
        """Race strategies on `ranks` ranks; return None, or the cause of failure in one line.

        Args:
            runs: a finished run of each strategy that takes part, and of one rank if that takes part.

        Raises:
            JobStopped: a signal arrived meanwhile.
            RunError: the disk is full, or the log cannot be written.
        """
        return None

    @abstractmethod
    def is_done(self, run: RunRecord, run_dir: Path) -> bool:
        """Return whether a run is completely done."""

    @abstractmethod
    def run(self, run: RunRecord, run_dir: Path) -> str | None:
        """Make or finish a run; return None, or the cause of failure in one line.

        Raises:
            JobStopped: a signal arrived meanwhile.
            RunError: the disk is full, or the log cannot be written.
        """


def log_of(run_dir: Path) -> Path:
    """Return the log of a run's commands and their output; it is beside the runs' folders."""
    return run_dir.parent / LOGS / f"{run_dir.name}.log"
