"""The jobs of a search for a user's script, which runs unedited and pauses on request."""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from speechdp.comm.startup.folder_owner import owner_of
from speechdp.counting import counted
from speechdp.experiments.compare.plan import FRAMES
from speechdp.experiments.compare.record import RunRecord
from speechdp.experiments.compare.script_training import SEED, UserScript, run_turn, run_until
from speechdp.experiments.jobs import JobStarter
from speechdp.experiments.race.plan import RacePlan, RaceSetting
from speechdp.experiments.race.script import ScriptRace, ScriptTurns
from speechdp.experiments.tune.jobs import (
    NEW_RUN,
    RacedSettings,
    TunedJobs,
    besides_steps_s,
    steps_of_turn,
)
from speechdp.experiments.tune.plan import Besides, ExpectedTimes, Setting
from speechdp.experiments.tune.search import TuneRequest
from speechdp.launching.variables import FOLDER
from speechdp.ownership.overwrite import RUN, empty
from speechdp.parallel.data_parallel import STRATEGY
from speechdp.parallel.ranks import BACKEND
from speechdp.parallel.registry import StrategyChoice
from speechdp.parallel.run_files import RunDirectory
from speechdp.parallel.stop import Pause
from speechdp.report.runs.timing_file import DEFAULT_WARMUP_STEPS


