"""What would make a run faster: the same run with one thing changed, by the model of the simulation."""

from __future__ import annotations

from dataclasses import dataclass, replace

from speechdp.errors import ConfigError
from speechdp.parallel.declared import Exchange
from speechdp.parallel.period import plain_number
from speechdp.parallel.registry import StrategyChoice
from speechdp.simulation.exchanges import exchange_of, has_period
from speechdp.simulation.fit import fit_link
from speechdp.simulation.links import Cluster, Samples
from speechdp.simulation.measured import MeasuredRun
from speechdp.simulation.predict import Interval, Scenario, is_too_long, predict_paces
from speechdp.simulation.simulate import Request, scenario_of
from speechdp.simulation.steps import MeasuredWork

#: How much longer a period, and how much faster a link inside a host.
LONGER, FASTER = 4, 10
#: Steps between averages in place of exchanges of gradients.
_INSTEAD = 16
#: Links as they are sold, bytes/s by name; the next faster one than the measured is tried.
_SOLD = {f"{rate} Gbit/s": rate * 1e9 / 8 for rate in (1, 10, 25, 100, 400)}
#: A link that is faster by less than this is called the same.
_NOTABLY = 1.8


@dataclass(frozen=True)
class Gain:
    """How many times as fast a run would be with one change.

    Attributes:
        change: e.g. "at 10 Gbit/s", "with period 64".
        times: of the same steps; with another link or period also of what predictions err by.
        averages_less: the change is a longer period.
    """

    change: str
    times: Interval
    averages_less: bool = False


def gains_of(run: MeasuredRun) -> list[Gain]:
    """Return what would make a run faster, the most first; none where nothing can be said of it.

    Args:
        run: finished, on two ranks or more for all but the loading of data.
    """
    request = Request(ranks=(run.ranks,), ranks_per_node=run.ranks_per_node)
    try:
        scenario, _ = scenario_of([run], request)
        exchange = exchange_of(run.strategy, scenario.model)
    except ConfigError:  # its links show nowhere, or its strategy is not known here: nothing can be said
        return []
    if run.ranks > 1 and fit_link([run], scenario.model, crosses=run.crosses) is None:
        return []  # inside a host a link would be assumed, and what it costs made up
    if is_too_long(exchange, run.ranks):
        return []
    # Steps of this run alone: it is the one that is to become faster.
    scenario = replace(scenario, work=MeasuredWork.of([run]))
    now = _rate(scenario, run, exchange)
    changes: dict[str, tuple[Scenario, Exchange]] = {}
    if run.ranks > 1:
        name, cluster = _faster_link(run, scenario.cluster)
        changes[name] = (replace(scenario, cluster=cluster), exchange)
        changes["without differences between the ranks"] = (
            replace(scenario, work=scenario.work.without_stragglers()),
            exchange,
        )
        longer = _longer(run.strategy)
        if longer is not None:
            other = exchange_of(longer, scenario.model)
            if not is_too_long(other, run.ranks):
                changes[_name_of(longer, run.strategy, other)] = (scenario, other)
    if scenario.work.data_wait > 0:
        changes["without waiting for data"] = (
            replace(scenario, work=MeasuredWork.of([run], loads=False)),
            exchange,
        )
    gains = [
        Gain(
            change,
            Interval.of(
                _rate(changed, run, other) / now,
                # Of other exchanges than the measured ones it is the model that says what they take.
                scenario.error if other is not exchange or changed.cluster is not scenario.cluster else 0.0,
            ),
            other is not exchange,
        )
        for change, (changed, other) in changes.items()
    ]
    return sorted(gains, key=lambda gain: -gain.times.mean)


def _rate(scenario: Scenario, run: MeasuredRun, exchange: Exchange) -> Samples:
    """Return steps a second of a rank, for each replicate."""
    (pace,) = predict_paces(scenario, run.ranks, [exchange])
    return 1 / pace.step_s


def _faster_link(run: MeasuredRun, cluster: Cluster) -> tuple[str, Cluster]:
    """Return a cluster with a faster link, and what that is called."""
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
    """Return the strategy with a longer period; None where its period is not in steps.

    Gradients have none: instead of them parameters are averaged, once in a while.
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
