"""The jobs of a search for a script of the user's: it runs unedited, and pauses where it is told to."""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from speechdp.comm.startup.folder_owner import owner_of
from speechdp.counting import counted
from speechdp.experiments.compare.plan import readable_name
from speechdp.experiments.compare.script_training import SEED, UserScript
from speechdp.experiments.compare.training import log_of
from speechdp.experiments.jobs import JobStarter
from speechdp.experiments.race.plan import order_of_rounds, why_left_out
from speechdp.experiments.race.record import FOLDER
from speechdp.experiments.tune.jobs import (
    NEW_RUN,
    RacedSettings,
    TunedJobs,
    besides_steps_s,
    is_timed,
    steps_of_turn,
)
from speechdp.experiments.tune.plan import Besides, Setting
from speechdp.experiments.tune.run import TuneRequest
from speechdp.ownership.overwrite import RUN, empty
from speechdp.parallel.data_parallel import STRATEGY
from speechdp.parallel.ranks import BACKEND
from speechdp.parallel.registry import StrategyChoice
from speechdp.parallel.run_files import RunDirectory
from speechdp.parallel.stop import PAUSE, Pause
from speechdp.report.runs.folders import read_run
from speechdp.report.runs.raced import RacedSpeed
from speechdp.report.runs.timing_file import DEFAULT_WARMUP_STEPS


@dataclass(frozen=True)
class _Turn:
    """What a short run has shown.

    Attributes:
        frames_per_s: of all ranks.
        frames_per_step: of all ranks.
    """

    frames_per_s: float
    frames_per_step: float


