"""Find strategies by name and parse `NAME:option=value,...`; the folder strategies/ is the registry."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import typing
from typing import Any

from speechdp.errors import ConfigError
from speechdp.parallel.period import Period
from speechdp.parallel.strategy import Strategy

_BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def strategy_names() -> list[str]:
    """Return the names of all strategies, sorted."""
    package = importlib.import_module("speechdp.strategies")
    return sorted(m.name for m in pkgutil.iter_modules(package.__path__) if not m.ispkg)


def strategy_class(name: str) -> type[Strategy]:
    """Return the strategy class in file `name`.

    Raises:
        ConfigError: there is no such file.
    """
    if name not in strategy_names():
        raise ConfigError(f"unknown strategy {name!r}; there are: {', '.join(strategy_names())}")
    module = importlib.import_module(f"speechdp.strategies.{name}")
    found = [
        c
        for c in vars(module).values()
        if isinstance(c, type) and issubclass(c, Strategy) and c.__module__ == module.__name__
    ]
    assert len(found) == 1, f"{module.__name__} must hold exactly one strategy"
    return found[0]


def parse_strategy(text: str) -> Strategy:
    """Make a strategy from `NAME` or `NAME:option=value,...`.

    Raises:
        ConfigError: unknown name or option, or a value that does not fit its option.
    """
    name, _, rest = text.partition(":")
    cls = strategy_class(name)
    options = typing.get_type_hints(cls)
    known = [f.name for f in dataclasses.fields(cls) if f.init]  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        option, equals, value = part.partition("=")
        if option not in known:
            raise ConfigError(f"strategy {name} has no option {option!r}; it has: {', '.join(known)}")
        if not equals:
            raise ConfigError(f"{name}:{option}: has no value; write {option}=...")
        values[option] = _convert(f"{name}:{option}", value, options[option])
    strategy = cls(**values)
    strategy.check_options()
    return strategy


def _convert(where: str, text: str, kind: Any) -> Any:
    if isinstance(kind, type) and issubclass(kind, Period):
        return kind.parse(text)
    if typing.get_origin(kind) is typing.Literal:
        if text not in typing.get_args(kind):
            raise ConfigError(f"{where}={text!r}: choose one of {', '.join(typing.get_args(kind))}")
        return text
    if kind is bool:
        if text.lower() not in _BOOLEANS:
            raise ConfigError(f"{where}={text!r}: write true or false")
        return _BOOLEANS[text.lower()]
    try:
        return kind(text)
    except ValueError:
        wanted = "a whole number" if kind is int else "a number"
        raise ConfigError(f"{where}={text!r}: write {wanted}") from None


def describe(strategy: Strategy) -> str:
    """Return `NAME:option=value,...` with every option, so that a run can be repeated from its record."""
    fields = [f.name for f in dataclasses.fields(strategy) if f.init]  # type: ignore[arg-type]
    options = ",".join(f"{field}={_text(getattr(strategy, field))}" for field in fields)
    return f"{strategy.name}:{options}" if options else strategy.name


def period_of(strategy: Strategy) -> str | None:
    """Return how often a strategy exchanges, as text; None for one that has no such option."""
    period = getattr(strategy, "period", getattr(strategy, "every", None))
    return None if period is None else str(period)


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
