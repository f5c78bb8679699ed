"""The jobs of a search: short runs that measure, a race, and runs that are trained rung by rung."""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from speechdp.data.shards.dataset import Dataset
from speechdp.errors import ConfigError, RunError
from speechdp.experiments.arguments import train_arguments
from speechdp.experiments.compare.own_training import CompareRequest, OwnTraining
from speechdp.experiments.compare.plan import SEQUENTIAL, readable_name
from speechdp.experiments.compare.training import log_of
from speechdp.experiments.jobs import JobStarter
from speechdp.experiments.race.plan import RaceOptions, RacePlan, RaceSetting, turn_steps
from speechdp.experiments.race.record import RaceRecord, find_race, is_of
from speechdp.experiments.tune.plan import Setting
from speechdp.experiments.tune.record import RUNS
from speechdp.options.run import TrainOptions
from speechdp.parallel.period import Period
from speechdp.parallel.registry import StrategyChoice
from speechdp.report.runs.folders import read_run
from speechdp.report.runs.raced import LEAST_ROUNDS
from speechdp.simulation.exchanges import exchange_of, is_known
from speechdp.simulation.measured import MeasuredRun, measured_run
from speechdp.simulation.predict import Interval, is_too_long, predict
from speechdp.simulation.simulate import Request, scenario_of

MEASURED = "measure"
#: Steps of a measuring run.
MEASURE_STEPS = 48
#: What is measured of each back-end: its exchanges whole, and in pieces beside backward.
MEASURED_STRATEGIES = ("model_averaging:period=1", "gradient_averaging")


@dataclass(frozen=True)
class Measurement:
    """What the short runs of a back-end have shown.

    Attributes:
        runs: with their steps and exchanges.
        start_s: what a job takes besides its steps, the shortest; None: none had to be started.
    """

    runs: tuple[MeasuredRun, ...]
    start_s: float | None

    def predict(self, ranks: int, settings: Sequence[Setting]) -> dict[Setting, Interval]:
        """Return the frames/s of those settings that can be predicted from these runs."""
        request = Request(ranks=(ranks,), ranks_per_node=max(run.ranks_per_node for run in self.runs))
        try:
            scenario, _ = scenario_of(self.runs, request)
        except ConfigError:  # the link shows nowhere: the race has to tell
            return {}
        known = [one for one in settings if is_known(one.strategy)]
        exchanges = [(one.strategy, exchange_of(one.strategy, scenario.model)) for one in known]
        shown = [(strategy, exchange) for strategy, exchange in exchanges if not is_too_long(exchange, ranks)]
        found = {one.strategy.text: one.frames_per_s for one in predict(scenario, ranks, shown)}
        return {one: found[one.strategy.text] for one in known if one.strategy.text in found}


@dataclass(frozen=True)
class Scored:
    """A run that was trained up to a step.

    Attributes:
        points: (step, held-out score) of its evaluations, by step.
        is_over: it has trained all its epochs.
    """

    points: tuple[tuple[int, float], ...]
    is_over: bool


