"""What strategies send, when, and for whom they wait: each declares it with `predicted_exchange`."""

from __future__ import annotations

from speechdp.errors import ConfigError
from speechdp.extensions import option_kinds
from speechdp.parallel.declared import Exchange, Model, Pattern
from speechdp.parallel.registry import StrategyChoice, own_strategy_names, strategy_names
from speechdp.parallel.strategy import Strategy, predicted_exchange

#: An arbitrary model: whether a strategy's exchange is known depends on its options alone.
_ANY_MODEL = Model(nbytes=4.0, optimizer_vectors=0, frames_per_step=1.0, step_s=1.0)


def is_known(choice: StrategyChoice) -> bool:
    """Return whether it is known what a strategy sends and for whom it waits."""
    return _declared(choice, _ANY_MODEL) is not None


def is_untold(choice: StrategyChoice) -> bool:
    """Return whether a user's strategy does not say what it sends, although that is always the same.

    So it is with every strategy that only a script registers: scripts are not read here.
    """
    if choice.name in own_strategy_names() or is_known(choice):
        return False
    return choice.name not in strategy_names() or not choice.parsed.traits.changes_over_time


def is_steady(choice: StrategyChoice) -> bool:
    """Return whether a strategy's exchange is known and the same throughout training."""
    return is_known(choice) and not choice.parsed.traits.changes_over_time


def changes_period(choice: StrategyChoice) -> bool:
    """Return whether a strategy changes its period; only the exchange of the first one is known."""
    return is_known(choice) and choice.parsed.traits.period_changes


def check_period(choice: StrategyChoice) -> None:
    """Refuse a user's strategy whose period changes: no constant period stands for its whole training.

    Raises:
        ConfigError: it is such a strategy, or unknown here.
    """
    # Whether or not it declares its exchange: to declare it would not help.
    if choice.name not in own_strategy_names() and choice.parsed.traits.period_changes:
        raise ConfigError(
            f"--strategies {choice.text}: its period changes during training, and only constant periods are "
            "predicted; leave it out, and give strategies like model_averaging with the periods that it uses"
        )


def has_period(choice: StrategyChoice) -> bool:
    """Return whether a strategy has an averaging period among its options."""
    return "period" in option_kinds(type(choice.parsed))


def known_strategies() -> list[str]:
    """Return the names of our strategies whose exchanges are predicted, in the order in which they are shown.

    Grouped by who waits for whom, and within a group by how often they exchange by default, most often first.
    """
    order = list(Pattern)
    found = {name: _declared(StrategyChoice(name), _ANY_MODEL) for name in own_strategy_names()}
    known = {name: exchange for name, exchange in found.items() if exchange is not None}
    return sorted(known, key=lambda name: (order.index(known[name].pattern), known[name].period, name))


def exchange_of(choice: StrategyChoice, model: Model) -> Exchange:
    """Return how a strategy exchanges a model.

    Raises:
        ConfigError: the strategy is unknown here, or its options cannot be used.
    """
    exchange = _declared(choice, model)
    if exchange is None:
        raise ConfigError(f"--strategies {choice.text}: {_why_unknown(choice)}")
    return exchange


def _why_unknown(choice: StrategyChoice) -> str:
    """Return why a strategy is not predicted, and what to do.  Raises ConfigError if it does not exist."""
    made = type(choice.parsed)
    if choice.name in own_strategy_names():
        return (
            "what it sends and waits for is not known here; choose among "
            f"{', '.join(sorted(known_strategies()))}, without compression=powersgd"
        )
    why = (
        f"{made.__name__}.predicted_exchange returns None; return there"
        if _says_itself(made)
        else f"{made.__name__} has no predicted_exchange of its own; return in one"
    )
    return f"{why} what it sends and whom it waits for (docs/api.md, A strategy of your own)"


def _says_itself(made: type[Strategy]) -> bool:
    """Return whether a user's class itself declares its exchanges: an inherited declaration may be wrong."""
    return "predicted_exchange" in vars(made)


def _declared(choice: StrategyChoice, model: Model) -> Exchange | None:
    """Return the declared exchange of a strategy; None: it declares none, or the strategy is unknown here."""
    is_ours = choice.name in own_strategy_names()
    try:
        made = choice.parsed
    except ConfigError:
        if is_ours:
            raise
        return None  # a script's strategy, or one whose package is not installed here or has changed
    return predicted_exchange(made, model) if is_ours or _says_itself(type(made)) else None
