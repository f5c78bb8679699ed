"""What `--help` shows: every option explained, in words that need no knowledge of the project."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import io
import itertools
import re
import sys
import typing
from collections.abc import Iterator
from typing import Any

import pytest

from speechdp.cli.main import run
from speechdp.cli.support.command_line import parse
from speechdp.cli.support.help_text import reflowed
from speechdp.cli.support.subcommands import SUBCOMMANDS
from speechdp.errors import ConfigError, UsageError

#: Literal or inward phrases that were once in a help text.
_BANNED = (
    "{None}",
    "(default: None)",
    "(default: )",
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


def help_of(name: str, monkeypatch: pytest.MonkeyPatch, columns: int = 129) -> list[str]:
    """Return the lines of the help of one of FORMS; from 130 columns on there are two of boxes."""
    monkeypatch.setenv("COLUMNS", str(columns))
    out = io.TextIOWrapper(io.BytesIO(), "utf-8")  # tyro draws no boxes in other encodings
    with monkeypatch.context() as patches, pytest.raises(SystemExit) as ended:
        patches.setattr(sys, "stdout", out)
        run([*name.split(), "--help"])
    assert ended.value.code == 0
    out.seek(0)
    return out.read().splitlines()


def command_class(name: str) -> Any:
    """Return the dataclass of the options of one of FORMS."""
    command = SUBCOMMANDS[name.split(maxsplit=1)[0]]
    class_name = command.script_class_name if name.endswith("--script") else command.class_name
    return getattr(importlib.import_module(f"speechdp.cli.{command.module}"), class_name)


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
    (purpose, *_) = (inspect.getdoc(command_class(name)) or "").split(". ")
    assert re.sub(r"\s+", " ", purpose) in text
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
    command, kind = SUBCOMMANDS[name.split(maxsplit=1)[0]], command_class(name)
    hidden = [*command.internal, "script_arguments"]
    if not name.endswith("--script"):
        hidden += command.refused
    lines = "\n".join(help_of(name, monkeypatch))
    for field in fields_of(kind):
        if "Positional" in str(field.type) or field.name == "num_ranks":
            continue
        # Texts of other options may name one: --strategy.
        option = rf"^│ (?:.*, )?--{field.name.replace('_', '-')}\b(?!-)"
        is_shown = re.search(option, lines, re.MULTILINE) is not None
        assert is_shown == (field.name not in hidden), field.name


def test_an_internal_option_is_still_taken() -> None:
    command = parse("profile", ["DATA", "OUT", "--job=weak-2", "--steps", "4"])
    assert (command.job, command.steps) == ("weak-2", 4)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("columns", [80, 118, 160])
def test_lines_are_as_wide_as_the_terminal(name: str, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = help_of(name, monkeypatch, columns)
    assert max(map(len, lines)) <= columns
    for line, after in itertools.pairwise(lines):
        # One short word alone, with the sentence going on below: a line break of the source.
        text, below = re.match("│ {9,}([^ │]{1,16}) *│", line), re.match(r"│ {9,}([a-z]\S*)", after)
        ends = text is None or text[1].endswith((".", ")"))
        assert ends or below is None or len(below[1]) > 30, line


@pytest.mark.parametrize("name", FORMS)
def test_values_are_named_as_in_other_options(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not re.search(r"--\S+ (INT|FLOAT|STR)\b", "\n".join(help_of(name, monkeypatch)))


def test_paragraphs_are_joined_and_lists_of_values_are_not() -> None:
    text = """What is read, however long,
    it is.  It goes on.
    all, most (the usual): the whole
    file; none: nothing.
    Else nothing."""
    assert reflowed(text) == (
        "What is read, however long, it is. It goes on.\n"
        "all, most (the usual): the whole file; none: nothing.\nElse nothing."
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "--ranks", "2"], "--ranks does not apply to train: it trains on the ranks it"),
        (["train", "-np", "2"], "-np does not apply to train: it trains on the ranks it is started"),
        (["launch", "--ranks", "2", "--", "train"], "--ranks does not apply to launch: use -np"),
        (["compare", "--seed=2"], "--seed does not apply to compare: use --seeds"),
        (["sweep", "--strategy", "bmuf"], "--strategy does not apply to sweep: use --swept, --periods and"),
        (
            ["profile", "--script", "s.py", "OUT"],
            "--script does not apply to profile: it times the functions",
        ),
        (["profile", "--realign_epochs", "1"], "--realign-epochs does not apply to profile: it measures"),
    ],
)
def test_what_help_hides_is_refused_with_what_to_do(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        parse(words[0], ["DATA", "OUT", *words[1:]])


@pytest.mark.parametrize(
    "words", [["tune", "DATA", "OUT"], ["compare", "DATA", "OUT"], ["sweep", "DATA", "OUT"]]
)
def test_arguments_of_a_script_that_is_not_there_are_refused_with_what_to_do(words: list[str]) -> None:
    with pytest.raises(
        ConfigError,
        match=r"^what follows -- are arguments of a script, .* give --script SCRIPT .*, or leave -- out$",
    ):
        parse(words[0], [*words[1:], "--", "--layers", "1"])
    assert parse(words[0], [*words[1:], "--layers", "1"]).options.model.layers == 1


def test_none_and_its_default_are_still_taken() -> None:
    command = parse("train", ["DATA", "RUN", "--epochs", "None", "--bidirectional", "True"])
    assert command.options.epochs is None and command.options.model.bidirectional is True


@pytest.mark.parametrize(
    ("words", "given"),
    [
        (["compare", "DATA", "OUT", "--launch-args", "--interface eth0"], "--interface eth0"),
        (["compare", "DATA", "OUT", "--launch_args", "--launcher=horovodrun"], "--launcher=horovodrun"),
        (["compare", "DATA", "OUT", "--launch-args=--verbose"], "--verbose"),
        (["compare", "DATA", "--launch-args", "", "OUT"], ""),
    ],
)
def test_options_for_another_program_may_be_a_word_of_their_own(words: list[str], given: str) -> None:
    command = parse(words[0], words[1:])
    assert command.launch_args == given and str(command.out_dir) == "OUT"


def test_what_follows_two_dashes_is_not_ours_to_join() -> None:
    command = parse("launch", ["-np", "2", "--mpi-args", "--mca a b", "--", "own.py", "--mpi-args", "-x y"])
    assert command.mpi_args == "--mca a b" and command.command[-2:] == ("--mpi-args", "-x y")
    with pytest.raises(UsageError, match="--mpi-args"):
        parse("launch", ["-np", "2", "--mpi-args"])


def test_a_folder_with_a_default_is_optional_in_the_usage(monkeypatch: pytest.MonkeyPatch) -> None:
    assert help_of("profile", monkeypatch)[0].endswith("[OPTIONS] DATA [OUT]")


@pytest.mark.parametrize(("option", "expected"), [("--epochs", "a whole number"), ("--momentum", "a number")])
def test_what_is_no_number_is_told_without_pythons_types(
    option: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["train", "DATA", "RUN", option, "two"]) == 2
    printed = capsys.readouterr().err
    assert printed == f"speechdp: {option}: expected {expected}, got 'two'\n"
    assert "NoneType" not in printed and "instantiated" not in printed


@pytest.mark.parametrize("name", ["train", "tune --script", "doctor"])
def test_help_tells_of_the_file_that_options_may_stand_in(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert help_of(name, monkeypatch)[-1] == "Options may stand in a file, too: --config FILE.json"


def test_a_search_has_its_budget_first_and_its_threads_last(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "\n".join(help_of("tune", monkeypatch))
    assert text.index("--budget TIME") < text.index("--backends NAME") < text.index("--threads N")


def test_both_searches_have_the_options_of_a_search() -> None:
    command = parse("tune", ["DATA", "OUT", "--budget", "90s", "--ranks", "3", "--race", "7"])
    assert (command.budget, command.ranks, command.race) == ("90s", 3, 7)
    assert command.periods == "4,16,64"
    script = parse("tune", ["--script", "train.py", "OUT"])
    assert script.budget == "30m"  # the form's own default


def test_an_option_may_have_any_name() -> None:
    assert (
        parse("posteriors", ["RUN", "DATA", "--out", "ARK", "--kind", "log_posterior"]).kind
        == "log_posterior"
    )
