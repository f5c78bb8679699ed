"""Simulate a training on clusters of many sizes: every strategy, every period, every number of ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from speechdp.counting import counted
from speechdp.errors import ConfigError
from speechdp.parallel.declared import Exchange, Model
from speechdp.parallel.registry import StrategyChoice, strategy_names
from speechdp.report.kit import formatting
from speechdp.simulation.exchanges import (
    changes_period,
    check_period,
    exchange_of,
    has_period,
    is_known,
    known_strategies,
)
from speechdp.simulation.fit import (
    BETWEEN_LATENCY_S,
    WITHIN_BYTES_PER_S,
    WITHIN_LATENCY_S,
    fit_link,
    fit_progress,
    model_of,
    spread_of,
)
from speechdp.simulation.links import Algorithm, Cluster, LinkSpeed
from speechdp.simulation.measured import MeasuredRun, basis
from speechdp.simulation.predict import (
    MODEL_ERROR,
    Prediction,
    Scenario,
    is_too_long,
    predict,
    why_refused,
)
from speechdp.simulation.steps import MeasuredWork

#: Beyond this multiple of the measured ranks, the prediction rests on the model alone.
_FAR = 16


@dataclass(frozen=True)
class GivenLink:
    """The user's values for a link; None: as measured."""

    bytes_per_s: float | None = None
    latency_s: float | None = None


@dataclass(frozen=True)
class Request:
    """What to simulate.

    Attributes:
        ranks: numbers of ranks.
        ranks_per_node: None: as in the runs.
        between, within: links of a node to the others, and between two ranks of a node.
        speedup: how much faster computation is than measured.
        factors: by rank, how many times as long its own work takes.
        strategies: those without a period of their own are simulated with all of `periods`; empty: all
            strategies.
        periods: periods, steps.
        algorithm: algorithm of allreduces; None: that of the runs' back-end.
    """

    ranks: tuple[int, ...]
    ranks_per_node: int | None = None
    between: GivenLink = GivenLink()
    within: GivenLink = GivenLink()
    speedup: float = 1.0
    factors: Mapping[int, float] = field(default_factory=dict)
    strategies: tuple[StrategyChoice, ...] = ()
    periods: tuple[int, ...] = (1, 4, 16, 64)
    algorithm: Algorithm | None = None


@dataclass(frozen=True)
class Simulation:
    """The predictions, and what they are based on.

    Attributes:
        runs: runs that steps were drawn from.
        predictions: ordered by strategy, period and number of ranks.
        assumptions: notes on the runs, values that were neither measured nor given, how far the predictions
            go beyond the measurements, and why rows are alike; a sentence or two each.
        refusals: strategies' own reasons why they cannot train on the largest number of ranks.
    """

    runs: tuple[MeasuredRun, ...]
    request: Request
    scenario: Scenario
    predictions: tuple[Prediction, ...]
    assumptions: tuple[str, ...]
    refusals: tuple[str, ...] = ()


def simulate(runs: Sequence[MeasuredRun], request: Request, notes: Sequence[str] = ()) -> Simulation:
    """Predict the speed of strategies on clusters.

    Args:
        runs: finished runs of one model, at least one.
        notes: notes on these and other runs.

    Raises:
        ConfigError: a strategy is unknown or cannot be used, none can be used on any of the numbers of ranks,
            or a link was neither measured nor given.
    """
    for choice in request.strategies:
        _check_installed(choice, runs)
    scenario, assumptions = scenario_of(runs, request)
    exchanges = exchanges_of(request, scenario.model)
    found = [prediction for ranks in request.ranks for prediction in predict(scenario, ranks, exchanges)]
    most = max(request.ranks)
    refusals = [why_refused(choice, most, scenario.cluster) for choice, _ in exchanges]
    if not found:
        where = "for these --ranks and --ranks-per-node"
        raise ConfigError(f"--strategies: nothing can be predicted {where}: {refusals[0]}")
    order = {(choice.text, exchange.period): place for place, (choice, exchange) in enumerate(exchanges)}
    found.sort(key=lambda one: (order[one.strategy.text, one.period], one.ranks))
    chosen = basis(runs)
    assumptions += _beyond_measured(chosen, most, scenario.cluster.ranks_per_node)
    assumptions += _in_one_piece(exchanges)
    assumptions += _first_periods(exchanges)
    all_notes = (*notes, *assumptions)
    return Simulation(chosen, request, scenario, tuple(found), all_notes, tuple(filter(None, refusals)))


