"""What a search tries, how it rules settings out, and how it spends its time: pure functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from speechdp.errors import ConfigError
from speechdp.parallel.period import Period
from speechdp.parallel.registry import StrategyChoice, parse_strategy
from speechdp.report.kit import formatting
from speechdp.simulation.exchanges import has_period, is_known

#: Strategies that are tried where none are named; those with a period, with every one of --periods.
STRATEGIES = (
    "gradient_averaging,gradient_averaging:compression=fp16,model_averaging,bmuf,slowmo,delayed_averaging,"
    "dpsgd,ad_psgd"
)
#: Averages between nodes are that much rarer than inside, where both are tried.
_RARER = 4
#: The gain in speed below which averaging less often is not worth trying.
WORTH = 1.02
#: Steps of a run in the first rung, at least: fewer say nothing of how a setting learns.
LEAST_STEPS = 20
#: Rungs, the last ones, at whose ends the runs of the other seeds are evaluated too.
SEED_STOPS = 3
#: Settings that the halving ends with.
LAST = 2
#: By what share of its steps a run may stop earlier or later than the others of its rung.
_OFF = 0.1
#: A rung is so many times as long as the one before, at least: less is not worth starting its runs.
_LONGER = 1.2
#: What a rung may have of its planned length, at most, where jobs were faster than planned.
_MORE = 1.5
REFERENCE = "gradient_averaging"


@dataclass(frozen=True)
class Setting:
    """One of what is tried.

    Attributes:
        batch_size: segments of a rank's batch; 0: the training's own.
        learning_rate: of the plateau; None: the training's own.
    """

    strategy: StrategyChoice
    batch_size: int = 0
    learning_rate: float | None = None

    @property
    def name(self) -> str:
        """Its name in records and on the page."""
        return " ".join([self.strategy.text, *self._besides])

    @property
    def file_name(self) -> str:
        """The name as part of a folder's."""
        return "-".join([self.strategy.file_name, *(word.replace("=", "") for word in self._besides)])

    @property
    def raced(self) -> Setting:
        """The setting that stands for it in the race: one is as fast with every learning rate."""
        return replace(self, learning_rate=None)

    @property
    def _besides(self) -> list[str]:
        """What it has besides a strategy, in words: `batch=8`, `rate=0.004`."""
        words = [f"batch={self.batch_size}"] if self.batch_size else []
        if self.learning_rate is not None:
            words.append(f"rate={formatting.learning_rate(self.learning_rate)}")
        return words

    @property
    def family(self) -> tuple[str, int]:
        """What settings share that differ in nothing but how much they exchange: period or compression.

        Periods in steps, frames and seconds cannot be compared, nor periods of an outer step, which may learn
        better the longer they are.
        """
        name, _, rest = self.strategy.text.partition(":")
        looser = ("compression",) if self.strategy.parsed.traits.has_outer_step else ("period", "compression")
        others = [word for word in rest.split(",") if word and word.partition("=")[0] not in looser]
        unit = [self._period.unit.value] if self._period is not None else []
        return ":".join([name, *others, *unit]), self.batch_size

    @property
    def looseness(self) -> float:
        """Orders the settings of a family: the larger, the less is exchanged."""
        compressed = "compression=" in self.strategy.text
        return (0.0 if self._period is None else self._period.value) + 0.5 * compressed

    @property
    def period_steps(self) -> int:
        """Steps in which every kind of exchange happens once; 1 where nobody knows how many."""
        period = str(self.strategy.parsed.traits.whole_period)
        return max(1, int(period)) if period.isdigit() else 1

    def stop(self, steps: int) -> int:
        """Return where a run stops that is to train so many steps, from 1 on, and is scored there.

        Between two steps of an outer optimizer its model stays as it was, and has not learnt what the ranks
        have: a run that would stop shortly before or after one stops at it.
        """
        if not self.strategy.parsed.traits.has_outer_step:
            return steps
        whole = self.period_steps * round(steps / self.period_steps)
        return whole if abs(whole - steps) <= _OFF * steps else steps

    @property
    def _period(self) -> Period | None:
        period = self.strategy.parsed.traits.period
        try:
            return None if period is None else Period.parse(str(period))
        except ConfigError:  # of a user's own kind
            return None


def settings_of(strategies: Sequence[StrategyChoice], periods: Sequence[int]) -> tuple[Setting, ...]:
    """Return what is tried, gradient averaging first: all others are compared with it.

    Args:
        periods: for strategies that have a period and were given without one.

    Raises:
        ConfigError: a strategy cannot have one of them.
    """
    found = {REFERENCE: Setting(StrategyChoice(REFERENCE))}
    for choice in strategies:
        texts = [_with_period(choice, period) for period in periods] if _averages(choice) else [choice]
        for text in texts:
            found.setdefault(text.text, Setting(text))
    return tuple(found.values())


def _averages(choice: StrategyChoice) -> bool:
    """Return whether --periods are tried: a strategy made to exchange at every step keeps its period."""
    return is_known(choice) and has_period(choice) and choice.parsed.traits.period != "1"


