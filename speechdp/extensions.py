"""Classes that others add by name, such as strategies: registered by a decorator, or offered by a package.

The options of such a class are the fields of its dataclass, written `NAME:option=value,...`.  Their values
are numbers, strings, paths, true or false, one of several words (`Literal`), or whatever a class's `parse`
class method reads and its `str` writes.  Each type may also be `| None`, written `none`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import sys
import traceback
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, Generic, TypeVar

from speechdp.counting import did_you_mean
from speechdp.errors import ConfigError, SpeechDPError, one_line

_T = TypeVar("_T")
_Class = TypeVar("_Class", bound=type[Any])
#: Types whose constructor takes the text unchanged.
_PLAIN = (int, float, str, Path)
_BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


class ExtensionPoint(Generic[_T]):
    """The names of one kind of class: ours, registered ones, and those that installed packages offer.

    Args:
        kind: name of one such class in messages, e.g. "strategy".
        group: entry-point group through which packages offer theirs.
        base: their base class, with a class variable `name`.
        own_names: returns the names of our own classes.
        check: refuses a class that lacks a required declaration, apart from abstract methods; called with
            "KIND 'NAME'" and the class.
    """

    def __init__(
        self,
        kind: str,
        group: str,
        base: type[Any],
        own_names: Callable[[], Iterable[str]],
        check: Callable[[str, type[Any]], None] = lambda where, cls: None,
    ) -> None:
        self.kind, self.group = kind, group
        self._base, self._own_names, self._check = base, own_names, check
        self.registered: dict[str, type[_T]] = {}

    def decorator(self, name: str) -> Callable[[_Class], _Class]:
        """Return a decorator that registers a class under the given name; it raises as `register`."""

        def register(cls: _Class) -> _Class:
            self.register(name, cls)
            return cls

        return register

    def check(self, where: str, cls: Any) -> None:
        """Refuse an object that is no class of this kind, lacks methods or has fields that cannot be options.

        Args:
            where: start of the message.

        Raises:
            ConfigError: the class cannot be used.
        """
        if not (isinstance(cls, type) and issubclass(cls, self._base) and dataclasses.is_dataclass(cls)):
            base = f"{self._base.__module__}.{self._base.__name__}"
            raise ConfigError(f"{where}: {cls!r} is not a dataclass derived from {base}")
        missing = sorted(getattr(cls, "__abstractmethods__", ()))
        if missing:
            raise ConfigError(f"{where}: {cls.__name__} has no {', no '.join(missing)}")
        self._check(where, cls)
        _check_options(where, cls)

    def register(self, name: str, cls: type[_T]) -> None:
        """Register a user's class.  Raises ConfigError if the class or the name cannot be used."""
        where = f"{self.kind} {name!r}"
        self.check(where, cls)
        if cls.__module__.startswith("speechdp."):
            raise ConfigError(f"{where}: {cls.__name__} has a name already; derive a class from it")
        if not name.isidentifier():
            raise ConfigError(f"{where}: a name may contain letters, digits and underscores only")
        other = self.registered.get(name)
        if name in self._own_names() or (other is not None and not _is_again(other, cls)):
            raise ConfigError(f"{where}: this name is already taken; choose another")
        cls.name = name  # type: ignore[attr-defined]
        self.registered[name] = cls

    def names(self) -> list[str]:
        """Return all names, sorted."""
        return sorted({*self._own_names(), *self.registered, *self._entry_points()})

    def find(self, name: str) -> type[_T]:
        """Return a class that is not one of ours.

        Raises:
            ConfigError: there is no class of that name, or its package cannot be used.
        """
        if name not in self.registered and name in self._entry_points():
            self._load(self._entry_points()[name])
        if name not in self.registered:
            raise ConfigError(self._unknown(name))
        return self.registered[name]

    def named(self, text: str) -> tuple[type[_T], str]:
        """Return the class of `NAME` or `MODULE:CLASS`, not one of ours, and its options' text.

        A registered name wins, unless a module of that name has such a class.  Modules in the working
        directory are found, too.

        Raises:
            ConfigError: there is no such class, or its module cannot be used.
        """
        name, _, rest = text.partition(":")
        class_name, _, behind = rest.partition(":")
        if name in self.registered or name in self._entry_points():
            found = self.find(name)
            if not isinstance(getattr(sys.modules.get(name), class_name.partition(".")[0], None), type):
                return found, rest
        if class_name and all(part.isidentifier() for part in class_name.split(".")):
            return self._imported(name, class_name), behind
        if name not in self.names():
            raise ConfigError(f"{self._unknown(name)}; or write MODULE:CLASS for one of your own")
        return self.find(name), rest

    def _unknown(self, name: str) -> str:
        names = self.names()
        return f"unknown {self.kind} {name!r}; there are: {', '.join(names)}{did_you_mean(name, names)}"

    def _imported(self, module: str, class_name: str) -> type[_T]:
        where = f"--{self.kind} {module}:{class_name}"
        here = str(Path.cwd())
        if here not in sys.path and "" not in sys.path:
            sys.path.append(here)
        name = module.removesuffix(".py")
        if name != module and name.isidentifier() and Path(module).is_file():
            raise ConfigError(f"{where}: {module} is the file of a module; write {name}:{class_name}")
        if not all(part.isidentifier() for part in module.split(".")):
            raise ConfigError(
                f"{where}: {module} is not the name of a module; write MODULE:CLASS, e.g. "
                f"my_{self.kind}:My{self.kind.capitalize()}"
            )
        found: Any = imported(
            f"{where}:",
            lambda: importlib.import_module(module),
            "the module has to be found on every host, in the working directory or by PYTHONPATH",
        )
        for part in class_name.split("."):
            if not hasattr(found, part):
                classes = [key for key, value in vars(found).items() if isinstance(value, type)]
                raise ConfigError(f"{where}: {module} has no class {class_name}{did_you_mean(part, classes)}")
            found = getattr(found, part)
        self.check(where, found)
        if "name" not in vars(found):
            found.name = f"{module}:{class_name}"
        return found  # type: ignore[no-any-return]

    def packages(self) -> set[str]:
        """Return the top-level modules of the installed packages that offer such classes."""
        return {point.module.partition(".")[0] for point in self._entry_points().values()}

    def _entry_points(self) -> dict[str, metadata.EntryPoint]:
        return {point.name: point for point in metadata.entry_points(group=self.group)}

    def _load(self, point: metadata.EntryPoint) -> None:
        """Import a package's class, and register it unless the import has."""
        cls = imported(
            f"{self.kind} {point.name!r}: {point.value}",
            point.load,
            "install its package again, on every host",
        )
        if self.registered.get(point.name) is not cls:
            self.register(point.name, cls)


