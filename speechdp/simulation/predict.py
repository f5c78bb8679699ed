"""Predict the speed of strategies on a cluster: drawn steps, modelled exchanges, and who waits for whom."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

from speechdp.comm.serial import SerialCommunicator
from speechdp.comm.sums import REDUCIBLE
from speechdp.errors import ConfigError
from speechdp.parallel.declared import Exchange, Model, Pattern
from speechdp.parallel.registry import StrategyChoice
from speechdp.simulation.events import Served, mixed_share, serve
from speechdp.simulation.links import Cluster
from speechdp.simulation.steps import REPLICATES, Drawn, Draws, MeasuredWork
from speechdp.simulation.waiting import (
    Pace,
    delayed,
    exposed_s,
    in_two_levels,
    neighbours,
    together,
    windows_of,
)

#: Bounds of the intervals: 90 % of the resamples lie between them.
LOW, HIGH = 0.05, 0.95
#: Error of predictions beyond the spread between runs, if ranks exchange: standard deviation of the
#: logarithm.  In 50 cells of benchmarks/strategies/simulate.py half of all errors were below 2.8 % and 9 in
#: 10 below 7.7 %, as for total standard deviations of 4.2 % and 4.7 %, of which 3 % is between runs
#: (docs/results.md).
MODEL_ERROR = 0.032
#: Equally likely values of a normal distribution.
_NORMAL = np.array([NormalDist().inv_cdf((place + 0.5) / 41) for place in range(41)])
#: Fewest steps for a replicate's mean, of all ranks together, and of each rank.
_LEAST_STEPS, _LEAST_OF_RANK = 4_096, 32
#: Largest number of steps of all ranks together that, with what is computed from them, fit into memory.
_MOST_STEPS = 2**25
#: Fewest windows of a period to follow if one starts before another has ended.
_LEAST_WINDOWS = 4
#: Bytes of a vector sent over a network that sockets buffer: by so much an answer and the next request
#: overlap (8 ranks, vectors of 0.1 to 4 MB, Linux, TCP; docs/results.md).
_IN_SOCKETS = 448 * 1024
#: Number of resamples for event simulation, which takes longest.
_EVENT_REPLICATES = 10
#: Fewest windows in event simulation, of all learners together and of each learner.
_EVENTS, _EVENTS_OF_LEARNER = 600, 6
#: Likewise of each worker of a server: if steps have a heavy tail, a few windows lack its long ones.
_EVENTS_OF_WORKER = 40
#: Steps of a window that event simulation draws individually; longer windows get the same mean and variance.
_STEPS_OF_EVENT = 16


@dataclass(frozen=True)
class Interval:
    """A mean over resamples, and the range of 90 % of them."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: npt.ArrayLike, spread: float = 0.0) -> Interval:
        """Return the interval of the resamples' values.

        Args:
            spread: spread of a single run around its expectation, standard deviation of the logarithm.
        """
        values = np.asarray(samples, float)
        mean, runs = float(values.mean()), np.multiply.outer(values, np.exp(spread * _NORMAL))
        low, high = map(float, np.quantile(runs, (LOW, HIGH)))
        # The mean of equal samples may differ from them by rounding; of skewed ones it may be outside.
        return cls(mean, min(low, mean), max(high, mean))


@dataclass(frozen=True)
class Scenario:
    """A training on a cluster.

    Attributes:
        work: the measured steps.
        model: the model that is exchanged.
        cluster: the links.
        factors: slow-down of ranks that are slower than measured, by rank.
        progress: progress of exchanges beside backward, 0 to 1, as measured.
        spread: spread between runs of the same settings, standard deviation of the logarithm of their speed.
        error: further error of predictions for several ranks, likewise.
        seed: seed of the draws.
    """

    work: MeasuredWork
    model: Model
    cluster: Cluster
    factors: Mapping[int, float] = field(default_factory=dict)
    progress: float = 1.0
    spread: float = 0.0
    error: float = 0.0
    seed: int = 1

    def draws(self, ranks: int, replicates: int = REPLICATES) -> Draws:
        """Return the drawn steps of `ranks` ranks."""
        return Draws(self.work, ranks, replicates, self.factors, self.seed)


@dataclass(frozen=True)
class Prediction:
    """The prediction for a strategy on a number of ranks.

    Attributes:
        period: steps between its exchanges.
        frames_per_s: frames/s of all ranks together.
        efficiency: frames/s relative to as many ranks that neither exchange nor wait, 0 to 1.
        step_s: mean time from one step of a rank to its next, s.
        computing, data_wait, exchange, waiting: mean shares of a step, 0 to 1; together 1.
        mixed: share of the requested exchanges that are made (`ad_psgd`); None: all.
    """

    strategy: StrategyChoice
    period: int
    ranks: int
    frames_per_s: Interval
    efficiency: Interval
    step_s: Interval
    computing: float
    data_wait: float
    exchange: float
    waiting: float
    mixed: float | None = None

    def gpu_hours(self, frames: float) -> Interval:
        """Return the hours of all ranks together to train on `frames` frames."""
        rate = self.frames_per_s
        hours = [self.ranks * frames / speed / 3600 for speed in (rate.mean, rate.high, rate.low)]
        return Interval(*hours)


