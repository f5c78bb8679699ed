"""From the words of a command line to the command that they are, with the options of --config files."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import takewhile
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import tyro

from speechdp import exit_codes
from speechdp.cli.support.config_file import (
    arguments_of,
    is_record_of_run,
    of_its_file,
    refuse_empty,
    refuse_unknown,
    with_config,
)
from speechdp.cli.support.help_text import option_rules, wrapped_paragraphs
from speechdp.cli.support.refusals import boxes_as_lines
from speechdp.cli.support.subcommands import SUBCOMMANDS, Subcommand
from speechdp.comm.environment import announced
from speechdp.counting import did_you_mean
from speechdp.errors import ConfigError, SpeechDPError, UsageError
from speechdp.launching.forwarded_options import plain_option
from speechdp.parallel.run_files import differing
from speechdp.process.notices import print_message

#: Subcommands that take another one after `--`.
_WITH_COMMAND = ("launch", "submit")
#: Options whose value is options for another program.
_QUOTED = ("--launch-args", "--mpi-args", "--scheduler-args")


def read_command(name: str, arguments: Sequence[str]) -> Any:
    """Return the command of a subcommand's command line, in which --config may be.

    Raises:
        SystemExit, UsageError, ConfigError: as `parse` and `with_config` do.
    """
    return _parsed(name, _with_config(name, arguments), _print_on_rank_0)


@runtime_checkable
class _CheckedBefore(Protocol):
    """A command some of whose options can be refused before any rank is started, and without torch."""

    def check(self) -> None:
        """Refuse them.  Raises ConfigError."""


@runtime_checkable
class _CheckedByStrategies(Protocol):
    """A command with options that only its strategies understand, which import torch."""

    def check_strategies(self) -> None:
        """Refuse them.  Raises ConfigError."""


def check_forwarded(arguments: Sequence[str], *, with_torch: bool = False) -> Any:
    """Refuse an invalid forwarded command line here, once, instead of on every rank or after a queue.

    Args:
        with_torch: import it, to check the options of strategies, too.

    Returns:
        The command that it is.

    Raises:
        SystemExit: an unknown command, having said so, or as `parse` does.
        UsageError, ConfigError: as `parse` does.
    """
    name, *rest = arguments
    if name not in SUBCOMMANDS:
        script = "to start a script, write python before it: -- python SCRIPT"
        meant = did_you_mean(name, SUBCOMMANDS)
        known = "speechdp --help lists them"
        print_message(f"unknown command {name!r}{meant or f'; {known}'}; {script}")
        raise SystemExit(exit_codes.USAGE)
    command = _parsed(name, rest, lambda text: None)  # rank 0 tells it
    if isinstance(command, _CheckedBefore):
        command.check()
    if with_torch and isinstance(command, _CheckedByStrategies):
        command.check_strategies()
    return command


def parse(name: str, arguments: Sequence[str]) -> Any:
    """Return the command of a subcommand's command line.

    Raises:
        SystemExit: --help, having helped.
        UsageError: unknown, wrong or missing options.
        ConfigError: invalid options.
    """
    command = SUBCOMMANDS[name]
    given, hidden = list(arguments), dict[str, Any]()
    of_script = bool(command.script_class_name) and _has_script(given)
    if of_script:
        given, hidden["script_arguments"] = _split_script_arguments(given)
    elif command.script_class_name and "--" in given:
        raise UsageError(
            "what follows -- are arguments of a script, but there is no --script: give --script SCRIPT "
            "before --, or leave -- out"
        )
    internal, shown = _take_internal(command, _with_quoted_options(given))
    refused = {} if of_script else command.refused
    kind = command.options_class(of_script=of_script)
    if name not in _WITH_COMMAND or "--" in given:  # else the option may be the script's
        _refuse_others(name, refused, given)
        refuse_unknown(shown, kind, name)
        refuse_empty(shown, kind)
    before_command = ""
    if name in _WITH_COMMAND and "--" not in arguments:
        inner = next((word for word in arguments if word in SUBCOMMANDS), "train")
        before_command = f"write -- before the command: ... -- {inner} ..."
    own = shown[: shown.index("--")] if "--" in shown else shown
    is_help = bool({"-h", "--help"} & set(own))
    hint = _config_file_hint() if is_help and name not in _WITH_COMMAND else nullcontext()
    with hint, wrapped_paragraphs() if is_help else boxes_as_lines(name, before_command):
        options = tyro.cli(
            kind,
            prog=f"speechdp {name}",
            args=["--help"] if is_help else shown,  # wrong values beside it would be drawn in a box
            config=(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes),
            registry=option_rules(hidden=refused),
        )
    hidden.update(internal)
    return dataclasses.replace(options, **hidden) if hidden else options


def _refuse_others(name: str, refused: Mapping[str, str], arguments: Sequence[str]) -> None:
    """Refuse options that a command has no use for.  Raises UsageError."""
    for word in takewhile(lambda word: word != "--", arguments):  # after it comes another command
        shown = word.partition("=")[0].replace("_", "-")
        option = shown.lstrip("-").replace("-", "_")
        if word.startswith("-") and option in refused:
            raise UsageError(f"{shown} does not apply to {name}: {refused[option]}")


def _has_script(arguments: Sequence[str]) -> bool:
    """Tell whether a training script of the user's is given."""
    ours = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return any(word.partition("=")[0] == "--script" for word in ours)


