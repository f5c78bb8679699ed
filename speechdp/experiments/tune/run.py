"""Carry a search out: measure, predict, race, halve; what is done is kept, and the best so far is known."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from speechdp.counting import counted
from speechdp.errors import ConfigError, RunError
from speechdp.experiments.compare.training import LOGS
from speechdp.experiments.jobs import JobStopped
from speechdp.experiments.race.plan import RaceOptions
from speechdp.experiments.tune.jobs import (
    MEASURED,
    Measurement,
    Scored,
    Stretch,
    TunedJobs,
)
from speechdp.experiments.tune.plan import (
    LAST,
    LEAST_STEPS,
    SEED_STOPS,
    Besides,
    Curve,
    ExpectedTimes,
    Finish,
    Rungs,
    Setting,
    batches_of,
    finishes,
    halvings,
    next_rung,
    plan_rungs,
    shrinkage,
    too_slow,
    untold,
)
from speechdp.experiments.tune.record import (
    HALVING,
    MEASURE,
    PREDICT,
    RACE,
    RUNS,
    TARGET,
    BackendRecord,
    RungRecord,
    SettingRecord,
    TuneRecord,
    check_same_search,
    write_tune,
)
from speechdp.options.run import TrainOptions
from speechdp.parallel.registry import StrategyChoice
from speechdp.report.kit import formatting
from speechdp.report.kit.metric_names import Terms
from speechdp.simulation.predict import Interval
from speechdp.tasks.metrics import TaskRecord

#: Share of the budget that the race takes at most, as far as its intervals allow.
_RACE_SHARE = 0.25
#: Share of it that the shortest race may take.
_MOST_OF_RACE = 0.5
#: What a budget has to have more than that, by which the same command finds it to be enough.
_ROOM = 1.05
#: Share of what is left of the budget that rungs are not planned for: longer ones cost more beside training.
_RESERVE = 0.05
#: Share of the budget by which a job may be expected to end too late, and is begun nevertheless.
_LATE = 0.01
#: What a command takes that goes on before it starts a job, s.
_READING_S = 2.0
#: Steps by which ranks at their own pace may pass the end of a rung.
_PASSED = 2
#: How it is told that somebody, the kernel for want of memory, or the network has ended a rank.
_LOST = ("SIGKILL", "SIGTERM", "signal 9", "signal 15", "was lost")
_USED_UP = "halving: the budget is used up, so settings are judged by what they have trained"


@dataclass(frozen=True)
class TunedTarget:
    """What is to be reached soonest.

    Attributes:
        value: as it was given; None: the best that the last settings all reach.
        task: whose values they are.

    Raises:
        ConfigError: no model reaches it.
    """

    value: float | None
    task: TaskRecord

    def __post_init__(self) -> None:
        Terms(self.task).score_of_target(self.value)  # it is needed at the end, after all the time

    @property
    def score(self) -> float | None:
        """The value as a score, of which more is better."""
        return Terms(self.task).score_of_target(self.value)


@dataclass(frozen=True)
class TuneRequest:
    """A search to be made.

    Attributes:
        out: its folder.
        ranks: of all runs.
        tried: settings with the training's own batch.
        backends: to choose from, in the order of preference.
        batch_sizes: other batches of a rank to try; empty: none.
        budget_s: for all of it.
        seeds: of the last rung, at least one; the first is that of all others.
        race: rounds at most, and steps of a turn at least.
        trained: what is trained, for the record.
        own_batch: segments of a rank's batch as it is trained; 0: not known.
    """

    out: Path
    ranks: int
    tried: tuple[Setting, ...]
    backends: tuple[str, ...]
    batch_sizes: tuple[int, ...]
    budget_s: float
    target: TunedTarget
    seeds: tuple[int, ...]
    race: RaceOptions
    trained: Mapping[str, Any]
    own_batch: int = 0

    @property
    def settings(self) -> dict[str, Any]:
        """What stands in the record: a search with other settings is another search."""
        return {
            **self.trained,
            "ranks": self.ranks,
            "strategies": [one.name for one in self.tried],
            "backends": list(self.backends),
            "batch_sizes": list(self.batch_sizes),
            "seeds": list(self.seeds),
            TARGET: self.target.value,
            "race": [self.race.rounds, self.race.least_steps],
        }


@dataclass(frozen=True)
class _Leg:
    """A part of a setting's run, for which a job is started unless it has been trained.

    Attributes:
        name: of the setting.
        begin_s, end_s: training time of the run.
    """

    name: str
    seed: int
    begin_s: float
    end_s: float


class Tuner:
    """Makes a search.

    Args:
        training: its jobs.
        say: takes a line of progress.
    """

    def __init__(self, request: TuneRequest, training: TunedJobs, say: Callable[[str], None]) -> None:
        self._request, self._training, self._say = request, training, say
        self._record = TuneRecord(request.settings)
        self._clock_s = time.monotonic()
        self._before_s = 0.0
        self._settings: dict[str, Setting] = {}
        #: What scores are shown as; which value of a script's they are, if nobody named one, its runs tell.
        self._terms = Terms(request.target.task)
        self._backend = ""  # that an earlier command chose
        #: Rungs of an earlier command: as long as they were, and recorded until this one has come so far.
        self._earlier: tuple[RungRecord, ...] = ()
        #: What the starts and the runs of the rung under way took besides training, s.
        self._starts_s: list[float] = []
        self._besides_s: list[float] = []

    def run(self) -> TuneRecord:
        """Search; return what was found.

        Raises:
            JobStopped: a signal asked for it; the same command goes on, and the record has the best so far.
            ConfigError: the folder holds another search, or the budget is too small.
            RunError: no back-end works, no setting can be trained, or the disk is full.
        """
        begun = check_same_search(self._request.out, self._request.settings, TrainOptions().to_json())
        if begun is not None:
            # What it has shown stays in the record until this command has come as far.
            self._before_s = begun.spent_s
            self._record = replace(begun, settings=self._request.settings)
            if begun.completed:
                return self._over(begun.settings.get(TARGET))
            self._backend = begun.backend if begun.stage != MEASURE else ""
        self._keep()
        try:
            self._training.begin()
            measured = self._measure()
            backend = self._predict(measured)
            self._search(backend, measured[backend])
        except (JobStopped, ConfigError, RunError):
            with contextlib.suppress(RunError):  # of a full disk, which is told already
                self._keep()
            raise
        self._keep(completed=True)
        return self._record

    def _over(self, target: float | None) -> TuneRecord:
        """Return a search that is over, with its choice made again where it was for another target."""
        record = self._record
        if target == self._request.target.value:
            self._say(f"{self._request.out}: this search is over; for another one give another folder")
            return record
        self._say(f"{self._request.out}: this search is over; its runs are judged by the target given now")
        self._settings = {
            one.name: Setting(StrategyChoice(one.strategy), one.batch_size) for one in record.tried
        }
        if record.rungs:
            self._training.begin()
            self._finish(record.backend)
        self._keep()
        return self._record

    def _search(self, backend: str, measured: Measurement) -> None:
        """Choose among what is left; where all but one are ruled out nothing has to be trained."""
        if len(self._record.left) == 1:
            self._choose(self._record.left)
            return
        self._race(backend, *self._plan_race(backend, measured))
        if len(self._record.left) > 1:
            self._halve(backend)

    @property
    def _spent_s(self) -> float:
        return round(self._before_s + time.monotonic() - self._clock_s, 3)

    def _keep(self, **changes: Any) -> None:
        """Take changes into the record and write it."""
        self._record = replace(self._record, spent_s=self._spent_s, **changes)
        write_tune(self._request.out, self._record)

    def _rule_out(self, stage: str, reasons: Mapping[str, str]) -> None:
        record = self._record
        for name, why in reasons.items():
            record = record.with_setting(name, out_in=stage, why=why)
        self._record = record
        self._keep()
        self._say_ruled_out(stage, len(reasons))

    def _say_ruled_out(self, stage: str, number: int) -> None:
        if number:
            left = counted(len(self._record.left), "setting")
            self._say(f"{stage}: {counted(number, 'setting')} ruled out, {left} left")

    def _measure(self) -> dict[str, Measurement]:
        """Measure every back-end, or the one that was chosen before; return what those that work show."""
        known = {one.name for one in self._record.backends if one.besides is not None}
        if not self._backend:
            before = {one.name: one for one in self._record.backends}
            backends = (before.get(name, BackendRecord(name)) for name in self._request.backends)
            self._keep(stage=MEASURE, backends=tuple(replace(one, speed=None, why="") for one in backends))
        found: dict[str, Measurement] = {}
        for name in [self._backend] if self._backend else self._request.backends:
            self._say(f"measure: computing, data and exchanges with back-end {name}")
            result = self._training.measure(name, knows_start=name in known)
            if isinstance(result, str) and any(word in result for word in _LOST):  # no fault of the back-end
                self._say(f"measure: back-end {name} is tried once more: {result}")
                result = self._training.measure(name, knows_start=name in known)
            if isinstance(result, Measurement):
                found[name] = result
                self._keep_backend(name, link=result.link, exchanges=result.exchanges)
                if result.besides is not None:
                    self._keep_backend(name, start_s=result.besides.start_s, run_s=result.besides.run_s)
                    if name not in known:  # else a rung of an earlier command may have told it better
                        self._keep_besides(result.besides)
                continue
            if self._backend:
                raise RunError(
                    f"{self._request.out}: back-end {name}, with which this search has begun, fails: "
                    f"{result}; the same command tries again"
                )
            self._say(f"measure: back-end {name} is left out: {result}")
            self._keep_backend(name, why=result)
        if not found:
            reasons = "; ".join(f"with {one.name}: {one.why}" for one in self._record.backends)
            raise RunError(
                f"{self._request.out}: nothing could be trained {reasons}; the output is in "
                f"{self._request.out / MEASURED / LOGS}, and the same command tries again"
            )
        return found

    def _keep_backend(self, name: str, **changes: Any) -> None:
        backends = tuple(replace(b, **changes) if b.name == name else b for b in self._record.backends)
        self._keep(backends=backends)

    def _predict(self, measured: Mapping[str, Measurement]) -> str:
        """Predict all settings with every back-end, choose one, and rule settings out; return it."""
        tried = self._request.tried
        self._settings = {one.name: one for one in tried}
        refused = {name: found.refused(tried) for name, found in measured.items()}
        speeds = {
            name: found.predict(self._request.ranks, [one for one in tried if one not in refused[name]])
            for name, found in measured.items()
        }
        backend = self._backend or self._choose_backend(speeds)
        shown = speeds[backend]
        reasons = too_slow(
            list(shown),
            lambda one, other: shown[one].low > shown[other].high,
            lambda one, other: shown[one].mean / shown[other].mean,
            "predicted",
        )
        records = []
        for setting in tried:
            own = SettingRecord(setting.name, setting.strategy.text)
            if setting in refused[backend]:
                own = replace(own, out_in=MEASURE, why=refused[backend][setting])
            elif setting in reasons:
                own = replace(own, out_in=PREDICT, why=reasons[setting])
            speed = shown.get(setting)
            if speed is not None:
                own = replace(own, predicted=speed.mean, predicted_low=speed.low, predicted_high=speed.high)
            records.append(own)
        records += self._other_batches([one for one in records if not one.out_in])
        names = {one.name for one in records}
        rungs = tuple(itertools.takewhile(lambda rung: names.issuperset(rung.settings), self._record.rungs))
        kept = self._record.chosen in names
        if not self._backend:  # else a rung of an earlier command may have told it better
            self._keep_besides(self._measured(backend))
        self._keep(
            stage=PREDICT,
            tried=tuple(records),
            rungs=rungs,
            target=None,
            seen_s=None,
            untold=(),
            chosen=self._record.chosen if kept else "",
            command=self._record.command if kept else "",
        )
        self._say_ruled_out(PREDICT, len(reasons) + len(refused[backend]))
        return backend

    def _measured(self, backend: str) -> Besides:
        """Return what jobs and runs take besides their steps, as it was measured."""
        besides = next(one.besides for one in self._record.backends if one.name == backend)
        assert besides is not None  # it was measured
        return besides

    def _keep_besides(self, besides: Besides) -> None:
        self._keep(start_s=besides.start_s, run_s=besides.run_s)

    def _choose_backend(self, speeds: Mapping[str, Mapping[Setting, Interval]]) -> str:
        """Return the first back-end, unless another is surely faster."""
        common = set[Setting].intersection(*[set(of) for of in speeds.values() if of] or [set()])
        found = {name: _overall([of[one] for one in common if of]) for name, of in speeds.items()}
        chosen = next(iter(found))
        for name, speed in found.items():
            kept = found[chosen]
            if speed is not None and (kept is None or speed.low > kept.high):
                chosen = name
        best = found[chosen]
        for name, speed in found.items():
            why = ""
            if name != chosen and speed is not None and best is not None and speed.high < best.low:
                why = f"predicted to be slower than {chosen}"
            elif name != chosen:
                why = f"cannot be told from {chosen} by what was measured"
            self._keep_backend(name, speed=None if speed is None else speed.mean, why=why)
        self._say(f"predict: back-end {chosen}")
        return chosen

    def _other_batches(self, left: Sequence[SettingRecord]) -> list[SettingRecord]:
        """Return gradient averaging, and the setting predicted to be fastest, with other batches.

        Where there are no more than the halving ends with, all of them.
        """
        fastest = max(left, key=lambda one: one.predicted or 0.0)
        few = [one.name for one in left] if len(left) <= LAST else []
        added = [
            Setting(self._settings[name].strategy, size)
            for size in self._request.batch_sizes
            for name in dict.fromkeys((self._request.tried[0].name, fastest.name, *few))
        ]
        self._settings |= {one.name: one for one in added}
        return [SettingRecord(one.name, one.strategy.text, one.batch_size) for one in added]

    def _plan_race(self, backend: str, measured: Measurement) -> tuple[float, ExpectedTimes]:
        """Return how long the race may take, and the pace that is expected of its settings.

        Raises:
            ConfigError: the shortest race and the shortest rungs cannot be expected to end within the budget;
                the message names one that will do.
        """
        pace = self._pace(backend, measured)
        share_s = _RACE_SHARE * self._request.budget_s
        usual_race_s = self._shortest_race_s(backend, pace)
        if self._record.rungs or not usual_race_s:
            return share_s, pace  # it was held: what it has shown is known better
        # A larger batch may take no longer, as on a GPU that waits for its host: a budget that suffices then
        # is not refused.
        quick = self._pace(backend, measured, is_quick=True)
        race_s = self._shortest_race_s(backend, quick)
        rungs, whole_s = self._expected_rungs(quick, measured)
        usual_s = self._rungs_s(pace, measured)
        left_s = self._left_s - (1 - _RESERVE) * race_s
        planned = plan_rungs(rungs.counts, rungs.seeds, left_s, self._record.besides, whole_s)
        told, budget_s = formatting.seconds, self._request.budget_s
        racing, training = (counted(count, "setting") for count in (len(self._record.left), rungs.counts[0]))
        if self._training.chooses_race and race_s > _MOST_OF_RACE * budget_s:
            found = f"the shortest race of {racing} takes about {told(race_s)}, more than half of it"
        elif rungs.counts[0] > 1 and planned.seconds[0] < rungs.seconds[0]:
            found = (
                f"{told(self._spent_s)} of {told(budget_s)} are used, the shortest race of {racing} is "
                f"expected to take {told(race_s)}, and training {training} rung by rung, for "
                f"{LEAST_STEPS} steps in the first, {told(rungs.cost_s(self._record.besides))}"
            )
        else:
            return min(share_s, max(self._left_s - usual_s, 0.0)), pace
        enough_s = self._enough_s(usual_race_s + usual_s)
        if self._training.chooses_race:
            enough_s = max(enough_s, math.ceil(_ROOM * usual_race_s / _MOST_OF_RACE))
        raise ConfigError(
            f"--budget {told(budget_s)}: {found}; go on with --budget {enough_s:.0f}s (what was "
            f"measured is kept){self._or_less()}"
        )

    def _or_less(self) -> str:
        """Return what else would make a search shorter, of what was asked for; "" where nothing would."""
        request = self._request
        if len(request.tried) > LAST:
            return ", or begin in another folder with fewer --strategies or --periods"
        if request.batch_sizes:
            return ", or begin in another folder with --batch-sizes none"
        return ", or begin in another folder with one of --seeds" if len(request.seeds) > 1 else ""

    def _shortest_race_s(self, backend: str, pace: ExpectedTimes) -> float:
        """Return about how long the shortest race takes; 0: one was held."""
        return self._training.expected_race_s(list(pace.steps_s), backend, 0.0, pace)

    def _rungs_s(self, pace: ExpectedTimes, measured: Measurement) -> float:
        """Return about how long the shortest rungs take; one that the race leaves alone is not trained."""
        rungs, _ = self._expected_rungs(pace, measured)
        return rungs.cost_s(self._record.besides) if rungs.counts[0] > 1 else 0.0

    def _expected_rungs(self, pace: ExpectedTimes, measured: Measurement) -> tuple[Rungs, float]:
        """Return the shortest rungs after a race, by what is predicted, and what the slowest training takes.

        Settings that the race would rule out, if it showed the predicted speeds, have no part in them: what
        it will show better than the prediction must not be a reason to refuse a budget.
        """
        known = {one: speed for one in pace.steps_s if (speed := self._record.of(one.name).predicted)}
        gone = too_slow(
            list(known),
            lambda one, other: known[one] > known[other],
            lambda one, other: known[one] / known[other],
            "",
        )
        steps_s = [step_s for one, step_s in pace.steps_s.items() if one not in gone]
        whole_s = max(steps_s) * self._training.total_steps(measured.frames_per_step)
        return self._shortest_rungs(len(steps_s), LEAST_STEPS * max(steps_s), whole_s), whole_s

    def _pace(self, backend: str, measured: Measurement, *, is_quick: bool = False) -> ExpectedTimes:
        """Return how long what is left is expected to take, before the race.

        Args:
            is_quick: a larger batch takes no longer; else as many times as long as it is larger.
        """
        left = [self._settings[name] for name in self._record.left]
        steps_s = {one: self._expected_step_s(one, backend, measured) for one in left}
        if not is_quick and self._request.own_batch:
            for one in left:
                steps_s[one] *= max(one.batch_size / self._request.own_batch, 1.0)
        return ExpectedTimes(self._measured(backend).cost_s(1), steps_s)

    def _expected_step_s(self, setting: Setting, backend: str, measured: Measurement) -> float:
        """Return about how long a step takes with the training's own batch."""
        own = self._record.of(Setting(setting.strategy).name)
        return measured.frames_per_step / own.predicted if own.predicted else self._training.step_s(backend)

    def _shortest_rungs(self, count: int, least_s: float, whole_s: float) -> Rungs:
        """Return the shortest rungs that show anything of so many settings.

        Args:
            least_s: time of the fewest steps.
            whole_s: a whole training of the slowest setting; none trains longer.
        """
        counts = halvings(count)
        first_s = min(least_s, whole_s / 2.0 ** (len(counts) - 1))
        seconds = tuple(first_s * 2.0**k for k in range(len(counts)))
        return Rungs(counts, seconds, len(self._request.seeds))

    def _race(self, backend: str, longest_s: float, pace: ExpectedTimes) -> None:
        """Let what is left race, and rule settings out by that."""
        self._keep(stage=RACE)
        race = self._training.hold_race(list(pace.steps_s), backend, longest_s, pace)
        if isinstance(race, str):
            raise RunError(
                f"{self._request.out}: the race of the settings failed: {race}; the same command tries again"
            )
        self._rule_out(RACE, {n: why for n, why in race.left_out.items() if n in self._record.left})
        if not race.speeds:
            raise RunError(
                f"{self._request.out}: fewer than two settings could race; name other --strategies"
            )
        raced = {self._settings[name]: race.speeds[name] for name in self._record.left}
        record = self._record
        for setting, speed in raced.items():
            rate, (low, high) = speed.ratio * race.baseline_per_s, speed.interval or (None, None)
            record = record.with_setting(
                setting.name,
                ratio=speed.ratio,
                ratio_low=low,
                ratio_high=high,
                frames_per_s=rate,
                steps_per_s=rate / race.frames_per_step[setting.name],
            )
        self._record = record
        reasons = too_slow(
            list(raced),
            lambda one, other: raced[one].is_faster_than(raced[other]),
            lambda one, other: raced[one].over(raced[other]).ratio,
            "raced",
        )
        self._rule_out(RACE, {one.name: why for one, why in reasons.items()})
        self._choose([max(self._record.left, key=lambda name: self._record.of(name).frames_per_s or 0.0)])

    def _choose(self, best: Sequence[str], equal: Sequence[str] = ()) -> None:
        """Take the first as the best so far."""
        name = best[0]
        command = self._training.command(self._settings[name], self._record.backend)
        self._keep(chosen=name, untold=tuple(equal), command=command)

    def _halve(self, backend: str) -> None:
        """Train what is left rung by rung, half of it each time, as far as the budget goes, and choose."""
        self._keep(stage=HALVING)
        self._earlier, done = self._record.rungs, list[RungRecord]()
        end_s: float | None = self._earlier[0].seconds if self._earlier else self._first_rung_s()
        while end_s is not None:
            rung = self._hold_rung(backend, end_s, done)
            if rung is None:
                self._say(_USED_UP)
                self._leave_behind(done[-1], LAST)
                break
            done.append(rung)
            self._keep_rungs(*done)
            if not rung.scores:
                raise RunError(self._nothing_trained(rung))
            self._choose(_by_score(rung))
            count, end_s = self._rung_after(done)
            self._leave_behind(rung, count)
        self._keep(rungs=tuple(done))
        self._finish(backend)

    def _nothing_trained(self, rung: RungRecord) -> str:
        """Return what to say and do where no setting has come through a rung."""
        legs = [_Leg(name, self._request.seeds[0], 0.0, rung.seconds) for name in rung.settings]
        remedy = "the same command tries again; other options need another folder"
        if all(map(self._has_trained, legs)):
            remedy = "the same command would find no more: correct what is trained, and give another folder"
        return (
            f"{self._request.out}: no setting could be trained: {rung.settings[0]}: "
            f"{self._record.of(rung.settings[0]).why}; their output is in "
            f"{self._request.out / RUNS / LOGS}; {remedy}"
        )

    def _keep_rungs(self, *rungs: RungRecord) -> None:
        self._keep(rungs=(*rungs, *self._earlier[len(rungs) :]))

    def _leave_behind(self, rung: RungRecord, count: int) -> None:
        """Rule out all but so many settings by how they fared in a rung."""
        was = "expected to stay behind" if rung.expected else "behind"
        why = f"after {formatting.seconds(rung.seconds)} of training it was {was} {counted(count, 'other')}"
        order = [name for name in _by_score(rung) if name in self._record.left]
        self._rule_out(HALVING, dict.fromkeys(order[count:], why))

    @property
    def _left_s(self) -> float:
        """What is left of the budget, less a reserve."""
        return (1 - _RESERVE) * max(self._request.budget_s - self._spent_s, 0.0)

    @property
    def _slowest_s(self) -> float:
        """How long a whole training of the slowest setting that is left takes."""
        return max(map(self._whole_s, self._record.left))

    def _whole_s(self, name: str) -> float:
        """Return how long a whole training takes."""
        rate, frames = self._steps_per_s(name), self._record.of(name).frames_per_s
        assert frames is not None  # it has raced
        return self._training.total_steps(frames / rate) / rate

    def _continued(self, curves: Mapping[str, Sequence[Curve]], end_s: float) -> dict[str, list[Curve]]:
        """Return settings' curves as they are expected to go on, for as long again at most."""
        share = shrinkage([curve for found in curves.values() for curve in found])
        return {
            name: [curve.continued(min(2 * end_s, self._whole_s(name)), share) for curve in found]
            for name, found in curves.items()
        }

    def _first_rung_s(self) -> float:
        """Return how long settings train in the first rung.  Raises ConfigError: the budget is too small."""
        besides, whole_s = self._record.besides, self._slowest_s
        least_s = max(LEAST_STEPS / self._steps_per_s(name) for name in self._record.left)
        needed = self._shortest_rungs(len(self._record.left), least_s, whole_s)
        counts = needed.counts
        rungs = plan_rungs(counts, needed.seeds, self._left_s, besides, whole_s)
        if rungs.seconds[0] < needed.seconds[0]:
            raise ConfigError(
                f"--budget: {formatting.seconds(self._spent_s)} of "
                f"{formatting.seconds(self._request.budget_s)} are used, and the rest trains each of "
                f"{counted(counts[0], 'setting')} for fewer than {LEAST_STEPS} steps; give "
                f"{self._enough_s(needed.cost_s(besides)):.0f}s at least (what was measured is kept)"
            )
        return rungs.seconds[0]

    def _rung_after(self, done: Sequence[RungRecord]) -> tuple[int, float | None]:
        """Return how many settings go on after some rungs, and until when they train; None: no more."""
        left = len(self._record.left)
        if len(done[-1].settings) <= LAST:
            return left, None
        if len(done) < len(self._earlier):
            following = self._earlier[len(done)]
            return len(following.settings), following.seconds
        ahead = next_rung(
            left,
            len(self._request.seeds),
            self._left_s,
            self._record.besides,
            self._slowest_s,
            [rung.seconds for rung in done],
        )
        if ahead is None:
            self._say(_USED_UP)
            return LAST, None
        if ahead[0] < math.ceil(left / 2):
            self._say(f"halving: the budget does not pay for all rungs, so the best {ahead[0]} go on at once")
        return ahead

    def _enough_s(self, rungs_s: float) -> float:
        """Return a budget that the same command will find to be enough, which first reads all again."""
        return math.ceil(1.1 * (self._spent_s + rungs_s) + _READING_S)

    def _steps_per_s(self, name: str) -> float:
        rate = self._record.of(name).steps_per_s
        assert rate is not None  # it has raced
        return rate

    def _hold_rung(self, backend: str, end_s: float, done: Sequence[RungRecord]) -> RungRecord | None:
        """Train what is left for as long; return how it fared, None: the budget does not suffice for all.

        The first rung is held in any case: it was planned, and without it nothing could be chosen.
        """
        rung = RungRecord(end_s, self._record.left)
        self._keep_rungs(*done, rung)
        number = counted(len(rung.settings), "setting")
        self._say(f"halving: {number} until {formatting.seconds(end_s)} of training")
        begin_s = done[-1].seconds if done else 0.0
        self._starts_s, self._besides_s = [], []
        legs = [_Leg(name, self._request.seeds[0], begin_s, end_s) for name in rung.settings]
        curves = self._train_legs(backend, legs, may_end=bool(done))
        seen_s = self._first_seen_s(curves or {}, end_s)
        if curves and seen_s > end_s:
            until = formatting.seconds(seen_s)
            self._say(f"halving: not all were evaluated by then, so all train until {until}")
            rung = replace(rung, seconds=seen_s)
            self._keep_rungs(*done, rung)
            legs = [_Leg(name, self._request.seeds[0], end_s, seen_s) for name in curves]
            curves = self._train_legs(backend, legs, may_end=bool(done))
        if curves is None:
            return None
        for name in curves:
            self._record = self._record.with_setting(name, rungs=self._record.of(name).rungs + 1)
        if len(done) >= len(self._earlier):  # nobody knows how far interrupted runs had come
            self._learn_besides()
        scores = {name: curve.at(rung.seconds) for name, curve in curves.items()}
        before = self._earlier[len(done)] if len(done) < len(self._earlier) else RungRecord(0.0, ())
        if before.scores.keys() == scores.keys():  # what went on from it has been trained
            return replace(rung, scores=scores, expected=before.expected)
        ahead = self._continued({name: [curve] for name, curve in curves.items()}, rung.seconds)
        is_known = any(ahead[name][0] is not curve for name, curve in curves.items())
        expected = {name: one.last for name, (one,) in ahead.items()} if is_known else {}
        return replace(rung, scores=scores, expected=expected)

    def _first_seen_s(self, curves: Mapping[str, Curve], end_s: float) -> float:
        """Return from when on all settings have a score, at least the end of a rung."""
        late = [end_s]
        for name, curve in curves.items():
            first_s, rate = curve.points[0][0], self._steps_per_s(name)
            if first_s > max(end_s, self._step_at(name, end_s) / rate) + _PASSED / rate:
                late.append(first_s)
        return max(late)

    def _train_legs(
        self, backend: str, legs: Sequence[_Leg], *, may_end: bool = True
    ) -> dict[str, Curve] | None:
        """Train parts of runs; return their scores by setting, without those that cannot be trained.

        Args:
            may_end: give up, and return None, as soon as not all are expected to end within the budget.
        """
        due = {leg for leg in legs if not self._has_trained(leg)}
        tries: dict[_Leg, float | str] = {}  # what those that a job came to have taken, or what went wrong
        curves: dict[str, Curve] = {}
        failed: dict[str, str] = {}
        told: set[_Leg] = set()
        is_over = False
        for number, leg in enumerate(legs):
            if leg.name in failed:
                continue
            if leg in due and leg not in tries and self._has_trained(leg):
                due.remove(leg)  # the part before has come to the training's end
            if leg in due and leg not in tries:
                ahead = [one for one in legs[number:] if one in due and one.name not in failed]
                is_over = may_end and not self._fits(ahead)
                if is_over:
                    break
                tries |= self._try(backend, ahead, partial(self._show, legs, told, ahead), may_end=may_end)
            curve = self._curve(backend, leg, tries.get(leg))
            if isinstance(curve, str):
                of_seed = "it" if leg.seed == self._request.seeds[0] else f"seed {leg.seed}"
                failed[leg.name] = f"{of_seed} failed: {curve}"
                curves.pop(leg.name, None)
                self._say(f"halving: {self._place(leg, legs)} failed: {curve}")
                continue
            curves[leg.name] = curve
            self._keep()
            if leg in due and leg not in told:
                self._say_score(leg, legs, curve)
        if failed:
            self._rule_out(HALVING, failed)
        return None if is_over else curves

    def _place(self, leg: _Leg, legs: Sequence[_Leg]) -> str:
        seed = "" if leg.seed == self._request.seeds[0] else f", seed {leg.seed}"
        return f"[{legs.index(leg) + 1}/{len(legs)}] {leg.name}{seed}"

    def _say_score(self, leg: _Leg, legs: Sequence[_Leg], curve: Curve) -> None:
        self._say(f"halving: {self._place(leg, legs)}: {self._terms.with_unit(curve.at(leg.end_s))}")

    def _step(self, leg: _Leg) -> int:
        """Return the step until which a part of a run trains."""
        return self._step_at(leg.name, leg.end_s)

    def _step_at(self, name: str, seconds: float) -> int:
        return self._settings[name].stop(self._steps_in(name, seconds))

    def _steps_in(self, name: str, seconds: float) -> int:
        return max(1, round(seconds * self._steps_per_s(name)))

    def _has_trained(self, leg: _Leg) -> bool:
        # One of an earlier version may have stopped shortly before the end of a period.
        step = min(self._step(leg), self._steps_in(leg.name, leg.end_s))
        return self._training.has_trained_to(self._settings[leg.name], leg.seed, step)

    def _ends_s(self, leg: _Leg) -> tuple[float, float]:
        """Return from when to when a part of a run trains: by its steps."""
        rate = self._steps_per_s(leg.name)
        begin = self._step_at(leg.name, leg.begin_s) if leg.begin_s else 0
        return begin / rate, self._step(leg) / rate

    def _fits(self, legs: Sequence[_Leg]) -> bool:
        """Return whether parts of runs are expected to be trained within the budget."""
        return not legs or self._cost_s(legs) <= self._time_s

    @property
    def _time_s(self) -> float:
        return (1 + _LATE) * self._request.budget_s - self._spent_s

    def _cost_s(self, legs: Sequence[_Leg]) -> float:
        """Return what training parts of runs in one start takes."""
        ends_s = map(self._ends_s, legs)
        return sum(end - begin for begin, end in ends_s) + self._record.besides.cost_s(len(legs))

    def _try(
        self, backend: str, legs: Sequence[_Leg], on_trained: Callable[[int], None], *, may_end: bool
    ) -> dict[_Leg, float | str]:
        """Train parts of runs within one start, as far as that goes.

        Args:
            legs: at least one.
            on_trained: as in `train_together`.
            may_end: begin none that would end too late.

        Returns:
            What those that it came to have taken, s, or what went wrong with the last of them.
        """
        for leg in legs:
            self._keep_folder(leg)
        self._keep()
        longest_s = max(self._time_s - self._cost_s(legs[-1:]), 1.0) if may_end else 0.0
        stretches = [Stretch(self._settings[leg.name], leg.seed, self._step(leg)) for leg in legs]
        trained = self._training.train_together(stretches, backend, longest_s, on_trained)
        tries: dict[_Leg, float | str] = dict(zip(legs, trained.took_s, strict=False))
        if len(tries) < len(legs) and (trained.message or not tries):
            tries[legs[len(tries)]] = trained.message or "it was not trained"
        else:
            self._starts_s.append(trained.start_s)
        return tries

    def _show(self, legs: Sequence[_Leg], told: set[_Leg], ahead: Sequence[_Leg], done: int) -> None:
        """Say the scores of the parts that a job has trained by now, while it goes on.

        Args:
            legs: of the rung.
            told: those whose scores were said.
            ahead: that the job trains, in order.
            done: how many it has trained.
        """
        for leg in ahead[:done]:
            curve = self._scored(leg) if leg not in told else ""
            if isinstance(curve, Curve):  # else it is told when the job has ended
                told.add(leg)
                self._keep()
                self._say_score(leg, legs, curve)

    def _learn_besides(self) -> None:
        """Take for what jobs and runs take besides training what those of a rung took."""
        now = self._record.besides
        start_s, run_s = _mean(self._starts_s, now.start_s), _mean(self._besides_s, now.run_s)
        self._keep_besides(Besides(start_s, max(0.0, run_s)))

    def _keep_folder(self, leg: _Leg) -> None:
        folder = self._training.run_dir(self._settings[leg.name], leg.seed)
        runs = {**self._record.of(leg.name).runs, str(leg.seed): folder.name}
        self._record = self._record.with_setting(leg.name, runs=runs)

    def _curve(self, backend: str, leg: _Leg, tried: float | str | None) -> Curve | str:
        """Return the scores of a run over its time at its raced speed, or what went wrong.

        Args:
            tried: what a job took for it, or what went wrong there, so that it is trained once more, by
                itself; None: it was trained before.
        """
        self._keep_folder(leg)
        has_trained = self._has_trained(leg)
        curve = tried if isinstance(tried, str) and not has_trained else self._scored(leg)
        if isinstance(curve, str):
            if has_trained:  # no job would go on with it
                return tried if isinstance(tried, str) else curve
            # A rank may have been lost: that is no fault of the setting.
            self._say(f"halving: {leg.name} failed and is tried once more: {curve}")
            step = self._step(leg)
            return self._curve_of(
                leg, self._training.train_to(self._settings[leg.name], backend, leg.seed, step)
            )
        if isinstance(tried, float) and not curve.is_over:  # it has come to its first evaluation at least
            begin_s, end_s = self._ends_s(leg)
            self._besides_s.append(tried - (max(end_s, curve.points[0][0]) - begin_s))
        return curve

    def _scored(self, leg: _Leg) -> Curve | str:
        """Return the scores that a run has, or why it has none."""
        return self._curve_of(leg, self._training.scored(self._settings[leg.name], leg.seed, self._step(leg)))

    def _curve_of(self, leg: _Leg, found: Scored | str) -> Curve | str:
        rate = self._steps_per_s(leg.name)
        if isinstance(found, str):
            return found
        if found.task is not None:
            self._terms = Terms(found.task)
        return Curve(tuple((at / rate, score) for at, score in found.points), found.is_over)

    def _finish(self, backend: str) -> None:
        """Train the last settings with the other seeds, as far as the budget goes, and choose.

        The one that reaches the target soonest is chosen.
        """
        first, *others = self._request.seeds
        ends_s = [rung.seconds for rung in self._record.rungs[-SEED_STOPS:]]
        last = [name for name in self._record.rungs[-1].scores if name in self._record.left]
        legs = [_Leg(name, first, ends_s[-1], ends_s[-1]) for name in last]
        found = self._train_legs(backend, legs, may_end=False)
        curves = {name: [curve] for name, curve in (found or {}).items()}
        for seed in others:
            # Evaluated where the first seed's was, or its time to the target would be known less well.
            parts = list(itertools.pairwise((0.0, *ends_s)))
            found = self._train_legs(backend, [_Leg(name, seed, *part) for name in curves for part in parts])
            if found is None:
                self._say(f"halving: the budget is used up: without seed {seed}")
                break
            curves = {name: [*curves[name], curve] for name, curve in found.items()}
        if not curves:
            raise RunError(f"{self._request.out}: none of the last settings can be trained with all seeds")
        ahead = self._continued(curves, ends_s[-1])
        target, ends = finishes(ahead, self._request.target.score)
        names = list(ends)
        for name, end in ends.items():
            why = "" if name == names[0] else _why_behind(end, ends[names[0]], names[0])
            scores = tuple(curve.at(ends_s[-1]) for curve in curves[name])
            self._record = self._record.with_setting(name, times_s=end.times_s, scores=scores, why=why)
        seen = [pair for name in curves for pair in zip(curves[name], ahead[name], strict=True)]
        lasts = [curve.points[-1][0] for curve, further in seen if further is not curve]
        seen_s = min(ends_s[-1], *lasts) if lasts else None
        self._record = replace(self._record, target=target, seen_s=seen_s)
        self._choose(names, untold(names, ends, {name: self._slack(name) for name in names}))

    def _slack(self, name: str) -> tuple[float, float]:
        """Return by which factors a setting's times may be shorter or longer: its speed is an estimate."""
        one = self._record.of(name)
        if one.ratio is None or one.ratio_low is None or one.ratio_high is None:
            return 1.0, 1.0
        return one.ratio / one.ratio_high, one.ratio / one.ratio_low


