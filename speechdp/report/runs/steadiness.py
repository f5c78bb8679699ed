"""Was the machine the same for all runs that are compared?

Runs that were timed one after another are compared as if nothing but their settings differed.  On a shared
machine that is not so: the same model's forward pass then takes longer in one run than in another.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from speechdp.report.runs.results import GpuConditions, RankTiming, RunResult, RunTiming
from speechdp.timing.load import NOTABLE_LOAD, OutsideLoad

#: Forward passes of the same model that differ by more show that the machine was not the same.
TOLERANCE = 0.05
#: Of two runs on a GPU that differ by less in the share of its clock, in the number of processes of others
#: and in the bytes they hold, neither had it worse.  A driver keeps some memory that no process holds.
NOTABLE_CLOCK = 0.02
NOTABLE_OTHERS = 0.05
NOTABLE_BYTES = 1e9


@dataclass(frozen=True)
class Circumstances:
    """Under which a rank of a run trained.

    Attributes:
        run: the run.
        rank, host: who.
        forward_s: forward pass for a frame, s.
        outside: cores of its host that did not work for the run; None where it was not recorded.
        gpu: conditions of its GPU; None where they were not recorded.
    """

    run: RunResult
    rank: int
    host: str
    forward_s: float
    outside: OutsideLoad | None
    gpu: GpuConditions | None


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
    ranks on the same host.  Where what is outside of the runs is known and did not differ, the difference is
    the runs' own, and none is found: the load of the cores by others and, of ranks that compute on GPUs, the
    clock and the other users of the GPU, too.
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


def notable_load(run: RunResult) -> OutsideLoad | None:
    """Return what took cores from a run on the host where it took most; None where too few to matter."""
    known = [one.outside for one in _circumstances(run) if one.outside is not None and one.outside.is_notable]
    return max(known, key=lambda load: load.total, default=None)


def outside_load(timing: RunTiming, rank: RankTiming) -> OutsideLoad | None:
    """Return the cores of a rank's host that did not work for its run.

    None where it is not known, as with feeders, whose load is not recorded.
    """
    here = [other.load for other in timing.ranks if other.host == rank.host]
    if timing.feeders or rank.load is None or any(load is None for load in here):
        return None
    own = (load.own for load in here if load is not None)
    return OutsideLoad.of(own, rank.load.host, rank.load.stolen)


def _circumstances(run: RunResult) -> list[Circumstances]:
    if run.timing is None:
        return []
    ranks = run.timing.ranks
    return [
        Circumstances(
            run,
            rank.rank,
            rank.host,
            rank.spans_s["forward"] / rank.frames,
            outside_load(run.timing, rank),
            rank.gpu,
        )
        for rank in ranks
        if rank.frames and rank.spans_s.get("forward")
    ]


def _is_from_outside(pair: Unsteadiness) -> bool:
    """Return whether something outside of the runs differed, or is not known to have been alike."""
    slow, fast = pair.slow.outside, pair.fast.outside
    if slow is None or fast is None or slow.total - fast.total > NOTABLE_LOAD * slow.ranks:
        return True
    # What keeps cores busy says nothing of what keeps a GPU busy.
    return pair.slow.run.on_gpu and not _had_the_gpu_alike(pair.slow.gpu, pair.fast.gpu)


def _had_the_gpu_alike(slow: GpuConditions | None, fast: GpuConditions | None) -> bool:
    """Return whether neither its clock nor its other users can have made a GPU slower than before."""
    if slow is None or fast is None:
        return False
    if slow.clock_mhz is None or fast.clock_mhz is None or slow.others is None or fast.others is None:
        return False
    more_bytes = (slow.others_bytes or 0.0) - (fast.others_bytes or 0.0)
    return (
        slow.clock_mhz >= (1 - NOTABLE_CLOCK) * fast.clock_mhz
        and slow.others - fast.others <= NOTABLE_OTHERS
        and more_bytes <= NOTABLE_BYTES
    )
