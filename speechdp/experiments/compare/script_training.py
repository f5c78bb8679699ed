"""Make the runs of a comparison with a user's unedited script, which gets its settings in the environment."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from speechdp.counting import counted
from speechdp.errors import ConfigError
from speechdp.experiments.compare.plan import FRAMES, SEQUENTIAL, ComparePlan
from speechdp.experiments.compare.record import RunRecord
from speechdp.experiments.compare.training import ComparedTraining, log_of
from speechdp.experiments.jobs import JobStarter
from speechdp.experiments.race.plan import (
    CHANGES,
    MOST_STEPS,
    TOO_LONG,
    RaceOptions,
    RaceSetting,
    period_of,
    turn_steps,
)
from speechdp.experiments.race.script import ScriptRace, ScriptTurns
from speechdp.launching.variables import FOLDER, PAUSE, RESUME
from speechdp.parallel.data_parallel import STRATEGY
from speechdp.parallel.ranks import BACKEND
from speechdp.parallel.registry import StrategyChoice
from speechdp.parallel.run_files import RunDirectory
from speechdp.parallel.stop import Pause
from speechdp.report.kit import formatting
from speechdp.report.runs.folders import read_run
from speechdp.report.runs.results import ONE_RANK
from speechdp.report.runs.timing_file import DEFAULT_WARMUP_STEPS

#: Environment variable with the seed of a script's run.
SEED = "SPEECHDP_SEED"
#: Placeholder of the seed in a script's arguments.
SEED_WORD = "{seed}"
#: Placeholder of the learning rate in a script's arguments.
RATE_WORD = "{learning_rate}"
#: The back-end whose ranks are threads of one process.
THREADS = "threads"


@dataclass(frozen=True)
class UserScript:
    """A script that trains with `speechdp.DataParallel`.

    Attributes:
        arguments: command-line arguments; `{seed}` stands for a run's seed, and `{learning_rate}` for its
            learning rate, if several are tried.
        backend: back-end, as in `run_ranks`; `threads`: one thread per rank.
    """

    path: Path
    arguments: tuple[str, ...] = ()
    backend: str = "auto"

    def words(self, run: RunRecord) -> list[str]:
        """Return the script's path and its arguments for a run."""
        values = {SEED_WORD: str(run.seed)}
        if run.learning_rate is not None:
            values[RATE_WORD] = formatting.learning_rate(run.learning_rate)
        return [str(self.path), *(_filled(word, values) for word in self.arguments)]

    def check_rates(self, *, given: bool) -> None:
        """Refuse learning rates without a placeholder in the arguments, and a placeholder without rates.

        Raises:
            ConfigError: one is there without the other.
        """
        has_place = any(RATE_WORD in word for word in self.arguments)
        if given and not has_place:
            raise ConfigError(
                f"--learning-rates: write {RATE_WORD} in the script's arguments where a rate is to stand, "
                f"for example -- --lr {RATE_WORD}"
            )
        if has_place and not given:
            raise ConfigError(
                f"{RATE_WORD} in the script's arguments stands for one of --learning-rates; give them, for "
                "example --learning-rates 0.001,0.002,0.004"
            )

    def processes(self, ranks: int) -> int:
        """Return the number of processes for a number of ranks."""
        return 1 if self.backend == THREADS else ranks

    def environment(self, strategy: StrategyChoice, ranks: int, seed: int, run_dir: Path) -> dict[str, str]:
        """Return the environment variables with the settings of a run."""
        # On one rank other back-ends would have nothing to do, and some need a launcher.
        backend = "auto" if ranks == 1 else self.backend
        return {
            STRATEGY: strategy.text,
            FOLDER: str(run_dir),
            BACKEND: f"{THREADS}:{ranks}" if backend == THREADS else backend,
            SEED: str(seed),
            RESUME: "1",
        }


def _filled(word: str, values: Mapping[str, str]) -> str:
    """Return a command-line word with its placeholders replaced by values."""
    for name, value in values.items():
        word = word.replace(name, value)
    return word


def run_until(
    script: UserScript, starter: JobStarter, run: RunRecord, run_dir: Path, pause: Pause
) -> str | None:
    """Run a script until it pauses, is cut off, or ends; return None, or the cause of failure.

    Raises:
        As JobStarter.run_script.
    """
    environment = script.environment(run.strategy, run.ranks, run.seed, run_dir) | {PAUSE: str(pause)}
    message = starter.run_script(
        script.processes(run.ranks),
        script.words(run),
        log_of(run_dir),
        environment,
        folder=run_dir,
        may_pause=True,
    )
    if message is None and not RunDirectory(run_dir).is_begun:
        return f"{script.path.name} {_NOTHING_TRAINED}"
    return message


def run_turn(
    script: UserScript, starter: JobStarter, run: RunRecord, run_dir: Path, last_step: int
) -> str | None:
    """Run a script up to a step, for a turn of a race; return None, or the cause of failure.

    Raises:
        As JobStarter.run_script.
    """
    message = run_until(script, starter, run, run_dir, Pause(last_step, cut=True))
    if message is None and RunDirectory(run_dir).is_complete:
        return f"{script.path.name} trained to its end before step {last_step}, with which a turn ends"
    return message