def predict(
    scenario: Scenario, ranks: int, exchanges: Sequence[tuple[StrategyChoice, Exchange]]
) -> list[Prediction]:
    """Predict the speed of several strategies on `ranks` ranks.

    All use the same drawn steps, and so do other scenarios with the same seed: their ratios are therefore
    more precise than the speeds themselves.

    Returns:
        Predictions in the order of `exchanges`, without strategies that a run on so many ranks would refuse:
        their groups do not divide the ranks, their server leaves no worker, or they average between nodes and
        there is one.
    """
    possible = [
        (choice, exchange)
        for choice, exchange in exchanges
        if not why_refused(choice, ranks, scenario.cluster)
    ]
    paces = predict_paces(scenario, ranks, [exchange for _, exchange in possible])
    return [
        _prediction(scenario, ranks, choice, exchange, pace)
        for (choice, exchange), pace in zip(possible, paces, strict=True)
    ]


class _RanksInNumber(SerialCommunicator):
    """Ranks that do not exist, to ask a strategy whether it would train on them."""

    def __init__(self, hosts: Sequence[Any]) -> None:
        super().__init__()
        self.size, self._hosts = len(hosts), hosts

    def allgather_object(self, value: Any) -> list[Any]:
        """Return the hosts that the ranks would be on: `check_ranks` gathers nothing else."""
        return list(self._hosts)


def _ranks_on(hosts: Sequence[Any], backend: str) -> _RanksInNumber:
    class Ranks(_RanksInNumber):
        reducible = REDUCIBLE[backend] if backend else _RanksInNumber.reducible

    Ranks.backend = backend
    return Ranks(hosts)


