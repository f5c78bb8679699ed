"""The request of a search, and the state that its stages share: jobs, budget, and results."""

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

#: Share of the remaining budget that is kept free of rungs, because longer rungs have more overhead.
_RESERVE = 0.05
#: Maximum time of a command that continues a race or rungs, before it starts a job, s.
_READING_S = 2.0


#: Key of a setting in the record that earlier versions did not have.
_RATES = "learning_rates"


def earlier_settings() -> dict[str, Any]:
    """Return defaults of settings of a search, or of parts of them, that earlier versions did not have."""
    return {**TrainOptions().to_json(), _RATES: []}


@dataclass(frozen=True)
class TunedTarget:
    """The value to reach soonest.

    Attributes:
        value: value as given; None: the best that all of the last settings reach.
        task: task of the value.

    Raises:
        ConfigError: no model can reach it.
    """

    value: float | None
    task: TaskRecord

    def __post_init__(self) -> None:
        Terms(self.task).score_of_target(self.value)  # refuse it now, not at the end of the search

    @property
    def score(self) -> float | None:
        """The value as a score; higher is better."""
        return Terms(self.task).score_of_target(self.value)


@dataclass(frozen=True)
class TuneRequest:
    """A search to make.

    Attributes:
        out: folder of the search.
        ranks: number of ranks of all runs.
        tried: settings with the training's own batch.
        backends: back-ends to choose from, in order of preference.
        batch_sizes: other batches per rank to try; empty: none.
        budget_s: time for the whole search, s.
        seeds: seeds of the last rung, at least one; all other runs use the first.
        race: maximum rounds, and minimum steps of a turn.
        trained: description of the training, for the record.
        own_batch: segments of the training's own batch per rank; 0: unknown.
        learning_rates: rates to train each setting with that remains after the race; empty: only the
            training's own.  Measurements and race use the lowest.
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
        """Settings for the record; they identify the search."""
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
    """Return the batches per rank to try besides the training's own.

    Args:
        given: requested batches; None: half and twice the training's own; empty: none.

    Raises:
        ConfigError: batches are requested, but the training's own batch is not given in segments per rank.
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
    """A search in progress.  Each stage reads the results of earlier stages here and adds its own.

    Args:
        request, jobs: as below.
        print_line: prints a line of progress.

    Attributes:
        request: the request.
        jobs: starts measurement and training jobs.
        print_line: as given.
        record: results so far; `keep` writes them.
        settings: tried settings by name, including other batches and learning rates; empty until predicted.
        backend_before: the back-end that an earlier command chose; "": none.
    """

    def __init__(self, request: TuneRequest, jobs: TunedJobs, print_line: Callable[[str], None]) -> None:
        self.request, self.jobs, self.print_line = request, jobs, print_line
        self.record = TuneRecord(request.settings)
        self.settings: dict[str, Setting] = {}
        self.backend_before = ""
        self._clock_s = time.monotonic()
        self._before_s = 0.0

    def take_up(self, begun: TuneRecord) -> None:
        """Start with the results of earlier commands.

        They stay in the record until this command has come as far.
        """
        self._before_s = begun.spent_s
        self.record = replace(begun, settings=self.request.settings)
        self.backend_before = begun.backend if begun.stage != MEASURE else ""

    def charge_from_now(self) -> None:
        """Charge this command's share of the budget only from now on.

        The time of reading an earlier command's results must not count.  Otherwise every refusal would name
        a larger budget, and the budget named before would never suffice.
        """
        self._clock_s = time.monotonic()

    @property
    def spent_s(self) -> float:
        """Time that all commands have used of the budget, s."""
        return round(self._before_s + time.monotonic() - self._clock_s, 3)

    @property
    def left_s(self) -> float:
        """Remaining budget, less a reserve, s."""
        return (1 - _RESERVE) * max(self.request.budget_s - self.spent_s, 0.0)

    def left_after_s(self, seconds: float) -> float:
        """Return the remaining budget, less a reserve, after `seconds` more, s."""
        return self.left_s - (1 - _RESERVE) * seconds

    def enough_s(self, ahead_s: float) -> float:
        """Return a budget that will suffice for the same command, which first reads all results again, s.

        Args:
            ahead_s: time of the remaining work, s.
        """
        return math.ceil(1.1 * (self.spent_s + ahead_s) + _READING_S)

    def keep(self, **changes: Any) -> None:
        """Change the record and write it.  Raises RunError (disk)."""
        self.record = replace(self.record, spent_s=self.spent_s, **changes)
        write_tune(self.request.out, self.record)

    def keep_besides(self, besides: Besides) -> None:
        """Record the times of jobs and runs besides their steps."""
        self.keep(start_s=besides.start_s, run_s=besides.run_s)

    def note(self, name: str, **changes: Any) -> None:
        """Change a setting in the record, without writing it yet."""
        self.record = self.record.with_setting(name, **changes)

    def rule_out(self, stage: str, reasons: Mapping[str, str]) -> None:
        """Rule settings out in a stage, print how many are left, and write the record."""
        for name, why in reasons.items():
            self.note(name, out_in=stage, why=why)
        self.keep()
        self.print_ruled_out(stage, len(reasons))

    def print_ruled_out(self, stage: str, number: int) -> None:
        """Print how many settings a stage has ruled out, unless none."""
        if number:
            # Until the race is over, the record also has an earlier command's settings with learning rates.
            left = counted(len(self.racing or self.record.left), "setting")
            self.print_line(f"{stage}: {counted(number, 'setting')} ruled out, {left} left")

    @property
    def racing(self) -> tuple[str, ...]:
        """Names of the remaining settings that race, each once: learning rates do not change the speed."""
        return tuple(name for name in self.record.left if self.settings[name].learning_rate is None)

    def try_rates(self) -> None:
        """Replace each setting that remains after the race by its copies with each learning rate."""
        rates = sorted(self.request.learning_rates)
        if not rates:
            return
        raced = {one.name: one for one in self.record.tried if one.learning_rate is None}
        # If the race was held again, an earlier command may have tried rates of settings now ruled out.
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
        self.print_line(f"{RACE}: {left} left to be trained with each of {len(rates)} learning rates")

    def choose(self, name: str, untold: Sequence[str] = ()) -> None:
        """Keep a setting as the best so far.

        Args:
            untold: settings that cannot be distinguished from it.
        """
        command = self.jobs.command(self.settings[name], self.record.backend)
        self.keep(chosen=name, untold=tuple(untold), command=command)