_NOTHING_TRAINED = "exited with code 0 but trained nothing with speechdp.DataParallel"


@dataclass(frozen=True)
class _Shown:
    """Measurements of a finished run of a script, for planning the race.

    Attributes:
        steps: number of training steps.
        step_s: time of a step, s.
        frames_a_step: mean frames of a rank per step.
        besides_s: time besides steps, evaluations and checkpoints, s; None: not known.
        changes_over_time: what it exchanges, or how often, changes in training, as it recorded: what a
            strategy that the script itself registers declares is not known here.
    """

    steps: int
    step_s: float
    frames_a_step: float
    besides_s: float | None
    changes_over_time: bool = False

    @classmethod
    def of(cls, run_dir: Path) -> _Shown | None:
        """Return the measurements of a run; None: it was not timed."""
        run = read_run(run_dir)
        timing = run.timing
        ranks = [] if timing is None else [rank for rank in timing.ranks if rank.steps and rank.wall_s]
        if not ranks:
            return None
        last = [rank.last_step or rank.steps for rank in ranks]
        job_s = RunDirectory(run_dir).script_s
        timed_s = max(rank.training_s + rank.eval_s + rank.checkpoint_s for rank in ranks)
        return cls(
            min(last),
            max(rank.wall_s / rank.steps for rank in ranks),
            sum(rank.frames / rank.steps for rank in ranks) / len(ranks),
            None if job_s is None else max(0.0, job_s - timed_s),
            run.changes_over_time,
        )

    def turn_steps(self, strategy: StrategyChoice, least: int) -> int:
        """Return the steps of a turn of a setting, as the race's own `turn_steps` does."""
        period = period_of(strategy)
        return turn_steps(period, least, frames_a_step=self.frames_a_step, step_s=self.step_s)


@dataclass(frozen=True)
class RacedRuns:
    """Runs of a script whose settings will race.

    Attributes:
        out: folder of the experiment.
        command: the user's command, for messages.
        ranks: number of ranks of the settings that do not train alone.
        seed: seed of all turns, and of their order.
        runs: folders of finished runs, one for each setting.
        rates: learning rates of the settings that have their own.
    """

    out: Path
    command: str
    ranks: int
    seed: int
    runs: Mapping[RaceSetting, Path]
    rates: Mapping[RaceSetting, float | None] = field(default_factory=dict)


