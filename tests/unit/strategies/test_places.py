"""What a strategy of this package needs beside its module: whatever is missing is named in one line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from speechdp.extensions import option_kinds, write_options
from speechdp.parallel.declared import Model
from speechdp.parallel.period import Period
from speechdp.parallel.registry import own_strategy_names, strategy_class
from speechdp.parallel.strategy import PredictsExchange, Strategy
from speechdp.strategies.model_averaging import ModelAveraging

REPOSITORY = Path(__file__).resolve().parents[3]
PAGE = "docs/strategies.md"
_OPTIONS_HEAD = "| option | default | meaning |"
#: In the place of a default, where an option has to be given with another one.
_NEEDED = "must be given"


def _text(path: str) -> str:
    return (REPOSITORY / path).read_text(encoding="utf-8")


def _first_table(page: str) -> set[str]:
    """Return the strategies that have a row before the first section."""
    rows = page.partition("\n## ")[0].splitlines()
    return {row.split("`")[1] for row in rows if row.startswith("| `")}


def _section(page: str, name: str) -> str | None:
    """Return what is below a strategy's heading, up to the next of its level."""
    found = re.search(rf"^## {re.escape(name)}\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    return found[1] if found else None


def _documented(section: str) -> dict[str, str]:
    """Return the default of each option in the tables of options of a section."""
    defaults: dict[str, str] = {}
    in_table = False
    for line in section.splitlines():
        in_table = line == _OPTIONS_HEAD or (in_table and line.startswith("|"))
        if in_table and line.startswith("| `"):
            options, default = (cell.strip() for cell in line.split(" | ")[:2])
            defaults |= dict.fromkeys(re.findall(r"`(\w+)`", options), default)
    return defaults


def _defaults(cls: type[Strategy]) -> dict[str, str]:
    """Return the default of each option as a user writes it: 1 for 1.0."""
    written = (option.partition("=") for option in write_options(cls()).split(",") if option)
    return {name: value.removesuffix(".0") for name, _, value in written}


def _wrong_options(cls: type[Strategy], section: str, page: str) -> Iterator[str]:
    """Yield what is wrong with the tables of options; one that derives from another has its options, too."""
    defaults, documented = _defaults(cls), _documented(section)
    inherited: set[str] = set()
    for base in cls.__mro__[1:]:
        inherited |= _documented(_section(page, getattr(base, "name", "")) or "").keys()
    table = f"{PAGE}, ## {cls.name}, {_OPTIONS_HEAD}"
    yield from (f"{table}: a row for `{name}`" for name in defaults.keys() - documented.keys() - inherited)
    for name, default in documented.items():
        if name not in defaults:
            yield f"{table}: no row for `{name}`, which is no option"
        elif default not in (defaults[name], _NEEDED):
            yield f"{table}: the default of `{name}` is {defaults[name]}, not {default}"


def missing(cls: type[Strategy]) -> list[str]:
    """Return what is still to be written for a strategy of this package: where, and what."""
    page, name = _text(PAGE), cls.name
    found = []
    if name not in _first_table(page):
        found.append(f"{PAGE}: a row | `{name}` | ... in the first table")
    section = _section(page, name)
    if section is None:
        found.append(f"{PAGE}: a section ## {name} with its equation and a table {_OPTIONS_HEAD}")
    else:
        found += sorted(_wrong_options(cls, section, page))
    if f"`{name}" not in _text("README.md"):
        found.append(f"README.md, ### A strategy: `{name}` in the table")
    made = cls()
    if not isinstance(made, PredictsExchange) or made.predicted_exchange(Model(4.0, 0, 1.0, 1.0)) is None:
        found.append(f"{cls.__name__}.predicted_exchange: what it sends, for simulate and tune")
    if f"`{name}" not in _text("docs/simulate.md"):
        found.append(f"docs/simulate.md, ## How it is computed: `{name}` in the table of who waits for what")
    for part in ("Update rule:", "Exchange:", "Guarantee:", "Source"):
        if part not in (cls.__doc__ or ""):
            found.append(f"the docstring of {cls.__name__}: {part.rstrip(':')}")
    for folder, what in (
        ("tests/helpers/strategy_checks", "a check of what only this strategy promises"),
        ("tests/contract/references", "the strategy in torch alone, with which scripts are compared"),
    ):
        if not any(name in file.read_text(encoding="utf-8") for file in (REPOSITORY / folder).glob("*.py")):
            found.append(f"{folder}: {what}, with {name} in its text")
    return found


@pytest.mark.parametrize("name", own_strategy_names())
def test_a_strategy_is_in_every_place(name: str) -> None:
    found = missing(strategy_class(name))
    assert not found, f"{name} still needs: " + "; ".join(found)


def test_documentation_names_no_strategy_that_is_not_there() -> None:
    assert sorted(_first_table(_text(PAGE))) == own_strategy_names()


@dataclass(eq=False)
class Unwritten(ModelAveraging):
    """Nothing is written of it."""

    period: Period = field(default_factory=lambda: Period(3))
    pace: float = 2.0


def test_each_place_that_is_missing_is_named() -> None:
    Unwritten.name = "unwritten"
    found = missing(Unwritten)
    places = [line.partition(":")[0].partition(",")[0] for line in found]
    docstring = ["the docstring of Unwritten"] * 4
    folders = ["tests/helpers/strategy_checks", "tests/contract/references"]
    assert places == [PAGE, PAGE, "README.md", "docs/simulate.md", *docstring, *folders]


def test_options_that_the_page_does_not_have_are_named() -> None:
    table = "\n".join(
        [_OPTIONS_HEAD, "|---|---|---|", "| `period`, `pace` | 3 | x |", "| `old` | 0 | x |", ""]
    )
    inherited = f"## model_averaging\n\n{_OPTIONS_HEAD}\n| `begin` | 0 | x |\n"
    found = [line.partition(" |: ")[2] for line in _wrong_options(Unwritten, table, inherited)]
    assert "a row for `momentum`" in found and "a row for `begin`" not in found
    assert found[-2:] == [
        "the default of `pace` is 2, not 3",
        "no row for `old`, which is no option",
    ]
    assert option_kinds(Unwritten).keys() - {"pace", "period"} - {"begin"} == {
        line.split("`")[1] for line in found[:-2]
    }
