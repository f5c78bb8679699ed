"""Check whether the machine was equally fast for all runs that are compared.

Comparing runs that were timed one after another assumes that only their settings differ.  On a shared machine
this may fail: the forward pass of the same model then takes longer in one run than in another.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from speechdp.report.runs.results import GpuConditions, RankTiming, RunResult, RunTiming
from speechdp.timing.load import NOTABLE_LOAD, OutsideLoad

#: A larger relative difference between forward passes of the same model shows that the machine differed.
TOLERANCE = 0.05
#: Smaller differences between two runs on a GPU do not count as worse conditions: relative difference of
#: clocks, number of others' processes, bytes they hold.  A driver keeps some memory that no process holds.
NOTABLE_CLOCK = 0.02
NOTABLE_OTHERS = 0.05
NOTABLE_BYTES = 1e9


@dataclass(frozen=True)
class Circumstances:
    """The circumstances in which a rank of a run trained.

    Attributes:
        run: the run.
        rank, host: the rank and its host.
        forward_s: time of the forward pass per frame, s.
        outside: cores of its host that did not work for the run; None if not recorded.
        gpu: conditions of its GPU; None if not recorded.
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
        """How much longer a forward pass took in the slow run, as a share of the fast run's."""
        return self.slow.forward_s / self.fast.forward_s - 1


def find_unsteadiness(runs: Iterable[RunResult]) -> Unsteadiness | None:
    """Return the rank and the two runs whose forward passes differ most; None if all are alike.

    Compared are the same rank on the same host, in runs of the same model with the same number of ranks and
    batch size.  A difference is ignored as the runs' own if the outside conditions are known and did not
    differ: the load of the cores by others and, for ranks on GPUs, also the clock and the other users of the
    GPU.
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
    """Return the outside load on the host where a run lost the most cores; None if too few to matter."""
    known = [one.outside for one in _circumstances(run) if one.outside is not None and one.outside.is_notable]
    return max(known, key=lambda load: load.total, default=None)


def outside_load(timing: RunTiming, rank: RankTiming) -> OutsideLoad | None:
    """Return the cores of a rank's host that did not work for its run; None if unknown.

    It is unknown for runs with feeders, because their load is not recorded.
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
    """Return whether the slow run had worse outside conditions, or may have had: they are not all known."""
    slow, fast = pair.slow.outside, pair.fast.outside
    if slow is None or fast is None or slow.total - fast.total > NOTABLE_LOAD * slow.ranks:
        return True
    # The load of the cores says nothing about the load of a GPU.
    return pair.slow.run.on_gpu and not _had_the_gpu_alike(pair.slow.gpu, pair.fast.gpu)


def _had_the_gpu_alike(slow: GpuConditions | None, fast: GpuConditions | None) -> bool:
    """Return whether neither clock nor other users can have made the GPU slower in the slow run."""
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
