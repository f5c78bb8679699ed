"""Carry a search out: measure, predict, race, halve; what is done is kept, and the best so far is known."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from speechdp.counting import counted
from speechdp.errors import ConfigError, RunError
from speechdp.experiments.compare.training import LOGS
from speechdp.experiments.jobs import JobStopped
from speechdp.experiments.race.plan import RaceOptions
from speechdp.experiments.tune.jobs import MEASURED, Measurement, RacedSettings, TunedJobs
from speechdp.experiments.tune.plan import (
    LEAST_STEPS,
    SEED_STOPS,
    Curve,
    Finish,
    Rungs,
    Setting,
    batches_of,
    finishes,
    halvings,
    plan_rungs,
    too_slow,
    untold,
)
from speechdp.experiments.tune.record import (
    HALVING,
    MEASURE,
    PREDICT,
    RACE,
    RUNS,
    BackendRecord,
    RungRecord,
    SettingRecord,
    TuneRecord,
    check_same_search,
    write_tune,
)
from speechdp.options.run import TrainOptions
from speechdp.report.kit import formatting
from speechdp.report.kit.metric_names import Terms
from speechdp.simulation.predict import Interval
from speechdp.tasks.metrics import TaskRecord

#: Share of the budget that the race takes at most, as far as its intervals allow.
_RACE_SHARE = 0.25
#: Settings that the halving ends with.
_LAST = 2


@dataclass(frozen=True)
class TunedTarget:
    """What is to be reached soonest.

    Attributes:
        value: as it was given; None: the best that the last settings all reach.
        task: whose values they are.
    """

    value: float | None
    task: TaskRecord

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
            "target": self.target.value,
            "race": [self.race.rounds, self.race.least_steps],
        }


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
        self._backend = ""  # that an earlier command chose

    def run(self) -> TuneRecord:
        """Search; return what was found.

        Raises:
            JobStopped: a signal asked for it; the same command goes on, and the record has the best so far.
            ConfigError: the folder holds another search, or the budget is too small.
            RunError: no back-end works, no setting can be trained, or the disk is full.
        """
        begun = check_same_search(self._request.out, self._request.settings, TrainOptions().to_json())
        if begun is not None:
            if begun.completed:
                self._say(f"{self._request.out}: this search is over; for another one give another folder")
                return begun
            # What it has shown stays in the record until this command has come as far.
            self._before_s, self._record = begun.spent_s, begun
            self._backend = begun.backend if begun.stage != MEASURE else ""
        self._keep()
        try:
            self._training.begin()
            measured = self._measure()
            backend = self._predict(measured)
            self._search(backend)
        except (JobStopped, ConfigError, RunError):
            with contextlib.suppress(RunError):  # of a full disk, which is told already
                self._keep()
            raise
        self._keep(completed=True)
        return self._record

    def _search(self, backend: str) -> None:
        """Choose among what is left; where all but one are ruled out nothing has to be trained."""
        if len(self._record.left) == 1:
            self._choose(self._record.left)
            return
        raced = self._race(backend)
        if len(self._record.left) > 1:
            self._halve(backend, raced)

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
        if not self._backend:
            self._keep(stage=MEASURE, backends=tuple(map(BackendRecord, self._request.backends)))
        found: dict[str, Measurement] = {}
        for name in [self._backend] if self._backend else self._request.backends:
            self._say(f"measure: computing, data and exchanges with back-end {name}")
            result = self._training.measure(name)
            if isinstance(result, Measurement):
                found[name] = result
                if result.start_s is not None:
                    self._keep(start_s=result.start_s)
                continue
            if self._backend:
                raise RunError(
                    f"{self._request.out}: back-end {name}, with which this search has begun, fails: "
                    f"{result}; the same command tries again"
                )
            self._say(f"measure: back-end {name} is left out: {result}")
            self._keep_backend(name, why=f"it does not work here: {result}")
        if not found:
            raise RunError(
                f"{self._request.out}: no back-end can train: {self._record.backends[0].why}; their output "
                f"is in {self._request.out / MEASURED / LOGS}"
            )
        return found

    def _keep_backend(self, name: str, **changes: Any) -> None:
        backends = tuple(replace(b, **changes) if b.name == name else b for b in self._record.backends)
        self._keep(backends=backends)

    def _predict(self, measured: Mapping[str, Measurement]) -> str:
        """Predict all settings with every back-end, choose one, and rule settings out; return it."""
        tried = self._request.tried
        self._settings = {one.name: one for one in tried}
        speeds = {name: found.predict(self._request.ranks, tried) for name, found in measured.items()}
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
            why = reasons.get(setting, "")
            own = SettingRecord(setting.name, setting.strategy.text, out_in=PREDICT if why else "", why=why)
            speed = shown.get(setting)
            if speed is not None:
                own = replace(own, predicted=speed.mean, predicted_low=speed.low, predicted_high=speed.high)
            records.append(own)
        records += self._other_batches([one for one in records if not one.out_in])
        names = {one.name for one in records}
        rungs = tuple(itertools.takewhile(lambda rung: names.issuperset(rung.settings), self._record.rungs))
        kept = self._record.chosen in names
        self._keep(
            stage=PREDICT,
            tried=tuple(records),
            rungs=rungs,
            target=None,
            untold=(),
            chosen=self._record.chosen if kept else "",
            command=self._record.command if kept else "",
        )
        self._say_ruled_out(PREDICT, len(reasons))
        return backend

    def _choose_backend(self, speeds: Mapping[str, Mapping[Setting, Interval]]) -> str:
        """Return the first back-end, unless another is surely faster."""
        common = set.intersection(*(set(of) for of in speeds.values()))
        found = {name: _overall([of[one] for one in common]) for name, of in speeds.items()}
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
        """Return gradient averaging, and the setting predicted to be fastest, with other batches."""
        fastest = max(left, key=lambda one: one.predicted or 0.0)
        added = [
            Setting(self._settings[name].strategy, size)
            for size in self._request.batch_sizes
            for name in dict.fromkeys((self._request.tried[0].name, fastest.name))
        ]
        self._settings |= {one.name: one for one in added}
        return [SettingRecord(one.name, one.strategy.text, one.batch_size) for one in added]

    def _race(self, backend: str) -> RacedSettings:
        """Let what is left race, and rule settings out by that."""
        self._keep(stage=RACE)
        racing = [self._settings[name] for name in self._record.left]
        self._say(f"race: {counted(len(racing), 'setting')} in turn")
        longest_s = _RACE_SHARE * self._request.budget_s
        race = self._training.hold_race(racing, backend, longest_s, self._record.start_s)
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
        return race

    def _choose(self, best: Sequence[str], equal: Sequence[str] = ()) -> None:
        """Take the first as the best so far."""
        name = best[0]
        command = self._training.command(self._settings[name], self._record.backend)
        self._keep(chosen=name, untold=tuple(equal), command=command)

    def _halve(self, backend: str, race: RacedSettings) -> None:
        """Train what is left rung by rung, half of it each time, and choose."""
        self._keep(stage=HALVING)
        counts = halvings(len(self._record.left), _LAST)
        earlier, done = self._record.rungs, list[RungRecord]()
        for number in range(len(counts)):
            alive = self._record.left
            # Those of an earlier command are as long as they were, and stay until this one has come so far.
            before_s = done[-1].seconds if done else 0.0
            is_known = number < len(earlier)
            until_s = earlier[number].seconds if is_known else self._rung_s(race, counts[number:], before_s)
            rung = RungRecord(until_s, alive)
            self._keep(rungs=(*done, rung, *earlier[number + 1 :]))
            self._say(
                f"halving: {counted(len(alive), 'setting')} until {formatting.seconds(until_s)} of training"
            )
            scores = self._train_rung(backend, alive, until_s)
            done.append(replace(rung, scores=scores))
            self._keep(rungs=(*done, *earlier[number + 1 :]))
            order = sorted(scores, key=lambda name: -scores[name])
            if not order:
                raise RunError(
                    f"{self._request.out}: no setting can be trained; their output is in "
                    f"{self._request.out / RUNS / LOGS}"
                )
            self._choose(order)
            if number + 1 < len(counts):
                behind = order[counts[number + 1] :]
                self._rule_out(
                    HALVING,
                    {
                        name: f"after {formatting.seconds(until_s)} of training it was behind "
                        f"{counted(counts[number + 1], 'other')}"
                        for name in behind
                    },
                )
        self._keep(rungs=tuple(done))
        self._finish(backend)

    def _rung_s(self, race: RacedSettings, counts: Sequence[int], before_s: float) -> float:
        """Return how long settings have trained by the end of the next rung, of the budget that is left."""
        start_s = self._record.start_s
        whole_s = [
            self._training.total_steps(race.frames_per_step[name]) / self._steps_per_s(name)
            for name in self._record.left
        ]
        left_s = self._request.budget_s - self._spent_s
        seeds = len(self._request.seeds)
        if not before_s:
            rungs = plan_rungs(counts, seeds, left_s, start_s, max(whole_s))
            least_s = max(LEAST_STEPS / self._steps_per_s(name) for name in self._record.left)
            if rungs.seconds[0] < least_s and rungs.seconds[-1] < max(whole_s):
                needed = Rungs(rungs.counts, tuple(least_s * 2**k for k in range(len(counts))), seeds)
                raise ConfigError(
                    f"--budget: {formatting.seconds(self._spent_s)} of "
                    f"{formatting.seconds(self._request.budget_s)} are used, and the rest trains each of "
                    f"{counted(counts[0], 'setting')} for fewer than {LEAST_STEPS} steps; give "
                    f"{self._enough_s(needed.cost_s(start_s)):.0f}s at least (what was measured is kept)"
                )
            return rungs.seconds[0]
        # What remains is shared out as at the beginning: every rung twice as long as the one before.
        planned = Rungs(tuple(counts), tuple(before_s * 2 ** (k + 1) for k in range(len(counts))), seeds)
        spared_s = sum(counts[:1]) * before_s  # those runs go on from where they stand
        cost_s = planned.cost_s(start_s) - spared_s
        factor = min(1.0, max(left_s, 0.0) / cost_s) if cost_s > 0 else 1.0
        return min(max(2 * before_s * factor, 1.2 * before_s), max(*whole_s, 1.2 * before_s))

    def _enough_s(self, rungs_s: float) -> float:
        """Return a budget that the same command will find to be enough, which first reads all again."""
        again_s = time.monotonic() - self._clock_s
        return math.ceil(1.1 * (self._spent_s + again_s + rungs_s))

    def _steps_per_s(self, name: str) -> float:
        rate = self._record.of(name).steps_per_s
        assert rate is not None  # it has raced
        return rate

    def _train_rung(self, backend: str, names: Sequence[str], until_s: float) -> dict[str, float]:
        """Train settings for a time; return their scores, of those that can be trained."""
        scores: dict[str, float] = {}
        failed: dict[str, str] = {}
        for number, name in enumerate(names, start=1):
            curve = self._curve(backend, name, self._request.seeds[0], until_s)
            if isinstance(curve, str):
                failed[name] = f"it failed: {curve}"
                self._say(f"halving: [{number}/{len(names)}] {name} failed: {curve}")
                continue
            scores[name] = curve.at(until_s)
            record = self._record.of(name)
            self._record = self._record.with_setting(name, rungs=record.rungs + 1)
            self._keep()
            self._say(f"halving: [{number}/{len(names)}] {name}: {scores[name]:.4g}")
        if failed:
            self._rule_out(HALVING, failed)
        return scores

    def _curve(self, backend: str, name: str, seed: int, until_s: float) -> Curve | str:
        """Train a run for a time at its raced speed; return its scores over that time, or what went wrong."""
        setting, rate = self._settings[name], self._steps_per_s(name)
        record = self._record.of(name)
        folder = self._training.run_dir(setting, seed)
        runs = {**record.runs, str(seed): folder.name}
        self._record = self._record.with_setting(name, runs=runs)
        step = max(1, round(until_s * rate))
        found = self._training.train_to(setting, backend, seed, step)
        if isinstance(found, str):  # a rank may have been lost: that is no fault of the setting
            self._say(f"halving: {name} failed and is tried once more: {found}")
            found = self._training.train_to(setting, backend, seed, step)
        if isinstance(found, str):
            return found
        return Curve(tuple((step / rate, score) for step, score in found.points))

    def _finish(self, backend: str) -> None:
        """Train the last settings with the other seeds, and choose by the time to the target."""
        ends_s = [rung.seconds for rung in self._record.rungs[-SEED_STOPS:]]
        curves: dict[str, list[Curve]] = {}
        for name in self._record.rungs[-1].scores:
            for seed in self._request.seeds:
                is_other = seed != self._request.seeds[0]
                if is_other:
                    self._say(f"halving: {name}, seed {seed}")
                # Evaluated where the first seed's was, or its time to the target would be known less well.
                for until_s in ends_s if is_other else ends_s[-1:]:
                    curve = self._curve(backend, name, seed, until_s)
                    if isinstance(curve, str):
                        break
                if isinstance(curve, str):
                    self._rule_out(HALVING, {name: f"seed {seed} failed: {curve}"})
                    curves.pop(name, None)
                    break
                curves.setdefault(name, []).append(curve)
        if not curves:
            raise RunError(f"{self._request.out}: none of the last settings can be trained with all seeds")
        target, ends = finishes(curves, self._request.target.score)
        names = list(ends)
        for name, end in ends.items():
            self._record = self._record.with_setting(name, times_s=end.times_s, scores=end.scores)
        behind = {name: _why_behind(ends[name], ends[names[0]], names[0]) for name in names[1:]}
        self._record = replace(self._record, target=target)
        self._choose(names, untold(names, ends))
        record = self._record
        for name, why in behind.items():
            record = record.with_setting(name, why=why)
        self._record = record


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
        return "it did not reach the target"
    return f"it reached the target {formatting.percent(end.mean_s / best.mean_s - 1)} % later than {name}"


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
