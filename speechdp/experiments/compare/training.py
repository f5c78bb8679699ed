"""What the runs of a comparison are: trainings of ours, or a script of the user's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from speechdp.experiments.compare.record import RunRecord

LOGS = "logs"


class ComparedTraining(ABC):
    """How a run of a comparison is carried out."""

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Return what all runs share: a folder of other settings is refused."""

    def begin(self) -> None:
        """Do what all runs need before the first.  Raises RunError where that fails."""
        return

    def race(self, ranks: int, runs: Sequence[RunRecord]) -> str | None:
        """Let strategies race on so many ranks; return None, or what went wrong in one line.

        Args:
            runs: a finished one of each strategy that takes part, and of one rank where it does.

        Raises:
            JobStopped: a signal came meanwhile.
            RunError: the disk is full, or its log cannot be written.
        """
        return None

    @abstractmethod
    def is_done(self, run: RunRecord, run_dir: Path) -> bool:
        """Tell whether nothing of a run is left to do."""

    @abstractmethod
    def run(self, run: RunRecord, run_dir: Path) -> str | None:
        """Carry out what is left of a run; return None, or what went wrong in one line.

        Raises:
            JobStopped: a signal came meanwhile.
            RunError: the disk is full, or its log cannot be written.
        """


def log_of(run_dir: Path) -> Path:
    """Return where a run's commands and what they print are written, beside the runs."""
    return run_dir.parent / LOGS / f"{run_dir.name}.log"