def _split_script_arguments(arguments: list[str]) -> tuple[list[str], tuple[str, ...]]:
    """Return our options, and what follows `--`: the script's own arguments."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    ours = arguments[:end]
    # `--script --help` asks for the help of this form; the option takes no such value.
    return ["--help"] if {"-h", "--help"} & set(ours) else ours, tuple(arguments[end + 1 :])


def _take_internal(command: Subcommand, arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return the internal options by name, and the other words: tyro does not parse what it does not show."""
    internal, others = {}, []
    for word in arguments:
        name, equals, value = word.removeprefix("--").partition("=")
        if word.startswith("--") and equals and name in command.internal:
            internal[name] = value
        else:
            others.append(word)
    return internal, others


def _with_quoted_options(arguments: Sequence[str]) -> list[str]:
    """Return the words with options for another program as one word with their name.

    `--mpi-args "--mca a b"` is what anybody writes; tyro takes a value that begins with - for an option.
    """
    found = list(arguments)
    end = found.index("--") if "--" in found else len(found)
    for place in reversed(range(end - 1)):
        if found[place].replace("_", "-") in _QUOTED:
            found[place : place + 2] = [f"{found[place]}={found[place + 1]}"]
    return found


@contextmanager
def _config_file_hint() -> Iterator[None]:
    """Say below the help that the block prints how options are given by a file."""
    try:
        yield
    finally:
        print("Options may stand in a file, too: --config FILE.json")


def _with_config(name: str, arguments: Sequence[str]) -> Sequence[str]:
    """Return a subcommand's command line with the options of --config, those of a forwarded command too.

    Raises:
        ConfigError: as `with_config`.
    """
    if not any(word.startswith("--config") for word in arguments):
        return arguments
    if name in _WITH_COMMAND:
        if "--" not in arguments:
            return arguments  # which is refused, with what to write
        place = arguments.index("--") + 1
        own, forwarded = arguments[:place], arguments[place:]
        if forwarded and forwarded[0] in SUBCOMMANDS:
            forwarded = [forwarded[0], *_with_config(forwarded[0], forwarded[1:])]
        return [*own, *forwarded]
    command = SUBCOMMANDS[name]
    of_script = bool(command.script_class_name) and _has_script(arguments)
    refused = {} if of_script else command.refused
    return with_config(
        arguments, lambda: command.options_class(of_script=of_script), refused, _print_on_rank_0
    )


def _parsed(name: str, arguments: Sequence[str], print_line: Callable[[str], None]) -> Any:
    """Return the command of a command line; `train --resume` has the run's own options beside those given.

    Args:
        name: of the subcommand.
        arguments: of its command line, without --config.
        print_line: prints which options they leave to the run.

    Raises:
        SystemExit, UsageError, ConfigError: as `parse` does.
    """
    given = {plain_option(word) for word in arguments}
    if name != "train" or "--resume" not in given:
        return parse(name, arguments)
    kind = SUBCOMMANDS["train"].options_class()
    folders = arguments_of(arguments, kind)  # DATA RUN
    record = Path(folders[-1], "run.json") if len(folders) == 2 else None
    if record is None or not is_record_of_run(record):
        return parse(name, arguments)  # there is no run yet, or who reads it says what is wrong with it
    made = dict.fromkeys(_made_by(name, arguments), "it is made by the options given")
    try:
        words = with_config([*arguments, f"--config={record}"], lambda: kind, made, lambda text: None)
        resumed = parse(name, words)
    except ConfigError as error:
        try:  # the options given make it another run; this message lists all differences
            return parse(name, arguments)
        except ConfigError:
            raise error from None
    pairs = differing(type(resumed.options)().to_json(), resumed.options.to_json())
    taken = [option if now is True else f"{option} {now}" for option, _, now in pairs if option not in given]
    if taken:
        print_line(f"{record}: options not given are taken from this run: {', '.join(taken)}")
    return resumed


def _made_by(name: str, arguments: Sequence[str]) -> list[str]:
    """Return the options that a run's record holds as if given, because the options given have made them."""
    try:
        options = parse(name, arguments).options
    except ConfigError:  # they need the run's own beside them
        return []
    made = {
        "alignments": options.alignments is None and options.aligns,
        "initial_model": options.initial_model is None and options.realign_from == "throughout",
    }
    return [option for option, is_made in made.items() if is_made]


def _print_on_rank_0(text: str) -> None:
    """Print a line to stderr that every rank of a job would have to print, not waiting for rank 0's."""
    launch = announced()
    if launch is None or launch.rank == 0:
        print_message(text)


def error_line(error: SpeechDPError, name: str, arguments: Sequence[str]) -> str:
    """Return the line of a command's error, with the --config file that the refused value is from, if any."""
    own = _of_forwarded(name, arguments)
    return of_its_file(str(error), own) if isinstance(error, ConfigError) else str(error)


def _of_forwarded(name: str, arguments: Sequence[str]) -> Sequence[str]:
    """Return the arguments of the subcommand that another starts, or its own, among which --config may be."""
    if name not in _WITH_COMMAND or "--" not in arguments:
        return arguments
    inner = arguments[arguments.index("--") + 1 :]
    return _of_forwarded(inner[0], inner[1:]) if inner and inner[0] in SUBCOMMANDS else ()
