"""A command's options, and --config FILE.json: a JSON object of options, or a run's run.json."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal, get_type_hints

import tyro

from speechdp.counting import did_you_mean
from speechdp.errors import ConfigError, UsageError
from speechdp.files import named_file_cannot_be_read
from speechdp.json_input import parse_json
from speechdp.launching.forwarded_options import plain_option
from speechdp.options.shown import MAY_BE_EMPTY
from speechdp.parallel.run_files import RUN_FORMAT

_OPTION = "--config"
#: Key in run.json of the options' values as resolved on that run's ranks.
_RESOLVED = "resolved"
#: Options whose paths in run.json may be relative to the folder in which the run was started.
_OF_PATHS = ("--alignments", "--initial-model")
#: Remedy for an unknown option that resembles no option of the command.
_LISTED = "; speechdp {} --help lists them"
#: Message about an empty word, which as a path would be the current folder.
_EMPTY = " is empty; is a variable of the shell unset?"
#: An option with one dash too few; -np is a name, -inf and -nan are numbers.
_LIKE_AN_OPTION = re.compile("-(?!inf$|nan$)[a-z][a-z-]{2,}")
#: Options whose values name strategies.
_OF_STRATEGIES = ("--strategy", "--strategies", "--swept", "--reference")
#: An option in a message.
_NAMED_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
#: An option that every command with the training options has.
_OF_TRAINING = "--preset"
#: Syntax of an option: a flag (--like, --no-like), one value, or the option repeated for each value.
_Kind = Literal["flag", "value", "repeated"]


def with_config(
    arguments: Sequence[str],
    of_command: Callable[[], type],
    refused: Mapping[str, str],
    print_line: Callable[[str], None],
) -> list[str]:
    """Return the arguments with --config replaced by the options in its file.

    They come before the other options, which take precedence.

    Args:
        arguments: arguments of a subcommand; after `--` come those of another command.
        of_command: returns the dataclass of the subcommand's options.
        refused: options that the subcommand does not use, with what to do instead.  A run's record has
            all of them, so they are left out then.
        print_line: prints a line about those of them that the run was given.

    Raises:
        UsageError: --config is given twice, or without a file.
        ConfigError: the file cannot be read, has no options, or has an unknown option or an empty value.
    """
    end = arguments.index("--") if "--" in arguments else len(arguments)
    own, rest = list(arguments[:end]), list(arguments[end:])
    places = [place for place, word in enumerate(own) if word.partition("=")[0] == _OPTION]
    if not places:
        return [*own, *rest]
    if len(places) > 1:
        raise UsageError(f"{_OPTION} is given {len(places)} times; put all options into one file")
    (place,) = places
    _, equals, value = own.pop(place).partition("=")
    if not equals:
        if place == len(own):
            raise UsageError(f"{_OPTION} needs a file: {_OPTION} FILE.json")
        value = own.pop(place)
    if not value:
        raise UsageError(f"{_OPTION}{_EMPTY}")
    given = {word.partition("=")[0].replace("_", "-") for word in own}
    command = of_command()
    refused = {_option(name): why for name, why in refused.items()}
    options = _Options(options_of(command), _may_be_empty(command), refused)
    words = list(_words(Path(value), options, given, print_line))
    first = next((i for i, word in enumerate(own) if word.startswith("-")), len(own))
    return [*own[:first], *words, *own[first:], *rest]


def of_its_file(line: str, arguments: Sequence[str]) -> str:
    """Add to an error line the name of the --config file that the refused option came from, if it did.

    Args:
        line: error line; names the option that it is about before any other, or a strategy.
        arguments: arguments of a subcommand, as given; options given besides --config are not the file's.
    """
    own = list(takewhile(lambda word: word != "--", arguments))
    place = next((place for place, word in enumerate(own) if word.partition("=")[0] == _OPTION), None)
    if place is None:
        return line
    path = Path(own[place].partition("=")[2] or next(iter(own[place + 1 :]), ""))
    try:
        values = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return line
    if not isinstance(values, dict) or str(path) in line:
        return line
    options = values.get("options") if values.get("format") == RUN_FORMAT else values
    its_own = {_option(name): value for name, value in _flat(options if isinstance(options, dict) else {})}
    for given in own:
        its_own.pop(plain_option(given), None)
    named = _NAMED_OPTION.search(line)
    if named is not None:
        is_its = named[0] in its_own
    else:  # a strategy refuses its own options, and does not know which of ours it was given by
        texts = [str(its_own[option]) for option in _OF_STRATEGIES if option in its_own]
        strategies = [one.partition(":")[0] for text in texts for one in text.split(",")]
        is_its = any(line.startswith(f"{one}:") or f"{one!r}" in line for one in strategies)
    return f"{path}: {line}" if is_its else line


@dataclasses.dataclass(frozen=True)
class _Options:
    """The options of a command, and the training options that it does not use, with what to do instead."""

    known: Mapping[str, _Kind]
    may_be_empty: Collection[str]
    refused: Mapping[str, str]


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def options_of(command: type) -> dict[str, _Kind]:
    """Return the options of a command and its groups, each with its syntax."""
    return {option: kind for option, kind, _ in _declared(command)}


def _may_be_empty(command: type) -> set[str]:
    return {option for option, _, may_be in _declared(command) if may_be}


@cache
def _declared(command: type) -> tuple[tuple[str, _Kind, bool], ...]:
    """Return the options of a command and its groups, with the syntax and whether the value may be "".

    Cached: a start that resumes a run calls this six times, and evaluating the annotations of `train`
    takes 15 ms.
    """
    found: list[tuple[str, _Kind, bool]] = []
    for name, hint in get_type_hints(command, include_extras=True).items():
        marks = getattr(hint, "__metadata__", ())
        kind = hint.__origin__ if marks else hint
        if tyro.conf.Positional in marks or tyro.conf.Suppress in marks:
            continue
        is_value = any(isinstance(mark, tyro.constructors.PrimitiveConstructorSpec) for mark in marks)
        if isinstance(kind, type) and dataclasses.is_dataclass(kind) and not is_value:
            found += _declared(kind)
        else:
            repeated = tyro.conf.UseAppendAction in marks
            written: _Kind = "flag" if kind is bool else "repeated" if repeated else "value"
            default = next(field.default for field in dataclasses.fields(command) if field.name == name)
            may_be_empty = MAY_BE_EMPTY in marks or default == ""
            found += [(spelling, written, may_be_empty) for spelling in _spellings(name, marks)]
    return tuple(found)


def arguments_of(words: Sequence[str], command: type) -> list[str]:
    """Return the positional arguments of a command line whose options each have one value or none.

    Args:
        words: arguments of a subcommand.
        command: the dataclass of its options.
    """
    known = options_of(command)
    found, is_value = list[str](), False
    for word in words:
        if not is_value and not word.startswith("-"):
            found.append(word)
        is_value = not is_value and "=" not in word and known.get(plain_option(word), "flag") != "flag"
    return found


def refuse_empty(arguments: Sequence[str], command: type) -> None:
    """Refuse "" as an argument, or as the value of an option that does not allow it.

    As a path it would be the current folder; as a list or a name it would be as if not given.

    Args:
        arguments: arguments of a subcommand; after `--` come those of another command.
        command: the dataclass of the subcommand's options.

    Raises:
        UsageError: naming the option or the place.
    """
    before = ""
    for word in takewhile(lambda word: word != "--", arguments):
        option, equals, value = word.partition("=")
        if word == "" or (equals and value == "" and word.startswith("-")):
            named = before if word == "" else option
            if not named.startswith("-"):
                named = f"the argument after {named!r}" if named else "the first argument"
            if named.replace("_", "-") not in _may_be_empty(command):
                raise UsageError(f"{named}{_EMPTY}")
        before = word


def _spellings(name: str, marks: Sequence[Any]) -> Iterator[str]:
    """Yield an option's name, which is its field's unless declared otherwise, and its other long names."""
    declared = [mark for mark in marks if hasattr(mark, "aliases")]  # what tyro.conf.arg returns
    named = [mark.name for mark in declared if mark.name is not None]
    yield _option(named[-1] if named else name)
    for mark in declared:
        yield from (alias for alias in mark.aliases or () if alias.startswith("--"))


def refuse_unknown(arguments: Sequence[str], command: type, name: str) -> None:
    """Refuse an unknown option before the word after it is taken for an argument.

    Also refuse a flag that is followed by a value, which tyro would take for an argument.

    Args:
        arguments: arguments of a subcommand; after `--` come those of another command.
        command: the dataclass of the subcommand's options.
        name: name of the subcommand.

    Raises:
        UsageError: naming the option.
    """
    known = options_of(command)
    flags = {option for option, kind in known.items() if kind == "flag"}
    flags |= {"--help", *(f"--no-{option[2:]}" for option in flags)}
    names = {*known, *flags}
    for word in takewhile(lambda word: word != "--", arguments):
        given, equals, value = word.partition("=")
        option = given.replace("_", "-")
        if equals and option in flags:
            raise UsageError(f"{given} takes no value; leave ={value} out")
        if given.startswith("--"):
            meant = "" if option in names else did_you_mean(option, known) or _LISTED.format(name)
        else:  # such as -epochs; a short name, a negative number or - resembles no option
            meant = did_you_mean(f"-{option}", known) if _LIKE_AN_OPTION.fullmatch(option) else ""
        if meant:
            raise UsageError(f"{name} has no option {given}{meant}")


def _words(
    path: Path, options: _Options, given: Collection[str], print_line: Callable[[str], None]
) -> Iterator[str]:
    """Yield the options in a file as words of a command line.  Raises ConfigError.

    Args:
        options: options of the command.
        given: options on the command line; they take precedence, because a repeatable option of the file
            would otherwise be added to them.
        print_line: prints a line about options of a run that the command does not use.
    """
    known, left_out = options.known, []
    values, began_in = _values_of(path, known)
    for name, value in _flat(values):
        option = _option(name)
        if option in options.refused:
            if began_in is None:
                raise ConfigError(
                    f"{path}: {name!r} does not apply to this command: {options.refused[option]}"
                )
            if option not in given and not _is_default(name, value):
                left_out.append(option if value is True else f"{option} {value}")
            continue
        if option not in known:
            meant = did_you_mean(option, known)
            raise ConfigError(f"{path}: {name!r} is not an option of this command{meant or '; leave it out'}")
        if known[option] == "repeated" and option in given:
            continue
        each = value if isinstance(value, list) else [value]
        is_empty = not each and known[option] != "repeated"
        if is_empty or (option not in options.may_be_empty and "" in each):
            raise ConfigError(f"{path}: {name!r} is empty; give it a value, or leave it out")
        elsewhere = Path(began_in or "").absolute() != Path.cwd()
        relative = elsewhere and option in _OF_PATHS and isinstance(value, str)
        yield from _of(path, option, str(Path(began_in or "") / value) if relative else value, known[option])
    if left_out:
        print_line(f"{path}: ignored, as they do not apply to this command: {', '.join(left_out)}")


def is_record_of_run(path: Path) -> bool:
    """Return whether a file can be read and is the record of a run."""
    try:
        values = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(values, dict) and values.get("format") == RUN_FORMAT and "options" in values


def _values_of(path: Path, known: Mapping[str, _Kind]) -> tuple[dict[str, Any], str | None]:
    """Return a file's options, and the folder in which its run was started (None: not a run's record).

    Args:
        known: options of the command.

    Raises:
        ConfigError: the file cannot be read, or has no options that the command could have.
    """
    began_in = None
    try:
        values = parse_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{_OPTION} {named_file_cannot_be_read(path, error)}") from error
    except ValueError as error:
        raise ConfigError(f'{path}: is not JSON ({error}); write {{"batch-size": 8}}, say') from error
    if isinstance(values, dict) and values.get("format") == RUN_FORMAT:
        if _OF_TRAINING not in known:
            raise ConfigError(
                f"{path}: is the record of a run, whose options are those of train, sweep, compare, tune and "
                f"profile; give {_OPTION} a file with options of this command"
            )
        began_in, values = str(values.get("directory", "")), values.get("options")
        if isinstance(values, dict):
            values = {name: value for name, value in values.items() if name != _RESOLVED}
    if not isinstance(values, dict):
        raise ConfigError(f'{path}: holds no options; write a JSON object, {{"batch-size": 8}}, say')
    return values, began_in


def _is_default(name: str, value: Any) -> bool:
    """Return whether a recorded value of an option is its default."""
    from speechdp.options.run import TrainOptions  # noqa: PLC0415 - fast --help

    return (name, value) in _flat(TrainOptions().to_json())


def _flat(values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the options in a file, including those in groups, as in run.json; null means not given."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value)
        elif value is not None:
            yield name, value


def _of(path: Path, option: str, value: Any, kind: _Kind) -> list[str]:
    if kind == "flag" and isinstance(value, bool):
        return [option if value else f"--no-{option.removeprefix('--')}"]
    if isinstance(value, list) and all(isinstance(one, (str, int, float)) for one in value):
        if kind == "repeated":
            return [f"{option}={one}" for one in value]
        if len(value) > 1:
            together = ",".join(map(str, value))
            raise ConfigError(
                f'{path}: {option} is {json.dumps(value)[:80]}; write one value, or "{together[:80]}" where '
                "it takes several"
            )
        return [f"{option}={value[0]}"]
    if isinstance(value, (str, int, float)):
        return [f"{option}={value}"]
    raise ConfigError(f"{path}: {option} is {json.dumps(value)[:80]}; write a text, a number, true or a list")
