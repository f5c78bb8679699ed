"""Interface of the jobs of a search, and their results."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from speechdp.errors import ConfigError
from speechdp.experiments.race.plan import turn_steps
from speechdp.experiments.race.record import RaceRecord
from speechdp.experiments.tune.plan import Besides, ExpectedTimes, Setting
from speechdp.experiments.tune.record import RUNS, ExchangeRecord, LinkRecord
from speechdp.parallel.declared import Model
from speechdp.parallel.period import Period
from speechdp.parallel.registry import StrategyChoice
from speechdp.report.runs.folders import read_run
from speechdp.report.runs.raced import RacedSpeed
from speechdp.simulation.exchanges import exchange_of, is_known, is_steady
from speechdp.simulation.fit import fitted_link, model_of, observe
from speechdp.simulation.measured import MeasuredRun, basis, measured_run
from speechdp.simulation.predict import Interval, is_too_long, predict, why_refused_on
from speechdp.simulation.simulate import Request, scenario_of
from speechdp.simulation.steps import MeasuredWork
from speechdp.tasks.metrics import TaskRecord

#: Placeholder for the run folder in the final command; not RUN, because the user may have a folder RUN.
NEW_RUN = "NEW_RUN"
#: Folder of the measurement runs.
MEASURED = "measure"
#: Steps of a measurement run.
MEASURE_STEPS = 48
#: Averages a small part of the model at every step, which shows the cost independent of an exchange's size.
_IN_PARTS = f"delayed_averaging:period={MEASURE_STEPS},fragments={MEASURE_STEPS},delay=0"
#: What to measure with each back-end: exchanges of the whole model, of a small part, and overlapped with
#: backward in pieces.
MEASURED_STRATEGIES = ("model_averaging:period=1", _IN_PARTS, "gradient_averaging")


@dataclass(frozen=True)
class Measurement:
    """Results of the short runs with a back-end.

    Attributes:
        runs: the runs with their steps and exchanges.
        besides: time besides their steps; None: no run had to be started.
    """

    runs: tuple[MeasuredRun, ...]
    besides: Besides | None

    @property
    def link(self) -> LinkRecord | None:
        """The link between ranks, fitted as in a simulation; None: the exchanges do not show it."""
        if not self.runs:
            return None
        crosses = self.runs[0].crosses
        fitted = fitted_link(self.runs, self._model, crosses=crosses)
        if fitted is None:
            return None
        latency, beta = Interval.of(fitted.speed.latency_s), Interval.of(fitted.speed.s_per_byte)
        low, mean, high = (1 / one if one > 0 else None for one in (beta.high, beta.mean, beta.low))
        bounds = latency.mean, latency.low, latency.high
        return LinkRecord(crosses, *bounds, fitted.knows_latency, mean, low, high)

    @property
    def exchanges(self) -> tuple[ExchangeRecord, ...]:
        """The measured exchanges with their times."""
        if not self.runs:
            return ()
        return tuple(filter(None, (_exchange_of(run, self._model) for run in self.runs)))

    @property
    def _model(self) -> Model:
        chosen = basis(self.runs)
        return model_of(chosen, MeasuredWork.of(chosen))

    def refused(self, settings: Sequence[Setting]) -> dict[Setting, str]:
        """Return the settings that these ranks or the back-end would refuse, if known, with reasons."""
        if not self.runs:
            return {}
        hosts, backend = self.runs[0].hosts, self.runs[0].backend
        known = [one for one in settings if is_known(one.strategy)]
        return {one: why for one in known if (why := why_refused_on(one.strategy, hosts, backend))}

    @property
    def frames_per_step(self) -> float:
        """Frames of all ranks per step, with the training's own batch."""
        return self._model.frames_per_step * self.runs[0].trainers

    def predict(self, ranks: int, settings: Sequence[Setting]) -> dict[Setting, Interval]:
        """Return the predicted frames/s of the settings that can be predicted from these runs."""
        request = Request(ranks=(ranks,), ranks_per_node=max(run.ranks_per_node for run in self.runs))
        try:
            scenario, _ = scenario_of(self.runs, request)
        except ConfigError:  # no exchange shows the link, so only the race can tell
            return {}
        # Only differences between settings matter, not the error relative to a run.
        scenario = replace(scenario, spread=0.0, error=0.0)
        known = [one for one in settings if is_steady(one.strategy)]
        exchanges = [(one.strategy, exchange_of(one.strategy, scenario.model)) for one in known]
        shown = [(strategy, exchange) for strategy, exchange in exchanges if not is_too_long(exchange, ranks)]
        found = {one.strategy.text: one.frames_per_s for one in predict(scenario, ranks, shown)}
        return {one: found[one.strategy.text] for one in known if one.strategy.text in found}


def _exchange_of(run: MeasuredRun, model: Model) -> ExchangeRecord | None:
    """Return the time of a measurement run's exchanges; None if the run does not show it."""
    exchange = exchange_of(run.strategy, model)
    if len(exchange.buckets) > 1:
        seconds, pieces = float(run.times.comm.min(axis=1).mean()), len(exchange.buckets)
        return ExchangeRecord(run.strategy.text, exchange.nbytes, pieces, seconds)
    seen = observe(run, model)
    if seen is None:
        return None
    return ExchangeRecord(run.strategy.text, seen.nbytes, 1, float(seen.seconds.mean()))


