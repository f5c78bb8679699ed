"""Predict what would make a run faster: the same run with one change, by the simulation's model."""

from __future__ import annotations

from dataclasses import dataclass, replace

from speechdp.errors import ConfigError
from speechdp.parallel.declared import Exchange
from speechdp.parallel.period import plain_number
from speechdp.parallel.registry import StrategyChoice
from speechdp.simulation.exchanges import exchange_of, has_period, is_steady
from speechdp.simulation.fit import fit_link
from speechdp.simulation.links import Cluster, Samples
from speechdp.simulation.measured import MeasuredRun
from speechdp.simulation.predict import Interval, Scenario, is_too_long, predict_paces
from speechdp.simulation.simulate import Request, scenario_of
from speechdp.simulation.steps import MeasuredWork

#: Factors for a longer period, and for a faster link inside a host.
LONGER, FASTER = 4, 10
#: Steps between averages that replace exchanges of gradients.
_INSTEAD = 16
#: Commercial link speeds, bytes/s by name; the next one faster than the measured link is tried.
_SOLD = {f"{rate} Gbit/s": rate * 1e9 / 8 for rate in (1, 10, 25, 100, 400)}
#: A link whose speed differs by less than this factor counts as the same.
_NOTABLY = 1.8


@dataclass(frozen=True)
class Gain:
    """The speed-up of a run by one change.

    Attributes:
        change: e.g. "at 10 Gbit/s", "with period 64".
        times: speed-up for the same steps; with another link or period, its interval includes the prediction
            error.
        averages_less: the change is a longer period.
    """

    change: str
    times: Interval
    averages_less: bool = False


def gains_of(run: MeasuredRun) -> list[Gain]:
    """Return what would make a run faster, the largest gain first; empty if nothing can be said about it.

    Args:
        run: a finished run; with a single rank only the loading of data is considered.
    """
    request = Request(ranks=(run.ranks,), ranks_per_node=run.ranks_per_node)
    if run.ranks > 1 and not is_steady(run.strategy):
        return []  # what it exchanges changes during training, or is unknown here
    try:
        scenario, _ = scenario_of([run], request)
        exchange = exchange_of(run.strategy, scenario.model)
    except ConfigError:  # no run shows its links, or its strategy is unknown here
        return []
    if run.ranks > 1 and fit_link([run], scenario.model, crosses=run.crosses) is None:
        return []  # the link inside the host would be assumed, and its cost invented
    if is_too_long(exchange, run.ranks):
        return []
    # Use only this run's steps: it is the one to make faster.
    scenario = replace(scenario, work=MeasuredWork.of([run]))
    now = _rate(scenario, run, exchange)
    gains = [
        Gain(
            change,
            Interval.of(
                _rate(changed, run, other) / now,
                # If the exchanges differ from the measured ones, their time comes from the model.
                scenario.error if other is not exchange or changed.cluster is not scenario.cluster else 0.0,
            ),
            other is not exchange,
        )
        for change, (changed, other) in _changes(run, scenario, exchange).items()
    ]
    return sorted(gains, key=lambda gain: -gain.times.mean)


def _changes(
    run: MeasuredRun, scenario: Scenario, exchange: Exchange
) -> dict[str, tuple[Scenario, Exchange]]:
    """Return what could be changed about a run, by its name for readers, with what the run would be then."""
    changes: dict[str, tuple[Scenario, Exchange]] = {}
    if run.ranks > 1:
        name, cluster = _faster_link(run, scenario.cluster)
        changes[name] = replace(scenario, cluster=cluster), exchange
        alike = replace(scenario, work=scenario.work.without_stragglers())
        changes["without differences between the ranks"] = alike, exchange
        longer = _longer(run.strategy)
        if longer is not None:
            other = exchange_of(longer, scenario.model)
            if not is_too_long(other, run.ranks):
                changes[_name_of(longer, run.strategy, other)] = scenario, other
    if scenario.work.data_wait > 0:
        fed = replace(scenario, work=MeasuredWork.of([run], loads=False))
        changes["without waiting for data"] = fed, exchange
    return changes


def _rate(scenario: Scenario, run: MeasuredRun, exchange: Exchange) -> Samples:
    """Return steps per second of a rank, for each replicate."""
    (pace,) = predict_paces(scenario, run.ranks, [exchange])
    return 1 / pace.step_s


def _faster_link(run: MeasuredRun, cluster: Cluster) -> tuple[str, Cluster]:
    """Return the name of a faster link, and a cluster with it."""
    if not run.crosses:
        return f"with exchanges {FASTER} times as fast", replace(
            cluster, within=cluster.within.faster(FASTER), between=cluster.between.faster(FASTER)
        )
    speed = cluster.between.bytes_per_s
    for name, sold in _SOLD.items():
        if sold > _NOTABLY * speed:
            return f"at {name}", replace(cluster, between=cluster.between.faster(sold / speed))
    return f"with a link {FASTER} times as fast", replace(cluster, between=cluster.between.faster(FASTER))


def _longer(choice: StrategyChoice) -> StrategyChoice | None:
    """Return the strategy with a longer period; None if its period is not in steps.

    Gradient averaging has no period: it is replaced by an average of the parameters every few steps.
    """
    name, _, rest = choice.text.partition(":")
    if name == "gradient_averaging":
        return StrategyChoice(f"model_averaging:period={_INSTEAD}")
    if not has_period(choice):
        return None
    period = str(choice.parsed.traits.period)
    if not period.isdigit():
        return None
    others = [part for part in rest.split(",") if part and not part.startswith("period=")]
    between = getattr(choice.parsed, "between_nodes", None)
    if between is not None and between.value > 0:  # stays the same multiple of the period
        others = [part for part in others if not part.startswith("between_nodes=")]
        others.append(f"between_nodes={plain_number(LONGER * between.value)}")
    return StrategyChoice(f"{name}:{','.join([*others, f'period={LONGER * int(period)}'])}")


def _name_of(longer: StrategyChoice, choice: StrategyChoice, exchange: Exchange) -> str:
    if longer.name == choice.name:
        return f"with period {longer.parsed.traits.period}"
    return f"with {longer.name.replace('_', ' ')} every {exchange.period} steps"
