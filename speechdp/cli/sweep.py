"""`speechdp sweep`: train with several averaging periods, and report throughput and accuracy of each."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from speechdp import exit_codes
from speechdp.cli.support.out_folder import OutFolder, inputs_of, owned_by_ranks, owned_folder
from speechdp.cli.support.script_options import ScriptOptions
from speechdp.cli.support.several_runs import check_new, check_target, report_failures, until_stopped
from speechdp.errors import ConfigError
from speechdp.options.run import TrainOptions
from speechdp.options.shown import MAY_BE_EMPTY, heading, shown

if TYPE_CHECKING:
    from speechdp.experiments.race.plan import RaceOptions
    from speechdp.experiments.sweep.plan import SweepPlan
    from speechdp.train.session import Session

_ALONE = (
    "one rank has no other to average with, so periods differ only by chance; start several: "
    "speechdp launch -np 2 -- sweep ..."
)


@dataclass(frozen=True)
class SweepCommand:
    """Train once with each averaging period, decode, and report throughput and accuracy.

    On two ranks: speechdp launch -np 2 -- sweep DATA OUT

    For a training script of your own: speechdp sweep --script train.py OUT; see sweep --script --help."""

    data: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DATA")]
    """Data directory written by `speechdp prepare`."""
    out_dir: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """Folder for the runs and the report.  Finished runs in it are kept, interrupted ones continue."""
    options: Annotated[TrainOptions, heading("training")] = field(default_factory=TrainOptions)
    periods: Annotated[str, shown("PERIOD,...")] = "1,4,16,64"
    """Averaging periods to try, in steps (16), thousands of frames per rank (600kf) or seconds (5s)."""
    swept: Annotated[str, shown("NAME[:OPTION=VALUE,...]")] = "model_averaging"
    """Strategy whose period is varied, with its other options, e.g. model_averaging:momentum=average."""
    reference: Annotated[str, shown("NAME[:OPTION=VALUE,...]"), MAY_BE_EMPTY] = "gradient_averaging"
    """Strategy trained once as the reference; empty: none."""
    one_rank_steps: Annotated[int, shown("STEPS")] = 200
    """Length of the extra run on one rank from which speed-ups are computed; 0: no such run."""
    decode_split: Annotated[str, shown("SPLIT"), MAY_BE_EMPTY] = "test"
    """Split to decode for the word error rate; empty: none.  Not used with --task synthesis."""
    race: Annotated[int, shown("ROUNDS")] = 24
    """Rounds of the race after the runs: all settings take turns, so that their speeds can be compared.
    An interval needs at least 6 rounds; 0: no race; speeds are those of the runs, or of an earlier race."""
    race_steps: Annotated[int, shown("STEPS")] = 16
    """Minimum number of steps of a turn in the race; each turn has whole averaging periods."""
    target: Annotated[float | None, shown("VALUE", "the best value that all runs reached")] = None
    """Report the time each run took to reach this held-out value.
    A log-probability in nats per frame; an L1 error with --task synthesis; else the task's first metric."""
    overwrite: bool = False
    """Delete the sweep in OUT and start over."""

    def check(self) -> None:
        """Refuse periods, races and names that are invalid with any strategy.  Raises ConfigError."""
        from speechdp.experiments.sweep.plan import check_periods  # noqa: PLC0415 - fast --help
        from speechdp.parallel.registry import StrategyChoice  # noqa: PLC0415

        check_periods(_split(self.periods))
        self._race()
        for strategy in filter(None, (self.swept, self.reference)):
            StrategyChoice(strategy).check_name()

    def check_strategies(self) -> None:
        """Refuse options that the strategies do not take.  Raises ConfigError."""
        self._plan()

    def run(self) -> int:
        """Run the sweep; return the exit code."""
        from speechdp.cli.support.distributed import SessionRequest, train_over_ranks  # noqa: PLC0415 - fast --help
        from speechdp.ownership.overwrite import SWEEP  # noqa: PLC0415

        self.check()
        self.check_strategies()
        check_target(self.target, self.options.make_task().record())
        check_new(self.options, self.out_dir, SWEEP)
        sweep = [self.swept, self.periods, self.reference, self.one_rank_steps, self.decode_split]
        sweep += [self.race, self.race_steps]
        others = {"OUT folder": self.out_dir, "sweep": sweep, "--overwrite": self.overwrite}
        request = SessionRequest(self.data, self.options, self.out_dir.name, others, saves_on_interrupt=True)
        return train_over_ranks(request, self._on_rank)

    def _plan(self) -> SweepPlan:
        from speechdp.experiments.sweep.plan import SweepPlan  # noqa: PLC0415

        plan = SweepPlan(
            strategy=self.swept,
            periods=_split(self.periods),
            reference=tuple(filter(None, [self.reference])),
            one_rank_steps=self.one_rank_steps,
            decode_split=self.options.to_decode(self.decode_split),
        )
        plan.runs()
        return plan

    def _race(self) -> RaceOptions:
        from speechdp.experiments.race.plan import RaceOptions  # noqa: PLC0415

        return RaceOptions(self.race, self.race_steps)

    def _on_rank(self, session: Session) -> int:
        from speechdp.cli.report import print_report  # noqa: PLC0415
        from speechdp.cli.support.distributed import reporter_maker  # noqa: PLC0415
        from speechdp.experiments.sweep.training import check_sweep, names_of, run_sweep  # noqa: PLC0415
        from speechdp.launching.variables import RESTART_REASON  # noqa: PLC0415
        from speechdp.options.targets import warn_of_spread_targets  # noqa: PLC0415
        from speechdp.ownership.overwrite import SWEEP  # noqa: PLC0415
        from speechdp.process.ending import STOPPED_BEFORE, Stopped, StoppedBefore  # noqa: PLC0415

        comm, plan = session.comm, self._plan()
        out = OutFolder(self.out_dir, self.overwrite, inputs_of(self.data, self.options))
        if comm.rank == 0:
            out.check(SWEEP)
        restarted = bool(os.environ.get(RESTART_REASON))
        check_sweep(session, self.options, plan, self.out_dir, overwrite=self.overwrite, restarted=restarted)
        try:
            with owned_by_ranks(session, out, "sweep", SWEEP):
                warn_of_spread_targets(self.options, lambda: session.dataset, session.reporter.notice)
                if comm.size == 1:
                    session.reporter.notice(_ALONE)
                reporter_for = reporter_maker(comm)
                failed = run_sweep(session, self.options, plan, self.out_dir, reporter_for, self._race())
        except Stopped as stop:
            if isinstance(stop, StoppedBefore) and stop.folder == self.out_dir:
                text = f"{STOPPED_BEFORE}: {self.out_dir}"
            else:
                text = f"stopped as requested; the same command continues {self.out_dir}"
            session.reporter.notice(text)
            return exit_codes.STOPPED
        if comm.rank == 0:
            print_report(self.out_dir, self.target)
            report_failures(failed, len(names_of(plan, comm.size)), None)
        return 1 if failed else 0


