"""Find strategies by name and parse `NAME:option=value,...`.

Ours are the files of speechdp/strategies.  Others register a class with `strategy`, in a script or in a
package that names it in the entry-point group `speechdp.strategies`.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import re
from collections.abc import Callable
from functools import cached_property
from typing import TypeVar

from speechdp.errors import ConfigError
from speechdp.extensions import ExtensionPoint, option_kinds, read_options, split_options, write_options
from speechdp.parallel.strategy import Strategy, Traits

_Class = TypeVar("_Class", bound=type[Strategy])


def strategy(name: str) -> Callable[[_Class], _Class]:
    """Return a decorator that registers a strategy class under the given name.

    Args:
        name: letters, digits and underscores, for `--strategy` and `DataParallel`.

    Raises:
        ConfigError: the class is not a strategy, overrides a final method, has traits as attributes or a
            field that cannot be an option; or the name is invalid or taken.

    Example::

        @speechdp.strategy("lazy_averaging")
        @dataclasses.dataclass(eq=False)
        class LazyAveraging(Strategy):
            period: int = 8
            ...
    """

    return STRATEGIES.decorator(name)


def own_strategy_names() -> list[str]:
    """Return the names of this package's strategies: the files of speechdp/strategies."""
    package = importlib.import_module("speechdp.strategies")
    return [m.name for m in pkgutil.iter_modules(package.__path__) if not m.ispkg]


#: What a strategy may not override, and what to do instead.
_FINAL = {
    "abandon": "append what set_up opens to self.channels, which abandon gives up",
    "attach": "override set_up instead, which attach calls",
    "close": "append what set_up opens to self.channels, which close closes",
    "peer_bytes": "append what set_up opens to self.channels, whose bytes are counted",
}


def _check_declared(where: str, cls: type[Strategy]) -> None:
    """Refuse a class that overrides a final method, or declares traits where they are not read.

    Raises ConfigError.
    """
    for name, remedy in _FINAL.items():
        if getattr(cls, name) is not getattr(Strategy, name):
            raise ConfigError(f"{where}: {cls.__name__} overrides {name}; {remedy}")
    options = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for trait in dataclasses.fields(Traits):
        # A class attribute only: an option may have the name of the trait that it decides.
        if isinstance(getattr(cls, trait.name, None), bool) and trait.name not in options:
            raise ConfigError(
                f"{where}: {cls.__name__} has {trait.name} as an attribute; declare it in the property "
                f"traits: return Traits({trait.name}={getattr(cls, trait.name)})"
            )


#: All strategies; other packages add theirs through this entry-point group.
STRATEGIES = ExtensionPoint[Strategy](
    "strategy", "speechdp.strategies", Strategy, own_strategy_names, _check_declared
)


def strategy_names() -> list[str]:
    """Return the names of all strategies, sorted: ours, registered ones, and those of installed packages."""
    return STRATEGIES.names()


def strategy_class(name: str) -> type[Strategy]:
    """Return a strategy's class.

    Raises:
        ConfigError: there is no strategy of that name, or its package cannot be used.
    """
    return _own_class(name) if name in own_strategy_names() else STRATEGIES.find(name)


def _own_class(name: str) -> type[Strategy]:
    module = importlib.import_module(f"speechdp.strategies.{name}")
    found = [
        c
        for c in vars(module).values()
        # In this order: Python 3.10 takes Callable[[Tensor], None] for a type, too.
        if isinstance(c, type) and c.__module__ == module.__name__ and issubclass(c, Strategy)
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
    made = cls(**read_options(name, cls, rest, kind="strategy"))
    made.check_options()
    return made


class StrategyChoice:
    """A strategy as the user chose it: the text, which records keep unchanged, and its meaning.

    The text is parsed once, when `parsed` is first read; each training attaches `parsed` to its own replica.
    Choices with the same text are equal.

    Args:
        text: `NAME` or `NAME:option=value,...`.
    """

    def __init__(self, text: str) -> None:
        self.text = text

    @property
    def name(self) -> str:
        """The strategy's name, which may be unknown in this installation."""
        return self.text.partition(":")[0]

    @cached_property
    def parsed(self) -> Strategy:
        """The strategy, not attached; raises the errors of `parse_strategy`."""
        return parse_strategy(self.text)

    def check_name(self) -> None:
        """Refuse an unknown strategy without importing torch, as `parsed` does.  Raises ConfigError."""
        if self.name not in strategy_names():
            strategy_class(self.name)

    @property
    def file_name(self) -> str:
        """The text in a form that fits a folder's name."""
        return re.sub(r"[^A-Za-z0-9_.=+]+", "-", self.text)

    def with_default(self, option: str, value: str) -> StrategyChoice:
        """Return the choice with an option added, unless it is already given or the strategy lacks it."""
        _, colon, rest = self.text.partition(":")
        if option not in option_kinds(type(self.parsed)) or option in split_options(rest):
            return self
        return StrategyChoice(f"{self.text}{',' if colon else ':'}{option}={value}")

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"StrategyChoice({self.text!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StrategyChoice) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)


def describe(strategy: Strategy) -> str:
    """Return `NAME:option=value,...` with every option, so that a run can be repeated from its record."""
    options = write_options(strategy)
    return f"{strategy.name}:{options}" if options else strategy.name