class TunedTraining(OwnTraining):
    """Trains settings of a search with `speechdp`, as a comparison does.

    Args:
        request: with the ranks of the search and one strategy, which does not count.
        say: takes a line of progress.
    """

    def __init__(self, request: CompareRequest, starter: JobStarter, say: Callable[[str], None]) -> None:
        super().__init__(request, starter, say)
        self._ranks = request.plan.ranks[0]

    def measure(self, backend: str) -> Measurement | str:
        """Train some steps with each of MEASURED_STRATEGIES; return what they show, or what went wrong."""
        runs, starts = [], []
        for text in MEASURED_STRATEGIES:
            run_dir = self._measured_dir(backend, text)
            options = dataclasses.replace(
                self._options(Setting(StrategyChoice(text)), backend, self._request.plan.seeds[0]),
                max_steps=MEASURE_STEPS,
            )
            begun_s, is_done = time.monotonic(), (run_dir / "completed.json").is_file()
            message = None if is_done else self._train(run_dir, options, self._ranks)
            if message is not None:
                return message
            try:
                runs.append(measured_run(read_run(run_dir)))
            except ConfigError as error:
                return str(error)
            if not is_done:
                starts.append(_start_s(run_dir, time.monotonic() - begun_s))
        return Measurement(tuple(runs), min(starts, default=None))

    def hold_race(self, settings: Sequence[Setting], backend: str, longest_s: float) -> RaceRecord | str:
        """Let settings race, unless they have; return the record, or what went wrong.

        Args:
            longest_s: time for it, by which it has fewer rounds and shorter turns, as far as intervals allow.
        """
        out, options = self._request.out.absolute(), self._options(settings[0], backend, self.seeds[0])
        before = _race_in(out, self._ranks)
        if before is not None:  # held with another budget, perhaps
            length = RaceOptions(before.plan.rounds, before.plan.least_steps)
            if is_of(before, self._race_plan(length, settings, options)):
                return before
        length = fitting_race(self._request.race, settings, self._step_s(backend), longest_s)
        words = ["tune", str(self._request.data.absolute()), str(out), "--job=race"]
        words += [f"--racing={racing_text(settings)}", f"--race={length.rounds}"]
        words += [f"--race-steps={length.least_steps}", f"--ranks={self._ranks}"]
        words += [f"--backends={backend}", f"--seeds={options.seed}"]
        own = TrainOptions()
        words += train_arguments(
            dataclasses.replace(options, strategy=own.strategy, backend=own.backend, seed=own.seed)
        )
        message = self._starter.run(self._ranks + options.loading.feeders, words, log_of(out / "race"))
        race = _race_in(out, self._ranks)
        if race is None or not is_of(race, self._race_plan(length, settings, options)):
            return message or "the job ended well but left no record (is OUT a shared folder?)"
        return race

    def _race_plan(self, length: RaceOptions, settings: Sequence[Setting], options: TrainOptions) -> RacePlan:
        return race_of(dataclasses.replace(self._request, race=length), settings, self._ranks, options)

    def _step_s(self, backend: str) -> float:
        """Return how long a step takes, by the slower of the measuring runs of a back-end."""
        found = []
        for text in MEASURED_STRATEGIES:
            timing = read_run(self._measured_dir(backend, text)).timing
            found += [r.wall_s / r.steps for r in timing.ranks if r.steps] if timing is not None else []
        return max(found, default=0.0)

    def _measured_dir(self, backend: str, strategy: str) -> Path:
        return (self._request.out / MEASURED / f"{backend}-{strategy.partition(':')[0]}").absolute()

    def train_to(self, setting: Setting, backend: str, seed: int, step: int) -> Scored | str:
        """Train a setting's run up to a step, or to its end before; return its scores, or what went wrong.

        The step is evaluated.  A run that has come so far is not touched.
        """
        run_dir = self.run_dir(setting, seed)
        found = _scored(run_dir)
        if not found.is_over and not any(at >= step for at, _ in found.points):
            options = self._options(setting, backend, seed)
            message = self._train(run_dir, options, self._ranks, pause_at=step)
            if message is not None:
                return message
            found = _scored(run_dir)
        points = up_to(found.points, step)
        return Scored(points, found.is_over) if points else "it was not evaluated"

    def run_dir(self, setting: Setting, seed: int) -> Path:
        """Return the folder of a setting's run."""
        readable = readable_name(setting.strategy)
        batch = f"-batch{setting.batch_size}" if setting.batch_size else ""
        return (self._request.out / RUNS / f"{readable}{batch}-seed{seed}").absolute()

    @property
    def seeds(self) -> tuple[int, ...]:
        """Seeds of the runs."""
        return self._request.plan.seeds

    def total_steps(self, race: RaceRecord, setting: Setting) -> float:
        """Return about how many steps a whole training of a raced setting has."""
        options = self._request.options
        return options.num_epochs * self.frames / frames_per_step(race, setting)

    @cached_property
    def frames(self) -> int:
        """Frames of an epoch."""
        return Dataset.open(self._request.data).num_frames(self._request.options.train_split)

    def command(self, setting: Setting, backend: str) -> str:
        """Return the words after `speechdp launch ... --` that train with a setting."""
        options = dataclasses.replace(
            with_setting(self._request.options, setting), backend=cast(Any, backend), seed=self.seeds[0]
        )
        launch = ["speechdp", "launch", *self._starter.launch_options, "-np", str(self._ranks), "--"]
        return shlex.join([*launch, "train", str(self._request.data), "RUN", *train_arguments(options)])

    def _options(self, setting: Setting, backend: str, seed: int) -> TrainOptions:
        options = with_setting(self._request.options, setting)
        options = dataclasses.replace(options, backend=cast(Any, backend), seed=seed)
        return options.on_alignments(self._alignments)