def _with_period(choice: StrategyChoice, period: int) -> StrategyChoice:
    """Return a strategy with a period, unless it has one.  Raises ConfigError: it cannot have this one."""
    found = choice.with_default("period", str(period))
    try:
        parse_strategy(found.text)
    except ConfigError as error:
        raise ConfigError(f"--strategies {choice.text} with --periods {period}: {error}") from error
    return found


def in_two_levels(periods: Sequence[int]) -> str:
    """Return the strategies that are tried besides where some of several hosts have several ranks."""
    texts = ["gradient_averaging:between_nodes=16"]
    texts += [f"model_averaging:period={p},between_nodes={_RARER * p}" for p in sorted(periods)[:-1]]
    return ",".join(texts)


#: Of two settings, whether the first is surely faster; and how many times as fast it is.
IsFaster: TypeAlias = Callable[[Setting, Setting], bool]
Times: TypeAlias = Callable[[Setting, Setting], float]


def too_slow(settings: Sequence[Setting], is_faster: IsFaster, times: Times, how: str) -> dict[Setting, str]:
    """Return which settings need not be trained, and why: exchanging less must be paid for in speed.

    A setting is ruled out where gradient averaging, which loses nothing in learning, is surely faster, or
    where another of its family exchanges more and is as fast within 2 %.  Only settings with equal batches
    are compared.

    Args:
        how: speeds were found, "predicted" or "raced".
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
    """Return the other batches of a rank to try: those given, else half and twice the training's own."""
    wanted = given or (own // 2, 2 * own)
    return tuple(dict.fromkeys(size for size in wanted if size > 0 and size != own))


@dataclass(frozen=True)
class ExpectedTimes:
    """How long jobs are expected to take, by what was measured and predicted.

    Attributes:
        start_s: what a job takes besides its steps.
        steps_s: how long a step of each setting takes.
    """

    start_s: float
    steps_s: Mapping[Setting, float]


@dataclass(frozen=True)
class Besides:
    """What training costs besides its steps, s.

    Attributes:
        start_s: a start of the ranks that trains several runs; 0 where every run is a start of its own.
        run_s: a run, each time that it begins or goes on: building it, evaluations, checkpoints.
    """

    start_s: float
    run_s: float

    def cost_s(self, runs: int) -> float:
        """Return what so many runs cost in one start."""
        return self.start_s + runs * self.run_s


NOTHING = Besides(0.0, 0.0)


@dataclass(frozen=True)
class Rungs:
    """Successive halving: in each rung settings train for the same time, and half of them go on.

    Attributes:
        counts: settings in each rung.
        seconds: training time of each by the end of each rung.
        seeds: runs of each setting in the last rung.
        done_s: ends of the rungs before, from which the runs go on.
    """

    counts: tuple[int, ...]
    seconds: tuple[float, ...]
    seeds: int
    done_s: tuple[float, ...] = ()

    def cost_s(self, besides: Besides) -> float:
        """Return what all runs take: a rung is a job, and so are the last settings with every other seed."""
        before, total = self.done_s[-1] if self.done_s else 0.0, 0.0
        for count, until in zip(self.counts, self.seconds, strict=True):
            total += count * (until - before) + besides.cost_s(count)
            before = until
        stops = min(SEED_STOPS, len(self.done_s) + len(self.counts))
        of_a_seed = self.counts[-1] * self.seconds[-1] + besides.cost_s(self.counts[-1] * stops)
        return total + (self.seeds - 1) * of_a_seed


def halvings(count: int) -> tuple[int, ...]:
    """Return how many settings are in each rung: half of those before, the last with LAST at most."""
    counts = [count]
    while counts[-1] > LAST:
        counts.append(max(LAST, math.ceil(counts[-1] / 2)))
    return tuple(counts)


def shortest_rungs(count: int, seeds: int, least_s: float, whole_s: float) -> Rungs:
    """Return the shortest rungs that show anything of so many settings.

    Args:
        seeds: of the last.
        least_s: time of the fewest steps.
        whole_s: a whole training of the slowest setting; none trains longer.
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
    """Spend a budget: each rung trains twice as long as the one before, from its beginning on.

    Args:
        counts: settings in each rung.
        seeds: in the last.
        budget_s: for all of it.
        besides: as in `Rungs.cost_s`.
        longest_s: a whole training of the slowest setting; none trains longer.
        done_s: as in `Rungs`.

    Returns:
        The rungs; of no length where starting the runs uses the budget up.
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
    """Return how many settings go on after some rungs, and until when they train; None: none can any more.

    Where what is left of the budget does not pay for all rungs, the last settings go on at once; where it
    does not pay for that either, they do as if there were no other seeds.  Where jobs were faster than it was
    planned, rungs are longer than twice the one before: it is the last ones that tell settings apart.

    Args:
        left: settings that can be trained, of those of the last rung.
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