@dataclass(frozen=True)
class Scored:
    """A run that was trained up to a step.

    Attributes:
        points: (step, held-out score) of its evaluations after step 0, ordered by step.
        is_over: it has trained all its epochs.
        has_diverged: its last score is not finite.
        task: task of the scores; None: unknown.
    """

    points: tuple[tuple[int, float], ...]
    is_over: bool
    has_diverged: bool = False
    task: TaskRecord | None = None


@dataclass(frozen=True)
class Stretch:
    """A setting's run, to be trained up to a step."""

    setting: Setting
    seed: int
    step: int


@dataclass(frozen=True)
class Trained:
    """Times of a job that trained several runs.

    Attributes:
        took_s: times of the finished stretches, in order, including evaluations and checkpoints.
        start_s: time of the job besides them.
        message: cause of failure of the next stretch; "": none.
    """

    took_s: tuple[float, ...]
    start_s: float
    message: str = ""


@dataclass(frozen=True)
class RacedSettings:
    """Speeds of settings as measured in the race.

    Attributes:
        speeds: ratios to gradient averaging by name; empty: fewer than two could take part.
        baseline_per_s: speed that the ratios refer to, frames/s.
        frames_per_step: frames of all ranks per step, by name.
        left_out: settings that could not take part, with reasons.
    """

    speeds: Mapping[str, RacedSpeed]
    baseline_per_s: float
    frames_per_step: Mapping[str, float]
    left_out: Mapping[str, str]

    @classmethod
    def of(cls, race: RaceRecord) -> RacedSettings:
        """Return the speeds measured in a race."""
        speeds = race.speeds()
        per_step = {name: frames_per_step(race, name) for name in speeds}
        baseline_per_s = race.frames_per_s(race.plan.baseline) if speeds else 0.0
        return cls(speeds, baseline_per_s, per_step, race.plan.left_out)


def frames_per_step(race: RaceRecord, name: str) -> float:
    """Return the frames of all ranks per step of a raced setting."""
    turns = [turn for turn in race.turns if turn.setting == name and turn.round > 0]
    return sum(sum(turn.frames) for turn in turns) / sum(turn.steps for turn in turns)


