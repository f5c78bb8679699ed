"""Learning curves of runs over time: extrapolation, and which reaches the target soonest."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from speechdp.chance import least_detectable

#: Share of its time by which a run must have been evaluated for its gains to be known: about a quarter.
_EARLY = 0.3
#: Number of pieces in which a curve is extrapolated; between points it is linear in time.
_CONTINUED = 8


@dataclass(frozen=True)
class Curve:
    """Held-out scores of a run over its training time at the speed of the race.

    Attributes:
        points: (seconds, score), ordered by time.
        is_over: the training has reached its end.
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
        """Return the score at a time: linearly interpolated, else that of the nearest evaluation."""
        times, scores = zip(*self.points, strict=True)
        return float(np.interp(seconds, times, scores))

    def time_to(self, target: float) -> float | None:
        """Return when the score first reached `target`, s, by linear interpolation; None: never.

        The earliest possible result is the first evaluation, before which nothing is known.
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
        """Return the gain of the score in the last doubling of the time, and in the doubling before.

        Between evaluations the score is interpolated linearly in log time.
        """
        times, scores = zip(*self.points, strict=True)
        wanted = np.log([times[-1] / 4, times[-1] / 2, times[-1]])
        first, middle, last = np.interp(wanted, np.log(times), scores)
        return float(last - middle), float(middle - first)

    def continued(self, until_s: float, share: float) -> Curve:
        """Return the curve with its expected continuation, which is linear in log time.

        Args:
            until_s: end of the continuation; at most about twice the time that the run has trained.
            share: result of `shrinkage`; 0: unknown, and the curve is returned unchanged.
        """
        end_s, score = self.points[-1]
        if share == 0 or self.is_over or until_s <= end_s:
            return self
        gain, doublings = share * self.gains()[0], math.log2(until_s / end_s)
        ahead = (doublings * part / _CONTINUED for part in range(1, _CONTINUED + 1))
        return Curve((*self.points, *((end_s * 2**d, score + gain * d) for d in ahead)))


def shrinkage(curves: Sequence[Curve]) -> float:
    """Return the expected gain of a run in the next doubling of its time, as a share of its last gain.

    Learning slows down: each doubling of the time gains less than the one before, and this ratio falls as
    well.  The ratio of the last gain to the one before is computed over all runs together, because a single
    run shows it poorly.  The next ratio is assumed to be its square: runs of a small LSTM had 1, 0.76, 0.46
    and 0.19 in successive doublings.

    Returns:
        From 0 to 1; 0 if a run was first evaluated too late, or if no run learns any more.
    """
    if any(curve.points[0][0] > _EARLY * curve.points[-1][0] for curve in curves):
        return 0.0
    last, before = (sum(gains) for gains in zip(*(curve.gains() for curve in curves), strict=True))
    return min(max(last / before, 0.0), 1.0) ** 2 if before > 0 else 0.0


@dataclass(frozen=True)
class Finish:
    """How soon a setting reached the target.

    Attributes:
        times_s: times of its runs, one for each seed, s; None: that run did not reach it.
        scores: final score of each run.
    """

    times_s: tuple[float | None, ...]
    scores: tuple[float, ...]

    @property
    def is_reached(self) -> bool:
        """Whether every run reached the target."""
        return None not in self.times_s

    @property
    def mean_s(self) -> float:
        """Mean time over the runs, s; infinite if a run did not reach the target."""
        reached = [time for time in self.times_s if time is not None]
        return sum(reached) / len(reached) if self.is_reached else math.inf

    @property
    def range_s(self) -> tuple[float, float]:
        """The shortest and the longest time, s; infinite if a run did not reach the target."""
        found = [math.inf if time is None else time for time in self.times_s]
        return min(found), max(found)

    @property
    def rank(self) -> tuple[float, float]:
        """Sort key of settings, the best first: by time, then by score."""
        return self.mean_s, -sum(self.scores) / len(self.scores)


def finishes(curves: Mapping[str, Sequence[Curve]], target: float | None) -> tuple[float, dict[str, Finish]]:
    """Return the target, and how soon each setting reached it, the soonest first.

    Args:
        curves: curves of each setting, one for each seed.
        target: score; None: the best that every run reached.
    """
    if target is None:
        target = min(curve.best for found in curves.values() for curve in found)
    found = {
        name: Finish(tuple(curve.time_to(target) for curve in runs), tuple(curve.last for curve in runs))
        for name, runs in curves.items()
    }
    return target, dict(sorted(found.items(), key=lambda item: item[1].rank))


def indistinguishable(
    names: Sequence[str], ends: Mapping[str, Finish], slack: Mapping[str, tuple[float, float]]
) -> tuple[str, ...]:
    """Return the settings whose difference from the first of `names` may be due to seeds or speed estimates.

    Two settings differ surely if the means of their log times differ by more than the variation over seeds
    explains, by a two-sample t-test with a common variance, plus the uncertainty of the speeds.  If a run
    did not reach the target, its time is unknown and the final scores are compared instead.  With one seed
    each, nothing is known about the variation.

    Args:
        slack: factors by which the times may be shorter or longer, from the uncertainty of the speeds.
    """
    first = names[0]
    return tuple(
        name for name in names[1:] if not _is_distinct(ends[first], ends[name], slack[first], slack[name])
    )


def _is_distinct(
    first: Finish, other: Finish, of_first: tuple[float, float], of_other: tuple[float, float]
) -> bool:
    """Return whether a setting differs from another that is behind it by more than chance."""
    ends = (first, other)
    values = [[math.log(time) for time in end.times_s if time is not None] for end in ends]
    open_by = math.log(of_first[1] / of_other[0])
    if any(len(found) < len(end.times_s) for found, end in zip(values, ends, strict=True)):
        values, open_by = [[-score for score in end.scores] for end in ends], 0.0
    least = least_detectable(values)
    return least is not None and fmean(values[1]) - fmean(values[0]) > least + open_by
