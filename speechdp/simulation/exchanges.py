"""What strategies send, when, and for what they wait: each says it itself, by `predicted_exchange`."""

from __future__ import annotations

from speechdp.errors import ConfigError
from speechdp.extensions import option_kinds
from speechdp.parallel.declared import Exchange, Model, Pattern
from speechdp.parallel.registry import StrategyChoice, own_strategy_names

#: Any model: whether it is known how a strategy exchanges depends on its options alone.
_ANY_MODEL = Model(nbytes=4.0, optimizer_vectors=0, frames_per_step=1.0, step_s=1.0)


def is_known(choice: StrategyChoice) -> bool:
    """Return whether it is known what a strategy sends and waits for."""
    return _declared(choice, _ANY_MODEL) is not None


def has_period(choice: StrategyChoice) -> bool:
    """Return whether a strategy has an averaging period as its option."""
    return "period" in option_kinds(type(choice.parsed))


def known_strategies() -> list[str]:
    """Return the names of ours whose exchanges are predicted, those together that wait alike."""
    order = list(Pattern)
    found = {name: _declared(StrategyChoice(name), _ANY_MODEL) for name in own_strategy_names()}
    known = {name: exchange for name, exchange in found.items() if exchange is not None}
    return sorted(known, key=lambda name: (order.index(known[name].pattern), name))


def exchange_of(choice: StrategyChoice, model: Model) -> Exchange:
    """Return how a strategy exchanges a model.

    Raises:
        ConfigError: the strategy is not known here, or its options cannot be used.
    """
    exchange = _declared(choice, model)
    if exchange is None:
        raise ConfigError(
            f"--strategies {choice.text}: what it sends and waits for is not known here; "
            f"choose among {', '.join(sorted(known_strategies()))}, without compression=powersgd"
        )
    return exchange


def _declared(choice: StrategyChoice, model: Model) -> Exchange | None:
    """Return what a strategy says of its exchanges; what one from outside inherits may be untrue of it."""
    if choice.name in own_strategy_names():
        return choice.parsed.predicted_exchange(model)
    try:
        made = choice.parsed
    except ConfigError:  # a script's, or of a package that is not installed here or has changed since
        return None
    return made.predicted_exchange(model) if "predicted_exchange" in vars(type(made)) else None
