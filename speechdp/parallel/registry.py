"""Find strategies by name and parse `NAME:option=value,...`.

Ours are the files of speechdp/strategies.  Others register a class of their own with `strategy`, in a script
or in a package that names it as an entry point of the group `speechdp.strategies`.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import typing
from collections.abc import Callable
from importlib import metadata
from typing import Any, TypeVar

from speechdp.errors import ConfigError
from speechdp.parallel.period import Period
from speechdp.parallel.strategy import Strategy

_Class = TypeVar("_Class", bound=type[Strategy])
#: Group of entry points by which packages offer strategies.
ENTRY_POINTS = "speechdp.strategies"
_REGISTERED: dict[str, type[Strategy]] = {}
_BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def strategy(name: str) -> Callable[[_Class], _Class]:
    """Return a decorator that registers a strategy class under a name of its own.

    Args:
        name: letters, digits and underscores, as `--strategy` and `DataParallel` take it.

    Raises:
        ConfigError: the name is none, or another strategy's.

    Example::

        @speechdp.strategy("lazy_averaging")
        @dataclasses.dataclass(eq=False)
        class LazyAveraging(Strategy):
            period: int = 8
            ...
    """

    def register(cls: _Class) -> _Class:
        if not (isinstance(cls, type) and issubclass(cls, Strategy) and dataclasses.is_dataclass(cls)):
            raise ConfigError(f"strategy {name!r}: {cls!r} is no dataclass derived from Strategy")
        if cls.__module__.startswith("speechdp."):
            raise ConfigError(f"strategy {name!r}: {cls.__name__} has a name already; derive a class from it")
        if not name.isidentifier():
            raise ConfigError(f"strategy {name!r}: a name has letters, digits and underscores")
        other = _REGISTERED.get(name)
        is_again = other is not None and other.__qualname__ == cls.__qualname__  # a module loaded anew
        if name in _own_names() or (other is not None and not is_again):
            raise ConfigError(f"strategy {name!r}: there is one of that name; choose another")
        cls.registered_name = name
        _REGISTERED[name] = cls
        return cls

    return register


def _own_names() -> list[str]:
    package = importlib.import_module("speechdp.strategies")
    return [m.name for m in pkgutil.iter_modules(package.__path__) if not m.ispkg]


def _entry_points() -> dict[str, metadata.EntryPoint]:
    return {point.name: point for point in metadata.entry_points(group=ENTRY_POINTS)}


def strategy_names() -> list[str]:
    """Return the names of all strategies, sorted: ours, registered ones, those of installed packages."""
    return sorted({*_own_names(), *_REGISTERED, *_entry_points()})


def strategy_class(name: str) -> type[Strategy]:
    """Return a strategy's class.

    Raises:
        ConfigError: there is none of that name, or its package cannot be used.
    """
    if name in _own_names():
        return _own_class(name)
    if name not in _REGISTERED and name in _entry_points():
        _load(_entry_points()[name])
    if name not in _REGISTERED:
        raise ConfigError(f"unknown strategy {name!r}; there are: {', '.join(strategy_names())}")
    return _REGISTERED[name]


def _load(point: metadata.EntryPoint) -> None:
    """Import a package's strategy, and register it unless it does so itself."""
    try:
        cls = point.load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"strategy {point.name!r}: {point.value} cannot be imported ({error}); "
            "install its package again, on every host"
        ) from error
    if _REGISTERED.get(point.name) is not cls:
        strategy(point.name)(cls)


def _own_class(name: str) -> type[Strategy]:
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
    made = cls(**values)
    made.check_options()
    return made


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


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