def imported(where: str, load: Callable[[], Any], remedy: str) -> Any:
    """Return what `load` imports.

    Args:
        where: start of the message.
        remedy: end of the message if a module is not found.

    Raises:
        ConfigError: the import fails; if a module's own code fails, the line names the place.
    """
    try:
        return load()
    except SpeechDPError:
        raise
    except Exception as error:  # a user's module may raise anything
        place = _place_in_module(error)
        if place:
            reason, remedy = f"{place}: {_description(error)}", "fix the module"
        else:
            reason = one_line(error)
        raise ConfigError(f"{where} cannot be imported ({reason}); {remedy}") from error


@contextlib.contextmanager
def code_of(cls: type[Any], where: str, remedy: str) -> Iterator[None]:
    """Turn exceptions that a user's class raises in the block into one line.

    Our own errors, and operating-system errors that name a file, are clear enough and pass unchanged.

    Args:
        where: start of the message.
        remedy: end of the message.

    Raises:
        ConfigError: anything else was raised; names the file and line in the class's module.
    """
    try:
        yield
    except SpeechDPError:
        raise
    except Exception as error:  # a user's class may raise anything
        if isinstance(error, OSError) and error.filename is not None:
            raise
        place = _place_in_class(error, cls)
        raise ConfigError(f"{where}: {place}: {_description(error)}; {remedy}") from error


def _description(error: Exception) -> str:
    """Return an error's class and text on one line."""
    return ": ".join(filter(None, (type(error).__name__, one_line(error))))