class TunedJobs(ABC):
    """Starts the jobs of a search.

    Args:
        out: folder of the search.
        metric: metric that ranks a script's runs, as in `read_run`; "": the value that they log last.
    """

    def __init__(self, out: Path, metric: str = "") -> None:
        self._out, self._metric = out.absolute(), metric

    @abstractmethod
    def begin(self) -> None:
        """Prepare what all runs need.  Raises RunError."""

    #: Whether to refuse a race if even the shortest takes too much of the budget.
    chooses_race = True

    @abstractmethod
    def expected_race_s(
        self, settings: Sequence[Setting], backend: str, longest_s: float, pace: ExpectedTimes
    ) -> float:
        """Return the expected time of `hold_race`, s; 0 if the race was already held."""

    @abstractmethod
    def hold_race(
        self, settings: Sequence[Setting], backend: str, longest_s: float, pace: ExpectedTimes
    ) -> RacedSettings | str:
        """Race settings, unless that is done; return their speeds, or the cause of failure.

        Args:
            longest_s: time limit, s; turns are reduced to meet it as far as intervals allow.
            pace: expected times of these settings.
        """

    @abstractmethod
    def total_steps(self, frames_per_step: float) -> float:
        """Return the number of steps of a whole training; infinite if unknown."""

    @abstractmethod
    def command(self, setting: Setting, backend: str) -> str:
        """Return the command line that trains with a setting."""

    @abstractmethod
    def _train_some(
        self, strategies: Mapping[Path, StrategyChoice], backend: str, steps: int
    ) -> Besides | str:
        """Train some steps with each of some strategies and the first seed, without anything else.

        Delete what an earlier start left, because its steps would not be timed.

        Args:
            strategies: strategies by the folders of their runs, at least one.

        Returns:
            The shortest time besides the steps, or the cause of failure.
        """

    @abstractmethod
    def _train_on(self, run_dir: Path, setting: Setting, backend: str, seed: int, step: int) -> str | None:
        """Continue a run to its evaluation at or soon after a step; return None, or the cause of failure."""

    def measure(self, backend: str, *, knows_start: bool) -> Measurement | str:
        """Train some steps with each of MEASURED_STRATEGIES; return the results, or the cause of failure.

        Args:
            knows_start: the time of a job besides its steps is known.  If not, repeat all runs: to measure
                it, and because existing runs may belong to another search whose record was deleted.
        """
        folders = measured_dirs(self._out, backend)
        timed = {text for run_dir, text in folders.items() if is_timed(run_dir)}
        if knows_start and timed == set(MEASURED_STRATEGIES) - {_IN_PARTS}:
            # An earlier version measured without it; an additional run would change the predictions.
            folders = {run_dir: text for run_dir, text in folders.items() if text in timed}
        due = {
            run_dir: StrategyChoice(text)
            for run_dir, text in folders.items()
            if not (knows_start and is_timed(run_dir))
        }
        besides = self._train_some(due, backend, MEASURE_STEPS) if due else None
        if isinstance(besides, str):
            return besides
        try:
            runs = [
                # Its record has every option; here use the strategy as requested.
                replace(measured_run(read_run(run_dir), may_have_paused=True), strategy=StrategyChoice(text))
                for run_dir, text in folders.items()
            ]
        except ConfigError as error:
            return str(error)
        return Measurement(tuple(runs), besides)

    def step_s(self, backend: str) -> float:
        """Return the time of a step without prediction, s: that of the back-end's slowest measurement."""
        found = []
        for run_dir in measured_dirs(self._out, backend):
            timing = read_run(run_dir).timing
            found += [r.wall_s / r.steps for r in timing.ranks if r.steps] if timing is not None else []
        return max(found, default=0.0)

    def train_together(
        self,
        stretches: Sequence[Stretch],
        backend: str,
        longest_s: float,
        on_trained: Callable[[int], None],
    ) -> Trained:
        """Train runs one after another within one start, as far as possible; here only the first.

        Args:
            stretches: stretches to train, at least one.
            longest_s: time after which no further stretch begins, s; 0: train all.
            on_trained: called with the number of trained stretches when it grows, perhaps in another thread.
        """
        begun_s, one = time.monotonic(), stretches[0]
        message = self._train_on(
            self.run_dir(one.setting, one.seed), one.setting, backend, one.seed, one.step
        )
        took_s = time.monotonic() - begun_s
        return Trained((took_s,), 0.0) if message is None else Trained((), 0.0, message)

    def train_to(self, setting: Setting, backend: str, seed: int, step: int) -> Scored | str:
        """Train one setting's run up to a step or its end; return its scores, or the cause of failure.

        The run is evaluated there or soon after.  A run that has already trained that far is left alone.
        """
        if not self.has_trained_to(setting, seed, step):
            message = self._train_on(self.run_dir(setting, seed), setting, backend, seed, step)
            if message is not None:
                return message
        return self.scored(setting, seed, step)

    def scored(self, setting: Setting, seed: int, step: int) -> Scored | str:
        """Return the scores of a setting's run up to a step, or why there are none."""
        found = self._scored(self.run_dir(setting, seed))
        points = up_to(found.points, step)
        if found.has_diverged and not any(at >= step for at, _ in points):
            return "its held-out value is not finite"
        # A finished run counts as unfinished if it had more evaluations after that step.
        is_over = found.is_over and len(points) == len(found.points)
        return Scored(points, is_over, task=found.task) if points else "it was not evaluated"

    def has_trained_to(self, setting: Setting, seed: int, step: int) -> bool:
        """Return whether a setting's run has reached a step or its end, so that no job has to be started."""
        found = self._scored(self.run_dir(setting, seed))
        return found.is_over or found.has_diverged or any(at >= step for at, _ in found.points)

    def run_dir(self, setting: Setting, seed: int) -> Path:
        """Return the folder of a setting's run."""
        return self._out / RUNS / f"{setting.file_name}-seed{seed}"

    def _scored(self, run_dir: Path) -> Scored:
        if not (run_dir / "run.json").is_file():
            return Scored((), is_over=False)
        result = read_run(run_dir, self._metric)
        points = tuple(
            (one.step, one.score)
            for one in result.evaluations
            if one.score is not None and math.isfinite(one.score) and one.step > 0
        )
        last = result.evaluations[-1].score if result.evaluations else 0.0
        has_diverged = last is None or not math.isfinite(last)
        return Scored(points, result.completed, has_diverged, result.task)


def measured_dirs(out: Path, backend: str) -> dict[Path, str]:
    """Return the folders of the runs that measure a back-end, with their strategies."""
    return {out / MEASURED / f"{backend}-{text.partition(':')[0]}": text for text in MEASURED_STRATEGIES}


def is_timed(run_dir: Path) -> bool:
    """Return whether a short run was trained and timed."""
    return (run_dir / "timing.json").is_file()


def steps_of_turn(setting: Setting, least: int) -> int:
    """Return the steps of a setting's turn: at least `least`, in whole periods if these are in steps."""
    return turn_steps(Period.parse(str(setting.period_steps)), least, frames_a_step=1.0, step_s=None)


def up_to(points: Sequence[tuple[int, float]], step: int) -> tuple[tuple[int, float], ...]:
    """Return the evaluations up to the first at or after a step; asynchronous ranks overshoot a little."""
    passed = next((number for number, (at, _) in enumerate(points, start=1) if at >= step), len(points))
    return tuple(points[:passed])


def besides_steps_s(run_dir: Path, wall_s: float) -> float:
    """Return the time of a run besides its steps, s.

    Args:
        wall_s: total time, s.
    """
    timing = read_run(run_dir).timing
    trained = 0.0 if timing is None else max((rank.training_s for rank in timing.ranks), default=0.0)
    return max(0.0, wall_s - trained)
