"""A search from its first stage to its choice, with jobs that are made up."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from speechdp.errors import ConfigError, RunError
from speechdp.experiments.compare.record import read_record
from speechdp.experiments.jobs import JobStopped
from speechdp.experiments.race.plan import RaceOptions, RacePlan, RaceSetting
from speechdp.experiments.race.record import RaceRecord, Turn
from speechdp.experiments.race.shown import ShownRaces
from speechdp.experiments.tune import search as tune_search
from speechdp.experiments.tune.jobs import Measurement, RacedSettings, Scored, Stretch, Trained, up_to
from speechdp.experiments.tune.plan import Besides, ExpectedTimes, Setting
from speechdp.experiments.tune.record import (
    BackendRecord,
    ExchangeRecord,
    LinkRecord,
    SettingRecord,
    TuneRecord,
    read_tune,
)
from speechdp.experiments.tune.run import Tuner
from speechdp.experiments.tune.search import TunedTarget, TuneRequest
from speechdp.experiments.tune.training import fitting_race
from speechdp.launching.faults import Fault
from speechdp.parallel.registry import StrategyChoice
from speechdp.report.kit import formatting
from speechdp.report.runs.folders import read_run
from speechdp.report.runs.results import Evaluation, RunResult
from speechdp.report.runs.script_metric import script_task
from speechdp.report.tune.answer import find_answer
from speechdp.report.tune.report import shown_settings
from speechdp.report.tune.search import Search
from speechdp.report.tune.tables import backends_table, make_table, ratio_text
from speechdp.simulation.predict import Interval
from speechdp.tasks.metrics import LOG_PROB, TaskRecord
from speechdp.timing.load import OutsideLoad
from tests.helpers.races import made_up_race
from tests.helpers.terminal import on_terminal

GRADIENTS, SHORT, LONG = "gradient_averaging", "model_averaging:period=4", "model_averaging:period=16"
DPSGD = "dpsgd"
#: Frames/s of the settings, and what each is worth: the score after s seconds is -1 / (1 + worth s).
SPEEDS = {GRADIENTS: 100.0, SHORT: 150.0, LONG: 200.0, DPSGD: 90.0}
WORTH = {GRADIENTS: 1.0, SHORT: 3.0, LONG: 2.0, DPSGD: 9.0}
#: Further settings that none of the others rules out by its speed.
MORE = {f"bmuf:period={period}": speed for period, speed in ((4, 150.0), (16, 200.0), (64, 250.0))}
MORE |= {f"slowmo:period={period}": speed for period, speed in ((4, 160.0), (16, 210.0))}
SPEEDS |= MORE
WORTH |= {text: 1.0 + 0.1 * place for place, text in enumerate(MORE)}
FRAMES_A_STEP, EPOCH_STEPS = 10, 10_000


@pytest.fixture(autouse=True)
def no_time_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no time pass but that of a test's own clock.

    By the real one, a test that gets no core for a while spends its budget, as does a disk that is slow.
    """
    monkeypatch.setattr(tune_search, "time", SimpleNamespace(monotonic=lambda: 0.0))


@dataclass(frozen=True)
class MadeUp(Measurement):
    """Predicts the speeds above, `factor` times as fast."""

    factor: float = 1.0

    @property
    def frames_per_step(self) -> float:
        return FRAMES_A_STEP

    def predict(self, ranks: int, settings: Sequence[Setting]) -> dict[Setting, Interval]:
        found = {one: self.factor * SPEEDS[one.strategy.text] for one in settings}
        return {one: Interval(speed, 0.98 * speed, 1.02 * speed) for one, speed in found.items()}


def _rate(setting: Setting) -> float:
    """Steps/s of a setting."""
    return SPEEDS[setting.strategy.text] / FRAMES_A_STEP