def _mean(values: Sequence[float], default: float) -> float:
    return sum(values) / len(values) if values else default


def _by_score(rung: RungRecord) -> list[str]:
    """Return the names of a rung's settings, the best first: by what is expected of them, if known."""
    scores = rung.expected or rung.scores
    return sorted(scores, key=lambda name: -scores[name])


def _overall(speeds: Sequence[Interval]) -> Interval | None:
    """Return the geometric mean of several speeds; None where there is none."""
    if not speeds:
        return None
    count = len(speeds)
    return Interval(
        math.exp(sum(math.log(one.mean) for one in speeds) / count),
        math.exp(sum(math.log(one.low) for one in speeds) / count),
        math.exp(sum(math.log(one.high) for one in speeds) / count),
    )


def _why_behind(end: Finish, best: Finish, name: str) -> str:
    if math.isinf(end.mean_s):
        return "it does not reach the target"
    return f"it reaches the target {formatting.percent(end.mean_s / best.mean_s - 1)} % later than {name}"


def other_batches(options: TrainOptions, ranks: int, given: Sequence[int] | None) -> tuple[int, ...]:
    """Return the batches of a rank to try besides the training's own.

    Args:
        given: those asked for; None: half and twice its own; empty: none.

    Raises:
        ConfigError: batches were asked for where the training's own is given otherwise.
    """
    own = options.resolve(ranks).plan().batch_size
    batch = options.batch
    if not own or batch.global_batch is not None or batch.batch_frames:
        if given:
            raise ConfigError(
                "--batch-sizes: not with --global-batch or --batch-frames, which say what a rank's batch "
                "is; leave one out"
            )
        return ()
    if given is not None and not given:
        return ()
    return batches_of(own, given or ())
