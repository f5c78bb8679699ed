"""Decide which settings race, in which order, and how long their turns are: pure functions."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from speechdp.errors import ConfigError
from speechdp.extensions import split_options
from speechdp.parallel.period import Period, PeriodUnit
from speechdp.parallel.registry import StrategyChoice, strategy_names
from speechdp.parallel.strategy import Strategy

if TYPE_CHECKING:
    from speechdp.options.run import TrainOptions

#: Defaults: rounds of a race, not counting the warm-up, and minimum steps of a turn.
ROUNDS, LEAST_STEPS = 24, 16
#: Maximum steps of a turn; turns are short so that the machine's state is the same for all turns of a round.
MOST_STEPS = 1024
#: Maximum number of rounds, because reports compare all pairs of rounds.
MOST_ROUNDS = 1000
#: Reasons why a setting does not race.
CHANGES = "what it exchanges changes during training, and a race sees only the beginning"
TOO_LONG = f"its period is longer than the {MOST_STEPS} steps that a turn of a race has at most"
#: Minimum exchanges of a turn if periods may end within a step, so that one more or less matters little.
_SEVERAL = 4


@dataclass(frozen=True)
class RaceSetting:
    """One of what races.

    Attributes:
        name: name, unique in the race.
        alone: rank 0 trains alone while the others sleep, as the base of speed-ups.
        batch_of: if alone, use the batch of one of this many ranks; 0: the batch of all ranks together.
        batch_size: segments of a rank's batch; 0: the training's own.
    """

    name: str
    strategy: StrategyChoice
    alone: bool = False
    batch_of: int = 0
    batch_size: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the entry for the record, with the strategy as given."""
        return {**vars(self), "strategy": self.strategy.text}


@dataclass(frozen=True)
class RacePlan:
    """A planned race.

    Attributes:
        ranks: number of training ranks.
        rounds: number of turns of each setting, not counting the warm-up.
        least_steps: minimum steps of a turn.
        seed: seed of the order.
        settings: settings that race.
        left_out: settings that do not race, with the reason.
        training: data and options that the settings share.
        own_starts: each turn starts the ranks anew, and warms up for some steps instead of a first round.
    """

    ranks: int
    rounds: int
    least_steps: int
    seed: int
    settings: tuple[RaceSetting, ...]
    left_out: dict[str, str] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    own_starts: bool = False

    @property
    def is_race(self) -> bool:
        """Whether there are at least two settings to compare."""
        return self.rounds > 0 and sum(not setting.alone for setting in self.settings) > 1

    @property
    def baseline(self) -> str:
        """Name of the setting that speeds are relative to: gradient averaging, else the first one given."""
        together = [setting for setting in self.settings if not setting.alone]
        averaging = (setting for setting in together if setting.strategy.name == "gradient_averaging")
        return next(averaging, together[0]).name

    def without(self, left_out: Mapping[str, str]) -> RacePlan:
        """Return the race without some settings.

        Args:
            left_out: names of all settings that do not race, with the reason.
        """
        kept = tuple(setting for setting in self.settings if setting.name not in left_out)
        return dataclasses.replace(self, settings=kept, left_out=dict(left_out))


def shared_training(data_checksum: str, options: TrainOptions) -> dict[str, Any]:
    """Return what a race's settings share, for its record.

    Args:
        data_checksum: checksum of the data directory.
        options: options of all settings; the strategy is ignored.
    """
    shared = {key: value for key, value in options.to_json().items() if key != "strategy"}
    return {"data": data_checksum, "options": shared}


@dataclass(frozen=True)
class RaceOptions:
    """Length of a race.

    Attributes:
        rounds: as in RacePlan; 0: no race.
        least_steps: as in RacePlan.
    """

    rounds: int = ROUNDS
    least_steps: int = LEAST_STEPS

    def __post_init__(self) -> None:
        if self.rounds < 0:
            raise ConfigError(f"--race {self.rounds}: write a number of rounds, or 0 for no race")
        if self.rounds > MOST_ROUNDS:
            raise ConfigError(f"--race {self.rounds}: at most {MOST_ROUNDS:,} rounds")
        if not 1 <= self.least_steps <= MOST_STEPS:
            raise ConfigError(f"--race-steps {self.least_steps}: must be from 1 to {MOST_STEPS}")

    def plan(
        self,
        ranks: int,
        seed: int,
        settings: Iterable[RaceSetting],
        training: dict[str, Any],
        more_left_out: Mapping[str, str] = MappingProxyType({}),
    ) -> RacePlan:
        """Return the race of these settings; leave out those whose speed a few steps do not show.

        Args:
            more_left_out: other settings to leave out, with the reason.
        """
        given = tuple(settings)
        reasons = {setting.name: _why_left_out(setting.strategy) for setting in given}
        left_out = {name: reason for name, reason in reasons.items() if reason} | dict(more_left_out)
        plan = RacePlan(ranks, self.rounds, self.least_steps, seed, given, training=training)
        return plan.without(left_out)


def _why_left_out(choice: StrategyChoice) -> str:
    # Nothing is known here about a strategy that a script registers.
    return "" if choice.name not in strategy_names() else why_left_out(choice.parsed)


def period_of(choice: StrategyChoice) -> Period | None:
    """Return the period after which every kind of a strategy's exchanges has happened; None: it has none.

    For a strategy that a script registers, it is assumed to be the option `period`.
    """
    if choice.name in strategy_names():
        whole = choice.parsed.traits.whole_period
        return None if whole is None else Period.parse(whole)
    given = split_options(choice.text.partition(":")[2]).get("period")
    try:
        return None if given is None else Period.parse(given)
    except ConfigError:  # the option may mean anything in a strategy of the user's own
        return None


def why_left_out(strategy: Strategy) -> str:
    """Return why a race cannot measure the speed of a strategy; "": it can."""
    traits = strategy.traits
    period = None if traits.whole_period is None else Period.parse(traits.whole_period)
    if traits.changes_over_time:
        return CHANGES
    if period is None:
        return ""
    if period.unit is PeriodUnit.STEPS and period.value > MOST_STEPS:
        return TOO_LONG
    if period.unit is PeriodUnit.SECONDS and not traits.synchronous:
        return "its ranks do not agree on the number of steps in its period in seconds"
    return ""


def order_of_rounds(num_settings: int, rounds: int, seed: int) -> list[list[int]]:
    """Return the order of turns: round 0 is the warm-up, then follow `rounds` that count.

    The order is the same on every rank for the same seed.  It is random, so that passing load on the machine
    affects all settings equally often.
    """
    drawn = random.Random(seed)
    return [drawn.sample(range(num_settings), num_settings) for _ in range(rounds + 1)]


def turn_steps(period: Period | None, least: int, *, frames_a_step: float, step_s: float | None) -> int:
    """Return the steps of a turn: the fewest whole periods with at least `least` steps.

    Args:
        period: period of the setting; None: it has none.
        least: minimum number of steps.
        frames_a_step: mean frames of a rank per step.
        step_s: time of a step, s; None: not known yet, so a period in seconds is ignored.

    Returns:
        The steps; more than MOST_STEPS if the setting cannot race.
    """
    if period is None or (period.unit is PeriodUnit.SECONDS and step_s is None):
        return least
    if period.unit is PeriodUnit.STEPS:
        return math.ceil(least / period.value) * int(period.value)
    in_steps = period.value / (frames_a_step if period.unit is PeriodUnit.FRAMES else step_s or math.inf)
    periods = max(1 if in_steps >= least else _SEVERAL, math.ceil(least / in_steps))
    return max(1, round(periods * in_steps))
