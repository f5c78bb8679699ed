"""What each strategy sends, when, and for what it waits: its options in the terms of the simulation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from speechdp.errors import ConfigError
from speechdp.extensions import option_kinds
from speechdp.parallel.period import Period, PeriodUnit, rounds_between
from speechdp.parallel.registry import StrategyChoice
from speechdp.parallel.strategy import Strategy
from speechdp.strategies.mechanisms.number_formats import share_of_bytes


class Pattern(Enum):
    """Who waits for whom."""

    TOGETHER = "all ranks wait for all"
    DELAYED = "all ranks sum, and wait for it some steps later"
    NEIGHBOURS = "each rank waits for a few"
    GOSSIP = "no rank waits"
    SERVER = "each rank waits for the server alone"


@dataclass(frozen=True)
class Exchange:
    """How a strategy exchanges.

    Attributes:
        period: steps between exchanges.
        nbytes: of the vector that is exchanged, as it travels.
        buckets: bytes of the pieces that are exchanged while backward still runs, in the order of backward;
            empty: all of it after the step's work.
        delay: steps after which a sum is waited for (DELAYED).
        topology: who exchanges with whom (NEIGHBOURS, GOSSIP).
        overlaps: the exchange runs beside the next step's forward and backward pass (NEIGHBOURS).
        groups: ranks that sum their gradients at every step (GOSSIP).
        dedicated: rank 0 only serves.
        at_server: rank 0 gathers and hands back (TOGETHER); its update replaces the ranks' own (SERVER).
        rounds: every so many exchanges there is one between nodes, the others are inside nodes (TOGETHER); 0:
            all are over all ranks at once.
        node_size: consecutive ranks of a node in this sense; 0: as the cluster's nodes have them.
        nbytes_between: of the vector that goes between nodes.
    """

    pattern: Pattern
    period: int
    nbytes: float
    buckets: tuple[float, ...] = ()
    delay: int = 0
    topology: str = ""
    overlaps: bool = True
    groups: int = 1
    dedicated: bool = False
    at_server: bool = False
    rounds: int = 0
    node_size: int = 0
    nbytes_between: float = 0.0


@dataclass(frozen=True)
class Model:
    """What is exchanged.

    Attributes:
        nbytes: of the parameters.
        optimizer_vectors: vectors of that size that its optimizer keeps.
        frames_per_step: of a rank.
        step_s: of a rank alone.
    """

    nbytes: float
    optimizer_vectors: int
    frames_per_step: float
    step_s: float

    def steps_in(self, period: Period) -> int:
        """Return a period in steps, 1 at least."""
        if period.unit is PeriodUnit.FRAMES:
            return max(1, round(period.value / self.frames_per_step))
        if period.unit is PeriodUnit.SECONDS:
            return max(1, round(period.value / self.step_s))
        return int(period.value)


def is_known(choice: StrategyChoice) -> bool:
    """Return whether it is known what a strategy sends and waits for.

    It is not of those from outside, nor of factors: how large they are depends on the model's matrices.
    """
    return choice.name in _KNOWN and getattr(choice.parsed, "compression", "") != "powersgd"


def has_period(choice: StrategyChoice) -> bool:
    """Return whether a strategy has an averaging period as its option."""
    return "period" in option_kinds(type(choice.parsed))


def exchange_of(choice: StrategyChoice, model: Model) -> Exchange:
    """Return how a strategy exchanges a model.

    Raises:
        ConfigError: the strategy is not known here, or its options cannot be used.
    """
    if not is_known(choice):
        raise ConfigError(
            f"--strategies {choice.text}: what it sends and waits for is not known here; "
            f"choose among {', '.join(sorted(_KNOWN))}, without compression=powersgd"
        )
    return _KNOWN[choice.name](choice.parsed, model)


def buckets_of(nbytes: float, bucket_mib: float) -> tuple[float, ...]:
    """Return the pieces in which gradients are exchanged during backward, bytes."""
    size = bucket_mib * 2**20
    whole = int(nbytes // size)
    rest = nbytes - whole * size
    return (size,) * whole + ((rest,) if rest > 0 else ())


def _gradients(strategy: Any, model: Model) -> Exchange:
    share = 1.0 if strategy.compression == "none" else 0.5
    buckets = tuple(share * b for b in buckets_of(model.nbytes, strategy.bucket_mib))
    return Exchange(
        Pattern.TOGETHER,
        strategy.every,
        share * model.nbytes,
        buckets if strategy.overlap else (),
        rounds=strategy.between_nodes,
        node_size=strategy.node_size,
        nbytes_between=model.nbytes,
    )


def _averaging(strategy: Any, model: Model) -> Exchange:
    with_state = getattr(strategy, "momentum", "") == "average"
    vectors = 1 + (model.optimizer_vectors if with_state else 0)
    period, nbytes = model.steps_in(strategy.period), vectors * model.nbytes
    travelling = nbytes * share_of_bytes(strategy.compression)
    if strategy.between_nodes.value == 0:
        return Exchange(Pattern.TOGETHER, period, travelling)
    rounds = rounds_between(strategy.between_nodes, strategy.period)
    return Exchange(
        Pattern.TOGETHER,
        period,
        nbytes,
        rounds=rounds,
        node_size=strategy.node_size,
        nbytes_between=travelling,
    )


def _delayed(strategy: Any, model: Model) -> Exchange:
    period = max(1, model.steps_in(strategy.period) // strategy.fragments)
    nbytes = model.nbytes / strategy.fragments * share_of_bytes(strategy.compression)
    if strategy.delay == 0:
        return Exchange(Pattern.TOGETHER, period, nbytes)
    return Exchange(Pattern.DELAYED, period, nbytes, delay=min(strategy.delay, period))


def _neighbours(strategy: Any, model: Model) -> Exchange:
    return Exchange(
        Pattern.NEIGHBOURS,
        model.steps_in(strategy.period),
        model.nbytes * share_of_bytes(strategy.compression),
        topology=strategy.topology,
        overlaps=strategy.overlap,
    )


def _gossip(strategy: Any, model: Model) -> Exchange:
    return Exchange(
        Pattern.GOSSIP,
        strategy.period,
        model.nbytes,
        buckets_of(model.nbytes, 25.0) if strategy.groups > 1 else (),
        topology=strategy.topology,
        groups=strategy.groups,
    )


def _parameter_server(strategy: Any, model: Model) -> Exchange:
    pattern = Pattern.TOGETHER if strategy.mode == "sync" else Pattern.SERVER
    return Exchange(pattern, 1, model.nbytes, dedicated=strategy.dedicated, at_server=True)


def _elastic(strategy: Any, model: Model) -> Exchange:
    period, nbytes = model.steps_in(strategy.period), model.nbytes * share_of_bytes(strategy.compression)
    if strategy.mode == "sync":
        return Exchange(Pattern.TOGETHER, period, nbytes)
    return Exchange(Pattern.SERVER, period, nbytes, dedicated=strategy.dedicated)


_KNOWN: dict[str, Callable[[Strategy, Model], Exchange]] = {
    "gradient_averaging": _gradients,
    "model_averaging": _averaging,
    "adaptive_averaging": _averaging,
    "bmuf": _averaging,
    "slowmo": _averaging,
    "diloco": _averaging,
    "delayed_averaging": _delayed,
    "dpsgd": _neighbours,
    "ad_psgd": _gossip,
    "parameter_server": _parameter_server,
    "easgd": _elastic,
}
#: Strategies whose exchanges are predicted.
KNOWN_STRATEGIES = tuple(_KNOWN)
