"""Fit links, and the overlap of exchanges with backward, to measured exchanges of runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from speechdp.parallel.declared import Model, Pattern
from speechdp.simulation.exchanges import exchange_of, is_known
from speechdp.simulation.links import SMALL_BYTES, Cluster, LinkSpeed, Samples
from speechdp.simulation.measured import MeasuredRun
from speechdp.simulation.steps import REPLICATES, MeasuredWork
from speechdp.simulation.waiting import exposed_s

#: Latencies to assume if only one message size was measured, s: between processes of a host, and over
#: Ethernet with TCP.
WITHIN_LATENCY_S, BETWEEN_LATENCY_S = 5e-6, 5e-5
#: Bandwidth within a host if nothing was measured, bytes/s: roughly that of copying through shared memory.
WITHIN_BYTES_PER_S = 5e9
#: Largest share of an exchange that an assumed latency may take.
_MOST_LATENCY = 0.5
#: Fewest exchanges from which a link is fitted.
_LEAST_EXCHANGES = 3
#: Usual spread between runs of the same settings on otherwise idle machines: standard deviation of the
#: logarithm of their speed (docs/results.md), and the number of runs that this prior counts as.
_USUAL_SPREAD, _USUAL_RUNS = 0.03, 4
#: Exchanges whose terms differ by less than this share do not separate latency from bandwidth.
_SAME_SIZE = 1e-3
#: Seed of the resamples.
_SEED = 1


@dataclass(frozen=True)
class Observed:
    """Exchanges of a run that no computation hid, each timed from the arrival of its last rank.

    Attributes:
        nbytes: size of the summed vector, bytes.
        seconds: time of each exchange.  (exchanges,)
    """

    ranks: int
    nbytes: float
    seconds: npt.NDArray[np.float64]

    @property
    def terms(self) -> tuple[float, float]:
        """Factors of alpha and beta in the time of the sum."""
        if self.nbytes < SMALL_BYTES:
            rounds = float(math.ceil(math.log2(self.ranks)))
            return rounds, rounds * self.nbytes
        return 2.0 * (self.ranks - 1), 2 * (self.ranks - 1) / self.ranks * self.nbytes


@dataclass(frozen=True)
class FittedLink:
    """A link fitted to exchanges.

    Attributes:
        speed: its latency and bandwidth.
        knows_latency: exchanges of several sizes determine the latency, at least in some resamples; otherwise
            it is assumed.
    """

    speed: LinkSpeed
    knows_latency: bool


def model_of(runs: Sequence[MeasuredRun], work: MeasuredWork) -> Model:
    """Return the model that the runs exchange."""
    return Model(runs[0].nbytes, runs[0].optimizer_vectors, work.frames, work.step_s)


def fit_link(runs: Sequence[MeasuredRun], model: Model, *, crosses: bool) -> LinkSpeed | None:
    """Return latency and bandwidth as `fitted_link` finds them; None if no run shows them."""
    found = fitted_link(runs, model, crosses=crosses)
    return None if found is None else found.speed


def fitted_link(runs: Sequence[MeasuredRun], model: Model, *, crosses: bool) -> FittedLink | None:
    """Fit latency and bandwidth to the exchanges of runs, for each resample of them.

    A resample's mean differs from its run's by chance, and runs differ from each other by their usual spread.
    Two sizes that lie close together would claim too much about latency and bandwidth separately, so the
    spread is added to the resamples.  With exchanges of only one size, the latency is assumed and the
    bandwidth fitted.

    Args:
        crosses: use runs whose ranks are on several hosts; False: on one.

    Returns:
        None if no run shows the time of an exchange.
    """
    chosen = [
        run
        for run in runs
        if run.crosses == crosses and run.ranks > 1 and run.aligned and is_known(run.strategy)
    ]
    observed = [seen for run in chosen if (seen := observe(run, model)) is not None]
    if not observed:
        speed = _fit_behind_backward(chosen, model, crosses=crosses)
        return None if speed is None else FittedLink(speed, knows_latency=False)
    generator = np.random.default_rng([_SEED, int(crosses)])
    spread = spread_of(runs)
    means = np.array([_resampled_means(seen.seconds, spread, generator) for seen in observed])
    assumed = BETWEEN_LATENCY_S if crosses else WITHIN_LATENCY_S
    fits = [_fit([seen.terms for seen in observed], means[:, r], assumed) for r in range(REPLICATES)]
    alpha, beta, shows_latency = np.array(fits).T
    return FittedLink(LinkSpeed(alpha, beta), bool(shows_latency.any()))


def _fit_behind_backward(runs: Sequence[MeasuredRun], model: Model, *, crosses: bool) -> LinkSpeed | None:
    """Fit a bandwidth to the part of bucketed exchanges that backward did not hide; None if it hid all."""
    assumed_s = BETWEEN_LATENCY_S if crosses else WITHIN_LATENCY_S
    found = []
    for run in runs:
        exchange = exchange_of(run.strategy, model)
        seen_s = float(run.times.comm.min(axis=1).mean()) * exchange.period
        if len(exchange.buckets) < 2 or exchange.rounds > 0 or seen_s <= 0:
            continue
        # The last piece is never hidden: its messages alone cannot take longer than the observed time.
        latency_s = min(assumed_s, _MOST_LATENCY * seen_s / (2 * (run.ranks - 1)))
        work, slow, fast = MeasuredWork.of([run]), 1e5, 1e13  # bytes/s, bounds of the search
        for _ in range(60):
            middle = float(np.sqrt(slow * fast))
            link = LinkSpeed.of(latency_s, middle)
            cluster = Cluster(run.ranks_per_node, link, link)
            if float(exposed_s(exchange, work, run.ranks, cluster).mean()) > seen_s:
                slow = middle
            else:
                fast = middle
        found.append((latency_s, fast))
    return LinkSpeed.of(*map(float, np.mean(found, axis=0))) if found else None


def observe(run: MeasuredRun, model: Model) -> Observed | None:
    """Return the exchanges of a run that computation did not hide; None if it shows none.

    The rank that arrives last does not wait, so the shortest communication of a step is the exchange itself.
    """
    exchange = exchange_of(run.strategy, model)
    if exchange.pattern is not Pattern.TOGETHER or exchange.at_server or len(exchange.buckets) > 1:
        return None
    if exchange.rounds > 0:  # some of them are inside nodes
        return None
    shortest = run.times.comm.min(axis=1)
    # Besides exchanges, `comm` may contain agreements on a number.  The median of as many of the longest as
    # there were exchanges tells the time of one; the longest alone may be an outlier.
    changes = run.strategy.parsed.traits.changes_over_time
    count = _LEAST_EXCHANGES if changes else max(len(shortest) // exchange.period, 1)
    seconds = shortest[shortest > 0.1 * np.median(np.sort(shortest)[-count:])]
    if len(seconds) < _LEAST_EXCHANGES:
        return None
    return Observed(run.ranks, exchange.nbytes, seconds)


def fit_progress(runs: Sequence[MeasuredRun], work: MeasuredWork, model: Model, cluster: Cluster) -> float:
    """Return how far exchanges progressed beside backward in the runs, 0 to 1; 1 if none shows it."""
    found = []
    for run in filter(lambda run: is_known(run.strategy), runs):
        exchange = exchange_of(run.strategy, model)
        if run.ranks == 1 or len(exchange.buckets) < 2 or exchange.rounds > 0:
            continue
        if exchange.pattern is not Pattern.TOGETHER:
            continue
        hidden, whole = (
            float(exposed_s(exchange, work, run.ranks, cluster, progress).mean()) for progress in (1.0, 0.0)
        )
        shortest = run.times.comm.min(axis=1)
        seen = float(shortest.mean()) * exchange.period
        if whole - hidden > 0.05 * whole:
            found.append(float(np.clip((whole - seen) / (whole - hidden), 0.0, 1.0)))
    return float(np.mean(found)) if found else 1.0


def spread_of(runs: Sequence[MeasuredRun]) -> float:
    """Return the spread between runs of the same settings: standard deviation of the log of a frame's work.

    Combines the spread between runs on equally many ranks with the usual spread, as few runs show little.
    """
    groups: dict[int, list[float]] = {}
    for run in runs:
        trained = run.times.trained
        work_s = run.times.work()[trained].mean() / run.times.frames[trained].mean()
        groups.setdefault(run.trainers, []).append(math.log(work_s))
    squares = [float(np.square(np.array(group) - np.mean(group)).sum()) for group in groups.values()]
    shown = sum(len(group) - 1 for group in groups.values())
    return math.sqrt((_USUAL_RUNS * _USUAL_SPREAD**2 + sum(squares)) / (_USUAL_RUNS + shown))


def _resampled_means(
    seconds: npt.NDArray[np.float64], spread: float, generator: np.random.Generator
) -> Samples:
    """Return the mean of each resample, with the spread between runs added.  (replicates,)"""
    drawn = generator.integers(len(seconds), size=(REPLICATES, len(seconds)))
    means: Samples = seconds[drawn].mean(axis=1)
    half = generator.standard_normal(REPLICATES // 2)
    other_runs: Samples = means * np.exp(spread * np.concatenate([half, -half]))
    return other_runs


def _fit(
    terms: Sequence[tuple[float, float]], seconds: Samples, assumed_s: float
) -> tuple[float, float, bool]:
    """Return non-negative alpha and beta with the least sum of squared relative errors.

    Also returns whether the exchanges determine alpha; otherwise it is assumed.
    """
    table = np.array(terms) / seconds[:, None]
    scale = np.linalg.norm(table, axis=0)
    if np.linalg.matrix_rank(table / scale, tol=_SAME_SIZE) > 1:
        alpha, beta = np.linalg.lstsq(table / scale, np.ones(len(table)), rcond=None)[0] / scale
        if alpha >= 0 and beta > 0:
            return float(alpha), float(beta), True
    per_alpha, per_beta = np.array(terms).T
    alpha = min(assumed_s, float((_MOST_LATENCY * seconds / per_alpha).min()))
    rest = seconds - alpha * per_alpha
    weights = (per_beta / seconds) ** 2
    beta = float((weights * rest / per_beta).sum() / weights.sum())
    return alpha, max(beta, 0.0), False
