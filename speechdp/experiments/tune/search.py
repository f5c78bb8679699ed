"""A search: what it was asked for, and what its stages share: its jobs, its budget, and what it has found."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from speechdp.counting import counted
from speechdp.errors import ConfigError
from speechdp.experiments.race.plan import RaceOptions
from speechdp.experiments.tune.jobs import TunedJobs
from speechdp.experiments.tune.plan import Besides, Setting, batches_of
from speechdp.experiments.tune.record import (
    MEASURE,
    RACE,
    TARGET,
    SettingRecord,
    TuneRecord,
    write_tune,
)
from speechdp.options.run import TrainOptions
from speechdp.report.kit.metric_names import Terms
from speechdp.tasks.metrics import TaskRecord

#: Share of what is left of the budget that rungs are not planned for: longer ones cost more beside training.
_RESERVE = 0.05
#: What a command takes at most that goes on with a race or rungs before it starts a job, s.
_READING_S = 2.0


#: The setting of a record that earlier versions did not have.
_RATES = "learning_rates"


def earlier_settings() -> dict[str, Any]:
    """Return the settings of a search, or parts of them, that an earlier version did not have."""
    return {**TrainOptions().to_json(), _RATES: []}


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
        learning_rates: with each of which every setting is trained that the race leaves; empty: all have the
            training's own.  They are measured and race with the lowest.
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
    learning_rates: tuple[float, ...] = ()

    @property
    def settings(self) -> dict[str, Any]:
        """What stands in the record: a search with other settings is another search."""
        return {
            **self.trained,
            "ranks": self.ranks,
            "strategies": [one.name for one in self.tried],
            "backends": list(self.backends),
            "batch_sizes": list(self.batch_sizes),
            _RATES: sorted(self.learning_rates),
            "seeds": list(self.seeds),
            TARGET: self.target.value,
            "race": [self.race.rounds, self.race.least_steps],
        }


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


class SearchState:
    """A search under way.  Each of its stages reads here what those before have found, and adds to it.

    Args:
        request, jobs: as below.
        say: takes a line of progress.

    Attributes:
        request: what is searched.
        jobs: starts what has to be measured and trained.
        say: as given.
        record: what is known; `keep` writes it.
        settings: that are tried, by name, also those with other batches and learning rates; empty until they
            are predicted.
        backend_before: the back-end that an earlier command chose; "": none has.
    """

    def __init__(self, request: TuneRequest, jobs: TunedJobs, say: Callable[[str], None]) -> None:
        self.request, self.jobs, self.say = request, jobs, say
        self.record = TuneRecord(request.settings)
        self.settings: dict[str, Setting] = {}
        self.backend_before = ""
        self._clock_s = time.monotonic()
        self._before_s = 0.0

    def take_up(self, begun: TuneRecord) -> None:
        """Begin with what earlier commands have found.

        It stays in the record until this command has come as far.
        """
        self._before_s = begun.spent_s
        self.record = replace(begun, settings=self.request.settings)
        self.backend_before = begun.backend if begun.stage != MEASURE else ""

    def charge_from_now(self) -> None:
        """Count only what follows as this command's share of the budget.

        What an earlier command has paid for and this one has only read again would make every refusal name a
        larger budget, and the one that was named not suffice.
        """
        self._clock_s = time.monotonic()

    @property
    def spent_s(self) -> float:
        """What all commands have used of the budget."""
        return round(self._before_s + time.monotonic() - self._clock_s, 3)

    @property
    def left_s(self) -> float:
        """What is left of the budget, less a reserve."""
        return (1 - _RESERVE) * max(self.request.budget_s - self.spent_s, 0.0)

    def left_after_s(self, seconds: float) -> float:
        """Return what is left of the budget, less a reserve, after so much more time."""
        return self.left_s - (1 - _RESERVE) * seconds

    def enough_s(self, ahead_s: float) -> float:
        """Return a budget that the same command will find to be enough, which first reads all again.

        Args:
            ahead_s: what is still to be done takes.
        """
        return math.ceil(1.1 * (self.spent_s + ahead_s) + _READING_S)

    def keep(self, **changes: Any) -> None:
        """Take changes into the record and write it.  Raises RunError (disk)."""
        self.record = replace(self.record, spent_s=self.spent_s, **changes)
        write_tune(self.request.out, self.record)

    def keep_besides(self, besides: Besides) -> None:
        """Keep what jobs and runs take besides their steps."""
        self.keep(start_s=besides.start_s, run_s=besides.run_s)

    def note(self, name: str, **changes: Any) -> None:
        """Take changes of a setting into the record, which is written when more is known."""
        self.record = self.record.with_setting(name, **changes)

    def rule_out(self, stage: str, reasons: Mapping[str, str]) -> None:
        """Rule settings out in a stage, say how many are left, and keep that."""
        for name, why in reasons.items():
            self.note(name, out_in=stage, why=why)
        self.keep()
        self.say_ruled_out(stage, len(reasons))

    def say_ruled_out(self, stage: str, number: int) -> None:
        """Say how many settings a stage has ruled out, unless it was none."""
        if number:
            # Until the race is over, rates of an earlier command stand beside what races.
            left = counted(len(self.racing or self.record.left), "setting")
            self.say(f"{stage}: {counted(number, 'setting')} ruled out, {left} left")

    @property
    def racing(self) -> tuple[str, ...]:
        """Names of the settings that race, of those left: one is as fast with every learning rate."""
        return tuple(name for name in self.record.left if self.settings[name].learning_rate is None)

    def try_rates(self) -> None:
        """Put every setting that the race has left, with each of the learning rates, in its own place."""
        rates = sorted(self.request.learning_rates)
        if not rates:
            return
        raced = {one.name: one for one in self.record.tried if one.learning_rate is None}
        # Of an earlier command there are rates of what this one's race has ruled out, if that was held again.
        tried = list[SettingRecord]()
        for one in self.record.tried:
            own = raced[one.setting.raced.name]
            if one.learning_rate is not None and own.out_in:
                tried.append(own.at_rate(one.learning_rate))
            elif one.learning_rate is None:
                tried += [own] if own.out_in else map(own.at_rate, rates)
        self.settings |= {one.name: one.setting for one in tried}
        self.keep(tried=tuple(tried))
        left = counted(sum(not one.out_in for one in raced.values()), "setting")
        self.say(f"{RACE}: {left} left to be trained with each of {len(rates)} learning rates")

    def choose(self, name: str, untold: Sequence[str] = ()) -> None:
        """Keep a setting as the best so far.

        Args:
            untold: those that cannot be told from it.
        """
        command = self.jobs.command(self.settings[name], self.record.backend)
        self.keep(chosen=name, untold=tuple(untold), command=command)
