"""Was the machine the same for all runs that are compared?

Runs that were timed one after another are compared as if nothing but their settings differed.  On a shared
machine that is not so: the same model's forward pass then takes longer in one run than in another.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from speechdp.report.runs.results import RankTiming, RunResult

#: Forward passes of the same model that differ by more show that the machine was not the same.
TOLERANCE = 0.05
#: Cores, as a share of one for each rank, that other work must take, or by which it must differ, to be a
#: cause: ranks whose strategy exchanges in the background slow down their own forward passes.
NOTABLE_LOAD = 0.05


@dataclass(frozen=True)
class Circumstances:
    """Under which a rank of a run trained.

    Attributes:
        run: the run.
        rank, host: who.
        ranks_there: ranks of the run on that host.
        forward_s: forward pass for a frame, s.
        elsewhere: cores of its host that worked for others, mean; None where it was not recorded.
    """

    run: RunResult
    rank: int
    host: str
    ranks_there: int
    forward_s: float
    elsewhere: float | None


@dataclass(frozen=True)
class Unsteadiness:
    """The largest difference between runs of the same model: the same rank in two runs."""

    slow: Circumstances
    fast: Circumstances

    @property
    def excess(self) -> float:
        """By which share a forward pass took longer in the slow run."""
        return self.slow.forward_s / self.fast.forward_s - 1


def find_unsteadiness(runs: Iterable[RunResult]) -> Unsteadiness | None:
    """Find the rank and the two runs whose forward passes differ most; None where all are alike.

    Only runs of the same model on as many ranks and with batches of the same size are compared, and only
    ranks on the same host.  Where the load by others is known and did not differ, the difference is the
    runs' own, and none is found.
    """
    alike: dict[object, list[Circumstances]] = {}
    for run in runs:
        key = tuple(str(run.settings.get(name)) for name in ("size", "batch_size", "num_parameters"))
        for found in _circumstances(run):
            alike.setdefault((key, found.rank, found.host), []).append(found)
    pairs = (
        Unsteadiness(slow, fast)
        for group in alike.values()
        for slow, fast in itertools.permutations(group, 2)
    )
    notable = [pair for pair in pairs if pair.excess > TOLERANCE and _is_from_outside(pair)]
    return max(notable, key=lambda pair: pair.excess, default=None)


def notable_load(run: RunResult) -> float:
    """Return the cores of a run's busiest host that worked for others, mean; 0 where too few to matter."""
    known = [
        one.elsewhere
        for one in _circumstances(run)
        if one.elsewhere is not None and one.elsewhere > NOTABLE_LOAD * one.ranks_there
    ]
    return max(known, default=0.0)


def _circumstances(run: RunResult) -> list[Circumstances]:
    ranks = run.timing.ranks if run.timing else ()
    fed = bool(run.timing and run.timing.feeders)
    return [
        Circumstances(
            run,
            rank.rank,
            rank.host,
            sum(other.host == rank.host for other in ranks),
            rank.spans_s["forward"] / rank.frames,
            _elsewhere(rank, ranks, has_feeders=fed),
        )
        for rank in ranks
        if rank.frames and rank.spans_s.get("forward")
    ]


def _elsewhere(rank: RankTiming, ranks: Sequence[RankTiming], *, has_feeders: bool) -> float | None:
    """Return the cores of a rank's host that did not work for the run, those stolen among them.

    None where it is not known, as with feeders, whose load is not recorded.
    """
    here = [other.load for other in ranks if other.host == rank.host]
    if has_feeders or rank.load is None or any(load is None for load in here):
        return None
    own = sum(load.own for load in here if load is not None)
    return max(0.0, rank.load.host - own) + rank.load.stolen


def _is_from_outside(pair: Unsteadiness) -> bool:
    slow, fast = pair.slow.elsewhere, pair.fast.elsewhere
    return slow is None or fast is None or slow - fast > NOTABLE_LOAD * pair.slow.ranks_there