def scenario_of(runs: Sequence[MeasuredRun], request: Request) -> tuple[Scenario, tuple[str, ...]]:
    """Return the training and the cluster, and the assumptions about the cluster.

    Raises:
        ConfigError: a link between nodes is needed but neither measured nor given.
    """
    chosen = basis(runs)
    work = MeasuredWork.of(chosen, request.speedup)
    model = model_of(chosen, work)
    per_node = request.ranks_per_node or max(run.ranks_per_node for run in chosen)
    # The time of messages does not depend on the speed of computation: fit links to the steps as measured.
    measured = model_of(chosen, MeasuredWork.of(chosen))
    assumptions: list[str] = []
    within = _within(fit_link(runs, measured, crosses=False), request.within, assumptions)
    between = within
    if max(request.ranks) > per_node:
        between = _between(runs, fit_link(runs, measured, crosses=True), request.between, assumptions)
        assumptions += _limit_inside(within, between, request)
    algorithm = request.algorithm or ("auto" if any(run.on_gpu for run in chosen) else "ring")
    cluster = Cluster(per_node, within, between, algorithm)
    progress = _progress(runs, chosen, measured)
    scenario = Scenario(work, model, cluster, request.factors, progress, spread_of(runs), MODEL_ERROR)
    return scenario, tuple(assumptions)


def _check_installed(choice: StrategyChoice, runs: Sequence[MeasuredRun]) -> None:
    """Refuse the strategy of a run if it is unknown here, as one is that only a script registers.

    Raises:
        ConfigError: it is such a strategy.
    """
    if choice.name not in strategy_names() and any(run.strategy.name == choice.name for run in runs):
        raise ConfigError(
            f"--strategies {choice.text}: the run was trained with it, but no package that provides it is "
            "installed here, and a strategy that only a script registers is not predicted; put it into a "
            "package (docs/api.md, A strategy of your own)"
        )


def exchanges_of(request: Request, model: Model) -> list[tuple[StrategyChoice, Exchange]]:
    """Return every strategy with every period to simulate, each once.

    Raises:
        ConfigError: a strategy is unknown here, its period changes, or its options cannot be used.
    """
    strategies = request.strategies or tuple(map(StrategyChoice, known_strategies()))
    found: dict[str, tuple[StrategyChoice, Exchange]] = {}
    for choice in strategies:
        check_period(choice)
        if not is_known(choice) or not has_period(choice):
            found[choice.text] = (choice, exchange_of(choice, model))
            continue
        for period in request.periods:
            text = choice.with_default("period", str(period))
            try:
                found.setdefault(text.text, (text, exchange_of(text, model)))
            except ConfigError as error:
                raise ConfigError(f"--strategies {choice.text} with --periods {period}: {error}") from error
    for choice, exchange in found.values():
        if is_too_long(exchange, max(request.ranks)):
            raise ConfigError(
                f"--strategies {choice.text}: {exchange.period:,} steps between exchanges on "
                f"{max(request.ranks):,} ranks are too many to follow; shorten the period, or give "
                "fewer --ranks"
            )
    return list(found.values())


def _in_one_piece(exchanges: Sequence[tuple[StrategyChoice, Exchange]]) -> tuple[str, ...]:
    """Explain why gradient averaging takes as long as averaging parameters at every step, if it does."""
    gradients = [one for choice, one in exchanges if choice.name == "gradient_averaging"]
    averages = [
        one
        for choice, one in exchanges
        if choice.name == "model_averaging" and one.period == 1 and one.rounds == 0
    ]
    # Without its pieces an exchange covers the whole vector, after all ranks have computed.
    whole = [replace(one, buckets=(), nbytes_between=0.0) for one in gradients if len(one.buckets) == 1]
    if not any(one in averages for one in whole):
        return ()
    return (
        "The model's gradients fit into one bucket (bucket_mib), which is sent after backward: no exchange "
        "overlaps with computing, and gradient averaging takes as long as averaging parameters at every "
        "step.",
    )


def _first_periods(exchanges: Sequence[tuple[StrategyChoice, Exchange]]) -> tuple[str, ...]:
    """Name the strategies whose period changes during training, which are predicted with the first one."""
    names = dict.fromkeys(choice.name for choice, _ in exchanges if changes_period(choice))
    return tuple(
        f"{formatting.capital(name.replace('_', ' '))} changes its period during training: it is predicted "
        "as if it kept the first one, as model averaging does."
        for name in names
    )