@dataclass
class Jobs:
    """In place of `TunedTraining`: what would be started is listed, what would be trained is computed.

    Attributes:
        fails: texts of strategies that cannot be trained.
        stops_after: jobs of training after which a signal comes; -1: it comes as back-ends are measured.
        breaks: how many jobs of a strategy end by a lost rank.
        factors: how fast back-ends are; one that is missing does not work.
        starts: what a run takes with a back-end besides its steps, where that is not 0.5 s.
    """

    out: Path
    fails: tuple[str, ...] = ()
    stops_after: int | None = None
    breaks: dict[str, int] = field(default_factory=dict)
    factors: dict[str, float] = field(default_factory=lambda: {"mpi": 1.0})
    starts: dict[str, float] = field(default_factory=dict)
    trained: list[tuple[str, int, int]] = field(default_factory=list)
    raced: list[list[str]] = field(default_factory=list)
    measured: list[tuple[str, bool]] = field(default_factory=list)

    def begin(self) -> None:
        return

    def measure(self, backend: str, *, knows_start: bool) -> Measurement | str:
        if self.stops_after == -1:
            raise JobStopped
        if backend not in self.factors:
            return "is not installed"
        self.measured.append((backend, knows_start))
        besides = Besides(0.0, self.starts.get(backend, 0.5))
        return MadeUp((), None if knows_start else besides, self.factors[backend])

    def hold_race(
        self, settings: Sequence[Setting], backend: str, longest_s: float, pace: ExpectedTimes
    ) -> RacedSettings | str:
        self.raced.append([one.name for one in settings])
        racing = tuple(RaceSetting(one.name, one.strategy, batch_size=one.batch_size) for one in settings)
        rounds = 8
        turns = tuple(
            Turn(number, one.name, 10, (50, 50), (seconds, seconds))
            for number in range(rounds + 1)
            for one in settings
            for seconds in [10 * FRAMES_A_STEP / SPEEDS[one.strategy.text] * (1 + 0.01 * number)]
        )
        plan = RacePlan(2, rounds, 10, 1, racing)
        return RacedSettings.of(RaceRecord(plan, turns, ("a", "a"), ({}, {}), "", 1.0))

    chooses_race = True

    def expected_race_s(
        self, settings: Sequence[Setting], backend: str, longest_s: float, pace: ExpectedTimes
    ) -> float:
        return 0.0

    def step_s(self, backend: str) -> float:
        return FRAMES_A_STEP / min(SPEEDS.values())

    def total_steps(self, frames_per_step: float) -> float:
        return EPOCH_STEPS

    def train_to(self, setting: Setting, backend: str, seed: int, step: int) -> Scored | str:
        if self.has_trained_to(setting, seed, step):
            return self.scored(setting, seed, step)
        return self._train(setting, seed, step) or self.scored(setting, seed, step)

    def _train(self, setting: Setting, seed: int, step: int) -> str | None:
        if self.stops_after is not None and len(self.trained) >= self.stops_after:
            raise JobStopped
        if setting.strategy.text in self.fails:
            return "the loss is nan"
        if self.breaks.get(setting.strategy.text, 0):
            self.breaks[setting.strategy.text] -= 1
            return "rank 1 was lost"
        self.trained.append((setting.name, seed, step))
        return None

    def train_together(
        self,
        stretches: Sequence[Stretch],
        backend: str,
        longest_s: float,
        on_trained: Callable[[int], None],
    ) -> Trained:
        """As with a script: one run."""
        one, begun_s = stretches[0], tune_search.time.monotonic()
        message = self._train(one.setting, one.seed, one.step)
        took_s = tune_search.time.monotonic() - begun_s
        return Trained((), 0.0, message) if message else Trained((took_s,), 0.0)

    def stands(self, setting: Setting, seed: int) -> int:
        """Return how many steps a run has trained."""
        ends = [at for name, of, at in self.trained if (name, of) == (setting.name, seed)]
        return max(ends, default=0)

    def scored(self, setting: Setting, seed: int, step: int) -> Scored | str:
        rate = _rate(setting)
        worth = WORTH[setting.strategy.text] * (1.0 if seed == 1 else 1.01)
        steps = sorted({max(1, step * share // 4) for share in (1, 2, 3, 4)})
        return Scored(tuple((at, -1 / (1 + worth * at / rate)) for at in steps), is_over=False)

    def has_trained_to(self, setting: Setting, seed: int, step: int) -> bool:
        return any((name, of) == (setting.name, seed) and at >= step for name, of, at in self.trained)

    def run_dir(self, setting: Setting, seed: int) -> Path:
        return self.out.absolute() / "runs" / f"{setting.name}-{seed}".replace(":", "-").replace(" ", "-")

    def command(self, setting: Setting, backend: str) -> str:
        return f"train --strategy {setting.strategy.text} --backend {backend}"


@dataclass
class Timed(Jobs):
    """Jobs that take time, by a clock of their own.

    Attributes:
        race_s: of the race.
        start_s: of a job.
        factor: of what a step takes in training over what it took in the race.
        first_step: of a setting, where its first evaluation is later than the others'.
    """

    race_s: float = 0.0
    start_s: float = 0.0
    factor: float = 1.0
    first_step: dict[str, int] = field(default_factory=dict)
    now_s: float = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def hold_race(
        self, settings: Sequence[Setting], backend: str, longest_s: float, pace: ExpectedTimes
    ) -> RacedSettings | str:
        self.now_s += self.race_s
        return super().hold_race(settings, backend, longest_s, pace)

    def _train(self, setting: Setting, seed: int, step: int) -> str | None:
        end = max(step, self.first_step.get(setting.name, 0))
        self.now_s += self.start_s + self.factor * (end - self.stands(setting, seed)) / _rate(setting)
        return super()._train(setting, seed, end)

    def scored(self, setting: Setting, seed: int, step: int) -> Scored | str:
        first = self.first_step.get(setting.name, 0)
        found = super().scored(setting, seed, max(step, first))
        assert isinstance(found, Scored)
        kept = tuple(point for point in found.points if point[0] >= first)
        return Scored(kept, found.is_over)


@dataclass
class Together(Jobs):
    """Jobs that train several runs in one start.

    Attributes:
        jobs: how many each was asked to train, and for how long it may begin others.
        capped: a job begins no other after so many runs.
    """

    jobs: list[tuple[int, float]] = field(default_factory=list)
    capped: int = 1_000
    alone: list[str] = field(default_factory=list)

    def train_together(
        self,
        stretches: Sequence[Stretch],
        backend: str,
        longest_s: float,
        on_trained: Callable[[int], None],
    ) -> Trained:
        self.jobs.append((len(stretches), longest_s))
        took_s: list[float] = []
        for one in stretches[: self.capped]:
            before = self.stands(one.setting, one.seed)
            message = self._train(one.setting, one.seed, one.step)
            if message is not None:
                return Trained(tuple(took_s), 3.0, message)
            raced = _rate(one.setting) / 1.045  # in the mean
            took_s.append(2.0 + (one.step - before) / raced)
            on_trained(len(took_s))
        return Trained(tuple(took_s), 3.0)

    def train_to(self, setting: Setting, backend: str, seed: int, step: int) -> Scored | str:
        if not self.has_trained_to(setting, seed, step):
            self.alone.append(setting.name)
        return super().train_to(setting, backend, seed, step)


def timed_search(
    monkeypatch: pytest.MonkeyPatch, jobs: Timed, **options: Any
) -> tuple[TuneRecord, list[str]]:
    """Return what a search finds, and what it says."""
    told: list[str] = []
    monkeypatch.setattr(tune_search, "time", SimpleNamespace(monotonic=jobs.monotonic))
    return search(jobs.out, jobs, print_line=told.append, **options), told


def target_of(value: float) -> TunedTarget:
    return TunedTarget(value, script_task("score:max"))


def search(
    out: Path,
    jobs: Jobs,
    texts: Sequence[str] = (GRADIENTS, SHORT, LONG, DPSGD),
    backends: tuple[str, ...] = ("mpi",),
    print_line: Callable[[str], None] = lambda line: None,
    **changes: Any,
) -> TuneRecord:
    values: dict[str, Any] = {
        "out": out,
        "ranks": 2,
        "tried": tuple(Setting(StrategyChoice(text)) for text in texts),
        "backends": backends,
        "batch_sizes": (),
        "budget_s": 500.0,
        "target": TunedTarget(None, script_task("")),
        "seeds": (1, 2),
        "race": RaceOptions(6, 16),
        "trained": {"data": "x"},
        **changes,
    }
    return Tuner(TuneRequest(**values), jobs, print_line).run()  # type: ignore[arg-type]


def test_the_setting_that_learns_fastest_is_chosen_not_the_fastest(tmp_path: Path) -> None:
    jobs = Jobs(tmp_path)
    record = search(tmp_path, jobs)
    assert record.chosen == SHORT and record.completed
    assert record.command == f"train --strategy {SHORT} --backend mpi"
    assert jobs.raced == [[GRADIENTS, SHORT, LONG]]  # dpsgd is slower than gradient averaging
    assert "predicted to be slower" in record.of(DPSGD).why and record.of(DPSGD).out_in == "predict"
    assert record.of(LONG).ratio == pytest.approx(2.0) and record.of(LONG).steps_per_s is not None
    assert [set(rung.settings) for rung in record.rungs] == [{GRADIENTS, SHORT, LONG}, {SHORT, LONG}]
    assert record.of(GRADIENTS).out_in == "halving"
    assert len(record.of(SHORT).times_s) == 2 and record.of(SHORT).times_s < record.of(LONG).times_s
    assert read_tune(tmp_path) == record


@dataclass
class Crossing(Jobs):
    """Scores are -(1 + s)^-p with another p for LONG, which is ahead of the others from `cross_s` on."""

    cross_s: float = 100.0

    def scored(self, setting: Setting, seed: int, step: int) -> Scored | str:
        power, factor = (0.35, (1 + self.cross_s) ** 0.15) if setting.name == LONG else (0.2, 1.0)
        factor *= 1.2 if setting.name == GRADIENTS else 1.0
        found = (
            (at, at / _rate(setting)) for at in sorted({max(1, step * part // 8) for part in range(1, 9)})
        )
        return Scored(tuple((at, -factor * (1 + s) ** -power) for at, s in found), is_over=False)


def test_a_setting_that_is_about_to_lead_is_chosen(tmp_path: Path) -> None:
    seen = search(tmp_path / "seen", Crossing(tmp_path / "seen", cross_s=0.1)).rungs[-1].seconds
    record = search(tmp_path / "late", Crossing(tmp_path / "late", cross_s=1.3 * seen))
    last = record.rungs[-1]
    assert last.scores[LONG] < last.scores[SHORT] and last.expected[LONG] > last.expected[SHORT]
    assert record.chosen == LONG and record.of(SHORT).why.startswith("it reaches the target ")
    assert min(time for time in record.of(LONG).times_s if time is not None) > last.seconds
    assert "expected to stay behind 2 others" in record.of(GRADIENTS).why
    answer = find_answer(Search(record, {}))
    assert any("later times are extrapolated" in line for line in answer.details)
    assert read_tune(tmp_path / "late") == record
    # One that leads only when it has trained on for more than as long again is not expected to.
    later = search(tmp_path / "later", Crossing(tmp_path / "later", cross_s=6.0 * seen))
    assert later.chosen == SHORT


def test_doubts_about_predictions_are_told_where_something_rests_on_them(tmp_path: Path) -> None:
    def cautions(search: Search) -> str:
        return " ".join(find_answer(search).cautions)

    # DPSGD is ruled out by its prediction, and there is a single back-end.
    record = search(tmp_path, Jobs(tmp_path), texts=(GRADIENTS, SHORT, LONG, DPSGD))
    assert record.of(DPSGD).out_in == "predict"
    assert "predict" not in cautions(Search(record, {}, loads={}))
    mpi_busy = {"mpi": OutsideLoad(0.98, 0.0)}
    busy = cautions(Search(record, {}, loads=mpi_busy))
    assert "(mpi: 0.98 cores busy with other work), so predictions may be wrong: to be sure of what" in busy
    assert (
        "to be sure of what was ruled out by prediction (1 setting), search again" in busy
        and "choice of the back-end" not in busy
    )
    failed = replace(record, backends=(*record.backends, BackendRecord("torch")))
    assert "choice of the back-end" not in cautions(Search(failed, {}, loads=mpi_busy))
    two = replace(record, backends=(*record.backends, BackendRecord("torch", 90.0, why="slower")))
    assert "and the choice of the back-end, search again" in cautions(Search(two, {}, loads=mpi_busy))
    other = cautions(Search(two, {}, loads={"torch": OutsideLoad(0.98, 0.3)}))
    assert "(torch: 0.98 cores busy with other work and 0.3 stolen by the virtual machine's host)" in other
    assert ": to be sure of the choice of the back-end, search again" in other
    # A common factor rules nothing out wrongly; what was predicted otherwise than the others may be.
    slow = replace(
        record, tried=tuple(replace(one, predicted=0.5 * (one.predicted or 0.0)) for one in record.tried)
    )
    assert "refutes" not in cautions(Search(slow, {}))
    off = replace(record.of(SHORT), predicted=400.0)
    told = cautions(Search(replace(record, tried=(record.tried[0], off, *record.tried[2:])), {}))
    assert (
        f"The race refutes a prediction: {SHORT} was predicted to be 4.00 times as fast as {GRADIENTS}, "
        "and is 1.5" in told
    )
    # Nothing was ruled out by prediction.
    all_raced = search(tmp_path / "all", Jobs(tmp_path / "all"), texts=(GRADIENTS, SHORT, LONG))
    assert "cores busy" not in cautions(Search(all_raced, {}, loads=mpi_busy))


@pytest.mark.parametrize("target", [0.9, math.nan, math.inf])
def test_a_target_that_no_model_reaches_is_refused_before_anything_else(target: float) -> None:
    with pytest.raises(ConfigError, match=f"--target {target:g}: "):
        TunedTarget(target, TaskRecord((LOG_PROB,)))


def test_a_search_that_was_interrupted_may_be_given_another_target(tmp_path: Path) -> None:
    jobs = Jobs(tmp_path, stops_after=2)
    with pytest.raises(JobStopped):
        search(tmp_path, jobs, target=target_of(-1e-9))
    jobs.stops_after = None
    record = search(tmp_path, jobs, target=target_of(-0.5))
    assert record.target == -0.5 and record.settings["target"] == -0.5 and record.completed


def test_a_search_that_is_over_is_judged_again_by_another_target(tmp_path: Path) -> None:
    told: list[str] = []
    jobs = Jobs(tmp_path)
    search(tmp_path, jobs, target=target_of(-1e-9))
    trained = set(jobs.trained)
    record = search(tmp_path, jobs, target=target_of(-0.005), print_line=told.append)
    assert set(jobs.trained) == trained and record == read_tune(tmp_path)
    assert told == [f"{tmp_path}: this search is over; its runs are judged by the target given now"]
    fresh = search(tmp_path / "fresh", Jobs(tmp_path / "fresh"), target=target_of(-0.005))
    for key in ("target", "chosen", "untold", "command", "completed"):
        assert getattr(record, key) == getattr(fresh, key), key
    # How long a rung is follows from the time that a search has taken, which no two have in common.
    one, other = ([(each.name, each.out_in, each.rungs) for each in found.tried] for found in (record, fresh))
    assert one == other
    assert None not in record.of(SHORT).times_s and record.of(SHORT).why == ""


def test_another_target_stays_to_be_judged_by_where_that_is_interrupted(tmp_path: Path) -> None:
    jobs = Jobs(tmp_path)
    first = search(tmp_path, jobs, target=target_of(-1e-9))
    jobs.trained = [run for run in jobs.trained if run[1] == 1]  # runs of other seeds were deleted
    jobs.stops_after = 0
    with pytest.raises(JobStopped):
        search(tmp_path, jobs, target=target_of(-0.005))
    kept = read_tune(tmp_path)
    assert kept is not None and kept.settings["target"] == -1e-9 and kept.chosen == first.chosen
    jobs.stops_after = None
    told: list[str] = []
    record = search(tmp_path, jobs, target=target_of(-0.005), print_line=told.append)
    assert told[0] == f"{tmp_path}: this search is over; its runs are judged by the target given now"
    assert record.settings["target"] == -0.005 and record.target == -0.005


def test_settings_of_a_rung_train_for_the_same_time(tmp_path: Path) -> None:
    jobs = Jobs(tmp_path)
    record = search(tmp_path, jobs)
    for rung in record.rungs:
        for name in rung.settings:
            rate = record.of(name).steps_per_s
            assert rate is not None
            assert (name, 1, round(rung.seconds * rate)) in jobs.trained
    assert record.rungs[1].seconds >= 1.2 * record.rungs[0].seconds


@dataclass
class SeldomSeen(Timed):
    """Runs are evaluated where they stop, and nowhere else: epochs are longer than rungs."""

    def scored(self, setting: Setting, seed: int, step: int) -> Scored | str:
        found = super().scored(setting, seed, step)
        assert isinstance(found, Scored)
        stops = {at for name, of, at in self.trained if (name, of) == (setting.name, seed)}
        return Scored(tuple(point for point in found.points if point[0] in stops), found.is_over)


def test_a_run_that_stops_at_an_outer_step_is_not_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = SeldomSeen(tmp_path)
    record, told = timed_search(monkeypatch, jobs, texts=(GRADIENTS, *MORE))
    assert not any("not all settings were evaluated by then" in line for line in told) and record.completed
    for name, period in (("bmuf:period=16", 16), ("bmuf:period=64", 64)):
        rate = record.of(name).steps_per_s
        assert rate is not None
        asked = [round(rung.seconds * rate) for rung in record.rungs if name in rung.scores]
        stops = sorted({at for of, seed, at in jobs.trained if (of, seed) == (name, 1)})
        assert [abs(at - wanted) <= wanted / 10 for at, wanted in zip(stops, asked, strict=True)]
        assert any(at % period == 0 and at != wanted for at, wanted in zip(stops, asked, strict=True))


def test_a_search_that_is_stopped_goes_on_where_it_was(tmp_path: Path) -> None:
    whole, jobs = Jobs(tmp_path / "whole"), Jobs(tmp_path / "parts", stops_after=2)
    expected = search(tmp_path / "whole", whole)
    with pytest.raises(JobStopped):
        search(tmp_path / "parts", jobs)
    stopped = read_tune(tmp_path / "parts")
    assert stopped.chosen == LONG and not stopped.completed  # the fastest so far
    assert len(stopped.rungs) == 1
    jobs.stops_after = None
    record = search(tmp_path / "parts", jobs)
    assert record.rungs[0].seconds == stopped.rungs[0].seconds
    assert record.chosen == expected.chosen and record.completed
    before = list(jobs.trained)
    assert search(tmp_path / "parts", jobs) == record and jobs.trained == before


def test_a_search_that_is_stopped_twice_is_still_whole(tmp_path: Path) -> None:
    jobs = Jobs(tmp_path, stops_after=4)
    with pytest.raises(JobStopped):
        search(tmp_path, jobs, batch_sizes=(8,))
    first = read_tune(tmp_path)
    jobs.stops_after = -1
    with pytest.raises(JobStopped):
        search(tmp_path, jobs, batch_sizes=(8,))
    again = read_tune(tmp_path)
    assert (again.rungs, again.tried, again.chosen) == (first.rungs, first.tried, first.chosen)
    jobs.stops_after = None
    record = search(tmp_path, jobs, batch_sizes=(8,))
    assert record.completed and record.rungs[0].seconds == first.rungs[0].seconds


@pytest.mark.parametrize(("trained", "told"), [(0, "Fastest"), (3, "Best")])
def test_a_search_that_stops_in_a_race_held_again_has_a_best_of_before(
    tmp_path: Path, trained: int, told: str
) -> None:
    """The record of its race was damaged, say."""

    class Racing(Jobs):
        def hold_race(
            self, settings: Sequence[Setting], backend: str, longest_s: float, pace: ExpectedTimes
        ) -> RacedSettings | str:
            raise JobStopped

    with pytest.raises(JobStopped):
        search(tmp_path, Jobs(tmp_path, stops_after=trained))
    chosen = read_tune(tmp_path).chosen
    with pytest.raises(JobStopped):
        search(tmp_path, Racing(tmp_path))
    answer = find_answer(Search(read_tune(tmp_path), {}))
    held = "as an earlier command found; the race has to be held again"
    assert answer.headline == f"{told} so far: {chosen}, {held}."
    assert ("by its speed alone" in answer.cautions[0]) == (told == "Fastest")


def test_a_back_end_that_was_chosen_stays(tmp_path: Path) -> None:
    jobs = Jobs(tmp_path, factors={"mpi": 1.0}, stops_after=1)
    with pytest.raises(JobStopped):
        search(tmp_path, jobs, backends=("horovod", "mpi"))
    jobs.factors, jobs.stops_after = {"horovod": 9.0, "mpi": 1.0}, None
    record = search(tmp_path, jobs, backends=("horovod", "mpi"))
    assert record.backend == "mpi" and record.command.endswith("--backend mpi")
    assert [one.why for one in record.backends] == ["is not installed", ""]


def test_what_a_start_takes_is_that_of_the_back_end_chosen(tmp_path: Path) -> None:
    starts = {"mpi": 2.0, "torch": 9.0}
    jobs = Jobs(tmp_path, factors=dict.fromkeys(starts, 1.0), starts=starts, stops_after=0)
    for _ in range(2):
        with pytest.raises(JobStopped):
            search(tmp_path, jobs, backends=("mpi", "torch"))
        record = read_tune(tmp_path)
        assert record.backend == "mpi" and record.besides == Besides(0.0, 2.0)
        assert {one.name: one.run_s for one in record.backends} == starts
    assert jobs.measured == [("mpi", False), ("torch", False), ("mpi", True)]


def test_what_a_rung_has_shown_of_starts_is_known_to_the_next_command_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    race_starts = []

    class StoppedAfterARung(Timed):
        def hold_race(self, *given: Any) -> RacedSettings | str:
            race_starts.append(given[-1].start_s)
            return super().hold_race(*given)

        def _train(self, *given: Any) -> str | None:
            if len(self.trained) == 3:
                raise JobStopped
            return super()._train(*given)

    jobs, known = StoppedAfterARung(tmp_path, start_s=9.0), set()
    for _ in range(2):
        with pytest.raises(JobStopped):
            timed_search(monkeypatch, jobs)
        known.add(read_tune(tmp_path).run_s)
    assert len(known) == 1 and known.pop() > 5.0
    assert race_starts == [0.5, 0.5]  # as measured, or the next command would hold another race


@pytest.mark.parametrize("missing", [("start_s", "run_s"), ("run_s",)])
def test_an_earlier_versions_search_is_measured_again_for_what_a_start_takes(
    tmp_path: Path, missing: tuple[str, ...]
) -> None:
    jobs = Jobs(tmp_path, stops_after=0)
    with pytest.raises(JobStopped):
        search(tmp_path, jobs)
    content = json.loads((tmp_path / "tune.json").read_text())
    for forgotten in missing:
        del content["backends"][0][forgotten]
    (tmp_path / "tune.json").write_text(json.dumps({**content, "start_s": 0.0}))
    jobs.starts = {"mpi": 3.0}
    with pytest.raises(JobStopped):
        search(tmp_path, jobs)
    assert read_tune(tmp_path).run_s == 3.0
    assert jobs.measured == [("mpi", False), ("mpi", False)]


def test_a_back_end_that_fails_later_is_named(tmp_path: Path) -> None:
    jobs = Jobs(tmp_path, stops_after=1)
    with pytest.raises(JobStopped):
        search(tmp_path, jobs)
    jobs.factors = {}
    with pytest.raises(
        RunError, match="back-end mpi, with which this search has begun, fails: is not installed"
    ):
        search(tmp_path, jobs)
    assert read_tune(tmp_path).chosen


def test_a_job_that_is_lost_once_is_tried_again(tmp_path: Path) -> None:
    told: list[str] = []
    record = search(tmp_path, Jobs(tmp_path, breaks={SHORT: 1}), print_line=told.append)
    assert (
        record.chosen == SHORT and f"halving: {SHORT} failed and is tried once more: rank 1 was lost" in told
    )


def test_a_run_that_has_diverged_is_not_tried_again(tmp_path: Path) -> None:
    class Diverging(Jobs):
        def scored(self, setting: Setting, seed: int, step: int) -> Scored | str:
            if setting.strategy.text == SHORT:
                return "its held-out value is not finite"
            return super().scored(setting, seed, step)

    told: list[str] = []
    jobs = Diverging(tmp_path)
    record = search(tmp_path, jobs, print_line=told.append)
    assert record.of(SHORT).why == "it failed: its held-out value is not finite"
    assert [name for name, _, _ in jobs.trained].count(SHORT) == 1
    assert not any("tried once more" in line for line in told)


def test_where_all_settings_diverge_the_same_command_is_not_advised(tmp_path: Path) -> None:
    class Diverging(Jobs):
        def scored(self, setting: Setting, seed: int, step: int) -> Scored | str:
            return "its held-out value is not finite"

    with pytest.raises(
        RunError, match=r"value is not finite; .*; the same command would find no more: .* another folder$"
    ):
        search(tmp_path, Diverging(tmp_path))


def test_a_training_that_comes_to_its_end_before_the_others_is_not_started_again(tmp_path: Path) -> None:
    class Ending(Jobs):
        def has_trained_to(self, setting: Setting, seed: int, step: int) -> bool:
            # SHORT ends within the first part, whatever is asked for.
            is_over = setting.strategy.text == SHORT and self.stands(setting, seed) > 0
            return is_over or super().has_trained_to(setting, seed, step)

    told: list[str] = []
    jobs = Ending(tmp_path)
    record = search(tmp_path, jobs, print_line=told.append)
    assert len(record.rungs) > 1 and record.chosen == SHORT  # which has gone through all of them
    assert [(name, seed) for name, seed, _ in jobs.trained].count((SHORT, 2)) == 1
    assert not any("tried once more" in line for line in told)


def test_strategies_that_do_not_say_what_they_send_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SPEEDS, "of_a_script:period=4", SPEEDS[SHORT])
    monkeypatch.setitem(WORTH, "of_a_script:period=4", WORTH[SHORT])
    told: list[str] = []
    search(tmp_path, Jobs(tmp_path), (GRADIENTS, SHORT, "of_a_script:period=4"), print_line=told.append)
    (line,) = [line for line in told if "not predicted" in line]
    assert line.startswith(
        "predict: of_a_script:period=4: not predicted, only raced, because it is not known "
    )
    told.clear()
    search(tmp_path / "ours", Jobs(tmp_path / "ours"), print_line=told.append)
    assert not any("not predicted" in line for line in told)


def test_a_rung_is_one_start(tmp_path: Path) -> None:
    told: list[str] = []
    jobs = Together(tmp_path)
    record = search(tmp_path, jobs, print_line=told.append)
    expected = search(tmp_path / "each", Jobs(tmp_path / "each"))
    assert record.chosen == expected.chosen and record.completed
    assert [one.settings for one in record.rungs] == [one.settings for one in expected.rungs]
    assert [count for count, _ in jobs.jobs] == [3, 2, 4]  # two rungs, and two stops of the other seed
    # The first rung ends in any case; a later one begins its last run in time for that to end.
    assert jobs.jobs[0][1] == 0.0
    last_s = record.rungs[1].seconds - record.rungs[0].seconds + 3.0 + 2.0
    assert jobs.jobs[1][1] == pytest.approx(1.01 * 500.0 - last_s, abs=2.0)
    assert not jobs.alone
    scores = [line for line in told if line.startswith("halving: [")]
    assert len(scores) == len(set(scores)) == 9  # each said once
    assert record.start_s == 3.0 and record.run_s == pytest.approx(2.0, abs=0.5)


def test_a_run_that_fails_in_a_job_of_several_is_tried_alone_and_the_others_go_on_together(
    tmp_path: Path,
) -> None:
    told: list[str] = []
    jobs = Together(tmp_path, breaks={SHORT: 1})
    record = search(tmp_path, jobs, print_line=told.append)
    assert record.chosen == SHORT and jobs.alone == [SHORT]  # of the first rung
    assert [count for count, _ in jobs.jobs][:2] == [3, 1]
    assert f"halving: {SHORT} failed and is tried once more: rank 1 was lost" in told
    failing = Together(tmp_path / "fails", fails=(SHORT,))
    record = search(tmp_path / "fails", failing)
    assert record.of(SHORT).why == "it failed: the loss is nan" and record.chosen == LONG
    assert failing.alone == [SHORT]  # though in vain


def test_a_job_that_would_take_too_long_ends_early_and_the_search_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Capped(Together):
        def train_together(self, *given: Any) -> Trained:
            if self.jobs:  # the machine has become slow
                self.capped, clock.now_s = 1, 1e4
            return super().train_together(*given)

    clock = SimpleNamespace(now_s=0.0)
    monkeypatch.setattr(tune_search, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    jobs, told = Capped(tmp_path), list[str]()
    record = search(tmp_path, jobs, print_line=told.append)
    assert [count for count, _ in jobs.jobs] == [3, 2] and len(record.rungs) == 1 and record.completed
    assert "halving: the budget is used up, so settings are judged by what they have trained" in told


def test_a_job_that_leaves_nothing_is_no_fault_of_the_other_settings(tmp_path: Path) -> None:
    class Empty(Together):
        def train_together(self, *given: Any) -> Trained:
            if not self.jobs:
                self.jobs.append((0, 0.0))
                return Trained((), 3.0)
            return super().train_together(*given)

    told: list[str] = []
    jobs = Empty(tmp_path)
    record = search(tmp_path, jobs, print_line=told.append)
    assert record.chosen == SHORT and jobs.alone == [GRADIENTS]
    assert f"halving: {GRADIENTS} failed and is tried once more: it was not trained" in told


def test_a_search_that_is_stopped_in_a_job_of_several_goes_on(tmp_path: Path) -> None:
    jobs = Together(tmp_path, stops_after=2)
    with pytest.raises(JobStopped):
        search(tmp_path, jobs)
    stopped = read_tune(tmp_path)
    assert len(stopped.rungs) == 1 and all(stopped.of(name).runs for name in (GRADIENTS, SHORT, LONG))
    jobs.stops_after = None
    record = search(tmp_path, jobs)
    assert record.chosen == SHORT and [count for count, _ in jobs.jobs] == [3, 1, 2, 4]


def test_a_search_that_is_over_says_so(tmp_path: Path) -> None:
    told: list[str] = []
    search(tmp_path, Jobs(tmp_path))
    search(tmp_path, Jobs(tmp_path), budget_s=5000.0, print_line=told.append)
    assert told == [f"{tmp_path}: this search is over; for another one give another folder"]


def test_other_seeds_are_evaluated_at_the_ends_of_the_last_rungs_too(tmp_path: Path) -> None:
    jobs = Jobs(tmp_path)
    record = search(tmp_path, jobs)
    stops = [step for name, seed, step in jobs.trained if (name, seed) == (SHORT, 2)]
    rate = record.of(SHORT).steps_per_s
    assert rate is not None
    assert stops == [round(rung.seconds * rate) for rung in record.rungs]


def test_a_budget_is_kept_although_jobs_take_longer_than_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """195 s are left for 8 settings; a start takes 1 s more than believed, and training a fifth longer."""
    jobs = Timed(tmp_path, starts={"mpi": 6.5}, race_s=105.0, start_s=7.5, factor=1.2)
    record, told = timed_search(monkeypatch, jobs, texts=(GRADIENTS, SHORT, LONG, *MORE), budget_s=300.0)
    assert [len(rung.settings) for rung in record.rungs] == [8, 2]  # as below
    assert "halving: the budget does not suffice for all rungs, so only the best 2 continue" in told
    assert len(record.of(record.chosen).times_s) == 2
    assert 250.0 < record.spent_s <= 305.0
    assert record.backends[0].run_s == 6.5 and 7.5 < record.run_s < 12.0


@pytest.mark.parametrize(
    ("start_s", "rungs", "seeds"), [(6.5, 3, 2), (10.0, 2, 2), (16.0, 2, 1), (23.0, 1, 1)]
)
def test_where_the_budget_is_short_rungs_are_left_out_then_seeds_then_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start_s: float, rungs: int, seeds: int
) -> None:
    jobs = Timed(tmp_path, starts={"mpi": 6.5}, race_s=60.0, start_s=start_s)
    record, told = timed_search(monkeypatch, jobs, texts=(GRADIENTS, SHORT, LONG, *MORE), budget_s=260.0)
    assert len(record.rungs) == rungs and len(record.of(record.chosen).times_s) == seeds
    assert record.completed and len(record.left) == 2
    assert record.spent_s <= 265.0
    assert ("halving: the budget is used up: without seed 2" in told) == (seeds == 1)
    assert any("judged by what they have trained" in line for line in told) == (rungs == 1)


def test_a_rung_is_given_up_where_its_jobs_would_not_end_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class SlowLater(Timed):
        """The machine grows slow after the first rung."""

        def _train(self, *given: Any) -> str | None:
            self.start_s = 6.5 if len(self.trained) < 8 else 60.0
            return super()._train(*given)

    jobs = SlowLater(tmp_path, starts={"mpi": 6.5}, race_s=20.0)
    record, told = timed_search(monkeypatch, jobs, texts=(GRADIENTS, SHORT, LONG, *MORE), budget_s=260.0)
    assert len(record.rungs) == 1 and set(record.rungs[0].scores) == {GRADIENTS, SHORT, LONG, *MORE}
    assert record.completed and len(record.left) == 2 and record.chosen in record.left
    assert "halving: the budget is used up, so settings are judged by what they have trained" in told
    assert record.spent_s <= 260.0 + 60.0  # the job under way ends


def test_settings_are_compared_from_where_all_were_evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script that evaluates its slow setting late gives it no score at the end of the first rung."""
    jobs = Timed(tmp_path, first_step={GRADIENTS: 600})
    record, told = timed_search(monkeypatch, jobs)
    late_s = 600 / (SPEEDS[GRADIENTS] / FRAMES_A_STEP)
    assert record.rungs[0].seconds == pytest.approx(late_s, rel=0.1)
    (said,) = (line for line in told if "not all settings were evaluated by then" in line)
    assert "all train until" in said
    for name in record.rungs[0].settings:
        rate = record.of(name).steps_per_s
        assert rate is not None and (name, 1, round(record.rungs[0].seconds * rate)) in jobs.trained
    assert read_tune(tmp_path) == record


def test_a_step_or_two_past_the_end_of_a_rung_count_as_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, _ = timed_search(monkeypatch, Timed(tmp_path / "whole"))
    rate = record.of(GRADIENTS).steps_per_s
    assert rate is not None
    due = round(record.rungs[0].seconds * rate)
    jobs = Timed(tmp_path / "late", first_step={GRADIENTS: due + 1})
    late, told = timed_search(monkeypatch, jobs)
    assert late.rungs[0].seconds == record.rungs[0].seconds
    assert not any("not all settings were evaluated" in line for line in told)


def test_the_budget_that_is_advised_is_enough(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        search(tmp_path, Jobs(tmp_path), budget_s=8.0)
    found = re.search(r"give at least (\d+)s", str(refused.value))
    assert found is not None and search(tmp_path, Jobs(tmp_path), budget_s=float(found[1])).completed


@dataclass
class LongRace(Jobs):
    """The race takes half of a quarter of the budget, `least_s` at least, and is known to."""

    least_s: float = 4.0

    def expected_race_s(
        self, settings: Sequence[Setting], backend: str, longest_s: float, pace: ExpectedTimes
    ) -> float:
        return 0.0 if self.raced else max(self.least_s, longest_s / 2)


def test_a_budget_that_is_too_small_is_refused_before_the_race(tmp_path: Path) -> None:
    jobs, told = LongRace(tmp_path), list[str]()
    with pytest.raises(ConfigError) as refused:
        search(tmp_path, jobs, budget_s=10.0, print_line=told.append)
    assert (
        "the shortest race of 3 settings is expected to take 4.0 s, and training 3 settings rung by rung"
        in str(refused.value)
    )
    assert not jobs.raced and not any(line.startswith("race") for line in told)
    (wanted,) = re.findall(r"go on with --budget (\d+)s \(what was measured is kept\)", str(refused.value))
    record = search(tmp_path, jobs, budget_s=float(wanted))
    assert record.completed and len(jobs.raced) == 1
    # Where it was held nothing is expected any more.
    with pytest.raises(
        ConfigError, match="and the rest would train each of 3 settings for fewer than 20 steps"
    ):
        search(tmp_path / "held", LongRace(tmp_path / "held", raced=[["it was"]]), budget_s=8.0)


@dataclass
class SlowToRead(LongRace):
    """What is there takes long to read and to predict from, as on a slow disk, in every command."""

    now_s: float = 0.0

    def begin(self) -> None:
        self.now_s += 20.0


def test_a_refused_budget_stays_the_same_and_the_one_that_is_advised_is_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs, advised = SlowToRead(tmp_path), list[str]()
    monkeypatch.setattr(tune_search, "time", SimpleNamespace(monotonic=lambda: jobs.now_s))
    for _ in range(3):
        with pytest.raises(ConfigError) as refused:
            search(tmp_path, jobs, budget_s=10.0)
        advised += re.findall(r"go on with --budget (\d+)s", str(refused.value))
    assert len(advised) == 3 and len(set(advised)) == 1
    assert search(tmp_path, jobs, budget_s=float(advised[0])).completed


def test_what_has_to_be_measured_again_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where runs/measured was deleted between two commands."""

    class MeasuringAgain(SlowToRead):
        def measure(self, backend: str, *, knows_start: bool) -> Measurement | str:
            self.now_s += 30.0
            return super().measure(backend, knows_start=False)

    spent_s = []
    for kind in (SlowToRead, SlowToRead, MeasuringAgain):
        jobs = kind(tmp_path)
        monkeypatch.setattr(tune_search, "time", SimpleNamespace(monotonic=lambda jobs=jobs: jobs.now_s))
        with pytest.raises(ConfigError, match="go on with --budget"):
            search(tmp_path, jobs, budget_s=10.0)
        spent_s.append(read_tune(tmp_path).spent_s)
    assert spent_s[1] == spent_s[0] and spent_s[2] >= spent_s[1] + 30.0


def test_a_race_that_takes_more_than_half_of_the_budget_is_not_begun(tmp_path: Path) -> None:
    jobs = LongRace(tmp_path, least_s=300.0)
    with pytest.raises(
        ConfigError, match=r"shortest race of 3 settings takes .* more than half of it"
    ) as refused:
        search(tmp_path, jobs, budget_s=500.0)
    (wanted,) = re.findall(r"go on with --budget (\d+)s", str(refused.value))
    assert not jobs.raced and 600.0 < float(wanted) < 700.0
    assert search(tmp_path, jobs, budget_s=float(wanted)).completed
    jobs = LongRace(tmp_path / "script", least_s=300.0)
    jobs.chooses_race = False  # type: ignore[misc]
    assert search(tmp_path / "script", jobs, budget_s=500.0).completed


def test_what_the_race_is_expected_to_rule_out_is_no_reason_to_refuse_a_budget(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Unsure(MadeUp):
        """Intervals so wide that nothing is ruled out before the race."""

        def predict(self, ranks: int, settings: Sequence[Setting]) -> dict[Setting, Interval]:
            found = super().predict(ranks, settings)
            return {one: Interval(at.mean, at.mean / 9, at.mean * 9) for one, at in found.items()}

    class Jobs(LongRace):
        def measure(self, backend: str, *, knows_start: bool) -> Measurement | str:
            return Unsure((), Besides(0.0, 0.5))

    texts = (GRADIENTS, SHORT, DPSGD)  # the last one is slower than the first
    with pytest.raises(ConfigError, match=r"race of 3 settings .* training 2 settings rung by rung"):
        search(tmp_path, Jobs(tmp_path), texts=texts, budget_s=8.0)


def test_what_a_back_end_refuses_is_ruled_out_before_the_race_and_names_it(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Refusing(MadeUp):
        def refused(self, settings: Sequence[Setting]) -> dict[Setting, str]:
            return {one: "the mpi back-end cannot sum that type" for one in settings if one.name == LONG}

    class OfTwo(Jobs):
        def measure(self, backend: str, *, knows_start: bool) -> Measurement | str:
            self.measured.append((backend, knows_start))
            kind = Refusing if backend == "mpi" else MadeUp
            return kind((), Besides(0.0, 0.5), self.factors[backend])

    jobs, told = OfTwo(tmp_path), list[str]()
    record = search(tmp_path, jobs, texts=(GRADIENTS, SHORT, LONG), batch_sizes=(8,), print_line=told.append)
    assert (record.of(LONG).out_in, record.of(LONG).predicted) == ("measure", None)
    assert record.of(LONG).why == "the mpi back-end cannot sum that type"
    assert jobs.raced[0] == [GRADIENTS, SHORT, f"{GRADIENTS} batch=8", f"{SHORT} batch=8"]
    assert "predict: 1 setting ruled out, 4 settings left" in told
    # It says nothing against the prediction, and another back-end may train it.
    cautions = " ".join(find_answer(Search(record, {}, loads={"mpi": OutsideLoad(0.98, 0.0)})).cautions)
    assert "ruled out by prediction" not in cautions and "Other batches" not in cautions
    both = OfTwo(tmp_path / "both", factors={"mpi": 1.0, "torch": 2.0})
    found = search(tmp_path / "both", both, texts=(GRADIENTS, SHORT, LONG), backends=("mpi", "torch"))
    assert found.backend == "torch" and found.of(LONG).predicted


def test_what_exchanges_take_is_in_the_record_and_on_the_page(tmp_path: Path) -> None:
    link = LinkRecord(True, 5e-5, 4e-5, 6e-5, True, 1.25e8, 1.2e8, None)
    exchanges = (
        ExchangeRecord("model_averaging:period=1", 4e6, 1, 0.032),
        ExchangeRecord("delayed_averaging:delay=0", 800.0, 1, 0.0001),
        ExchangeRecord("gradient_averaging", 4e6, 3, 0.011),
    )

    @dataclass(frozen=True)
    class Shown(MadeUp):
        link: LinkRecord | None = None  # type: ignore[misc]
        exchanges: tuple[ExchangeRecord, ...] = ()  # type: ignore[misc]

    class Measuring(Jobs):
        def measure(self, backend: str, *, knows_start: bool) -> Measurement | str:
            assumed = replace(link, knows_latency=False, bytes_per_s=None, bytes_per_s_low=None)
            shown = link if backend == "mpi" else assumed
            return Shown((), Besides(0.0, 0.5), self.factors[backend], shown, exchanges)

    factors = {"mpi": 1.0, "torch": 0.5}
    record = search(tmp_path, Measuring(tmp_path, factors=factors), backends=("mpi", "torch"))
    assert record.backends[0].link == link and record.backends[0].exchanges == exchanges
    assert read_tune(tmp_path) == record
    table = backends_table(Search(record, {}))
    cells = {head.name: [cell.text for cell in of] for head, of in table.cells()}
    titles = [f"{column.title}, {column.unit}" for column in table.columns]
    assert titles[1:3] == ["latency, µs", "bandwidth, Gbit/s"]
    assert titles[3:6] == ["4 MB whole, ms", "800 B (a part), ms", "4 MB in 3 buckets, ms"]
    assert cells["mpi"][1:] == ["50.0 [40.0, 60.0]", "1 [0.96, unlimited]", "32.0", "0.100", "11.0", "chosen"]
    assert cells["torch"][1:3] == ["50.0 (assumed)", "unlimited [unlimited, unlimited]"]
    assert "between nodes, fitted as by speechdp simulate" in table.note


def test_what_cannot_be_trained_is_ruled_out_with_its_message(tmp_path: Path) -> None:
    record = search(tmp_path, Jobs(tmp_path, fails=(SHORT,)))
    assert record.of(SHORT).why == "it failed: the loss is nan" and record.chosen == LONG


def test_nothing_can_be_trained(tmp_path: Path) -> None:
    with pytest.raises(
        RunError,
        match=r"no setting could be trained: gradient_averaging: it failed: the loss is nan; their output "
        r"is in .*runs/logs; the same command tries again; other options need another folder",
    ):
        search(tmp_path, Jobs(tmp_path, fails=tuple(SPEEDS)))


@pytest.mark.parametrize(
    ("factors", "chosen"),
    [
        ({"horovod": 1.0, "mpi": 1.02}, "horovod"),
        ({"horovod": 1.0, "mpi": 1.2}, "mpi"),
        ({"mpi": 1.0}, "mpi"),
    ],
)
def test_the_preferred_back_end_gives_way_to_one_that_is_surely_faster(
    tmp_path: Path, factors: dict[str, float], chosen: str
) -> None:
    record = search(tmp_path, Jobs(tmp_path, factors=factors), backends=("horovod", "mpi"))
    assert record.backend == chosen
    others = {one.name: one.why for one in record.backends if one.name != chosen}
    assert all(others.values())
    if "horovod" not in factors:
        assert others == {"horovod": "is not installed"}


def test_no_back_end_works(tmp_path: Path) -> None:
    expected = (
        r"nothing could be trained with mpi: is not installed; the output is in .* the same command tries"
    )
    with pytest.raises(RunError, match=expected):
        search(tmp_path, Jobs(tmp_path, factors={}))


def test_a_full_disk_ends_the_search_and_rules_out_nothing(tmp_path: Path) -> None:
    class Full(Jobs):
        def train_together(self, *arguments: Any) -> Trained:
            raise RunError("a: cannot be written (No space left on device); free some space, then go on")

    with pytest.raises(RunError, match="No space left on device"):
        search(tmp_path, Full(tmp_path))
    before = read_tune(tmp_path)
    raced_out = {one.name for one in before.tried if one.out_in}
    assert not before.completed and not any(one.out_in == "halving" for one in before.tried)
    record = search(tmp_path, Jobs(tmp_path))
    expected = search(tmp_path / "other", Jobs(tmp_path / "other"))
    assert record.completed and record.chosen == expected.chosen
    assert raced_out == {one.name for one in expected.tried if one.out_in and one.out_in != "halving"}


def test_a_rank_that_is_killed_is_no_fault_of_the_back_end(tmp_path: Path) -> None:
    class Loses(Jobs):
        lost: list[str] = []  # noqa: RUF012 (of this test alone)

        def measure(self, backend: str, *, knows_start: bool) -> Measurement | str:
            if backend not in self.lost:
                self.lost.append(backend)
                return Fault("killed", 1, "vm", signal=9).describe()
            return super().measure(backend, knows_start=knows_start)

    told: list[str] = []
    record = search(tmp_path, Loses(tmp_path), print_line=told.append)
    assert record.completed and record.backend == "mpi"
    assert sum("is tried once more: rank 1 on vm was killed" in line for line in told) == 1


def test_other_batches_are_tried_of_gradient_averaging_and_the_fastest(tmp_path: Path) -> None:
    jobs = Jobs(tmp_path)
    search(tmp_path, jobs, batch_sizes=(8,))
    assert jobs.raced[0][-2:] == [f"{GRADIENTS} batch=8", f"{LONG} batch=8"]


def test_a_setting_that_was_tried_with_one_batch_only_is_told_of(tmp_path: Path) -> None:
    record = search(tmp_path, Jobs(tmp_path), batch_sizes=(8,))
    assert record.chosen == SHORT and all(one.strategy != SHORT or not one.batch_size for one in record.tried)
    told = " ".join(find_answer(Search(record, {})).cautions)
    assert f"Other batches were tried with {GRADIENTS} and {LONG} only" in told
    assert f"another folder and --strategies {SHORT}." in told
    # Which tries them: there are few settings.
    jobs = Jobs(tmp_path / "again")
    again = search(tmp_path / "again", jobs, texts=(GRADIENTS, SHORT), batch_sizes=(8,))
    assert jobs.raced[0] == [GRADIENTS, SHORT, f"{GRADIENTS} batch=8", f"{SHORT} batch=8"]
    assert "Other batches" not in " ".join(find_answer(Search(again, {})).cautions)


def test_where_there_are_few_settings_all_are_tried_with_other_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SPEEDS, SHORT, 99.0)  # too near to gradient averaging's for it to be ruled out
    jobs = Jobs(tmp_path)
    search(tmp_path, jobs, texts=(GRADIENTS, SHORT), batch_sizes=(8,))
    assert jobs.raced[0] == [GRADIENTS, SHORT, f"{GRADIENTS} batch=8", f"{SHORT} batch=8"]


def test_a_budget_that_trains_hardly_a_step_is_refused_with_what_is_needed(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"fewer than 20 steps; give at least \d+s \(what was measured is kept\)"
    ):
        search(tmp_path, Jobs(tmp_path), budget_s=8.0)


def test_another_search_in_the_folder_is_refused(tmp_path: Path) -> None:
    search(tmp_path, Jobs(tmp_path))
    with pytest.raises(ConfigError, match=r"was started with other options \(on other data\)"):
        search(tmp_path, Jobs(tmp_path), trained={"data": "y"})


@pytest.mark.parametrize(("name", "read"), [("tune.json", read_tune), ("compare.json", read_record)])
def test_a_damaged_record_is_named_with_what_helps(
    tmp_path: Path, name: str, read: Callable[[Path], object]
) -> None:
    what = {"tune.json": "search", "compare.json": "comparison"}[name]
    (tmp_path / name).write_text("{")
    remedy = (
        f"delete it and give the command of the {what} again \\(its runs are kept\\), or with --overwrite"
    )
    with pytest.raises(ConfigError, match=f"^{tmp_path / name}: cannot be read .*; {remedy}$"):
        read(tmp_path)


@pytest.mark.parametrize(("name", "read"), [("tune.json", read_tune), ("compare.json", read_record)])
def test_a_record_of_another_version_is_not_to_be_deleted(
    tmp_path: Path, name: str, read: Callable[[Path], object]
) -> None:
    (tmp_path / name).write_text(json.dumps({"format": f"speechdp-{name[:-5]}", "version": 2, "runs": {}}))
    remedy = "use the speechdp that wrote it, or choose another folder"
    said = "is of version 2, and this speechdp reads version 1"
    with pytest.raises(ConfigError, match=f"^{tmp_path / name}: {said}; {remedy}$"):
        read(tmp_path)


def test_a_setting_that_fails_in_the_race_is_ruled_out_with_its_message(tmp_path: Path) -> None:
    class Failing(Jobs):
        def hold_race(
            self, settings: Sequence[Setting], backend: str, longest_s: float, pace: ExpectedTimes
        ) -> RacedSettings | str:
            others = [one for one in settings if one.name != LONG]
            raced = super().hold_race(others, backend, longest_s, pace)
            assert isinstance(raced, RacedSettings)
            return replace(raced, left_out={LONG: "it failed: the loss is nan"})

    record = search(tmp_path, Failing(tmp_path))
    assert (record.of(LONG).out_in, record.of(LONG).why) == ("race", "it failed: the loss is nan")
    assert record.chosen == SHORT and record.completed


class OneRaces(Jobs):
    def hold_race(
        self, settings: Sequence[Setting], backend: str, longest_s: float, pace: ExpectedTimes
    ) -> RacedSettings | str:
        return RacedSettings({}, 0.0, {}, {SHORT: "it failed: the loss is nan"})


def test_where_one_alone_could_race_its_learning_rates_are_trained(tmp_path: Path) -> None:
    told: list[str] = []
    jobs = OneRaces(tmp_path)
    texts = (GRADIENTS, SHORT)
    record = search(tmp_path, jobs, texts=texts, learning_rates=(0.1, 0.2), print_line=told.append)
    held = f"skipped, because only {GRADIENTS} could take part: {SHORT}: it failed: the loss is nan"
    assert f"race: {held}" in told
    assert record.of(SHORT).why == "it failed: the loss is nan" and record.completed
    assert record.chosen.startswith(f"{GRADIENTS} rate=")
    assert record.of(record.chosen).frames_per_s == SPEEDS[GRADIENTS]


def test_where_one_alone_could_race_the_others_are_named_with_why(tmp_path: Path) -> None:
    with pytest.raises(
        RunError, match=f"fewer than two .* could race: {SHORT}: it failed: the loss is nan; "
    ):
        search(tmp_path, OneRaces(tmp_path), texts=(GRADIENTS, SHORT))


@dataclass
class Interrupted(Timed):
    """Is stopped halfway through one part of a run, which is gone on with from there.

    Attributes:
        at: how many are trained before; None: it is not stopped.
    """

    at: int | None = None
    done_s: float = 0.0

    def _train(self, setting: Setting, seed: int, step: int) -> str | None:
        if self.at == len(self.trained):
            self.at = None
            self.done_s = 0.5 * self.factor * (step - self.stands(setting, seed)) / _rate(setting)
            self.now_s += self.done_s
            raise JobStopped
        self.now_s, self.done_s = self.now_s - self.done_s, 0.0
        return super()._train(setting, seed, step)


@pytest.mark.parametrize("at", range(6))
def test_an_interrupted_search_counts_its_time_once_and_goes_on_as_if_it_were_not(
    at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = timed_search(monkeypatch, Interrupted(tmp_path / "whole"))
    jobs = Interrupted(tmp_path / "parts", at=at)
    with pytest.raises(JobStopped):
        timed_search(monkeypatch, jobs)
    assert read_tune(jobs.out).spent_s == pytest.approx(jobs.now_s, abs=0.01)
    jobs.now_s += 1000.0  # nobody searches meanwhile
    record, _ = timed_search(monkeypatch, jobs)
    assert record.spent_s == pytest.approx(jobs.now_s - 1000.0, abs=0.01)
    assert [rung.settings for rung in record.rungs] == [rung.settings for rung in expected.rungs]
    # What a start takes is known a little less well where a rung was cut.
    expected_s = [rung.seconds for rung in expected.rungs]
    assert [rung.seconds for rung in record.rungs] == pytest.approx(expected_s, rel=0.02)
    assert record.rungs[0].seconds == expected_s[0]
    assert record.chosen == expected.chosen


def test_a_target_that_none_reaches_leaves_the_best_score(tmp_path: Path) -> None:
    record = search(tmp_path, Jobs(tmp_path), target=target_of(-1e-9))
    assert record.of(record.chosen).times_s == (None, None) and record.chosen == SHORT
    assert record.of(LONG).why == "it does not reach the target"
    headline = find_answer(Search(record, {})).headline
    assert re.fullmatch(
        r"None of the last settings is expected to reach .* within .* of training; .*", headline
    )
    assert "with every seed" not in headline


def test_a_target_that_one_of_the_seeds_reaches_is_said_to_be_so(tmp_path: Path) -> None:
    lowest = search(tmp_path, Jobs(tmp_path)).target  # all runs reach it, LONG's first as it ends
    assert lowest is not None
    record = search(tmp_path, Jobs(tmp_path), target=target_of(lowest * (1 - 1e-6)))
    assert record.chosen == SHORT and record.of(LONG).times_s[0] is None and record.of(LONG).times_s[1]
    assert record.of(LONG).why == "it does not reach the target with every seed"


def test_a_target_that_some_runs_reach_is_not_called_out_of_reach(tmp_path: Path) -> None:
    record = replace(search(tmp_path, Jobs(tmp_path), target=target_of(-0.1)), seen_s=None, chosen=SHORT)
    for name, times in ((SHORT, (None, 7.0)), (LONG, (None, None))):
        record = record.with_setting(name, times_s=times)
    until = formatting.seconds(record.rungs[-1].seconds)
    answer = find_answer(Search(record, {}))
    assert re.match(r"None of the last settings reaches .* with every seed within ", answer.headline)
    assert f"within {until} of training; {SHORT} comes closest" in answer.headline
    assert f"{LONG}: the target is not reached." in answer.details
    better = replace(record.with_setting(LONG, times_s=(5.0, 7.0)), chosen=LONG)
    assert f"{SHORT}: the target is reached by 1 of 2 runs." in find_answer(Search(better, {})).details
    cells = {head.name: [cell.text for cell in of] for head, of in make_table(Search(better, {}), {}).cells()}
    assert "not by 1 of 2 seeds" in cells[SHORT]


def test_a_run_that_went_further_is_scored_where_the_rung_ends() -> None:
    points = ((10, -3.0), (20, -2.0), (31, -1.5), (40, -1.0))
    assert up_to(points, 30) == points[:3]  # asynchronous ranks pass a step before they meet
    assert up_to(points, 20) == points[:2] and up_to(points, 99) == points and up_to((), 5) == ()


def test_a_race_has_fewer_rounds_and_then_shorter_turns_where_time_is_short() -> None:
    settings = [Setting(StrategyChoice(text)) for text in (GRADIENTS, LONG)]
    wanted = RaceOptions(12, 32)
    steps = 32 + 32
    pace = dict.fromkeys(settings, 0.1)
    assert fitting_race(wanted, pace, 13 * steps * 0.1 + 1e-6) == wanted
    assert fitting_race(wanted, pace, 9 * steps * 0.1 + 1e-6) == RaceOptions(8, 32)
    assert fitting_race(wanted, pace, 7 * 32 * 0.1 + 1e-6) == RaceOptions(6, 16)
    assert fitting_race(wanted, pace, 0.0) == RaceOptions(6, 8)
    assert fitting_race(RaceOptions(6, 4), pace, 0.0) == RaceOptions(6, 4)


def test_where_one_setting_is_left_nothing_has_to_be_trained(tmp_path: Path) -> None:
    jobs = Jobs(tmp_path)
    record = search(tmp_path, jobs, texts=(GRADIENTS, DPSGD))
    assert record.chosen == GRADIENTS and record.completed and record.command
    assert jobs.raced == jobs.trained == []
    answer = find_answer(Search(record, {}))
    assert answer.headline == "gradient_averaging: all other settings are ruled out by their speed."
    (speed,) = answer.details
    assert "is predicted to train at 100 [98" in speed and "has not raced" in speed


def test_what_was_refused_is_not_said_to_be_ruled_out_by_its_speed(tmp_path: Path) -> None:
    record = search(tmp_path, Jobs(tmp_path), texts=(GRADIENTS, DPSGD))
    refused = replace(record, tried=(*record.tried, SettingRecord(LONG, LONG, out_in="measure", why="no")))
    answer = find_answer(Search(refused, {}))
    assert answer.headline == f"{GRADIENTS}: all other settings are ruled out, 1 of them by speed."
    assert answer.cautions[0] == f"The speed of {LONG} was not compared: the table says why."
    failed = replace(
        record, tried=(record.tried[0], SettingRecord(LONG, LONG, out_in="race", why="it failed"))
    )
    assert "ruled out, none of them by speed" in find_answer(Search(failed, {})).headline
    alone = find_answer(Search(replace(record, tried=record.tried[:1]), {}))
    assert alone.headline == f"{GRADIENTS}: no other setting was to be tried." and not alone.cautions
    raced = find_answer(Search(replace(record, tried=(replace(record.tried[0], frames_per_s=1234.0),)), {}))
    assert raced.details == ("It trains at 1,234 frames/s.",)


def test_a_narrow_terminal_shows_what_decided(tmp_path: Path) -> None:
    record = search(tmp_path, Jobs(tmp_path))
    head = on_terminal(make_table(Search(record, {}), {}), 80).partition("\u2500")[0]
    assert "raced" in head and "to target" in head
    unknown = replace(record, tried=tuple(replace(one, times_s=()) for one in record.tried))
    head = on_terminal(make_table(Search(unknown, {}), {}), 80).partition("\u2500")[0]
    assert "log-probability" in head and "to target" not in head


def test_what_is_compared_with_what_is_said(tmp_path: Path) -> None:
    record = replace(search(tmp_path, Jobs(tmp_path)), untold=(LONG,))
    answer = find_answer(Search(record, {}))
    assert record.chosen == SHORT and record.of(LONG).times_s
    assert re.match(f"{SHORT} .*reach.* the held-out log-probability .*nats/frame soonest: ", answer.headline)
    assert any("] times the speed of gradient averaging." in text for text in answer.details)
    assert any(re.match(f"{LONG} .*reach.* it after .* s of training ", text) for text in answer.details)
    assert (
        f"{LONG} cannot be told apart from {SHORT} with so few seeds and so short a race." in answer.cautions
    )


def test_gradient_averaging_is_not_compared_with_itself(tmp_path: Path) -> None:
    record = search(tmp_path, Jobs(tmp_path))
    chosen = record.with_setting(GRADIENTS, times_s=record.of(SHORT).times_s, ratio_low=1.0, ratio_high=1.0)
    answer = find_answer(Search(replace(chosen, chosen=GRADIENTS), {}))
    (pace,) = [text for text in answer.details if text.startswith("It trains at ")]
    assert pace.endswith(f" frames/s with back-end {record.backend}.")
    assert ratio_text(chosen.of(GRADIENTS)) == "1.00" and "[" in ratio_text(chosen.of(SHORT))


def test_only_figures_that_are_shown_are_explained(tmp_path: Path) -> None:
    """A search whose settings have not raced yet shows neither speeds of a race nor times."""
    record = search(tmp_path, Jobs(tmp_path))
    whole = make_table(Search(record, {}), {}).note
    assert "Predicted: 90 % interval; raced: ratio within rounds" in whole and "brackets hold" in whole
    early = tuple(replace(one, ratio=None, times_s=()) for one in record.tried)
    assert make_table(Search(replace(record, tried=early), {}), {}).note == "Predicted: 90 % interval."


def test_the_only_one_left_is_not_said_to_be_the_soonest(tmp_path: Path) -> None:
    """One that nothing was compared with reached the target soonest."""
    record = search(tmp_path / "both", Jobs(tmp_path / "both"))
    assert " soonest: " in find_answer(Search(record, {})).headline
    jobs = Jobs(tmp_path / "one", fails=(SHORT, GRADIENTS))
    record = search(tmp_path / "one", jobs)
    assert record.chosen == LONG and record.of(LONG).times_s and not record.of(SHORT).times_s
    headline = find_answer(Search(record, {})).headline
    assert "soonest" not in headline and " and is the only one left to do so: " in headline


def test_that_the_budget_begins_anew_without_a_record_is_said(tmp_path: Path) -> None:
    told: list[str] = []
    search(tmp_path, Jobs(tmp_path), print_line=told.append)
    search(tmp_path, Jobs(tmp_path), print_line=told.append)
    assert not any("starts from zero" in line for line in told)
    (tmp_path / "tune.json").unlink()
    (tmp_path / "runs").mkdir(exist_ok=True)
    record = search(tmp_path, Jobs(tmp_path), print_line=told.append)
    (line,) = (line for line in told if "starts from zero" in line)
    assert line.startswith(f"{tmp_path}: tune.json is missing, so the budget starts from zero; the runs and")
    assert record.completed


def test_one_seed_has_no_range(tmp_path: Path) -> None:
    record = search(tmp_path, Jobs(tmp_path), seeds=(1,))
    of_one = Search(record, {})
    cells = {head.name: [cell.text for cell in of] for head, of in make_table(of_one, {}).cells()}
    assert cells[record.chosen] and not any("[" in text for text in cells[record.chosen][-2:])
    assert find_answer(of_one).headline.endswith(" s of training.")


def test_long_times_are_written_out(tmp_path: Path) -> None:
    """Not as 1.23e+03, and the range in the units of the mean."""
    record = search(tmp_path, Jobs(tmp_path)).with_setting(SHORT, times_s=(1234.0, 12345.0))
    found = Search(record, {})
    assert find_answer(found).headline.endswith(": 1 h 53 min of training [20 min 34 s to 3 h 25 min].")
    cells = {head.name: [cell.text for cell in of] for head, of in make_table(found, {}).cells()}
    assert "6,790 [1,234, 12,345]" in cells[SHORT]


def test_a_target_that_was_seen_to_be_reached_is_not_called_expected(tmp_path: Path) -> None:
    """Curves were continued, and the target is within what was trained."""
    record = replace(search(tmp_path, Jobs(tmp_path)), seen_s=5.6)
    for name, times in ((SHORT, (0.3, 0.8)), (LONG, (0.9, 1.5))):
        record = record.with_setting(name, times_s=times)
    answer = find_answer(Search(record, {}))
    assert f"{SHORT} reaches " in answer.headline and not any("expected" in line for line in answer.details)
    one_later = find_answer(Search(record.with_setting(LONG, times_s=(0.9, 6.0)), {}))
    assert f"{SHORT} reaches " in one_later.headline
    assert any(
        "The last settings were trained for 5.6 s; later times are" in line for line in one_later.details
    )
    later = find_answer(Search(record.with_setting(SHORT, times_s=(0.3, 6.0)), {}))
    assert f"{SHORT} is expected to reach " in later.headline


def test_what_a_scripts_race_and_runs_do_not_show_is_told(tmp_path: Path) -> None:
    """A race of one turn each, a script without a seed, and a metric of unknown direction that grew."""
    record = replace(search(tmp_path, Jobs(tmp_path)), settings={"script": "train.py", "ranks": 2})
    metric, runs = script_task("quality"), {}
    for name in (SHORT, LONG):
        curve = tuple(Evaluation(10 * n, None, None, float(n), -0.1 * n, None) for n in (1, 2))
        run = RunResult(
            "a", tmp_path, {"script": "train.py"}, curve, None, None, False, True, (), script_task=metric
        )
        runs[name] = (run, replace(run, name="b"))
    few, enough = (
        ShownRaces({2: made_up_race({GRADIENTS: 1.0, SHORT: 1.5, LONG: 2.0}, rounds=rounds)})
        for rounds in (1, 6)
    )
    told = " ".join(find_answer(Search(record, runs, few)).cautions)
    assert "The race on 2 ranks had 1 round, too few for intervals (6 are needed)" in told
    assert "Runs with different seeds logged exactly the same, so they count as one" in told
    assert "if more is better, give --metric quality:max in another folder." in told
    assert "too few" not in " ".join(find_answer(Search(record, {}, enough)).cautions)
    assert backends_table(Search(record, runs)).columns[0].unit == "items/s"


def test_what_was_set_is_shown_model_and_batch_first(tmp_path: Path) -> None:
    """Options that were left alone leave no blank row and no zeros."""
    record = search(tmp_path, Jobs(tmp_path))
    settings = {
        "data": "9f2c",
        "model": {"preset": None, "layers": None},
        "batch": {"batch_size": None, "right_context": 0, "batch_frames": 0, "order": "pooled"},
        "epochs": 4,
    }
    folder = tmp_path / "used"
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps({"preset": "small", "batch_size": 16}))
    found = Search(replace(record, settings=settings), {record.tried[0].name: (read_run(folder),)})
    assert shown_settings(found) == [
        ("preset", "small"),
        ("batch size", "16 a rank"),
        ("batch", "order pooled"),
        ("epochs", "4"),
    ]
    # With several learning rates that of what was measured is none of all runs.
    rates = {"optimizer": {"name": "sgd", "learning_rate": 0.1}, "learning_rates": [0.1, 0.2]}
    shown = shown_settings(Search(replace(record, settings=rates), {}))
    assert shown == [("optimizer", "name sgd"), ("learning rates", "0.1, 0.2")]
    one = shown_settings(Search(replace(record, settings={**rates, "learning_rates": []}), {}))
    assert one == [("optimizer", "name sgd, learning_rate 0.1")]


@dataclass
class Rated(Jobs):
    """Every setting learns best at a learning rate of its own: SHORT at 0.4, others at 0.1."""

    def scored(self, setting: Setting, seed: int, step: int) -> Scored | str:
        best = 0.4 if setting.strategy.text == SHORT else 0.1
        loss = 1.0 + abs(math.log2((setting.learning_rate or 0.1) / best))
        found = super().scored(setting, seed, step)
        assert isinstance(found, Scored)
        return replace(found, points=tuple((at, loss * score) for at, score in found.points))


RATES = (0.1, 0.2, 0.4)


def test_what_the_race_leaves_is_trained_with_every_learning_rate(tmp_path: Path) -> None:
    jobs, told = Rated(tmp_path), list[str]()
    record = search(tmp_path, jobs, learning_rates=RATES, print_line=told.append)
    assert jobs.raced == [[GRADIENTS, SHORT, LONG]]  # speed is that of any learning rate
    assert "race: 3 settings left to be trained with each of 3 learning rates" in told
    left = [f"{text} rate={rate}" for text in (GRADIENTS, SHORT, LONG) for rate in RATES]
    assert record.rungs[0].settings == tuple(left)
    assert {name for name, _, _ in jobs.trained} == set(left)
    assert record.chosen == f"{SHORT} rate=0.4" and record.of(record.chosen).learning_rate == 0.4
    assert [record.of(f"{LONG} rate={rate}").ratio for rate in RATES] == pytest.approx([2.0] * 3)
    # What was ruled out before has none.
    assert [one.name for one in record.tried if one.learning_rate is None] == [DPSGD]
    assert read_tune(tmp_path) == record
    (caution,) = (one for one in find_answer(Search(record, {})).cautions if "learning rate" in one)
    assert caution.startswith("It has the highest of the learning rates tried: one beyond it may be better;")


def test_what_raced_took_part_with_each_of_its_learning_rates(tmp_path: Path) -> None:
    """The race knows a setting without them."""
    record = search(tmp_path, Rated(tmp_path), learning_rates=RATES)
    few, enough, without = (
        ShownRaces({2: made_up_race(dict.fromkeys(raced, 1.0), rounds=rounds)})
        for raced, rounds in (
            ((GRADIENTS, SHORT, LONG), 1),
            ((GRADIENTS, SHORT, LONG), 6),
            ((GRADIENTS, LONG), 6),
        )
    )
    told, fine, one_missing = (
        find_answer(Search(record, {}, races)).cautions for races in (few, enough, without)
    )
    assert not any("took no part" in line or "too few" in line for line in fine)
    assert any("The race on 2 ranks had 1 round, too few for intervals" in line for line in told)
    (missing,) = (line for line in one_missing if "took no part" in line)
    assert missing.startswith(f"{SHORT} took no part in the race on 2 ranks: it was added")


def test_without_learning_rates_the_page_says_that_all_had_one(tmp_path: Path) -> None:
    record = search(tmp_path, Jobs(tmp_path))
    (caution,) = (one for one in find_answer(Search(record, {})).cautions if "learning rate" in one)
    assert "trained with the same learning rate" in caution and "--learning-rates" in caution


def test_a_best_learning_rate_between_others_needs_no_word(tmp_path: Path) -> None:
    record = search(tmp_path, Rated(tmp_path), learning_rates=(*RATES, 0.8))
    assert record.chosen == f"{SHORT} rate=0.4"
    assert not any("learning rate" in one for one in find_answer(Search(record, {})).cautions)


@pytest.mark.parametrize("trained", [0, 4, 10, 12])
def test_a_search_with_learning_rates_goes_on_where_it_was_interrupted(tmp_path: Path, trained: int) -> None:
    jobs = Rated(tmp_path, stops_after=trained)
    with pytest.raises(JobStopped):
        search(tmp_path, jobs, learning_rates=RATES)
    stopped, done = read_tune(tmp_path), list(jobs.trained)

    class Killed(Rated):
        """Ends before the race has told what is left."""

        def hold_race(self, *given: Any) -> RacedSettings | str:
            raise JobStopped

    told = list[str]()
    with pytest.raises(JobStopped):
        search(tmp_path, Killed(tmp_path), learning_rates=RATES, print_line=told.append)
    # Rates that were tried before are no further settings that are left for the race.
    assert [line for line in told if "ruled out" in line] == ["predict: 1 setting ruled out, 3 settings left"]
    kept = read_tune(tmp_path)
    assert kept.rungs == stopped.rungs and kept.chosen == stopped.chosen
    assert find_answer(Search(kept, {})).headline
    jobs.stops_after = None
    record = search(tmp_path, jobs, learning_rates=RATES)
    assert record.chosen == f"{SHORT} rate=0.4" and record.completed
    assert record.rungs[0].seconds == stopped.rungs[0].seconds
    assert jobs.trained[: len(done)] == done and len(set(jobs.trained)) == len(jobs.trained)


def test_learning_rates_of_what_another_race_rules_out_stay_in_the_record(tmp_path: Path) -> None:
    """Rungs of the command before name them, until this one has come as far."""

    class HeldAgain(Rated):
        """A race that leaves SHORT out, and an end as its rungs are read."""

        def hold_race(self, *given: Any) -> RacedSettings | str:
            held = super().hold_race(*given)
            assert isinstance(held, RacedSettings)
            return replace(held, left_out={SHORT: "it failed"})

        def scored(self, setting: Setting, seed: int, step: int) -> Scored | str:
            raise JobStopped

    jobs = Rated(tmp_path, stops_after=12)
    with pytest.raises(JobStopped):
        search(tmp_path, jobs, learning_rates=RATES)
    with pytest.raises(JobStopped):
        search(tmp_path, HeldAgain(tmp_path, trained=jobs.trained), learning_rates=RATES)
    record = read_tune(tmp_path)
    ruled_out = {f"{SHORT} rate={rate}" for rate in RATES}
    assert len(record.rungs) == 2 and ruled_out & {*record.rungs[1].settings}
    assert {record.of(name).out_in for name in ruled_out} == {"race"} and not ruled_out & {*record.left}
    jobs.stops_after = None  # once more it races well, and its runs count again
    assert search(tmp_path, jobs, learning_rates=RATES).chosen == f"{SHORT} rate=0.4"


def test_learning_rates_of_one_strategy_need_no_race(tmp_path: Path) -> None:
    jobs = Rated(tmp_path)
    record = search(tmp_path, jobs, texts=(GRADIENTS, DPSGD), learning_rates=RATES)
    assert jobs.raced == [] and record.chosen == f"{GRADIENTS} rate=0.1" and record.completed
    assert record.of(record.chosen).frames_per_s == SPEEDS[GRADIENTS]
    found = Search(record, {})
    assert "It is predicted to train at 100 frames/s with back-end mpi." in find_answer(found).details
    assert "Times are at the predicted speed" in make_table(found, {}).note
    raced = Search(search(tmp_path / "raced", Rated(tmp_path / "raced"), learning_rates=RATES), {})
    assert "Times are at the raced speed" in make_table(raced, {}).note
    assert "predicted to train" not in " ".join(find_answer(raced).details)
    again = search(tmp_path, jobs, texts=(GRADIENTS, DPSGD), learning_rates=RATES, target=target_of(-0.5))
    assert again.chosen == record.chosen and again.target == -0.5


def test_another_set_of_learning_rates_is_another_search(tmp_path: Path) -> None:
    search(tmp_path, Rated(tmp_path), learning_rates=RATES)
    with pytest.raises(
        ConfigError, match=r"was started with other options \(learning rates: now with 0\.8\)"
    ):
        search(tmp_path, Rated(tmp_path), learning_rates=(*RATES, 0.8))
    # One of a version that knew none had one for all.
    old = tmp_path / "old"
    search(old, Jobs(old))
    content = json.loads((old / "tune.json").read_text())
    del content["settings"]["learning_rates"]
    (old / "tune.json").write_text(json.dumps(content))
    assert search(old, Jobs(old)).completed
    with pytest.raises(ConfigError, match=r"now with 0\.1, 0\.2, 0\.4"):
        search(old, Rated(old), learning_rates=RATES)


def test_a_budget_counts_every_learning_rate(tmp_path: Path) -> None:
    """20 steps of 3 settings at 3 rates, and so on: refused before the race, with one that suffices."""

    class Racing(Jobs):
        def expected_race_s(self, *given: Any) -> float:
            return 0.0 if self.raced else 1.0

    jobs = Racing(tmp_path)
    with pytest.raises(
        ConfigError, match=r"training 9 settings rung by rung.*go on with --budget (\d+)s"
    ) as told:
        search(tmp_path, jobs, learning_rates=RATES, budget_s=60.0)
    found = re.search(r"--budget (\d+)s", str(told.value).partition("go on with")[2])
    assert found is not None and jobs.raced == []
    assert search(tmp_path, jobs, learning_rates=RATES, budget_s=float(found[1])).completed
