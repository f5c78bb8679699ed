"""Compute how long windows of steps take if some or all synchronous ranks wait for each other.

Everything is a sum or a maximum of the drawn steps, for all ranks and replicates at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from speechdp.parallel.declared import Exchange
from speechdp.simulation.links import Cluster, Samples
from speechdp.simulation.steps import Drawn, MeasuredWork
from speechdp.strategies.mechanisms.topology import exponential_offset

#: Most windows that are followed in sequence; more change nothing but the computing time.
_MOST_WINDOWS = 48


@dataclass(frozen=True)
class Pace:
    """Mean times of a step over steps and ranks, s.  (replicates,) each

    Attributes:
        step_s: time from one step to the next.
        exchange_s: part of it spent in exchanges that are not hidden.
        mixed: share of the requested exchanges that were made; None: all.
    """

    step_s: Samples
    exchange_s: Samples
    mixed: float | None = None


def windows_of(drawn: Drawn, period: int) -> npt.NDArray[np.float64]:
    """Return the work of whole windows, s.  (replicates, windows, ranks)"""
    replicates, steps, ranks = drawn.shape
    count = steps // period
    windows: npt.NDArray[np.float64] = (
        drawn[:, : count * period].reshape(replicates, count, period, ranks).sum(axis=2, dtype=float)
    )
    return windows


def slowest(drawn: Drawn, period: int) -> Samples:
    """Return the expected work of a window on its slowest rank, s.  (replicates,)"""
    longest: Samples = windows_of(drawn, period).max(axis=2).mean(axis=1)
    return longest


def exposed_s(
    exchange: Exchange, work: MeasuredWork, ranks: int, cluster: Cluster, progress: float = 1.0
) -> Samples:
    """Return the time that an exchange of all ranks adds to a window, s.

    Pieces exchanged during backward start when backward has filled them, one after another.

    Args:
        progress: how far exchanges progress beside backward, from 0 (not at all) to 1, as measured.
    """
    if ranks == 1:
        return np.zeros(1)
    if exchange.at_server:
        return _gathered_s(exchange.nbytes, ranks, cluster)
    if not exchange.buckets:
        return cluster.allreduce_s(exchange.nbytes, ranks)
    pieces = [cluster.allreduce_s(nbytes, ranks) for nbytes in exchange.buckets]
    whole = np.sum(np.broadcast_arrays(*pieces), axis=0)
    backward_s = work.backward * work.step_s
    filled, ended = 0.0, np.zeros(1)
    for nbytes, piece in zip(exchange.buckets, pieces, strict=True):
        filled += nbytes / exchange.nbytes
        ended = np.maximum(ended, filled * backward_s) + piece
    rest = np.maximum(ended - backward_s, 0.0)
    exposed: Samples = progress * rest + (1 - progress) * whole
    return exposed


def _gathered_s(nbytes: float, ranks: int, cluster: Cluster) -> Samples:
    """Return the time for rank 0 to get a vector from every other rank and send one back, one by one."""
    near = min(ranks, cluster.ranks_per_node) - 1
    far = ranks - 1 - near
    return 2 * (
        near * cluster.message_s(nbytes, crosses=False) + far * cluster.message_s(nbytes, crosses=True)
    )


def together(drawn: Drawn, exchange: Exchange, exposed: Samples) -> Pace:
    """Simulate ranks that all wait for each other once per period."""
    window_s = slowest(drawn, exchange.period) + exposed
    return Pace(window_s / exchange.period, _wide(exposed / exchange.period, window_s))


def in_two_levels(
    drawn: Drawn, exchange: Exchange, work: MeasuredWork, cluster: Cluster, progress: float
) -> Pace:
    """Simulate ranks that wait for those of their node once per period, and for all once in `rounds` periods.

    Args:
        drawn: at least the steps of `rounds` periods.
        progress: as in `exposed_s`.
    """
    ranks, size = drawn.shape[2], exchange.node_size or cluster.ranks_per_node
    inside_s = exposed_s(exchange, work, min(size, ranks), cluster, progress)
    between_s = _between_s(exchange, ranks, size, cluster)
    windows = windows_of(drawn, exchange.period)
    slowest_of_node = [windows[:, :, first : first + size].max(axis=2) for first in range(0, ranks, size)]
    apart = windows_of(np.stack(slowest_of_node, axis=2), exchange.rounds)
    exposed = exchange.rounds * inside_s + between_s
    step_s = (apart.max(axis=2).mean(axis=1) + exposed) / (exchange.rounds * exchange.period)
    return Pace(step_s, _wide(exposed / (exchange.rounds * exchange.period), step_s))


def _between_s(exchange: Exchange, ranks: int, size: int, cluster: Cluster) -> Samples:
    """Return the time for the first ranks of all nodes to sum a vector and pass it on, s."""
    leaders = replace(cluster, ranks_per_node=max(1, cluster.ranks_per_node // size))
    sum_s = leaders.allreduce_s(exchange.nbytes_between, -(-ranks // size))
    if size == 1:
        return sum_s
    crosses = size > cluster.ranks_per_node
    whole = max(exchange.nbytes, exchange.nbytes_between)  # one of the two may be compressed
    handed_on: Samples = sum_s + cluster.message_s(whole, crosses=crosses)
    return handed_on


def delayed(drawn: Drawn, exchange: Exchange, sum_s: Samples) -> Pace:
    """Simulate ranks that start a sum at the end of a window and wait for it `delay` steps later.

    Args:
        drawn: at least two windows.
        sum_s: time of an exchange after the last rank has joined it.
    """
    period, delay = exchange.period, exchange.delay
    count = min(drawn.shape[1] // period, _MOST_WINDOWS)
    drawn = _first(drawn, count * period)
    clock = np.zeros((drawn.shape[0], drawn.shape[2]))
    done = np.full((drawn.shape[0], 1), -np.inf)
    waited = np.zeros(drawn.shape[0])
    ends = []
    for window in range(count):
        steps = drawn[:, window * period : (window + 1) * period].astype(float)
        here = clock + steps[:, :delay].sum(axis=1)
        arrived = np.maximum(here, done)
        waited += (arrived - here).mean(axis=1)
        clock = arrived + steps[:, delay:].sum(axis=1)
        ends.append(clock.max(axis=1))
        done = clock.max(axis=1, keepdims=True) + _column(sum_s)
    return _pace_of(ends, waited, period, sum_s)


def neighbours(drawn: Drawn, exchange: Exchange, work: MeasuredWork, cluster: Cluster) -> Pace:
    """Simulate ranks that exchange with a few others beside the first step of each window.

    Args:
        drawn: at least two windows.
    """
    period, ranks = exchange.period, drawn.shape[2]
    count = min(drawn.shape[1] // period, _MOST_WINDOWS)
    drawn = _first(drawn, count * period)
    before_update = 1 - work.update
    clock = np.zeros((drawn.shape[0], ranks))
    waited = np.zeros(drawn.shape[0])
    generator = np.random.default_rng(ranks)
    ends = []
    longest = np.zeros(1)
    for window in range(count):
        steps = drawn[:, window * period : (window + 1) * period].astype(float)
        here = clock + steps[:, 0] * before_update
        begun = clock if exchange.overlaps else here
        partners, message_s = _partners(exchange, ranks, cluster, window, generator)
        longest = np.maximum(longest, message_s)
        ready = begun
        for partner in partners:
            ready = np.maximum(ready, begun[:, partner])
        if exchange.topology == "complete":
            ready = begun.max(axis=1, keepdims=True)
        arrived = np.maximum(here, ready + _column(message_s))
        waited += (arrived - here).mean(axis=1)
        clock = arrived + steps[:, 0] * (1 - before_update) + steps[:, 1:].sum(axis=1)
        ends.append(clock.max(axis=1))
    return _pace_of(ends, waited, period, longest)


def _partners(
    exchange: Exchange, ranks: int, cluster: Cluster, number: int, generator: np.random.Generator
) -> tuple[list[npt.NDArray[np.intp]], Samples]:
    """Return for whom each rank waits at an exchange, and how long it takes once both are there, s."""
    everyone, crosses = np.arange(ranks), cluster.nodes(ranks) > 1
    if ranks == 1:
        return [], np.zeros(1)
    if exchange.topology == "complete":
        return [], cluster.allreduce_s(exchange.nbytes, ranks)
    sharing = min(ranks, cluster.ranks_per_node)
    if exchange.topology == "random":
        order, partner = generator.permutation(ranks), everyone.copy()
        even = ranks - ranks % 2
        partner[order[:even:2]], partner[order[1:even:2]] = order[1:even:2], order[:even:2]
        return [partner], cluster.message_s(exchange.nbytes, crosses=crosses, sharing=sharing)
    if exchange.topology == "exponential":
        offset = exponential_offset(ranks, number)
        shared = min(offset, sharing)
        return [(everyone - offset) % ranks], cluster.message_s(
            exchange.nbytes, crosses=crosses, sharing=shared
        )
    # A ring passes through each node once: in each direction one message leaves a node at a time.
    message_s = cluster.message_s(exchange.nbytes, crosses=crosses)
    sides = [(everyone - 1) % ranks, (everyone + 1) % ranks]
    return sides[: min(ranks - 1, 2)], min(ranks - 1, 2) * message_s


def _pace_of(ends: list[Samples], waited: Samples, period: int, longest: Samples) -> Pace:
    """Return the pace from the ends of windows, except the first, and the time waited in all of them.

    It is the pace of the rank that is furthest behind: sooner or later its delay reaches all others.  The
    wait counts as exchange up to the time of one exchange, and beyond that as waiting for ranks.
    """
    step_s = (ends[-1] - ends[0]) / ((len(ends) - 1) * period)
    exchange_s = np.minimum(waited / len(ends), longest) / period
    return Pace(step_s, exchange_s)


def _first(drawn: Drawn, steps: int) -> Drawn:
    """Return the first steps, scaled to the mean of all of them, because the mean of a few is noisy."""
    first = drawn[:, :steps]
    level = drawn.mean(axis=(1, 2), dtype=float) / first.mean(axis=(1, 2), dtype=float)
    levelled: Drawn = first * level[:, None, None].astype(np.float32)
    return levelled


def _column(values: Samples) -> npt.NDArray[np.float64]:
    return np.asarray(values)[:, None]


def _wide(values: Samples, like: Samples) -> Samples:
    return np.broadcast_to(values, like.shape).copy()