def with_setting(options: TrainOptions, setting: Setting) -> TrainOptions:
    """Return options of a training with a setting's strategy and batch."""
    if setting.batch_size:
        batch = dataclasses.replace(options.batch, batch_size=setting.batch_size)
        options = dataclasses.replace(options, batch=batch)
    return dataclasses.replace(options, strategy=setting.strategy)


def race_of(
    request: CompareRequest, settings: Sequence[Setting], ranks: int, options: TrainOptions
) -> RacePlan:
    """Return the race of the settings of a search.

    Args:
        options: what they share, as the ranks are given them.
    """
    racing = [RaceSetting(one.name, one.strategy, batch_size=one.batch_size) for one in settings]
    own = dataclasses.replace(options, strategy=SEQUENTIAL, seed=request.plan.seeds[0])
    shared = {key: value for key, value in own.to_json().items() if key != "strategy"}
    return request.race.plan(ranks, own.seed, racing, {"data": request.data_checksum, "options": shared})


def fitting_race(
    wanted: RaceOptions, settings: Sequence[Setting], step_s: float, longest_s: float
) -> RaceOptions:
    """Return a race that is over in time: first fewer rounds, then shorter turns; at worst the shortest.

    Args:
        wanted: how long it may last.
        step_s: of a setting, with its training's own batch.
    """
    fewest = min(wanted.rounds, LEAST_ROUNDS)
    tried = [
        RaceOptions(rounds, steps)
        for steps in dict.fromkeys((wanted.least_steps, *(s for s in (16, 8) if s < wanted.least_steps)))
        for rounds in range(wanted.rounds if steps == wanted.least_steps else fewest, fewest - 1, -1)
    ]
    for length in tried:
        steps = sum(
            turn_steps(_period_in_steps(one), length.least_steps, frames_a_step=1.0, step_s=None)
            for one in settings
        )
        if (length.rounds + 1) * steps * step_s <= longest_s:
            return length
    return tried[-1]


def _period_in_steps(setting: Setting) -> Period | None:
    """Return a setting's period where it is in steps: turns have whole ones."""
    period = setting.strategy.parsed.traits.period
    return Period.parse(period) if period is not None and str(period).isdigit() else None


def racing_text(settings: Sequence[Setting]) -> str:
    """Return settings in one word, for the ranks of a race."""
    return json.dumps([[one.strategy.text, one.batch_size] for one in settings])


def settings_in(text: str) -> tuple[Setting, ...]:
    """Return what `racing_text` has written."""
    return tuple(Setting(StrategyChoice(strategy), size) for strategy, size in json.loads(text))


def frames_per_step(race: RaceRecord, setting: Setting) -> float:
    """Return the frames of all ranks in a step of a raced setting."""
    turns = [turn for turn in race.turns if turn.setting == setting.name and turn.round > 0]
    return sum(sum(turn.frames) for turn in turns) / sum(turn.steps for turn in turns)


def _race_in(out: Path, ranks: int) -> RaceRecord | None:
    """Return the race that was held; None: there is none, or it is damaged and to be held again."""
    try:
        return find_race(out, ranks)
    except RunError:
        return None


def up_to(points: Sequence[tuple[int, float]], step: int) -> tuple[tuple[int, float], ...]:
    """Return the evaluations before a step and the first from it on; asynchronous ranks pass it a little."""
    passed = next((number for number, (at, _) in enumerate(points, start=1) if at >= step), len(points))
    return tuple(points[:passed])


def _scored(run_dir: Path) -> Scored:
    if not (run_dir / "run.json").is_file():
        return Scored((), is_over=False)
    result = read_run(run_dir)
    points = tuple(
        (one.step, one.score)
        for one in result.evaluations
        if one.score is not None and math.isfinite(one.score)
    )
    return Scored(points, result.completed)


def _start_s(run_dir: Path, wall_s: float) -> float:
    """Return what a job took besides its steps."""
    timing = read_run(run_dir).timing
    trained = 0.0 if timing is None else max((rank.wall_s for rank in timing.ranks), default=0.0)
    return max(0.0, wall_s - trained)
