"""Decide which settings race, in which order, and how long a turn of each is: pure functions."""

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

#: Rounds of a race, its warm-up not counted, and steps of a turn, where nothing else is asked for.
ROUNDS, LEAST_STEPS = 24, 16
#: A turn has as many steps at most: the machine is to be the same for all turns of a round.
MOST_STEPS = 1024
#: Reports compare all pairs of rounds.
MOST_ROUNDS = 1000
TOO_LONG = f"its period is longer than the {MOST_STEPS} steps that a turn of a race has at most"
#: Exchanges of a turn, at least, where a period may end anywhere in a step: one more or less says little.
_SEVERAL = 4


@dataclass(frozen=True)
class RaceSetting:
    """One of what races.

    Attributes:
        name: no other setting of the race has it.
        alone: rank 0 trains alone while the others sleep: what speed-ups are computed from.
        batch_of: alone, it has the batch that one of so many ranks has; 0: that of all ranks together.
        batch_size: segments of a rank's batch; 0: the training's own.
    """

    name: str
    strategy: StrategyChoice
    alone: bool = False
    batch_of: int = 0
    batch_size: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return what stands in the record; the strategy as it was given."""
        return {**vars(self), "strategy": self.strategy.text}


@dataclass(frozen=True)
class RacePlan:
    """A race to be held.

    Attributes:
        ranks: that train.
        rounds: how often each setting has its turn, its warm-up not counted.
        least_steps: of a turn.
        seed: of the order.
        settings: what races.
        left_out: what does not, and why not.
        training: what the settings share: data and options.
        own_starts: each turn is a start of the ranks, with some steps to warm up in place of a first round.
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
        """Whether there are two that can be compared."""
        return self.rounds > 0 and sum(not setting.alone for setting in self.settings) > 1

    @property
    def baseline(self) -> str:
        """Name of what speeds are ratios to: gradient averaging, else the setting that was given first."""
        together = [setting for setting in self.settings if not setting.alone]
        averaging = (setting for setting in together if setting.strategy.name == "gradient_averaging")
        return next(averaging, together[0]).name

    def without(self, left_out: Mapping[str, str]) -> RacePlan:
        """Return the race of the other settings.

        Args:
            left_out: names of all that do not race, and why not.
        """
        kept = tuple(setting for setting in self.settings if setting.name not in left_out)
        return dataclasses.replace(self, settings=kept, left_out=dict(left_out))


def shared_training(data_checksum: str, options: TrainOptions) -> dict[str, Any]:
    """Return what a race's settings share, for its record.

    Args:
        data_checksum: of the data directory.
        options: of them all; the strategy does not count.
    """
    shared = {key: value for key, value in options.to_json().items() if key != "strategy"}
    return {"data": data_checksum, "options": shared}


@dataclass(frozen=True)
class RaceOptions:
    """How long a race lasts.

    Attributes:
        rounds: as in RacePlan; 0: no race is held.
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
        """Return the race of these settings; those whose speed some steps cannot tell are left out.

        Args:
            more_left_out: others that are, and why.
        """
        given = tuple(settings)
        reasons = {setting.name: _why_left_out(setting.strategy) for setting in given}
        left_out = {name: reason for name, reason in reasons.items() if reason} | dict(more_left_out)
        plan = RacePlan(ranks, self.rounds, self.least_steps, seed, given, training=training)
        return plan.without(left_out)


def _why_left_out(choice: StrategyChoice) -> str:
    # Of a strategy that a script has registered nothing is known here.
    return "" if choice.name not in strategy_names() else why_left_out(choice.parsed)


def period_of(choice: StrategyChoice) -> Period | None:
    """Return after how long all kinds of a setting's exchanges have happened; None: it has no period.

    A strategy that a script has registered is taken to have it in an option `period`.
    """
    if choice.name in strategy_names():
        whole = choice.parsed.traits.whole_period
        return None if whole is None else Period.parse(whole)
    given = split_options(choice.text.partition(":")[2]).get("period")
    try:
        return None if given is None else Period.parse(given)
    except ConfigError:  # what its author has made of it
        return None


def why_left_out(strategy: Strategy) -> str:
    """Return why a race cannot tell the speed of a strategy; "": it can."""
    traits = strategy.traits
    period = None if traits.whole_period is None else Period.parse(traits.whole_period)
    if traits.changes_over_time:
        return "what it exchanges changes during training, and a race sees only the beginning"
    if period is None:
        return ""
    if period.unit is PeriodUnit.STEPS and period.value > MOST_STEPS:
        return TOO_LONG
    if period.unit is PeriodUnit.SECONDS and not traits.synchronous:
        return "its ranks do not agree on the number of steps in its period in seconds"
    return ""


def order_of_rounds(num_settings: int, rounds: int, seed: int) -> list[list[int]]:
    """Return in which order the settings take turns: round 0 is the warm-up, then `rounds` that count.

    The same for the same seed, on every rank.  Whatever comes and goes on the machine meets each setting as
    often as any other.
    """
    drawn = random.Random(seed)
    return [drawn.sample(range(num_settings), num_settings) for _ in range(rounds + 1)]


def turn_steps(period: Period | None, least: int, *, frames_a_step: float, step_s: float | None) -> int:
    """Return the steps of a turn: the fewest whole periods that have `least` steps.

    Args:
        period: of the setting; None: it has none.
        least: steps.
        frames_a_step: of a rank, mean.
        step_s: how long a step takes; None: not known yet, and a period in seconds is passed over.

    Returns:
        The steps; more than MOST_STEPS where such a setting cannot race.
    """
    if period is None or (period.unit is PeriodUnit.SECONDS and step_s is None):
        return least
    if period.unit is PeriodUnit.STEPS:
        return math.ceil(least / period.value) * int(period.value)
    in_steps = period.value / (frames_a_step if period.unit is PeriodUnit.FRAMES else step_s or math.inf)
    periods = max(1 if in_steps >= least else _SEVERAL, math.ceil(least / in_steps))
    return max(1, round(periods * in_steps))
