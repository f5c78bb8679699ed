"""Decide what a search tries, which settings it rules out, and how it spends its time: pure functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

from speechdp.errors import ConfigError
from speechdp.experiments.race.plan import period_of
from speechdp.parallel.period import Period
from speechdp.parallel.registry import StrategyChoice, parse_strategy, strategy_names
from speechdp.parallel.strategy import Traits
from speechdp.report.kit import formatting
from speechdp.simulation.exchanges import has_period

#: Strategies to try by default; those with a period are tried with each of --periods.
STRATEGIES = (
    "gradient_averaging,gradient_averaging:compression=fp16,model_averaging,bmuf,slowmo,delayed_averaging,"
    "dpsgd,ad_psgd"
)
#: Factor by which averages between nodes are rarer than inside nodes, if both are tried.
_RARER = 4
#: The gain in speed below which averaging less often is not worth trying.
WORTH = 1.02
#: Minimum steps of a run in the first rung; fewer do not show how a setting learns.
LEAST_STEPS = 20
#: Number of last rungs at whose ends the runs of the other seeds are also evaluated.
SEED_STOPS = 3
#: Number of settings in the last rung.
LAST = 2
#: Share of its steps by which a run may stop earlier or later than the others of its rung.
_OFF = 0.1
#: Minimum ratio of a rung's length to that of the one before; less is not worth starting the runs.
_LONGER = 1.2
#: Maximum ratio of a rung's length to its planned length if jobs were faster than planned.
_MORE = 1.5
REFERENCE = "gradient_averaging"


@dataclass(frozen=True)
class Setting:
    """A setting to try.

    Attributes:
        batch_size: segments of a rank's batch; 0: the training's own.
        learning_rate: learning rate of the plateau; None: the training's own.
    """

    strategy: StrategyChoice
    batch_size: int = 0
    learning_rate: float | None = None

    @property
    def name(self) -> str:
        """Name of the setting in records and on the page."""
        return " ".join([self.strategy.text, *self._besides])

    @property
    def file_name(self) -> str:
        """The name as part of a folder name."""
        return "-".join([self.strategy.file_name, *(word.replace("=", "") for word in self._besides)])

    @property
    def raced(self) -> Setting:
        """The setting that represents it in the race, as the learning rate does not change the speed."""
        return replace(self, learning_rate=None)

    @property
    def _besides(self) -> list[str]:
        """Its options besides the strategy, as text: `batch=8`, `rate=0.004`."""
        words = [f"batch={self.batch_size}"] if self.batch_size else []
        if self.learning_rate is not None:
            words.append(f"rate={formatting.learning_rate(self.learning_rate)}")
        return words

    @property
    def family(self) -> tuple[str, int]:
        """Key shared by settings that differ only in how much they exchange: in period or compression.

        Periods in steps, frames and seconds are not comparable.  Neither are periods of an outer step,
        because longer ones may learn better.
        """
        name, _, rest = self.strategy.text.partition(":")
        looser = ("compression",) if self._traits.has_outer_step else ("period", "compression")
        others = [word for word in rest.split(",") if word and word.partition("=")[0] not in looser]
        unit = [self._period.unit.value] if self._period is not None else []
        return ":".join([name, *others, *unit]), self.batch_size

    @property
    def looseness(self) -> float:
        """Sort key within a family: the larger, the less is exchanged."""
        compressed = "compression=" in self.strategy.text
        return (0.0 if self._period is None else self._period.value) + 0.5 * compressed

    @property
    def period_steps(self) -> int:
        """Steps in which every kind of exchange happens once; 1 if unknown."""
        period = str(self._traits.whole_period)
        return max(1, int(period)) if period.isdigit() else 1

    def stop(self, steps: int) -> int:
        """Return the step at which a run of about `steps` steps (at least 1) stops and is scored.

        Between two steps of an outer optimizer the model does not change, and lacks what the ranks have
        learnt since.  So a run that would stop shortly before or after an outer step stops at it.
        """
        if not self._traits.has_outer_step:
            return steps
        whole = self.period_steps * round(steps / self.period_steps)
        return whole if abs(whole - steps) <= _OFF * steps else steps

    @cached_property
    def _traits(self) -> Traits:
        """What the strategy declares; of one that a script registers, only the option period is known."""
        if self.strategy.name in strategy_names():
            return self.strategy.parsed.traits
        period = period_of(self.strategy)
        return Traits(period=None if period is None else str(period))

    @property
    def _period(self) -> Period | None:
        period = self._traits.period
        try:
            return None if period is None else Period.parse(str(period))
        except ConfigError:  # the user's own kind of period
            return None


def settings_of(strategies: Sequence[StrategyChoice], periods: Sequence[int]) -> tuple[Setting, ...]:
    """Return the settings to try; gradient averaging, with which all others are compared, comes first.

    Args:
        periods: periods for strategies that have a period option and were given without it.

    Raises:
        ConfigError: a strategy does not accept one of the periods.
    """
    found = {REFERENCE: Setting(StrategyChoice(REFERENCE))}
    for choice in strategies:
        texts = [_with_period(choice, period) for period in periods] if _averages(choice) else [choice]
        for text in texts:
            found.setdefault(text.text, Setting(text))
    return tuple(found.values())


def _averages(choice: StrategyChoice) -> bool:
    """Return whether to try --periods; a strategy made to exchange at every step keeps its period."""
    return choice.name in strategy_names() and has_period(choice) and choice.parsed.traits.period != "1"


def _with_period(choice: StrategyChoice, period: int) -> StrategyChoice:
    """Return a strategy with this period, unless it has one.  Raises ConfigError: it does not accept it."""
    found = choice.with_default("period", str(period))
    try:
        parse_strategy(found.text)
    except ConfigError as error:
        raise ConfigError(f"--strategies {choice.text} with --periods {period}: {error}") from error
    return found


def in_two_levels(periods: Sequence[int]) -> str:
    """Return additional strategies to try if there are several hosts and some have several ranks."""
    texts = ["gradient_averaging:between_nodes=16"]
    texts += [f"model_averaging:period={p},between_nodes={_RARER * p}" for p in sorted(periods)[:-1]]
    return ",".join(texts)


#: Whether the first of two settings is surely faster than the second; and how many times as fast it is.
IsFaster: TypeAlias = Callable[[Setting, Setting], bool]
Times: TypeAlias = Callable[[Setting, Setting], float]


def too_slow(settings: Sequence[Setting], is_faster: IsFaster, times: Times, how: str) -> dict[Setting, str]:
    """Return the settings that need not be trained, with reasons: exchanging less must gain speed.

    A setting is ruled out if gradient averaging, which loses nothing in learning, is surely faster, or if
    another setting of its family exchanges more and is as fast within 2 %.  Only settings with equal
    batches are compared.

    Args:
        how: how speeds were found: "predicted" or "raced".
    """
    reasons: dict[Setting, str] = {}
    for setting in sorted(settings, key=lambda one: one.looseness):
        alike = [one for one in settings if one.batch_size == setting.batch_size and one not in reasons]
        reference = next((one for one in alike if one.strategy.text == REFERENCE), None)
        tighter = [
            one
            for one in alike
            if one.family == setting.family
            and one.looseness < setting.looseness
            and times(setting, one) < WORTH
        ]
        if reference is not None and reference is not setting and is_faster(reference, setting):
            reasons[setting] = f"{how} to be slower than gradient averaging, which learns as much a frame"
        elif tighter:
            least = f"{100 * (WORTH - 1):.0f} %"
            reasons[setting] = (
                f"{how} to be less than {least} faster than {tighter[-1].name}, which exchanges more"
            )
    return reasons


def batches_of(own: int, given: Sequence[int]) -> tuple[int, ...]:
    """Return the other batches per rank to try: those given, else half and twice the training's own."""
    wanted = given or (own // 2, 2 * own)
    return tuple(dict.fromkeys(size for size in wanted if size > 0 and size != own))


@dataclass(frozen=True)
class ExpectedTimes:
    """Expected times of jobs, from measurements and predictions.

    Attributes:
        start_s: time of a job besides its steps, s.
        steps_s: time of a step of each setting, s.
    """

    start_s: float
    steps_s: Mapping[Setting, float]


@dataclass(frozen=True)
class Besides:
    """Overhead of training besides its steps, s.

    Attributes:
        start_s: time of a start of the ranks that trains several runs; 0 if every run is started separately.
        run_s: time of a run each time that it begins or continues: building it, evaluations, checkpoints.
    """

    start_s: float
    run_s: float

    def cost_s(self, runs: int) -> float:
        """Return the overhead of `runs` runs in one start, s."""
        return self.start_s + runs * self.run_s


NOTHING = Besides(0.0, 0.0)


@dataclass(frozen=True)
class Rungs:
    """Successive halving: in each rung settings train for the same time, and half of them continue.

    Attributes:
        counts: number of settings in each rung.
        seconds: training time of each setting by the end of each rung, s.
        seeds: number of runs of each setting in the last rung.
        done_s: ends of the finished rungs, s, from which the runs continue.
    """

    counts: tuple[int, ...]
    seconds: tuple[float, ...]
    seeds: int
    done_s: tuple[float, ...] = ()

    def cost_s(self, besides: Besides) -> float:
        """Return the time of all runs, s.  Each rung and each further seed of the last settings is a job."""
        before, total = self.done_s[-1] if self.done_s else 0.0, 0.0
        for count, until in zip(self.counts, self.seconds, strict=True):
            total += count * (until - before) + besides.cost_s(count)
            before = until
        stops = min(SEED_STOPS, len(self.done_s) + len(self.counts))
        of_a_seed = self.counts[-1] * self.seconds[-1] + besides.cost_s(self.counts[-1] * stops)
        return total + (self.seeds - 1) * of_a_seed


def halvings(count: int) -> tuple[int, ...]:
    """Return the number of settings in each rung: half of the rung before, at most LAST in the last."""
    counts = [count]
    while counts[-1] > LAST:
        counts.append(max(LAST, math.ceil(counts[-1] / 2)))
    return tuple(counts)


def shortest_rungs(count: int, seeds: int, least_s: float, whole_s: float) -> Rungs:
    """Return the shortest informative rungs for `count` settings.

    Args:
        count: number of settings.
        seeds: number of seeds in the last rung.
        least_s: time of the fewest steps, s.
        whole_s: time of a whole training of the slowest setting, s; none trains longer.
    """
    counts = halvings(count)
    first_s = min(least_s, whole_s / 2.0 ** (len(counts) - 1))
    return Rungs(counts, tuple(first_s * 2.0**k for k in range(len(counts))), seeds)


def plan_rungs(
    counts: Sequence[int],
    seeds: int,
    budget_s: float,
    besides: Besides,
    longest_s: float,
    done_s: Sequence[float] = (),
) -> Rungs:
    """Plan rungs that use up a budget; the total training time doubles from rung to rung.

    Args:
        counts: number of settings in each rung.
        seeds: number of seeds in the last rung.
        budget_s: time for all rungs, s.
        besides: as in `Rungs.cost_s`.
        longest_s: time of a whole training of the slowest setting, s; none trains longer.
        done_s: as in `Rungs`.

    Returns:
        The rungs; of zero length if starting the runs uses up the budget.
    """
    unit = Rungs(tuple(counts), tuple(2.0**k for k in range(len(counts))), seeds)
    after = replace(unit, done_s=tuple(done_s))
    starts_s = after.cost_s(besides) - after.cost_s(NOTHING)
    trained_s = counts[0] * done_s[-1] if done_s else 0.0
    first = max(budget_s - starts_s + trained_s, 0.0) / unit.cost_s(NOTHING)
    first = min(first, longest_s / unit.seconds[-1])
    return replace(after, seconds=tuple(first * share for share in unit.seconds))


def next_rung(
    left: int, seeds: int, budget_s: float, besides: Besides, longest_s: float, done_s: Sequence[float]
) -> tuple[int, float] | None:
    """Return how many settings continue after some rungs, and until when, s; None: none can.

    If the remaining budget does not pay for all rungs, skip to the last settings; if it does not pay for
    that either, plan without the other seeds.  If jobs were faster than planned, make rungs longer than
    twice the one before, because the last rungs distinguish settings best.

    Args:
        left: number of settings of the last rung that can be trained.
        seeds, budget_s, besides, longest_s, done_s: as in `plan_rungs`.
    """
    counts, before_s = halvings(left)[1:] or (left,), done_s[-1]
    for ahead, runs in ((counts, seeds), (counts[-1:], seeds), (counts[-1:], 1)):
        end_s = plan_rungs(ahead, runs, budget_s, besides, math.inf, done_s).seconds[0]
        if end_s >= _LONGER * before_s:
            planned_s = before_s * 2 ** (1 + len(counts) - len(ahead))
            most_s = _MORE * planned_s if len(ahead) == len(counts) else planned_s
            return ahead[0], max(min(end_s, most_s, longest_s), before_s)
    return None