class TunedScript(TunedJobs):
    """Runs a script of the user's with the settings of a search.

    Turns of its race are short runs, each a start of its own: within one start a script has one strategy.

    Args:
        request: of the search.
        metric: what its runs are judged by; "": what they log last.
        say: takes a line of progress.
    """

    def __init__(
        self,
        request: TuneRequest,
        script: UserScript,
        starter: JobStarter,
        metric: str,
        say: Callable[[str], None],
    ) -> None:
        super().__init__(request.out, metric)
        self._script, self._starter = script, starter
        self._ranks, self._seeds = request.ranks, request.seeds
        self._length, self._say = request.race, say

    #: Of a script there are only fewer rounds, one at least, however long that takes.
    chooses_race = False

    def begin(self) -> None:
        """See TunedJobs: a script needs nothing."""

    def total_steps(self, frames_per_step: float) -> float:
        """See TunedJobs: a script does not say."""
        return math.inf

    def hold_race(
        self, settings: Sequence[Setting], backend: str, longest_s: float, start_s: float
    ) -> RacedSettings | str:
        """See TunedJobs: round after round, each setting once in random order."""
        left_out = {one.name: why for one in settings if (why := why_left_out(one.strategy.parsed))}
        settings = [one for one in settings if one.name not in left_out]
        if len(settings) < 2:
            return RacedSettings({}, 0.0, {}, left_out)
        steps = self._steps_of(settings)
        rounds = self._rounds(steps, backend, longest_s, start_s)
        found: dict[str, list[_Turn]] = {one.name: [] for one in settings}
        for number, order in enumerate(order_of_rounds(len(settings), rounds, self._seeds[0])[1:], start=1):
            left = sum(one.name not in left_out for one in settings)
            self._say(f"race: {counted(left, 'setting')}, round {number} of {rounds}")
            for setting in (settings[index] for index in order if settings[index].name not in left_out):
                turn = self._take_turn(self._folder(setting, number), setting, backend, steps[setting])
                if isinstance(turn, _Turn):
                    found[setting.name].append(turn)
                else:
                    left_out[setting.name] = f"it failed: {turn}"
                    self._say(f"race: {setting.name} failed: {turn}")
        reference = settings[0].name
        if reference in left_out:
            return f"{reference}: {left_out[reference]}"
        raced = {name: turns for name, turns in found.items() if name not in left_out}
        return RacedSettings(
            _speeds(raced, reference) if len(raced) > 1 else {},
            _mean([turn.frames_per_s for turn in raced[reference]]),
            {name: _mean([turn.frames_per_step for turn in turns]) for name, turns in raced.items()},
            left_out,
        )

    def expected_race_s(
        self, settings: Sequence[Setting], backend: str, longest_s: float, start_s: float
    ) -> float:
        """See TunedJobs."""
        racing = [one for one in settings if not why_left_out(one.strategy.parsed)]
        steps = self._steps_of(racing)
        rounds = self._rounds(steps, backend, longest_s, start_s) if len(racing) > 1 else 0
        due = [
            one
            for one in racing
            for number in range(1, rounds + 1)
            if not is_timed(self._folder(one, number))
        ]
        return sum(start_s + steps[one] * self.step_s(backend) for one in due)

    def _steps_of(self, settings: Sequence[Setting]) -> dict[Setting, int]:
        """Return the steps of the short runs of settings."""
        return {one: DEFAULT_WARMUP_STEPS + steps_of_turn(one, self._length.least_steps) for one in settings}

    def _rounds(self, steps: Mapping[Setting, int], backend: str, longest_s: float, start_s: float) -> int:
        """Return how many rounds of these short runs there is time for, one at least."""
        round_s = len(steps) * start_s + sum(steps.values()) * self.step_s(backend)
        return max(1, min(self._length.rounds, int(longest_s / max(round_s, 1e-9))))

    def _folder(self, setting: Setting, number: int) -> Path:
        """Return the folder of a short run in a round."""
        return self._out / FOLDER / f"{readable_name(setting.strategy)}-{number}"

    def _take_turn(self, folder: Path, setting: Setting, backend: str, steps: int) -> _Turn | str:
        """Train some steps, unless that is done; return their speed, or what went wrong."""
        if not is_timed(folder):
            besides = self._train_some({folder: setting.strategy}, backend, steps)
            if isinstance(besides, str):
                return besides
        timing = read_run(folder).timing
        ranks = [] if timing is None else [rank for rank in timing.ranks if rank.frames and rank.wall_s]
        if not ranks:
            return f"{folder}: its timing.json is damaged; delete the folder to run it again"
        frames = sum(rank.frames for rank in ranks)
        slowest_s, most_steps = max(rank.wall_s for rank in ranks), max(rank.steps for rank in ranks)
        return _Turn(frames / slowest_s, frames / most_steps)

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
        return Besides(0.0, min(took_s))  # every run is a start of its own

    def _train_one(self, run_dir: Path, strategy: StrategyChoice, backend: str, steps: int) -> str | None:
        if RunDirectory(run_dir).is_begun:
            with owner_of(run_dir, "tune", self._say) as owner:
                empty(owner, RUN)
        message = self._run(run_dir, strategy, backend, self._seeds[0], Pause(steps))
        if message is None and RunDirectory(run_dir).is_complete:
            return (
                f"{self._script.path.name} trained to its end and did not pause at step {steps}: let it look "
                "at run.should_stop after each step and save (docs/api.md), and train for more steps"
            )
        return message

    def _train_on(self, run_dir: Path, setting: Setting, backend: str, seed: int, step: int) -> str | None:
        message = self._run(run_dir, setting.strategy, backend, seed, Pause(step, evaluated=True))
        scored = self._scored(run_dir)
        if message is None and not scored.points and not scored.has_diverged:
            return (
                f"it logged no value by which it can be judged within {counted(step, 'step')}: call run.log "
                "inside `with run.evaluating()` (docs/api.md), and name the value by --metric"
            )
        return message

    def _run(
        self, run_dir: Path, strategy: StrategyChoice, backend: str, seed: int, pause: Pause
    ) -> str | None:
        """Run the script until it pauses or ends; return None, or what went wrong."""
        script = replace(self._script, backend=backend)
        environment = script.environment(strategy, self._ranks, seed, run_dir) | {PAUSE: str(pause)}
        processes = script.processes(self._ranks)
        message = self._starter.run_script(
            processes, script.words(seed), log_of(run_dir), environment, may_pause=True
        )
        if message is None and not RunDirectory(run_dir).is_begun:
            return f"{script.path.name} ended well but trained nothing with speechdp.DataParallel"
        return message

    def command(self, setting: Setting, backend: str) -> str:
        """See TunedJobs."""
        script = replace(self._script, backend=backend)
        told = script.environment(setting.strategy, self._ranks, self._seeds[0], Path(NEW_RUN))
        shown = [f"{name}={shlex.quote(told[name])}" for name in (STRATEGY, BACKEND, SEED)]
        launch = ["speechdp", "launch", *self._starter.launch_options]
        launch += ["-np", str(script.processes(self._ranks)), "--", "python", *script.words(self._seeds[0])]
        return " ".join([*shown, shlex.join(launch)])


def _speeds(turns: dict[str, list[_Turn]], baseline: str) -> dict[str, RacedSpeed]:
    usual = turns[baseline]
    return {
        name: RacedSpeed(
            tuple(own.frames_per_s / its.frames_per_s for own, its in zip(of, usual, strict=True)), baseline
        )
        for name, of in turns.items()
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
