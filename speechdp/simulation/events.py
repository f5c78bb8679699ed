"""Simulate asynchronous ranks event by event: a server that serves one worker at a time, and mixing pairs."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from speechdp.strategies.mechanisms.topology import (
    BipartiteKind,
    is_active,
    passive_partners,
)

#: Share of the time that passes before counting starts: at first no worker waits.
_WARM_UP = 0.3


@dataclass(frozen=True)
class Served:
    """The result for workers and their server.

    Attributes:
        windows_per_s: windows that all workers together complete per second.
        waited_s: mean wait of a worker for its turn, s.
        service_s: mean time from its turn until it has the answer, s.
    """

    windows_per_s: float
    waited_s: float
    service_s: float


def serve(
    windows: npt.NDArray[np.float64], service_s: Sequence[float], under_way_s: Sequence[float]
) -> Served:
    """Simulate workers that work on a window, ask the server, and wait for its answer.

    The server serves one at a time, in order of arrival.

    Workers start at random positions in their windows and are followed for a fixed time.  If all started a
    window at once, or stopped after a fixed number of windows, long windows would count too little.

    Args:
        windows: work of each window, s, reused cyclically.  (windows, workers)
        service_s: time in which the server serves a worker and no other, s.  (workers,)
        under_way_s: further time until a worker has its answer, while the server serves others, s.
            (workers,)
    """
    count, workers = windows.shape
    work = windows.T.tolist()
    service, under_way = list(map(float, service_s)), list(map(float, under_way_s))
    ends = np.cumsum(windows, axis=0)  # ends of windows without waits
    begun = np.random.default_rng(workers).random(workers) * ends[-1]
    done = [min(int(np.searchsorted(ends[:, i], begun[i], "right")), count - 1) for i in range(workers)]
    arrivals = [(float(ends[done[i], i] - begun[i]), i) for i in range(workers)]
    heapq.heapify(arrivals)
    # Time for workers to complete their windows about once, whether or not they wait for the server.
    end = count * max(float(windows.mean()) + sum(service + under_way) / workers, sum(service))
    begin = _WARM_UP * end
    free = waited = served = 0.0
    counted = 0
    while True:
        arrived, worker = arrivals[0]
        start = max(arrived, free)
        free = start + service[worker]
        if free > end:
            break
        if free > begin:
            counted += 1
            waited += start - arrived
            served += service[worker] + under_way[worker]
        done[worker] += 1
        following = work[worker][done[worker] % count]
        heapq.heapreplace(arrivals, (free + under_way[worker] + following, worker))
    some = max(counted, 1)
    return Served(some / (end - begin), waited / some, served / some)


def mixed_share(
    windows: npt.NDArray[np.float64],
    message_s: Sequence[float],
    kind: BipartiteKind,
    ranks_per_node: int,
) -> float:
    """Return the share of the exchanges requested by learners that are made; the others are skipped.

    An active learner requests one per window and never waits.  A request is skipped if an earlier one of the
    same learner still waits.  An exchange needs both partners and, between nodes, the links of both, each for
    one exchange at a time, first come, first served.

    Args:
        windows: work between two requests, s.  (windows, learners)
        message_s: time of an exchange within a node, and of one between two, s.
        kind: who exchanges with whom.
        ranks_per_node: number of learners on a node.
    """
    learners = windows.shape[1]
    partners = {rank: passive_partners(rank, learners, kind) for rank in range(learners) if is_active(rank)}
    active = [rank for rank, others in partners.items() if others]
    if not active:
        return 1.0
    asked = np.cumsum(windows, axis=0)
    requests = sorted((time, rank) for rank in active for time in asked[:, rank].tolist())
    generator = np.random.default_rng(learners)
    draws = iter(generator.random(len(requests)).tolist())
    free = [0.0] * learners
    link_free = [0.0] * (-(-learners // ranks_per_node))
    # For each active learner, when its waiting exchange starts; 0: none waits.
    waiting_until = [0.0] * learners
    made = 0
    for time, rank in requests:
        if waiting_until[rank] > time:
            continue
        partner = partners[rank][int(next(draws) * len(partners[rank]))]
        here, there = rank // ranks_per_node, partner // ranks_per_node
        begins = max(time, free[rank], free[partner])
        if here != there:
            begins = max(begins, link_free[here], link_free[there])
        ends = begins + message_s[here != there]
        # Until its thread is free for the next one, one request waits and others are skipped.
        waiting_until[rank] = free[rank] if free[rank] > time else 0.0
        free[rank] = free[partner] = ends
        if here != there:
            link_free[here] = link_free[there] = ends
        made += 1
    return made / len(requests)
