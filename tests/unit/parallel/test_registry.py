"""Strategies from outside the package: registered in a script, or offered by an installed package."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from importlib import metadata

import pytest

import speechdp
from speechdp.errors import ConfigError
from speechdp.parallel.registry import STRATEGIES, describe, parse_strategy, strategy_names
from speechdp.strategies.model_averaging import ModelAveraging


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


@pytest.mark.parametrize("name", ["model_averaging", "taken", "not a name", ""])
def test_a_name_that_is_taken_or_none_is_refused(name: str) -> None:
    speechdp.strategy("taken")(Other)
    with pytest.raises(ConfigError, match=f"strategy {name!r}"):
        speechdp.strategy(name)(Outside)


def test_another_class_than_a_strategy_is_refused() -> None:
    with pytest.raises(ConfigError, match="no dataclass derived from Strategy"):
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
