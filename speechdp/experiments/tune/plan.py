"""What a search tries, how it rules settings out, and how it spends its time: pure functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from speechdp.errors import ConfigError
from speechdp.parallel.period import Period
from speechdp.parallel.registry import StrategyChoice, parse_strategy
from speechdp.simulation.exchanges import has_period, is_known

#: Strategies that are tried where none are named; those with a period, with every one of PERIODS.
STRATEGIES = (
    "gradient_averaging,gradient_averaging:compression=fp16,model_averaging,bmuf,slowmo,delayed_averaging,"
    "dpsgd,ad_psgd"
)
PERIODS = (4, 16, 64)
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
#: Share of its time by which a run must have been evaluated, or its gains are not known: a quarter, about.
_EARLY = 0.3
#: By what share of its steps a run may stop earlier or later than the others of its rung.
_OFF = 0.1
#: Pieces in which a curve is continued: between points it is straight over time.
_CONTINUED = 8
#: A rung is so many times as long as the one before, at least: less is not worth starting its runs.
_LONGER = 1.2
#: What a rung may have of its planned length, at most, where jobs were faster than planned.
_MORE = 1.5
#: Names of the strategies in which every step exchanges by default: their own default is the first choice.
_EVERY_STEP = ("dpsgd", "ad_psgd")
REFERENCE = "gradient_averaging"


@dataclass(frozen=True)
class Setting:
    """One of what is tried.

    Attributes:
        batch_size: segments of a rank's batch; 0: the training's own.
    """

    strategy: StrategyChoice
    batch_size: int = 0

    @property
    def name(self) -> str:
        """Its name in records and on the page."""
        return f"{self.strategy.text} batch={self.batch_size}" if self.batch_size else self.strategy.text

    @property
    def is_reference(self) -> bool:
        """Whether it is plain gradient averaging with the training's own batch."""
        return self.strategy.text == REFERENCE and not self.batch_size

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
        averages = is_known(choice) and has_period(choice) and choice.name not in _EVERY_STEP
        texts = [_with_period(choice, period) for period in periods] if averages else [choice]
        for text in texts:
            found.setdefault(text.text, Setting(text))
    return tuple(found.values())


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
            reasons[setting] = f"{how} to be no faster than {tighter[-1].name}, which exchanges more"
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


def halvings(count: int, last: int = LAST) -> tuple[int, ...]:
    """Return how many settings are in each rung: half of those before, the last with `last` at most."""
    counts = [count]
    while counts[-1] > last:
        counts.append(max(last, math.ceil(counts[-1] / 2)))
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


@dataclass(frozen=True)
class Curve:
    """Held-out scores of a run over its training time at the speed of the race.

    Attributes:
        points: (seconds, score), by time.
        is_over: the training has come to its end.
    """

    points: tuple[tuple[float, float], ...]
    is_over: bool = False

    @property
    def best(self) -> float:
        """The highest score."""
        return max(score for _, score in self.points)

    @property
    def last(self) -> float:
        """The score at the end."""
        return self.points[-1][1]

    def at(self, seconds: float) -> float:
        """Return the score at a time: between evaluations on a straight line, else the nearest one."""
        times, scores = zip(*self.points, strict=True)
        return float(np.interp(seconds, times, scores))

    def time_to(self, target: float) -> float | None:
        """Return when the score first was at `target`, s; between evaluations on a straight line.

        None where it never was.  Before the first evaluation nothing is known: that is the earliest.
        """
        before: tuple[float, float] | None = None
        for at, score in self.points:
            if score >= target:
                if before is None or score == before[1]:
                    return at
                share = (target - before[1]) / (score - before[1])
                return before[0] + share * (at - before[0])
            before = (at, score)
        return None

    def gains(self) -> tuple[float, float]:
        """Return what the score gained in the last doubling of the time, and in the one before.

        Between evaluations it is taken to lie on a straight line over log time.
        """
        times, scores = zip(*self.points, strict=True)
        wanted = np.log([times[-1] / 4, times[-1] / 2, times[-1]])
        first, middle, last = np.interp(wanted, np.log(times), scores)
        return float(last - middle), float(middle - first)

    def continued(self, until_s: float, share: float) -> Curve:
        """Return the curve as it is expected to go on: on a straight line over log time.

        Args:
            until_s: twice the time that the run has trained, about, at most.
            share: as `shrinkage` returns it; 0: nothing is known, and the curve stays as it is.
        """
        end_s, score = self.points[-1]
        if share == 0 or self.is_over or until_s <= end_s:
            return self
        gain, doublings = share * self.gains()[0], math.log2(until_s / end_s)
        ahead = (doublings * part / _CONTINUED for part in range(1, _CONTINUED + 1))
        return Curve((*self.points, *((end_s * 2**d, score + gain * d) for d in ahead)))


def shrinkage(curves: Sequence[Curve]) -> float:
    """Return what share of its last gain a run is expected to gain when it trains for as long again.

    Learning slows down: each doubling of the time brings less than the one before, and that share falls as
    well.  It is seen in all runs together, from the doubling before the last one to the last; a single run
    shows it badly.  The next share is taken to be the square of that: runs of a small LSTM had 1, 0.76, 0.46
    and 0.19, one doubling after another.

    Returns:
        From 0 to 1; 0 where a run was evaluated too late for that, or none learns any more.
    """
    if any(curve.points[0][0] > _EARLY * curve.points[-1][0] for curve in curves):
        return 0.0
    last, before = (sum(gains) for gains in zip(*(curve.gains() for curve in curves), strict=True))
    return min(max(last / before, 0.0), 1.0) ** 2 if before > 0 else 0.0


@dataclass(frozen=True)
class Finish:
    """How soon a setting reached the target.

    Attributes:
        times_s: by its runs, one a seed; None: that run did not.
        scores: at the end of each.
    """

    times_s: tuple[float | None, ...]
    scores: tuple[float, ...]

    @property
    def mean_s(self) -> float:
        """Mean over the runs; infinite where one did not reach it."""
        reached = [time for time in self.times_s if time is not None]
        return sum(reached) / len(reached) if len(reached) == len(self.times_s) else math.inf

    @property
    def range_s(self) -> tuple[float, float]:
        """The shortest and the longest; infinite where a run did not reach it."""
        found = [math.inf if time is None else time for time in self.times_s]
        return min(found), max(found)

    @property
    def rank(self) -> tuple[float, float]:
        """Orders settings, the best first: by time, then by score."""
        return self.mean_s, -sum(self.scores) / len(self.scores)


def finishes(curves: Mapping[str, Sequence[Curve]], target: float | None) -> tuple[float, dict[str, Finish]]:
    """Return the target, and how soon each setting reached it, the soonest first.

    Args:
        curves: of each setting, one a seed.
        target: score; None: the best that every run reached.
    """
    if target is None:
        target = min(curve.best for found in curves.values() for curve in found)
    found = {
        name: Finish(tuple(curve.time_to(target) for curve in runs), tuple(curve.last for curve in runs))
        for name, runs in curves.items()
    }
    return target, dict(sorted(found.items(), key=lambda item: item[1].rank))


def untold(
    names: Sequence[str], ends: Mapping[str, Finish], slack: Mapping[str, tuple[float, float]]
) -> tuple[str, ...]:
    """Return which settings cannot be told from the first of `names`: their runs' times overlap.

    Args:
        slack: by which factors the times may be shorter or longer, since the speeds are not known better.
    """
    soonest = {name: ends[name].range_s[0] * slack[name][0] for name in names}
    latest = ends[names[0]].range_s[1] * slack[names[0]][1]
    return tuple(name for name in names[1:] if soonest[name] <= latest)
