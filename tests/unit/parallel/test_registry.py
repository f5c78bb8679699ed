"""Strategies from outside the package: registered in a script, or offered by an installed package."""

from __future__ import annotations

import dataclasses
import re
import sys
import types
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest

import speechdp
from speechdp.errors import ConfigError
from speechdp.extensions import field_kinds
from speechdp.parallel.period import Period
from speechdp.parallel.registry import STRATEGIES, describe, parse_strategy, strategy_names
from speechdp.parallel.strategy import Progress, Strategy
from speechdp.strategies.model_averaging import ModelAveraging

if TYPE_CHECKING:
    from fractions import Fraction


@pytest.fixture(autouse=True)
def nothing_registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(STRATEGIES, "registered", {})
    yield


@dataclasses.dataclass(eq=False)
class Outside(ModelAveraging):
    """As model averaging, with an option more."""

    strength: float = 0.5


@dataclasses.dataclass(eq=False)
class Other(ModelAveraging):
    """As model averaging."""


def offered(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    """Have an installed package offer a strategy."""
    installed = {STRATEGIES.group: [metadata.EntryPoint(name, value, STRATEGIES.group)]}
    monkeypatch.setattr(metadata, "entry_points", lambda group: installed.get(group, []))


def test_a_registered_class_is_used_by_its_name() -> None:
    assert speechdp.strategy("outside")(Outside) is Outside
    made = parse_strategy("outside:strength=0.25,period=4")
    assert isinstance(made, Outside) and made.strength == 0.25 and made.name == "outside"
    assert parse_strategy(describe(made)).name == "outside"
    assert "outside" in strategy_names()

    class Derived(Outside):
        pass

    assert Derived.name == __name__.rpartition(".")[2] != "outside"


@pytest.mark.parametrize("name", ["model_averaging", "taken", "not a name", ""])
def test_a_name_that_is_taken_or_none_is_refused(name: str) -> None:
    speechdp.strategy("taken")(Other)
    with pytest.raises(ConfigError, match=f"strategy {name!r}"):
        speechdp.strategy(name)(Outside)


def test_another_class_than_a_strategy_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"not a dataclass derived from .*\.Strategy"):
        speechdp.strategy("other")(int)  # type: ignore[type-var]


def test_a_class_of_ours_keeps_its_name() -> None:
    with pytest.raises(ConfigError, match="derive a class from it"):
        speechdp.strategy("mine")(ModelAveraging)
    assert parse_strategy("model_averaging").name == "model_averaging"


def test_an_installed_package_offers_one(monkeypatch: pytest.MonkeyPatch) -> None:
    offered(monkeypatch, "from_a_package", f"{__name__}:Outside")
    assert "from_a_package" in strategy_names()
    made = parse_strategy("from_a_package:strength=2")
    assert type(made).__qualname__ == "Outside" and made.name == "from_a_package"


