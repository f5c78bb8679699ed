"""Race the settings that remain after the predictions, if the budget suffices for the race and the rungs."""

from __future__ import annotations

import math

from speechdp.counting import counted
from speechdp.errors import ConfigError, RunError
from speechdp.experiments.tune.jobs import Measurement, RacedSettings
from speechdp.experiments.tune.plan import (
    LAST,
    LEAST_STEPS,
    ExpectedTimes,
    Rungs,
    Setting,
    plan_rungs,
    shortest_rungs,
    too_slow,
)
from speechdp.experiments.tune.record import RACE
from speechdp.experiments.tune.search import SearchState
from speechdp.report.kit import formatting

#: Maximum share of the budget that the race takes, as far as its intervals allow.
_RACE_SHARE = 0.25
#: Maximum share of the budget that the shortest race may take.
_MOST_OF_RACE = 0.5
#: Factor by which a budget must exceed that, so that the same command will find it to be enough.
_ROOM = 1.05


class TunedRace:
    """Races the settings of a search.

    Args:
        search: search whose back-end is chosen.
        measured: measurements with that back-end.
    """

    def __init__(self, search: SearchState, measured: Measurement) -> None:
        self._search, self._measured = search, measured
        self._backend = search.record.backend

    def hold(self) -> None:
        """Race the remaining settings, unless done; rule out slow ones, and choose the fastest so far.

        If a single setting is left to be trained with several learning rates, take its predicted speed.

        Raises:
            ConfigError: the shortest race and rungs are not expected to end within the budget; the message
                names a sufficient one.
            RunError: the race failed, or fewer than two can take part and there is only one learning rate.
            JobStopped: a signal arrived meanwhile.
        """
        search = self._search
        longest_s, pace = self._plan()
        search.keep(stage=RACE)
        if len(search.racing) > 1:
            self._race(longest_s, pace)
        else:
            self._take_prediction(search.racing[0])
        search.try_rates()
        search.choose(max(search.record.left, key=lambda name: search.record.of(name).frames_per_s or 0.0))

    def _race(self, longest_s: float, pace: ExpectedTimes) -> None:
        """Race settings, and rule out those that cannot race or are too slow.

        Args:
            longest_s, pace: as in `TunedJobs.hold_race`.

        Raises:
            RunError, JobStopped: as `hold`.
        """
        search, out = self._search, self._search.request.out
        race = search.jobs.hold_race(list(pace.steps_s), self._backend, longest_s, pace)
        if isinstance(race, str):
            raise RunError(f"{out}: the race of the settings failed: {race}; the same command tries again")
        search.rule_out(RACE, {n: why for n, why in race.left_out.items() if n in search.racing})
        if race.speeds:
            self._take(race)
        elif len(search.racing) == 1 and search.request.learning_rates:  # a rate is still to be chosen
            search.print_line(
                f"race: skipped, because only {search.racing[0]} could take part: {self._who_could_not(race)}"
            )
            self._take_prediction(search.racing[0])
        else:
            raise RunError(
                f"{out}: fewer than two settings could race: {self._who_could_not(race)}; correct that, or "
                "name other --strategies in another folder"
            )

    def _who_could_not(self, race: RacedSettings) -> str:
        return "; ".join(f"{name}: {why}" for name, why in race.left_out.items())

    def _take_prediction(self, name: str) -> None:
        """Record the predicted speed of a setting that has nothing to race with."""
        rate = self._search.record.of(name).predicted
        if rate is None:
            rate = self._measured.frames_per_step / self._search.jobs.step_s(self._backend)
        self._search.note(name, frames_per_s=rate, steps_per_s=rate / self._measured.frames_per_step)

    def _take(self, race: RacedSettings) -> None:
        """Record the raced speeds, and rule out settings that are too slow."""
        search = self._search
        raced = {search.settings[name]: race.speeds[name] for name in search.racing}
        for setting, speed in raced.items():
            rate, (low, high) = speed.ratio * race.baseline_per_s, speed.interval or (None, None)
            search.note(
                setting.name,
                ratio=speed.ratio,
                ratio_low=low,
                ratio_high=high,
                frames_per_s=rate,
                steps_per_s=rate / race.frames_per_step[setting.name],
            )
        reasons = too_slow(
            list(raced),
            lambda one, other: raced[one].is_faster_than(raced[other]),
            lambda one, other: raced[one].over(raced[other]).ratio,
            "raced",
        )
        search.rule_out(RACE, {one.name: why for one, why in reasons.items()})

    def _plan(self) -> tuple[float, ExpectedTimes]:
        """Return the time limit of the race, s, and the expected times of its settings.

        Raises:
            ConfigError: as `hold`.
        """
        search, budget_s = self._search, self._search.request.budget_s
        pace = self._pace()
        share_s = _RACE_SHARE * budget_s
        race_s = self._shortest_race_s(pace)
        if search.record.rungs or not race_s:
            return share_s, pace  # already held, so its results are better known
        rungs, _ = self._expected_rungs(pace)
        # A single setting that remains after the race is not trained.
        rungs_s = rungs.cost_s(search.record.besides) if rungs.counts[0] > 1 else 0.0
        why = self._why_too_short()
        if not why:
            return min(share_s, max(search.left_s - rungs_s, 0.0)), pace
        enough_s = search.enough_s(race_s + rungs_s)
        if search.jobs.chooses_race:
            enough_s = max(enough_s, math.ceil(_ROOM * race_s / _MOST_OF_RACE))
        raise ConfigError(
            f"--budget {formatting.seconds(budget_s)}: {why}; go on with --budget {enough_s:.0f}s (what was "
            f"measured is kept){self._or_less()}"
        )

    def _why_too_short(self) -> str:
        """Return why the budget is expected not to suffice; "": it may suffice.

        A larger batch may take no longer, as on a GPU that waits for its host.  A budget that suffices in
        that case is not refused.
        """
        search, besides = self._search, self._search.record.besides
        duration, budget_s = formatting.seconds, search.request.budget_s
        pace = self._pace(is_quick=True)
        race_s = self._shortest_race_s(pace)
        rungs, whole_s = self._expected_rungs(pace)
        racing, training = (counted(count, "setting") for count in (len(search.racing), rungs.counts[0]))
        if search.jobs.chooses_race and race_s > _MOST_OF_RACE * budget_s:
            return f"the shortest race of {racing} takes about {duration(race_s)}, more than half of it"
        planned = plan_rungs(rungs.counts, rungs.seeds, search.left_after_s(race_s), besides, whole_s)
        if rungs.counts[0] == 1 or planned.seconds[0] >= rungs.seconds[0]:
            return ""
        return (
            f"{duration(search.spent_s)} of {duration(budget_s)} are used, the shortest race of {racing} is "
            f"expected to take {duration(race_s)}, and training {training} rung by rung, for "
            f"{LEAST_STEPS} steps in the first, {duration(rungs.cost_s(besides))}"
        )

    def _or_less(self) -> str:
        """Return which other options would make the search shorter; "": none."""
        request = self._search.request
        if len(request.tried) > LAST:
            return ", or begin in another folder with fewer --strategies or --periods"
        if request.batch_sizes:
            return ", or begin in another folder with --batch-sizes none"
        if len(request.learning_rates) > LAST:
            return ", or begin in another folder with fewer --learning-rates"
        return ", or begin in another folder with one of --seeds" if len(request.seeds) > 1 else ""

    def _shortest_race_s(self, pace: ExpectedTimes) -> float:
        """Return the expected time of the shortest race, s; 0: it was held, or there is none."""
        if len(pace.steps_s) < 2:
            return 0.0
        return self._search.jobs.expected_race_s(list(pace.steps_s), self._backend, 0.0, pace)

    def _expected_rungs(self, pace: ExpectedTimes) -> tuple[Rungs, float]:
        """Return the predicted shortest rungs after a race, and the time of the slowest training, s.

        They leave out settings that the race would rule out if it showed the predicted speeds.  Uncertainty
        that the race will resolve must not be a reason to refuse a budget.
        """
        search = self._search
        known = {one: speed for one in pace.steps_s if (speed := search.record.of(one.name).predicted)}
        gone = too_slow(
            list(known),
            lambda one, other: known[one] > known[other],
            lambda one, other: known[one] / known[other],
            "",
        )
        steps_s = [step_s for one, step_s in pace.steps_s.items() if one not in gone]
        whole_s = max(steps_s) * search.jobs.total_steps(self._measured.frames_per_step)
        seeds, rates = len(search.request.seeds), max(1, len(search.request.learning_rates))
        return shortest_rungs(rates * len(steps_s), seeds, LEAST_STEPS * max(steps_s), whole_s), whole_s

    def _pace(self, *, is_quick: bool = False) -> ExpectedTimes:
        """Return the expected step times of the settings that will race.

        Args:
            is_quick: assume that a larger batch takes no longer; else, time proportional to the batch.
        """
        record, own_batch = self._search.record, self._search.request.own_batch
        left = [self._search.settings[name] for name in self._search.racing]
        steps_s = {one: self._expected_step_s(one) for one in left}
        if not is_quick and own_batch:
            for one in left:
                steps_s[one] *= max(one.batch_size / own_batch, 1.0)
        return ExpectedTimes(record.measured_besides(self._backend).cost_s(1), steps_s)

    def _expected_step_s(self, setting: Setting) -> float:
        """Return the expected time of a step with the training's own batch, s."""
        own = self._search.record.of(Setting(setting.strategy).name)
        if own.predicted:
            return self._measured.frames_per_step / own.predicted
        return self._search.jobs.step_s(self._backend)
