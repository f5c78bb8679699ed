"""How runs learn over time: their curves, how these go on, and which reaches the target soonest."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from speechdp.chance import least_told

#: Share of its time by which a run must have been evaluated, or its gains are not known: a quarter, about.
_EARLY = 0.3
#: Pieces in which a curve is continued: between points it is straight over time.
_CONTINUED = 8


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
    def is_reached(self) -> bool:
        """Whether every run reached it."""
        return None not in self.times_s

    @property
    def mean_s(self) -> float:
        """Mean over the runs; infinite where one did not reach it."""
        reached = [time for time in self.times_s if time is not None]
        return sum(reached) / len(reached) if self.is_reached else math.inf

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
    """Return which settings cannot be told from the first of `names`: seeds or speeds may be the difference.

    Told are means of the times' logarithms that lie further apart than chance of the seeds explains, in the
    two-sample t-test with a common variance, and by what the speeds may be off besides.  Where a run did not
    reach the target, its time is not known, and the scores at the end are compared instead.  Of one seed each
    nothing is known of chance.

    Args:
        slack: by which factors the times may be shorter or longer, since the speeds are not known better.
    """
    first = names[0]
    return tuple(
        name for name in names[1:] if not _is_told(ends[first], ends[name], slack[first], slack[name])
    )


def _is_told(
    first: Finish, other: Finish, of_first: tuple[float, float], of_other: tuple[float, float]
) -> bool:
    """Return whether more than chance sets one setting apart from another that is behind it."""
    ends = (first, other)
    values = [[math.log(time) for time in end.times_s if time is not None] for end in ends]
    open_by = math.log(of_first[1] / of_other[0])
    if any(len(found) < len(end.times_s) for found, end in zip(values, ends, strict=True)):
        values, open_by = [[-score for score in end.scores] for end in ends], 0.0
    least = least_told(values)
    return least is not None and fmean(values[1]) - fmean(values[0]) > least + open_by