@pytest.mark.parametrize("value", ["no_such_package:Outside", "json:NoStrategy"])
def test_a_package_that_cannot_be_used_is_named(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    offered(monkeypatch, "broken", value)
    with pytest.raises(ConfigError, match=f"'broken': {value} cannot be imported .*; install its package"):
        parse_strategy("broken")


@dataclasses.dataclass(eq=False)
class Optional(ModelAveraging):
    """Has options that may be left open, and what is no option."""

    width: int | None = 3
    every: Period | None = None
    way: Literal["up", "down"] | None = None
    table: Path | None = None
    seen: dict[str, int] = dataclasses.field(default_factory=dict, init=False)


def test_options_may_be_left_open() -> None:
    speechdp.strategy("open")(Optional)
    made = parse_strategy("open:width=None,every=600kf,way=down,table=a/b")
    assert isinstance(made, Optional)
    assert (made.width, made.every, made.way) == (None, Period.parse("600kf"), "down")
    assert made.table == Path("a/b") and "seen" not in describe(made)
    again = parse_strategy(describe(made))
    assert describe(again) == describe(made) and vars(again) == vars(made)
    with pytest.raises(ConfigError, match="open:way='left': choose one of up, down"):
        parse_strategy("open:way=left")


def test_a_field_may_be_called_as_its_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """The class has the default under that name; a name that it alone has is found, too."""
    module = types.ModuleType("a_users_options")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    head = "from __future__ import annotations\nfrom dataclasses import dataclass\n"
    head += "from speechdp.parallel.period import Period\n"
    body = "    class Inner: ...\n    Period: Period = Period(3)\n    inner: Inner | None = None\n"
    exec(f"{head}@dataclass\nclass Options:\n{body}", vars(module))
    assert field_kinds(module.Options) == {"Period": Period, "inner": module.Options.Inner | None}


def with_field(kind: Any, default: Any = None) -> type[ModelAveraging]:
    """Return a strategy with a field of a type."""
    fields = [("odd", kind, dataclasses.field(default=default))]
    return dataclasses.make_dataclass("Odd", fields, bases=(ModelAveraging,), eq=False)


@pytest.mark.parametrize("kind", [tuple[int, ...], Literal[1, 2], dict, int | str | None, object])
def test_a_field_that_cannot_be_written_as_an_option_is_refused(kind: Any) -> None:
    with pytest.raises(ConfigError, match="'odd': the field odd of Odd cannot be an option"):
        speechdp.strategy("odd")(with_field(kind))


@dataclasses.dataclass(eq=False, kw_only=True)
class Needy(ModelAveraging):
    """Cannot be made without a width."""

    width: int


@dataclasses.dataclass(eq=False)
class Untold(ModelAveraging):
    """Has an option of a type that is there for mypy alone."""

    share: Fraction | None = None


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (Needy, "the field width of Needy has no default; give it one"),
        (
            Untold,
            "a field of Untold does not exist at run time (name 'Fraction' is not defined); import it",
        ),
    ],
)
def test_a_field_without_a_default_or_a_type_is_refused(cls: type[ModelAveraging], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        speechdp.strategy("odd")(cls)


@dataclasses.dataclass(eq=False)
class Halved(Strategy):
    """Leaves out what a strategy has to do."""

    def step(self, progress: Progress) -> None:
        """Do nothing."""


def with_attributes(**attributes: Any) -> type[ModelAveraging]:
    """Return a strategy with class attributes."""
    return dataclasses.make_dataclass("Odd", [], bases=(ModelAveraging,), namespace=attributes, eq=False)


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (Halved, "Halved has no finish, no load_state_dict, no state_dict"),
        (with_attributes(attach=id), "Odd overrides attach; override set_up instead, which attach calls"),
        (with_attributes(abandon=id), "Odd overrides abandon; append what set_up opens to self.channels"),
        (with_attributes(close=id), "Odd overrides close; append what set_up opens to self.channels"),
        (
            with_attributes(synchronous=False),
            "Odd has synchronous as an attribute; declare it in the property traits: return "
            "Traits(synchronous=False)",
        ),
        (with_attributes(replicas_equal=True), "Odd has replicas_equal as an attribute; declare it in"),
    ],
)
def test_a_class_that_would_not_work_as_a_strategy_is_refused(cls: type[Strategy], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^strategy 'odd': {re.escape(message)}"):
        speechdp.strategy("odd")(cls)
    assert "odd" not in strategy_names()


def test_an_option_may_decide_a_trait() -> None:
    option = [("synchronous", bool, dataclasses.field(default=True))]
    cls = dataclasses.make_dataclass("Deciding", option, bases=(ModelAveraging,), eq=False)
    assert speechdp.strategy("deciding")(cls) is cls


def test_a_class_loaded_anew_takes_its_name_again_but_not_that_of_another_module() -> None:
    first, again, elsewhere = (with_field(int, 1) for _ in range(3))
    speechdp.strategy("odd")(first)
    again.__module__, elsewhere.__module__ = "__main__", "another"
    assert speechdp.strategy("odd")(again) is again
    speechdp.strategy("odd")(first)
    with pytest.raises(ConfigError, match="strategy 'odd': this name is already taken"):
        speechdp.strategy("odd")(elsewhere)