class TunedScript(TunedJobs):
    """Runs a user's script with the settings of a search.

    Turns of its race are short runs, each started separately, because a script has one strategy per start.

    Args:
        request: request of the search.
        metric: metric that ranks its runs; "": the value that they log last.
        print_line: prints a line of progress.
    """

    def __init__(
        self,
        request: TuneRequest,
        script: UserScript,
        starter: JobStarter,
        metric: str,
        print_line: Callable[[str], None],
    ) -> None:
        super().__init__(request.out, metric)
        self._script, self._starter = script, starter
        self._ranks, self._seeds = request.ranks, request.seeds
        self._length, self._trained, self._print_line = request.race, request.trained, print_line
        self._own_rate = min(request.learning_rates, default=None)

    #: The race of a script is never refused; it only has fewer rounds, at least one, however long that takes.
    chooses_race = False

    def begin(self) -> None:
        """See TunedJobs: a script needs no preparation."""

    def total_steps(self, frames_per_step: float) -> float:
        """See TunedJobs: unknown for a script."""
        return math.inf

    def hold_race(
        self, settings: Sequence[Setting], backend: str, longest_s: float, pace: ExpectedTimes
    ) -> RacedSettings | str:
        """See TunedJobs: in each round, every setting runs once, in random order."""
        race = self._race_of(settings, backend, longest_s, pace)
        if not race.plan.is_race:
            return RacedSettings({}, 0.0, {}, race.plan.left_out)
        record = race.hold()
        if isinstance(record, str):
            return record
        reference = race.plan.settings[0].name
        if reference in record.plan.left_out:
            return f"{reference}: {record.plan.left_out[reference]}"
        return RacedSettings.of(record)

    def expected_race_s(
        self, settings: Sequence[Setting], backend: str, longest_s: float, pace: ExpectedTimes
    ) -> float:
        """See TunedJobs."""
        race = self._race_of(settings, backend, longest_s, pace)
        if not race.plan.is_race:
            return 0.0
        return max(0, race.plan.rounds - race.rounds_held) * self._round_s(race.plan, settings, pace)

    def _race_of(
        self, settings: Sequence[Setting], backend: str, longest_s: float, pace: ExpectedTimes
    ) -> ScriptRace:
        """Return the race of settings, with as many rounds as there is time for, at least one."""
        turns = ScriptTurns(
            {one.name: steps_of_turn(one, self._length.least_steps) for one in settings},
            lambda setting, folder, last_step: run_turn(
                replace(self._script, backend=backend),
                self._starter,
                self._record_of(Setting(setting.strategy), self._seeds[0]),
                folder,
                last_step,
            ),
        )
        racing = [RaceSetting(one.name, one.strategy) for one in settings]
        training = {**self._trained, "backend": backend}
        plan = replace(self._length.plan(self._ranks, self._seeds[0], racing, training), own_starts=True)
        rounds = int(longest_s / max(self._round_s(plan, settings, pace), 1e-9))
        plan = replace(plan, rounds=max(1, min(plan.rounds, rounds)))
        return ScriptRace(self._out, plan, turns, "tune", self._print_line)

    def _round_s(self, plan: RacePlan, settings: Sequence[Setting], pace: ExpectedTimes) -> float:
        """Return the expected time of a round, s."""
        racing = {setting.name for setting in plan.settings}
        return sum(
            pace.start_s
            + (DEFAULT_WARMUP_STEPS + steps_of_turn(one, self._length.least_steps)) * pace.steps_s[one]
            for one in settings
            if one.name in racing
        )

    def _train_some(
        self, strategies: Mapping[Path, StrategyChoice], backend: str, steps: int
    ) -> Besides | str:
        took_s = []
        for run_dir, strategy in strategies.items():
            begun_s = time.monotonic()
            message = self._train_one(run_dir, strategy, backend, steps)
            if message is not None:
                return message
            took_s.append(besides_steps_s(run_dir, time.monotonic() - begun_s))
        return Besides(0.0, min(took_s))  # every run is started separately

    def _train_one(self, run_dir: Path, strategy: StrategyChoice, backend: str, steps: int) -> str | None:
        if RunDirectory(run_dir).is_begun:
            with owner_of(run_dir, "tune", self._print_line) as owner:
                empty(owner, RUN)
        message = self._run(run_dir, Setting(strategy), backend, self._seeds[0], Pause(steps))
        if message is not None or not RunDirectory(run_dir).is_complete:
            return message
        done = RunDirectory(run_dir).steps_done()
        remedy = "look at run.should_stop after each step and save (docs/api.md)"
        if done < steps:
            remedy = f"train for more steps than {done:g}, by more epochs or smaller batches, say"
        return (
            f"{self._script.path.name} trained to its end and did not pause at step {steps}: let it {remedy}"
        )

    def _train_on(self, run_dir: Path, setting: Setting, backend: str, seed: int, step: int) -> str | None:
        message = self._run(run_dir, setting, backend, seed, Pause(step, evaluated=True))
        scored = self._scored(run_dir)
        if message is None and not scored.points and not scored.has_diverged:
            return (
                f"it logged no value by which it can be judged within {counted(step, 'step')}: call run.log "
                "inside `with run.evaluating()` (docs/api.md), and name the value by --metric"
            )
        return message

    def _run(self, run_dir: Path, setting: Setting, backend: str, seed: int, pause: Pause) -> str | None:
        """Run the script until it pauses or ends; return None, or the cause of failure."""
        script = replace(self._script, backend=backend)
        return run_until(script, self._starter, self._record_of(setting, seed), run_dir, pause)

    def _record_of(self, setting: Setting, seed: int) -> RunRecord:
        rate = self._own_rate if setting.learning_rate is None else setting.learning_rate
        return RunRecord(setting.strategy, self._ranks, seed, FRAMES, None, learning_rate=rate)

    def command(self, setting: Setting, backend: str) -> str:
        """See TunedJobs."""
        script = replace(self._script, backend=backend)
        record = self._record_of(setting, self._seeds[0])
        variables = script.environment(record.strategy, record.ranks, record.seed, Path(NEW_RUN))
        shown = [f"{name}={shlex.quote(variables[name])}" for name in (STRATEGY, FOLDER, BACKEND, SEED)]
        launch = ["speechdp", "launch", *self._starter.launch_options]
        launch += ["-np", str(script.processes(self._ranks)), "--", "python", *script.words(record)]
        return " ".join([*shown, shlex.join(launch)])
