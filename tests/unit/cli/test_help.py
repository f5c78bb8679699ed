"""What `--help` shows: every option explained, in words that need no knowledge of the project."""

from __future__ import annotations

import dataclasses
import importlib
import io
import re
import sys
import typing
from collections.abc import Iterator
from typing import Any

import pytest

from speechdp.cli.main import _HEADINGS, SUBCOMMANDS, parse, run

#: Literal or inward phrases that were once in a help text.
_BANNED = (
    "{None}",
    "(default: None)",
    "Not for you",
    "recalled",
    "start anew",
    "go on with",
    "in one word",
    "that is in",
    "Without it:",
    "without it:",
    "says so",
    "others start over",
)
#: Subcommands, and those that also take a script of the user's.
FORMS = [*SUBCOMMANDS, *(f"{name} --script" for name, c in SUBCOMMANDS.items() if c.script_class_name)]
_EDGE = re.compile("[│╭╮╰╯─]")
_TITLE = re.compile("^╭─ (.+?) ─", re.MULTILINE)
_OPTION = re.compile("│ -{1,2}[a-z]")


def help_of(name: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the lines of the help of one of FORMS."""
    monkeypatch.setenv("COLUMNS", "129")  # from 130 on there are two columns of boxes
    out = io.TextIOWrapper(io.BytesIO(), "utf-8")  # tyro draws no boxes in other encodings
    with monkeypatch.context() as patches, pytest.raises(SystemExit) as ended:
        patches.setattr(sys, "stdout", out)
        run([*name.split(), "--help"])
    assert ended.value.code == 0
    out.seek(0)
    return out.read().splitlines()


def fields_of(kind: Any) -> Iterator[dataclasses.Field[Any]]:
    """Yield the options of a dataclass, those of nested groups included."""
    kinds = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        if dataclasses.is_dataclass(kinds[field.name]):
            yield from fields_of(kinds[field.name])
        else:
            yield field


@pytest.mark.parametrize("name", FORMS)
def test_help_explains_itself(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = help_of(name, monkeypatch)
    text = re.sub(r"\s+", " ", _EDGE.sub(" ", " ".join(lines)))
    for phrase in _BANNED:
        assert phrase not in text, phrase
    titles = _TITLE.findall("\n".join(lines))
    assert "options" in titles
    for title in titles:
        words = title.lower().split()
        assert len(words) == len(set(words)) and "." not in title, title


@pytest.mark.parametrize("name", FORMS)
def test_every_option_has_a_text(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = help_of(name, monkeypatch)
    shown = [index for index, line in enumerate(lines) if _OPTION.match(line)]
    lines = [_EDGE.sub(" ", line).strip() for line in lines]
    assert len(shown) > 1
    for index in shown:
        invocation, _, text = lines[index].partition("  ")
        explained = (text or lines[index + 1]).strip()
        assert re.match(r"\w", explained) and not explained.startswith("(default"), invocation


@pytest.mark.parametrize("name", FORMS)
def test_internal_options_are_hidden_and_the_others_shown(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    command = SUBCOMMANDS[name.split(maxsplit=1)[0]]
    class_name = command.script_class_name if name.endswith("--script") else command.class_name
    kind = getattr(importlib.import_module(f"speechdp.cli.{command.module}"), class_name)
    hidden = (*command.internal, "script_arguments")
    lines = "\n".join(help_of(name, monkeypatch))
    for field in fields_of(kind):
        if "Positional" in str(field.type) or field.name == "num_ranks":
            continue
        is_shown = re.search(rf"--{field.name.replace('_', '-')}\b(?!-)", lines) is not None
        assert is_shown == (field.name not in hidden), field.name


def test_an_internal_option_is_still_taken() -> None:
    command = parse("profile", ["DATA", "OUT", "--job=weak-2", "--steps", "4"])
    assert (command.job, command.steps) == ("weak-2", 4)


def test_the_overview_has_every_command_under_one_heading() -> None:
    assert sorted(name for names in _HEADINGS.values() for name in names) == sorted(SUBCOMMANDS)


def test_none_and_its_default_are_still_taken() -> None:
    command = parse("train", ["DATA", "RUN", "--epochs", "None", "--bidirectional", "True"])
    assert command.options.epochs is None and command.options.model.bidirectional is True