def _beyond_measured(chosen: Sequence[MeasuredRun], ranks: int, per_node: int) -> tuple[str, ...]:
    """Return notes on how far a prediction for `ranks` ranks goes beyond the runs' measurements."""
    measured = max(run.ranks for run in chosen)
    trainers = max(run.trainers for run in chosen)
    of_node = max(run.ranks_per_node for run in chosen)
    found = []
    if min(per_node, ranks) > of_node:
        found.append(
            f"Steps were measured with {counted(of_node, 'rank')} a node and are predicted with "
            f"{min(per_node, ranks):,}: contention among the additional ranks (cores, memory, disks) is not "
            "modelled."
        )
    if trainers == 1 < ranks:
        found.append(
            f"Steps were measured on 1 rank and are predicted for {ranks:,}: how much ranks differ in "
            "speed, and so wait for one another, was not measured."
        )
    if ranks > _FAR * measured:
        found.append(
            f"{counted(ranks, 'rank')} are {ranks / measured:,.0f} times as many as were measured "
            f"({measured:,}): beyond that range the prediction rests on the model alone."
        )
    return tuple(found)


def _within(fitted: LinkSpeed | None, given: GivenLink, assumptions: list[str]) -> LinkSpeed:
    """Return the link inside a node: given, otherwise fitted, otherwise assumed."""
    unknown = {
        "--intra-bandwidth": (given.bytes_per_s, f"{WITHIN_BYTES_PER_S / 1e9:.0f} GB/s"),
        "--intra-latency": (given.latency_s, f"{WITHIN_LATENCY_S * 1e6:.0f} µs"),
    }
    assumed = {option: words for option, (value, words) in unknown.items() if value is None}
    if fitted is None and assumed:
        assumptions.append(
            f"Exchanges inside a node were not measured: {' and '.join(assumed.values())} are assumed "
            f"({', '.join(assumed)})."
        )
    return _combined(fitted, given, LinkSpeed.of(WITHIN_LATENCY_S, WITHIN_BYTES_PER_S))


def _between(
    runs: Sequence[MeasuredRun], fitted: LinkSpeed | None, given: GivenLink, assumptions: list[str]
) -> LinkSpeed:
    """Return the link between nodes: given, otherwise fitted.

    Raises:
        ConfigError: it is neither.
    """
    if fitted is None and given.bytes_per_s is None:
        why = (
            "the runs' exchanges do not show its speed (synchronous ones show most)"
            if any(run.crosses for run in runs)
            else "all ranks of the run were on one host"
        )
        latency = ""
        if given.latency_s is None:
            latency = f" (and --latency, where it is not about {BETWEEN_LATENCY_S * 1e6:.0f} µs)"
        raise ConfigError(
            f"--bandwidth: the link between nodes was not measured, because {why}; "
            f"give --bandwidth{latency}, e.g. --bandwidth 25gbit"
        )
    if fitted is None and given.latency_s is None:
        assumptions.append(
            f"The latency between nodes was not measured: {BETWEEN_LATENCY_S * 1e6:.0f} µs are assumed "
            "(--latency)."
        )
    return _combined(fitted, given, LinkSpeed.of(BETWEEN_LATENCY_S, math.inf))


def _limit_inside(within: LinkSpeed, between: LinkSpeed, request: Request) -> list[str]:
    """Return a note if the link inside a node limits a given bandwidth between nodes, else nothing."""
    if request.between.bytes_per_s is None or request.within.bytes_per_s is not None:
        return []
    if within.bytes_per_s >= between.bytes_per_s:
        return []
    return [
        "No message between nodes is faster than one inside a node, "
        f"{formatting.gigabits(within.bytes_per_s)} Gbit/s: if the cluster's nodes are faster than that, "
        "give --intra-bandwidth."
    ]


def _combined(fitted: LinkSpeed | None, given: GivenLink, otherwise: LinkSpeed) -> LinkSpeed:
    link = fitted or otherwise
    if given.bytes_per_s is not None:
        link = replace(link, s_per_byte=np.array([1 / given.bytes_per_s]))
    if given.latency_s is not None:
        link = replace(link, latency_s=np.array([given.latency_s]))
    return link


def _progress(runs: Sequence[MeasuredRun], chosen: Sequence[MeasuredRun], model: Model) -> float:
    """Return how far exchanges progressed beside backward in the runs, over the links fitted to them."""
    crossing = chosen[0].crosses
    link = fit_link(runs, model, crosses=crossing)
    if link is None:
        return 1.0
    # Rings, because links are fitted to rings, whichever algorithm is to be predicted.
    as_measured = Cluster(chosen[0].ranks_per_node, link, link, "ring")
    return fit_progress(chosen, MeasuredWork.of(chosen), model, as_measured)
