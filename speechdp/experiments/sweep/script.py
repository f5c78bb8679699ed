"""A sweep over averaging periods of a user's script; each run is a separate job."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speechdp.experiments.compare.plan import FRAMES, SEQUENTIAL
from speechdp.experiments.compare.record import RunRecord
from speechdp.experiments.compare.run import carry_out
from speechdp.experiments.compare.script_training import RacedRuns, ScriptTraining
from speechdp.experiments.race.plan import RaceSetting
from speechdp.experiments.sweep.plan import SweepPlan, SweepRecord, refuse_other_sweep, write_sweep
from speechdp.report.runs.folders import common_metric
from speechdp.report.runs.results import ONE_RANK


@dataclass(frozen=True)
class ScriptSweep:
    """A sweep to be made.

    Attributes:
        ranks: number of ranks of every run except the one on one rank.
        one_rank: also run the script on one rank, to compute speed-ups.
        metric: metric for the report.
    """

    out: Path
    plan: SweepPlan
    ranks: int
    seed: int
    one_rank: bool = True
    metric: str = ""

    def runs(self) -> dict[str, RunRecord]:
        """Return the runs by the names of their folders.  Raises ConfigError as SweepPlan.runs does."""
        strategies = self.plan.runs()
        runs = {
            name: RunRecord(choice, self.ranks, self.seed, FRAMES, None)
            for name, choice in strategies.items()
        }
        if not self.one_rank or self.ranks == 1:
            return runs
        return {ONE_RANK: RunRecord(SEQUENTIAL, 1, self.seed, FRAMES, None), **runs}

    def settings(self, training: ScriptTraining) -> dict[str, Any]:
        """Return the settings that are not in the names of the runs."""
        own = {"number of ranks": self.ranks, "seed": self.seed, "--swept": self.plan.strategy}
        return {**training.settings(), **own}


def run_script_sweep(
    sweep: ScriptSweep, training: ScriptTraining, print_line: Callable[[str], None]
) -> tuple[int, bool]:
    """Make every run that is not finished, then race the settings.

    Returns:
        The number of runs that failed, and whether the race failed.

    Args:
        print_line: prints a line of progress.

    Raises:
        ConfigError: the folder holds a sweep with other runs or settings, or the runs do not log the metric.
        JobStopped: a signal requested a stop; the same command continues.
        RunError: the disk is full.
    """
    runs, failed = sweep.runs(), dict[str, str]()
    record = SweepRecord(
        tuple(runs), settings=sweep.settings(training), metric=sweep.metric, threads=training.threads
    )
    refuse_other_sweep(sweep.out, record)
    write_sweep(sweep.out, record)
    for position, (name, run) in enumerate(runs.items(), start=1):
        place = f"[{position}/{len(runs)}] {name}"
        message, _ = carry_out(training, run, sweep.out / name, place, print_line, metric=sweep.metric)
        if message is not None:
            failed[name] = message
        # Before hours of further runs, refuse a metric that none of the runs so far has logged.
        done = [other for other in list(runs)[:position] if other not in failed]
        common_metric([sweep.out / other for other in done], sweep.metric)
    write_sweep(sweep.out, dataclasses.replace(record, failed=failed))
    racing = {
        RaceSetting(name, run.strategy, alone=name == ONE_RANK): sweep.out / name
        for name, run in runs.items()
        if name not in failed
    }
    message = None
    if sweep.ranks > 1:
        message = training.hold_race(RacedRuns(sweep.out, "sweep", sweep.ranks, sweep.seed, racing))
    completed = not failed and message is None
    write_sweep(sweep.out, dataclasses.replace(record, completed=completed, failed=failed))
    return len(failed), message is not None