def why_refused(choice: StrategyChoice, ranks: int, cluster: Cluster) -> str:
    """Return why a run of a strategy on `ranks` ranks would be refused; "": it would not be."""
    return why_refused_on(choice, [rank // cluster.ranks_per_node for rank in range(ranks)])


def why_refused_on(choice: StrategyChoice, hosts: Sequence[Any], backend: str = "") -> str:
    """Return why a run of a strategy would be refused, before it starts; "": no reason is known.

    Args:
        choice: a strategy known here.
        hosts: host of each rank.
        backend: back-end of the exchanges; "": whichever the strategy needs.
    """
    try:
        choice.parsed.check_ranks(_ranks_on(hosts, backend))
    except ConfigError as error:
        return str(error)
    return ""


def predict_paces(scenario: Scenario, ranks: int, exchanges: Sequence[Exchange]) -> list[Pace]:
    """Return the pace with each exchange, from the same draws for all."""
    # Many strategies exchange in the same way: compute each pace only once.
    different = list(dict.fromkeys(exchanges))
    at_once = [e for e in different if e.pattern not in (Pattern.GOSSIP, Pattern.SERVER)]
    paces = dict(zip(at_once, _synchronous(scenario, ranks, at_once), strict=True))
    for exchange in different:
        if exchange.pattern is Pattern.SERVER:
            paces[exchange] = _with_server(scenario, ranks, exchange)
        elif exchange.pattern is Pattern.GOSSIP:
            paces[exchange] = _gossiping(scenario, ranks, exchange)
    return [_fed(paces[exchange], scenario.work) for exchange in exchanges]


def _synchronous(scenario: Scenario, ranks: int, exchanges: Sequence[Exchange]) -> list[Pace]:
    if not exchanges:
        return []
    found: list[list[Pace]] = [[] for _ in exchanges]
    draws = scenario.draws(ranks)
    for part, drawn in draws.together(_steps_needed(ranks, exchanges)):
        cluster = scenario.cluster.part(part)
        for exchange, paces in zip(exchanges, found, strict=True):
            paces.append(_pace(scenario, drawn, exchange, cluster))
    return [_joined(paces) for paces in found]


def _pace(scenario: Scenario, drawn: Drawn, exchange: Exchange, cluster: Cluster) -> Pace:
    ranks = drawn.shape[2]
    if exchange.pattern is Pattern.DELAYED and ranks > 1:
        return delayed(drawn, exchange, cluster.allreduce_s(exchange.nbytes, ranks))
    if exchange.pattern is Pattern.NEIGHBOURS and ranks > 1:
        return neighbours(drawn, exchange, scenario.work, cluster)
    if exchange.rounds > 0 and ranks > 1:
        return in_two_levels(drawn, exchange, scenario.work, cluster, scenario.progress)
    exposed = exposed_s(exchange, scenario.work, ranks, cluster, scenario.progress)
    return together(drawn[:, :, int(exchange.dedicated) :], exchange, exposed)


def is_too_long(exchange: Exchange, ranks: int) -> bool:
    """Return whether the steps of a period on `ranks` ranks are too many to draw."""
    return ranks * _steps_of_windows(exchange) > _MOST_STEPS


def _steps_of_windows(exchange: Exchange) -> int:
    """Return the fewest steps of a rank to draw for an exchange; event simulation draws fewer."""
    if exchange.pattern in (Pattern.GOSSIP, Pattern.SERVER):
        return 1
    return exchange.period * (
        max(exchange.rounds, 1) if exchange.pattern is Pattern.TOGETHER else _LEAST_WINDOWS
    )


def _steps_needed(ranks: int, exchanges: Sequence[Exchange]) -> int:
    """Return the number of steps to draw for each rank."""
    return max(_LEAST_OF_RANK, -(-_LEAST_STEPS // ranks), *map(_steps_of_windows, exchanges))


def _joined(paces: Sequence[Pace]) -> Pace:
    return Pace(
        np.concatenate([pace.step_s for pace in paces]),
        np.concatenate([np.broadcast_to(pace.exchange_s, pace.step_s.shape) for pace in paces]),
    )


def _gossiping(scenario: Scenario, ranks: int, exchange: Exchange) -> Pace:
    """Return the pace of learners that never wait for each other, and the share of exchanges they make."""
    draws, group_size = scenario.draws(ranks), exchange.group_size
    exposed = np.zeros(1)
    learner_s = draws.mean_s  # (replicates, learners)
    if group_size > 1:
        # Ranks of a group are neighbours; if a group spans nodes, its exchange goes over the network.
        inside = replace(exchange, pattern=Pattern.TOGETHER, nbytes=exchange.nbytes)
        exposed = exposed_s(inside, scenario.work, group_size, scenario.cluster, scenario.progress)
        steps = _steps_needed(ranks, [replace(inside, period=1)])
        slowest = [
            drawn.reshape(*drawn.shape[:2], -1, group_size).max(axis=3).mean(axis=1, dtype=float)
            for _, drawn in draws.together(steps)
        ]
        learner_s = np.concatenate(slowest) + exposed[:, None]
    rates = (1 / learner_s).mean(axis=1)
    mixed = _mixed(scenario, learner_s, exchange) if learner_s.shape[1] > 1 else None
    return Pace(1 / rates, np.broadcast_to(exposed, rates.shape), mixed)


def _mixed(scenario: Scenario, learner_s: npt.NDArray[np.float64], exchange: Exchange) -> float:
    """Return the share of exchanges that are made, from the resamples' means."""
    learners = learner_s.shape[1]
    count = max(_EVENTS_OF_LEARNER, _EVENTS // learners)
    cluster, per_node = scenario.cluster, max(1, scenario.cluster.ranks_per_node // exchange.group_size)
    messages = [float(cluster.message_s(exchange.nbytes, crosses=c).mean()) for c in (False, True)]
    windows = exchange.period * _spread_of(scenario, learners, count, exchange.period)
    windows *= learner_s.mean(axis=0)
    kind = cast(Literal["all", "ring", "exponential"], exchange.topology)
    return mixed_share(windows, messages, kind, per_node)


def _spread_of(scenario: Scenario, ranks: int, count: int, period: int) -> npt.NDArray[np.float64]:
    """Return windows of one resample relative to their mean.  (windows, ranks)"""
    draws = Draws(scenario.work, ranks, 1, {}, scenario.seed)
    (windows,) = _apart(draws, count, period)
    factors: npt.NDArray[np.float64] = windows / (period * draws.mean_s[0])
    return factors


def _apart(draws: Draws, count: int, period: int) -> list[npt.NDArray[np.float64]]:
    """Return `count` windows of each rank for each replicate, s.  (windows, ranks) each"""
    drawn_steps = min(period, _STEPS_OF_EVENT)
    found: list[npt.NDArray[np.float64]] = []
    for part, drawn in draws.apart(count * drawn_steps):
        means = draws.mean_s[part][:, None, :]
        rests = windows_of(drawn, drawn_steps) - drawn_steps * means
        windows = period * means + np.sqrt(period / drawn_steps) * rests
        found += list(np.maximum(windows, 0.0))
    return found


def _with_server(scenario: Scenario, ranks: int, exchange: Exchange) -> Pace:
    """Return the pace of workers that ask a server on rank 0 once per period."""
    workers = ranks - exchange.dedicated
    draws = scenario.draws(ranks, _EVENT_REPLICATES)
    update_s = scenario.work.update * scenario.work.step_s if exchange.at_server else 0.0
    service, under_way = (at[:, exchange.dedicated :] for at in _service_s(exchange, ranks, scenario.cluster))
    count = max(_EVENTS_OF_WORKER, _EVENTS // workers)
    paces = []
    for replicate, windows in enumerate(_apart(draws, count, exchange.period)):
        # Workers reuse these windows cyclically: with too few long ones, a worker would be too fast
        # throughout.
        usual = exchange.period * draws.mean_s[replicate] / np.maximum(windows.mean(axis=0), 1e-12)
        own = (windows * usual)[:, ranks - workers :]
        own = own * (1 - scenario.work.update) if exchange.at_server else own
        at = min(replicate, len(service) - 1)
        served = serve(own, service[at] + update_s, under_way[at])
        paces.append(_served_pace(served, exchange.period, workers))
    return _joined(paces)


def _service_s(
    exchange: Exchange, ranks: int, cluster: Cluster
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return the server's time to receive a vector and send one back, and the further time until arrival, s.

    A small message announces each vector.  Links carry both directions at once: while one worker's answer
    leaves, the next one's vector arrives as far as sockets buffer them; the remaining parts wait for each
    other.

    Returns:
        Both for each rank; a worker on rank 0 sends nothing.  (replicates or 1, ranks) each
    """
    near, far = (
        2 * (cluster.message_s(exchange.nbytes, crosses=crosses) + cluster.message_s(0, crosses=crosses))
        for crosses in (False, True)
    )
    passing = cluster.message_s(min(exchange.nbytes, _IN_SOCKETS), crosses=True) - cluster.message_s(
        0, crosses=True
    )
    is_near = np.arange(ranks) < cluster.ranks_per_node
    whole = np.where(is_near, near[:, None], far[:, None])
    under_way = np.where(is_near, 0.0, passing[:, None])
    whole[:, 0] = under_way[:, 0] = 0.0
    return whole - under_way, under_way


def _served_pace(served: Served, period: int, workers: int) -> Pace:
    step_s = workers / (period * served.windows_per_s)
    return Pace(np.array([step_s]), np.array([served.service_s / period]))


def _fed(pace: Pace, work: MeasuredWork) -> Pace:
    """Limit a pace to what the data path delivers."""
    return replace(pace, step_s=np.maximum(pace.step_s, work.batch_s))


def _prediction(
    scenario: Scenario, ranks: int, choice: StrategyChoice, exchange: Exchange, pace: Pace
) -> Prediction:
    draws, work = scenario.draws(ranks, len(pace.step_s)), scenario.work
    trainers = ranks - exchange.dedicated
    rates = trainers * work.frames / pace.step_s
    ideal = ranks * work.frames / draws.alone_s
    step_s = float(pace.step_s.mean())
    loading_s = _held_back(scenario, ranks, pace)
    own_s = min(_own_work(draws, exchange, work), step_s - loading_s)
    computing_s = own_s * (1 - work.data_wait)
    exchange_s = min(float(np.mean(pace.exchange_s)), max(step_s - own_s - loading_s, 0.0))
    waiting_s = max(step_s - own_s - exchange_s - loading_s, 0.0)
    spread = math.hypot(scenario.spread, scenario.error) if ranks > 1 else scenario.spread
    return Prediction(
        choice,
        exchange.period,
        ranks,
        Interval.of(rates, spread),
        Interval.of(rates / ideal),
        Interval.of(pace.step_s, spread),
        computing=computing_s / step_s,
        data_wait=(own_s * work.data_wait + loading_s) / step_s,
        exchange=exchange_s / step_s,
        waiting=waiting_s / step_s,
        mixed=pace.mixed,
    )


def _own_work(draws: Draws, exchange: Exchange, work: MeasuredWork) -> float:
    """Return a rank's own work in a step, s: the mean over ranks, or over steps of asynchronous ranks."""
    means = draws.mean_s[:, int(exchange.dedicated) :]
    gossips_alone = exchange.pattern is Pattern.GOSSIP and exchange.group_size == 1
    if not gossips_alone and exchange.pattern is not Pattern.SERVER:
        return float(means.mean())
    # A fast rank takes more of the steps, unless all wait equally for their turn.
    mean = float((1 / (1 / means).mean(axis=1)).mean())
    return mean * (1 - work.update) if exchange.at_server else mean


def _held_back(scenario: Scenario, ranks: int, pace: Pace) -> float:
    """Return the part of a step caused only by the limit of the data path, s."""
    held = np.isclose(pace.step_s, scenario.work.batch_s) if scenario.work.batch_s > 0 else np.zeros(1, bool)
    if not held.any():
        return 0.0
    alone_s = float(scenario.draws(ranks).alone_s.mean())
    return max(float(pace.step_s.mean()) - alone_s - float(np.mean(pace.exchange_s)), 0.0)