def _place_in_module(error: Exception) -> str:
    """Return file and line where a module's own code failed; "" if the module was not found."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}"
    machinery = (__file__, importlib.__file__, metadata.__file__)
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.name == "<module>" and frame.filename not in machinery:
            return f"{frame.filename}, line {frame.lineno}"
    return ""


def _place_in_class(error: Exception, cls: type[Any]) -> str:
    """Return the file and the innermost line where the code of a class, or of its bases, failed.

    Returns the file alone if none of its lines was running: the method cannot be called with these arguments.
    """
    modules = [base.__module__ for base in cls.__mro__ if not base.__module__.startswith("speechdp.")]
    files: list[str] = [getattr(sys.modules.get(module), "__file__", None) or module for module in modules]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename in files:
            return f"{frame.filename}, line {frame.lineno}"
    return files[0]


def _is_again(old: type[Any], new: type[Any]) -> bool:
    """Return whether a class is another one loaded again, including by a module that runs as the program."""
    modules = {old.__module__, new.__module__}
    return old.__qualname__ == new.__qualname__ and (len(modules) == 1 or "__main__" in modules)


def _check_options(where: str, cls: type[Any]) -> None:
    """Refuse a class with fields that cannot be options; fields of our base classes may be anything."""
    try:
        kinds = field_kinds(cls)
    except (NameError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"{where}: the type of a field of {cls.__name__} does not exist at run time ({error}); "
            "import it at the head of its module, not under TYPE_CHECKING"
        ) from error
    for field in dataclasses.fields(cls):
        name = field.name
        owner = next(base for base in cls.__mro__ if name in inspect.get_annotations(base))
        if not field.init or owner.__module__.startswith("speechdp."):
            continue
        if not _is_readable(kinds[name]):
            written = (
                field.type if isinstance(field.type, str) else getattr(field.type, "__name__", field.type)
            )
            raise ConfigError(
                f"{where}: the field {name} of {cls.__name__} cannot be an option, since it is {written}; "
                "take int, float, str, bool, Path, Literal of texts or a class with parse(), or "
                "declare it field(init=False)"
            )
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{where}: the field {name} of {cls.__name__} has no default; give it one")


def _without_none(kind: Any) -> Any:
    """Return T for `T | None`, and any other type unchanged."""
    if typing.get_origin(kind) not in (typing.Union, types.UnionType):
        return kind
    others = [part for part in typing.get_args(kind) if part is not type(None)]
    return others[0] if len(others) == 1 else kind


def _is_readable(kind: Any) -> bool:
    """Return whether `_convert` can turn a text into such a value."""
    kind = _without_none(kind)
    if typing.get_origin(kind) is typing.Literal:
        return all(isinstance(choice, str) for choice in typing.get_args(kind))
    return kind is bool or kind in _PLAIN or (isinstance(kind, type) and hasattr(kind, "parse"))


def field_kinds(cls: type[Any]) -> dict[str, Any]:
    """Return the types of a dataclass's fields, by their names.

    Other annotations of the class may name classes of modules that are not loaded, such as torch.

    Raises:
        NameError, AttributeError, TypeError: a field's type does not exist at run time.
    """
    kinds: dict[str, Any] = {}
    names = {field.name for field in dataclasses.fields(cls)}
    for base in reversed(cls.__mro__):
        own = {name: kind for name, kind in inspect.get_annotations(base).items() if name in names}
        fields_alone = type(base.__name__, (), {"__annotations__": own, "__module__": base.__module__})
        # The module's names before the class's own, as typing does for a class: in
        # `Period: Period = Period(3)` the class has the field's default under that name.
        module = getattr(sys.modules.get(base.__module__), "__dict__", {})
        kinds |= typing.get_type_hints(fields_alone, globalns=dict(vars(base)), localns=module)
    return kinds


def option_kinds(cls: type[Any]) -> dict[str, Any]:
    """Return the types of a class's options, by their names."""
    kinds = field_kinds(cls)
    names = [field.name for field in dataclasses.fields(cls) if field.init]
    return {name: kinds[name] for name in names if _is_readable(kinds[name])}


def split_options(text: str) -> dict[str, str | None]:
    """Return the value of each option in `option=value,...`; None if there is no `=`."""
    parts = [part.partition("=") for part in text.split(",") if part]
    return {option: value if equals else None for option, equals, value in parts}


def read_options(name: str, cls: type, text: str, *, kind: str) -> dict[str, Any]:
    """Read `option=value,...` as the fields of a dataclass.

    Args:
        name: name before options in messages.
        kind: what the class is, in messages.

    Raises:
        ConfigError: an unknown or repeated option, or a value that does not fit.
    """
    given = [part.partition("=")[0] for part in text.split(",") if part]
    for option in given:
        if given.count(option) > 1:
            raise ConfigError(f"{kind} {name}:{text}: {option} is given twice")
    kinds = option_kinds(cls)
    values: dict[str, Any] = {}
    for option, value in split_options(text).items():
        if option not in kinds:
            has = f"it has: {', '.join(kinds)}" if kinds else "it has none"
            raise ConfigError(f"{kind} {name} has no option {option!r}; {has}")
        if value is None:
            raise ConfigError(f"{name}:{option}: has no value; write {option}=...")
        values[option] = _convert(f"{name}:{option}", value, kinds[option])
    return values


def write_options(made: Any) -> str:
    """Return all options of an instance in the form that `read_options` reads: `period=16,nesterov=false`."""
    return ",".join(f"{option}={_text(getattr(made, option))}" for option in option_kinds(type(made)))


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)


def _convert(where: str, text: str, kind: Any) -> Any:
    inner = _without_none(kind)
    if inner is not kind and text.lower() == "none":
        return None
    kind = inner
    if isinstance(kind, type) and hasattr(kind, "parse"):
        try:
            return kind.parse(text)
        except (ValueError, ConfigError) as error:
            message = one_line(error)
            given = where if repr(text) in message else f"{where}={text!r}"  # once is enough
            raise ConfigError(f"{given}: {message}") from error
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