class ScriptTraining(ComparedTraining):
    """Runs a script once for each strategy, number of ranks and seed, and races the settings.

    Args:
        race: length of the races.
        print_line: prints a line of progress.
    """

    def __init__(
        self, script: UserScript, starter: JobStarter, race: RaceOptions, print_line: Callable[[str], None]
    ) -> None:
        self._script, self._starter, self._race, self._print_line = script, starter, race, print_line

    @property
    def threads(self) -> int | None:
        """CPU threads of each rank; None: the libraries' default."""
        return self._starter.threads

    def settings(self) -> dict[str, Any]:
        """Return the settings that all runs share."""
        script = self._script
        return {
            "script": str(script.path.absolute()),
            "command line": shlex.join(script.arguments),
            "backend": script.backend,
        }

    def is_done(self, run: RunRecord, run_dir: Path) -> bool:
        """Return whether the script has ended well; its work after training belongs to the run."""
        return RunDirectory(run_dir).script_has_ended_well

    def run(self, run: RunRecord, run_dir: Path) -> str | None:
        """Run the script; see ComparedTraining."""
        script, begun_s = self._script, time.monotonic()
        environment = script.environment(run.strategy, run.ranks, run.seed, run_dir)
        directory = RunDirectory(run_dir)
        directory.forget_end()  # so that the script can start over if it trained but then failed
        message = self._starter.run_script(
            script.processes(run.ranks), script.words(run), log_of(run_dir), environment, folder=run_dir
        )
        if message is not None:
            return message
        if not directory.is_begun:
            return f"{script.path.name} {_NOTHING_TRAINED}"
        if not directory.is_complete:
            return (
                f"{script.path.name} exited with code 0 but left no completed.json (a host may have been "
                "lost)"
            )
        directory.mark_script_ended(time.monotonic() - begun_s)
        return None

    def hold_race(self, raced: RacedRuns) -> str | None:
        """Race the settings of finished runs, unless that is done; return None, or the cause of failure.

        Raises:
            JobStopped: a signal arrived meanwhile; complete rounds are kept.
            RunError: the disk is full, or a log cannot be written.
        """
        paces = {setting: _Shown.of(run_dir) for setting, run_dir in raced.runs.items()}
        steps = {
            one: turn_steps(period_of(one.strategy), self._race.least_steps, frames_a_step=1.0, step_s=None)
            if pace is None
            else pace.turn_steps(one.strategy, self._race.least_steps)
            for one, pace in paces.items()
        }
        left_out = {
            one.name: self._why_left_out(one.strategy, steps[one], pace) for one, pace in paces.items()
        }
        plan = self._race.plan(
            raced.ranks,
            raced.seed,
            raced.runs,
            self.settings(),
            {name: reason for name, reason in left_out.items() if reason},
        )
        plan = replace(plan, own_starts=True)
        turns = ScriptTurns(
            {one.name: number for one, number in steps.items()},
            lambda setting, folder, last_step: run_turn(
                self._script, self._starter, _turn_of(setting, raced), folder, last_step
            ),
        )
        race = ScriptRace(raced.out, plan, turns, raced.command, self._print_line)
        if not plan.is_race:
            if plan.rounds and plan.left_out:
                name, reason = next(iter(plan.left_out.items()))
                self._print_line(
                    f"{race.place}: skipped, because fewer than two settings can take part: {name}: {reason}"
                )
                race.record_none()
            return None
        before = race.rounds_held
        if before >= plan.rounds:
            race.hold()  # no rounds are left to hold, but it may have been begun with more rounds
            return None
        known = {one: paces[one] for one in plan.settings}
        begun_s = time.monotonic()
        self._print_line(
            f"{race.place}: {self._cost(known, turns, plan.rounds - before)}; --race 0 leaves it out"
        )
        found = race.hold()
        if isinstance(found, str):
            self._print_line(f"{race.place}: failed: {found}")
            return found
        self._print_line(f"{race.place}: done in {formatting.seconds(time.monotonic() - begun_s)}")
        return None

    def _why_left_out(self, strategy: StrategyChoice, steps: int, pace: _Shown | None) -> str:
        """Return why a setting whose turns have `steps` steps cannot race; "": it can."""
        if pace is not None and pace.changes_over_time:
            return CHANGES
        if steps > MOST_STEPS:
            return TOO_LONG
        last = DEFAULT_WARMUP_STEPS + steps
        if pace is None or pace.steps >= last:
            return ""
        fitting = pace.steps - DEFAULT_WARMUP_STEPS
        remedy = "let it train for more steps"
        fewer = range(min(fitting, self._race.least_steps - 1), 0, -1)
        # A turn has whole periods, so a smaller --race-steps need not make it shorter.
        if shorter := next((least for least in fewer if pace.turn_steps(strategy, least) <= fitting), 0):
            remedy += f", or give --race-steps {shorter}"
        return (
            f"{self._script.path.name} trains for {counted(pace.steps, 'step')} only, and a turn has {last}, "
            f"{DEFAULT_WARMUP_STEPS} of them to warm up; {remedy}"
        )

    def _cost(self, paces: Mapping[RaceSetting, _Shown | None], turns: ScriptTurns, rounds: int) -> str:
        """Return a line on the cost of some rounds of a race."""
        lasts = sorted({turns.last_step(one.name) for one in paces})
        shown = f"{lasts[0]}" if len(lasts) == 1 else f"{lasts[0]} to {lasts[-1]}"
        text = (
            f"{counted(len(paces), 'setting')} in turn, {counted(rounds, 'round')}: "
            f"{counted(rounds * len(paces), 'start')} of {self._script.path.name}, each of {shown} steps"
        )
        besides = [
            pace.besides_s for pace in paces.values() if pace is not None and pace.besides_s is not None
        ]
        if not besides:
            return text
        stepping_s = sum(
            turns.last_step(one.name) * pace.step_s for one, pace in paces.items() if pace is not None
        )
        expected_s = rounds * (len(paces) * min(besides) + stepping_s)
        return f"{text}; about {formatting.seconds(expected_s)} by what the runs took"


def _turn_of(setting: RaceSetting, raced: RacedRuns) -> RunRecord:
    ranks = 1 if setting.alone else raced.ranks
    return RunRecord(
        setting.strategy, ranks, raced.seed, FRAMES, None, learning_rate=raced.rates.get(setting)
    )


class ComparedScript(ScriptTraining):
    """The script of a comparison.

    Args:
        out: folder of the comparison.
    """

    def __init__(
        self,
        script: UserScript,
        starter: JobStarter,
        race: RaceOptions,
        print_line: Callable[[str], None],
        out: Path,
        plan: ComparePlan,
    ) -> None:
        super().__init__(script, starter, race, print_line)
        self._out, self._plan = out, plan

    def race(self, ranks: int, runs: Sequence[RunRecord]) -> str | None:
        """See ComparedTraining."""
        settings = {_setting_of(run): run for run in sorted(runs, key=lambda run: run.ranks > 1)}
        return self.hold_race(
            RacedRuns(
                self._out,
                "compare",
                ranks,
                self._plan.seeds[0],
                {setting: self._out / run.planned.folder for setting, run in settings.items()},
                {setting: run.learning_rate for setting, run in settings.items()},
            )
        )


def _setting_of(run: RunRecord) -> RaceSetting:
    if run.ranks == 1:
        return RaceSetting(ONE_RANK, SEQUENTIAL, alone=True)
    return RaceSetting(run.strategy.text, run.strategy)
