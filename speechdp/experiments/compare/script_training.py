"""A script of the user's as what a comparison runs: unedited, told by its environment what to do."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speechdp.experiments.compare.record import RunRecord
from speechdp.experiments.compare.training import ComparedTraining, log_of
from speechdp.experiments.jobs import JobStarter
from speechdp.launching.restarts import RESUME_VARIABLE
from speechdp.parallel.data_parallel import STRATEGY
from speechdp.parallel.ranks import BACKEND
from speechdp.parallel.registry import StrategyChoice
from speechdp.parallel.run_files import RunDirectory
from speechdp.parallel.script_folder import FOLDER

#: Where a script finds the seed of its run.
SEED = "SPEECHDP_SEED"
#: Stands for the seed in a script's arguments.
SEED_WORD = "{seed}"
#: The back-end of which all ranks are threads of one process.
THREADS = "threads"


@dataclass(frozen=True)
class UserScript:
    """A script that trains with `speechdp.DataParallel`.

    Attributes:
        arguments: of its command line; `{seed}` in them stands for the seed of a run.
        backend: as for `run_ranks`; `threads` for as many as there are ranks.
    """

    path: Path
    arguments: tuple[str, ...] = ()
    backend: str = "auto"

    def words(self, seed: int) -> list[str]:
        """Return its path and arguments."""
        return [str(self.path), *(word.replace(SEED_WORD, str(seed)) for word in self.arguments)]

    def processes(self, ranks: int) -> int:
        """Return how many processes so many ranks are."""
        return 1 if self.backend == THREADS else ranks

    def environment(self, strategy: StrategyChoice, ranks: int, seed: int, run_dir: Path) -> dict[str, str]:
        """Return what tells it what to do."""
        # Other back-ends have nothing to do on one rank, and some need a launcher.
        backend = "auto" if ranks == 1 else self.backend
        return {
            STRATEGY: strategy.text,
            FOLDER: str(run_dir),
            BACKEND: f"{THREADS}:{ranks}" if backend == THREADS else backend,
            SEED: str(seed),
            RESUME_VARIABLE: "1",
        }


class ScriptTraining(ComparedTraining):
    """Runs a script once for each strategy, number of ranks and seed."""

    def __init__(self, script: UserScript, starter: JobStarter) -> None:
        self._script, self._starter = script, starter

    @property
    def threads(self) -> int | None:
        """CPU threads of each rank; None: whatever the libraries take."""
        return self._starter.threads

    def settings(self) -> dict[str, Any]:
        """Return what all runs share."""
        script = self._script
        return {
            "script": str(script.path.absolute()),
            "command line": shlex.join(script.arguments),
            "backend": script.backend,
        }

    def is_done(self, run_dir: Path) -> bool:
        """Tell whether the script has ended well; what it does after its training belongs to the run."""
        return RunDirectory(run_dir).script_has_ended_well

    def run(self, run: RunRecord, run_dir: Path) -> str | None:
        """Run the script; see ComparedTraining."""
        script = self._script
        environment = script.environment(run.strategy, run.ranks, run.seed, run_dir)
        directory = RunDirectory(run_dir)
        directory.forget_end()  # so that the script may begin anew where it trained but then failed
        message = self._starter.run_script(
            script.processes(run.ranks), script.words(run.seed), log_of(run_dir), environment
        )
        if message is not None:
            return message
        if not directory.is_begun:
            return f"{script.path.name} ended well but trained nothing with speechdp.DataParallel"
        if not directory.is_complete:
            return f"{script.path.name} ended well but left no completed.json (a host may have been lost)"
        directory.mark_script_ended()
        return None