@dataclass(frozen=True)
class SweepScriptCommand:
    """Run a training script of your own once with each averaging period, and report speed and metric.

    It starts the ranks itself: speechdp sweep --script train.py OUT --ranks 2 --periods 1,4,16 -- ARGUMENTS

    The script trains with speechdp.DataParallel and is not edited: the strategy, the folder and
    the seed (SPEECHDP_SEED) are passed in environment variables."""

    out_dir: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """Folder for the runs and the report.  Finished runs in it are kept.
    Others resume if the script loads its checkpoint, else they start over."""
    script: Annotated[ScriptOptions, heading("script")]
    ranks: Annotated[int, shown("N")] = 2
    """Number of ranks of every run."""
    periods: Annotated[str, shown("PERIOD,...")] = "1,4,16,64"
    """Averaging periods to try, in steps (16), thousands of items per rank (600kf) or seconds (5s).
    Items are what the weights of the script's steps count."""
    swept: Annotated[str, shown("NAME[:OPTION=VALUE,...]")] = "model_averaging"
    """Strategy whose period is varied, with its other options, e.g. model_averaging:momentum=average."""
    reference: Annotated[str, shown("NAME[:OPTION=VALUE,...]"), MAY_BE_EMPTY] = "gradient_averaging"
    """Strategy run once as the reference; empty: none."""
    one_rank: bool = True
    """Also run the script on one rank, to compute speed-ups."""
    seed: Annotated[int, shown("SEED")] = 1
    """Seed: replaces {seed} in the script's arguments, and is SPEECHDP_SEED in its environment."""
    race: Annotated[int, shown("ROUNDS")] = 6
    """Rounds of the race after the runs: short runs of all settings in turn, so that speeds can be compared.
    Each starts the script anew.  An interval needs at least 6 rounds.
    0: no race; speeds are those of the runs, or of an earlier race."""
    race_steps: Annotated[int, shown("STEPS")] = 32
    """Minimum number of steps of such a short run; each has whole averaging periods."""
    overwrite: bool = False
    """Delete the sweep in OUT and start over."""
    script_arguments: tyro.conf.Suppress[tuple[str, ...]] = ()
    """What follows `--`."""

    def run(self) -> int:
        """Run the sweep and its report; return the exit code: 1 if a run failed."""
        from speechdp.cli.report import print_report  # noqa: PLC0415 - keeps --help fast
        from speechdp.cli.support.console import line_printer  # noqa: PLC0415
        from speechdp.experiments.compare.script_training import ScriptTraining  # noqa: PLC0415
        from speechdp.experiments.jobs import LOGS  # noqa: PLC0415
        from speechdp.experiments.race.plan import RaceOptions  # noqa: PLC0415
        from speechdp.experiments.sweep.plan import SweepPlan, threads_before  # noqa: PLC0415
        from speechdp.experiments.sweep.script import ScriptSweep, run_script_sweep  # noqa: PLC0415
        from speechdp.ownership.overwrite import SWEEP  # noqa: PLC0415

        self.script.check()
        if self.ranks < 1:
            raise ConfigError(f"--ranks {self.ranks}: must be at least 1")
        plan = SweepPlan(
            strategy=self.swept,
            periods=_split(self.periods),
            reference=tuple(filter(None, [self.reference])),
            others=True,
        )
        sweep = ScriptSweep(self.out_dir, plan, self.ranks, self.seed, self.one_rank, self.script.metric)
        names = list(sweep.runs())
        before = None if self.overwrite else threads_before(self.out_dir)
        starter = self.script.starter("sweep --script", self.ranks, before)
        print_line, script = line_printer(), self.script.user_script(self.script_arguments)
        training = ScriptTraining(script, starter, RaceOptions(self.race, self.race_steps), print_line)
        with owned_folder(OutFolder(self.out_dir, self.overwrite), "sweep", print_line, SWEEP):

            def work() -> int:
                failed, has_race_failed = run_script_sweep(sweep, training, print_line)
                print_report(self.out_dir, self.script.target, self.script.metric)
                report_failures(failed, len(names), self.out_dir / LOGS)
                return 1 if failed or has_race_failed else 0

            return until_stopped(self.out_dir, print_line, work)


def _split(periods: str) -> tuple[str, ...]:
    """Split a list of periods such as `1,4,16`."""
    return tuple(filter(None, periods.split(",")))
