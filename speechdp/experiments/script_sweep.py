"""A sweep over averaging periods of a user's script, each run a job of its own."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from speechdp.experiments.compare.plan import FRAMES, SEQUENTIAL
from speechdp.experiments.compare.record import RunRecord
from speechdp.experiments.compare.run import run_news
from speechdp.experiments.compare.script_training import ScriptTraining
from speechdp.experiments.sweep import ONE_RANK, SweepPlan, write_sweep


@dataclass(frozen=True)
class ScriptSweep:
    """A sweep to be made.

    Attributes:
        ranks: of every run but the reference on one.
        one_rank: run the script on one rank, too, to compare speeds with.
        metric: for the report.
    """

    out: Path
    plan: SweepPlan
    ranks: int
    seed: int
    one_rank: bool = True
    metric: str = ""

    def runs(self) -> dict[str, RunRecord]:
        """Return the runs by the names of their folders.  Raises ConfigError: as SweepPlan.runs."""
        strategies = self.plan.runs()
        runs = {
            name: RunRecord(text, self.ranks, self.seed, FRAMES, None) for name, text in strategies.items()
        }
        if not self.one_rank or self.ranks == 1:
            return runs
        return {ONE_RANK: RunRecord(SEQUENTIAL, 1, self.seed, FRAMES, None), **runs}


def run_script_sweep(sweep: ScriptSweep, training: ScriptTraining, say: Callable[[str], None]) -> int:
    """Carry out every run that is not finished; return how many failed.

    Args:
        say: takes a line of progress.

    Raises:
        ConfigError: the folder holds a sweep over other runs.
        JobStopped: a signal asked for the end; the same command goes on.
        RunError: the disk is full.
    """
    runs = sweep.runs()
    write_sweep(sweep.out, list(runs), completed=False, metric=sweep.metric)
    failed = 0
    for position, (name, run) in enumerate(runs.items(), start=1):
        run_dir = (sweep.out / name).absolute()
        place = f"[{position}/{len(runs)}] {name}"
        message, wall_s = None, None
        if not training.is_done(run_dir):
            say(f"{place}: started")
            start_s = time.monotonic()
            message = training.run(run, run_dir)
            wall_s = time.monotonic() - start_s
        failed += message is not None
        say(f"{place}: {run_news(run_dir, message, wall_s, sweep.metric)}")
    write_sweep(sweep.out, list(runs), completed=not failed, metric=sweep.metric)
    return failed
