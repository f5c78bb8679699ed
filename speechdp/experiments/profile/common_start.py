"""The moment from which all ranks of a job count their times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

from speechdp.comm.base import Communicator
from speechdp.comm.environment import host_name

#: Number of barriers by which clocks are compared.
_ROUNDS = 9


@dataclass(frozen=True)
class CommonStart:
    """The common start on this rank.

    Attributes:
        origin_s: the moment, by this host's `time.perf_counter`.
        clock_offset_s: this host's clock minus rank 0's.
    """

    origin_s: float
    clock_offset_s: float


def begin_together(comm: Communicator) -> CommonStart:
    """Agree on a moment that has just passed on every rank.  Collective.

    Processes on one host read the same clock, so they share the moment exactly.  Clocks of other hosts are
    compared at a few barriers.  The error of the median is the spread with which a barrier releases ranks,
    well below 1 ms on an idle network.
    """
    times = []
    for _ in range(_ROUNDS):
        comm.barrier()
        times.append(perf_counter())
    everyone = comm.allgather_object({"host": host_name(), "times": times})
    comm.barrier()
    return start_of(everyone, comm.rank)


def start_of(everyone: Sequence[dict[str, Any]], rank: int) -> CommonStart:
    """Return the common start of a rank from the hosts of all ranks and their times after each barrier."""
    first, own = everyone[0], everyone[rank]
    offset = 0.0
    if own["host"] != first["host"]:
        # Ranks on one host must have the same origin, so its first rank decides.
        leader = next(each for each in everyone if each["host"] == own["host"])
        offset = median(a - b for a, b in zip(leader["times"], first["times"], strict=True))
    return CommonStart(first["times"][-1] + offset, offset)
