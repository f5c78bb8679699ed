"""Classes that others add by name, such as strategies: registered by a decorator, or offered by a package.

Options of such a class are the fields of its dataclass, written `NAME:option=value,...`.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Iterable
from importlib import metadata
from typing import Any, Generic, TypeVar

from speechdp.errors import ConfigError

_T = TypeVar("_T")
_BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


class ExtensionPoint(Generic[_T]):
    """The names of one kind of classes: ours, those registered, those that installed packages offer.

    Args:
        kind: what messages call one, e.g. "strategy".
        group: of entry points, by which packages offer theirs.
        base: what they derive from.
        own_names: gives the names of ours.
        name_attribute: of a class, which takes the name it is registered under.
        check: refuses a class that does not declare what it has to; told "KIND 'NAME'" and the class.
    """

    def __init__(
        self,
        kind: str,
        group: str,
        base: type[Any],
        own_names: Callable[[], Iterable[str]],
        name_attribute: str,
        check: Callable[[str, type[Any]], None] = lambda where, cls: None,
    ) -> None:
        self.kind, self.group = kind, group
        self._base, self._own_names, self._name_attribute = base, own_names, name_attribute
        self._check = check
        self.registered: dict[str, type[_T]] = {}

    def register(self, name: str, cls: type[_T]) -> None:
        """Register a class from outside.  Raises ConfigError: the class or the name cannot be used."""
        where = f"{self.kind} {name!r}"
        if not (isinstance(cls, type) and issubclass(cls, self._base) and dataclasses.is_dataclass(cls)):
            raise ConfigError(f"{where}: {cls!r} is no dataclass derived from {self._base.__name__}")
        self._check(where, cls)
        if cls.__module__.startswith("speechdp."):
            raise ConfigError(f"{where}: {cls.__name__} has a name already; derive a class from it")
        if not name.isidentifier():
            raise ConfigError(f"{where}: a name has letters, digits and underscores")
        other = self.registered.get(name)
        is_again = other is not None and other.__qualname__ == cls.__qualname__  # a module loaded anew
        if name in self._own_names() or (other is not None and not is_again):
            raise ConfigError(f"{where}: there is one of that name; choose another")
        setattr(cls, self._name_attribute, name)
        self.registered[name] = cls

    def names(self) -> list[str]:
        """Return all names, sorted."""
        return sorted({*self._own_names(), *self.registered, *self._entry_points()})

    def find(self, name: str) -> type[_T]:
        """Return a class that is none of ours.

        Raises:
            ConfigError: there is none of that name, or its package cannot be used.
        """
        if name not in self.registered and name in self._entry_points():
            self._load(self._entry_points()[name])
        if name not in self.registered:
            raise ConfigError(f"unknown {self.kind} {name!r}; there are: {', '.join(self.names())}")
        return self.registered[name]

    def _entry_points(self) -> dict[str, metadata.EntryPoint]:
        return {point.name: point for point in metadata.entry_points(group=self.group)}

    def _load(self, point: metadata.EntryPoint) -> None:
        """Import a package's class, and register it unless it does so itself."""
        try:
            cls = point.load()
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"{self.kind} {point.name!r}: {point.value} cannot be imported ({error}); "
                "install its package again, on every host"
            ) from error
        if self.registered.get(point.name) is not cls:
            self.register(point.name, cls)


def read_options(name: str, cls: type, text: str, *, kind: str) -> dict[str, Any]:
    """Read `option=value,...` as the fields of a dataclass.

    Args:
        name: stands before options in messages.
        kind: what the class is, for messages.

    Raises:
        ConfigError: an option it does not have, or a value that does not fit.
    """
    kinds = typing.get_type_hints(cls)
    known = [field.name for field in dataclasses.fields(cls) if field.init]
    values: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        option, equals, value = part.partition("=")
        if option not in known:
            has = f"it has: {', '.join(known)}" if known else "it has none"
            raise ConfigError(f"{kind} {name} has no option {option!r}; {has}")
        if not equals:
            raise ConfigError(f"{name}:{option}: has no value; write {option}=...")
        values[option] = _convert(f"{name}:{option}", value, kinds[option])
    return values


def _convert(where: str, text: str, kind: Any) -> Any:
    if isinstance(kind, type) and hasattr(kind, "parse"):
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
