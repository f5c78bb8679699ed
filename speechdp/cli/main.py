"""The console script `speechdp`: pick the subcommand, read its options, turn errors into one line."""

from __future__ import annotations

import dataclasses
import importlib
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import tyro

from speechdp import __version__, exit_codes, remedies
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
from speechdp.comm.environment import announced, wait_to_report
from speechdp.counting import did_you_mean
from speechdp.errors import ConfigError, SpeechDPError, UsageError
from speechdp.files import cannot_be_used
from speechdp.launching.forwarded_options import plain_option
from speechdp.parallel.run_files import differing
from speechdp.process.ending import (
    STOPPED_BEFORE,
    WARNINGS,
    Ended,
    describe_end,
    end_by_exception,
    end_by_held_warning,
    heed_put_off,
    ignore_signals,
    interrupts_raise,
    is_ended_by_mpirun,
    leave,
    leave_if_ended_by_mpirun,
)
from speechdp.process.garbage import collect_garbage_less_often
from speechdp.process.notices import print_message
from speechdp.process.output import STDERR, is_read, keep_standard_streams, lost_output
from speechdp.process.shortage import shortage
from speechdp.process.utf8 import use_utf8


@dataclass(frozen=True)
class Subcommand:
    """Where a subcommand's options are, and what `speechdp --help` says of it.

    Attributes:
        module: module of speechdp.cli.
        class_name: its dataclass of options.
        summary: one line for the overview.
        internal: options that only our own jobs give, as one word (`--job=weak-1`); `--help` hides them.
        refused: options of training or of the launcher that it has no use for, with what to do instead;
            `--help` hides them.
        script_class_name: the dataclass of options where `--script` is given: a training script of the
            user's, whose own arguments follow `--`; "": no such form.
    """

    module: str
    class_name: str
    summary: str
    internal: tuple[str, ...] = ()
    refused: Mapping[str, str] = dataclasses.field(default_factory=dict)
    script_class_name: str = ""


#: Subcommands under the headings of the overview.
_OVERVIEW: dict[str, dict[str, Subcommand]] = {
    "data": {
        "prepare": Subcommand(
            "prepare",
            "PrepareCommand",
            "make a data directory from a corpus, from Kaldi's files or with eSpeak NG",
        ),
        "inspect": Subcommand(
            "inspect", "InspectCommand", "show what a data directory holds and verify its checksums"
        ),
        "shard": Subcommand("shard", "ShardCommand", "copy a data directory into another number of shards"),
    },
    "training": {
        "train": Subcommand(
            "train",
            "TrainCommand",
            "train a model on all ranks it is started on",
            refused=dict.fromkeys(
                ("ranks", "np", "n", "hostfile", "hosts", "nodes"),
                "it trains on the ranks it is started on: "
                "speechdp launch -np N [--hostfile FILE] -- train ...",
            ),
        ),
        "sweep": Subcommand(
            "sweep",
            "SweepCommand",
            "train with several averaging periods, decode and report",
            refused={"strategy": "use --swept, --periods and --reference"},
            script_class_name="SweepScriptCommand",
        ),
        "compare": Subcommand(
            "compare",
            "CompareCommand",
            "train with several strategies and numbers of ranks, decode and report",
            internal=("job",),
            refused={
                "strategy": "use --strategies",
                "seed": "use --seeds",
                "max_steps": "runs are compared after whole epochs",
            },
            script_class_name="CompareScriptCommand",
        ),
        "tune": Subcommand(
            "tune",
            "TuneCommand",
            script_class_name="TuneScriptCommand",
            summary="find the strategy, averaging period, back-end and batch that learn fastest",
            internal=("job", "racing", "parts"),
            refused={
                "strategy": "use --strategies",
                "backend": "use --backends",
                "seed": "use --seeds",
                "max_steps": "use --budget",
            },
        ),
        "profile": Subcommand(
            "profile",
            "ProfileCommand",
            "time every function of a training step on several numbers of ranks",
            internal=("job",),
            refused={
                "global_batch": "give --batch-size, the batch of each rank; --strong measures with a "
                "constant batch over all ranks too",
                "max_steps": "use --steps",
                "script": "it times the functions of a task's model, in training on prepared data "
                "(train --task MODULE:CLASS trains one of yours); the parts of a script's steps are shown by "
                "speechdp report FOLDER",
                **dict.fromkeys(
                    (
                        "flat_start",
                        "realign",
                        "realign_epochs",
                        "realign_criterion",
                        "realign_from",
                        "context",
                        "tied_states",
                        "average_epochs",
                    ),
                    "it measures steps of one training",
                ),
            },
        ),
        "report": Subcommand(
            "report", "ReportCommand", "show the results of a run, sweep, comparison or profile"
        ),
        "simulate": Subcommand(
            "simulate", "SimulateCommand", "predict the speed of strategies and periods on a larger cluster"
        ),
    },
    "trained models": {
        "decode": Subcommand("decode", "DecodeCommand", "recognise a split and compute the word error rate"),
        "transcribe": Subcommand(
            "transcribe", "TranscribeCommand", "recognise audio files with a trained model"
        ),
        "synthesize": Subcommand(
            "synthesize", "SynthesizeCommand", "turn texts into speech, or measure how good it is"
        ),
        "posteriors": Subcommand(
            "posteriors", "PosteriorsCommand", "write a model's scores for Kaldi's decoders"
        ),
    },
    "several ranks and hosts": {
        "launch": Subcommand(
            "launch",
            "LaunchCommand",
            "start a command on several ranks and supervise it",
            refused={"ranks": "use -np"},
        ),
        "doctor": Subcommand(
            "doctor", "DoctorCommand", "check hosts, network and folders before starting a job"
        ),
        "submit": Subcommand(
            "submit", "SubmitCommand", "submit a command as a batch job (Slurm, LSF, PBS, Grid Engine)"
        ),
    },
}
SUBCOMMANDS = {name: command for group in _OVERVIEW.values() for name, command in group.items()}

#: Subcommands that take another one after `--`.
_WITH_COMMAND = ("launch", "submit")
#: Those that go on where they were stopped, if the same command is given again.
_GOING_ON = ("train", "sweep", "compare", "tune", "profile")
#: Options whose value is options for another program.
_QUOTED = ("--launch-args", "--mpi-args", "--scheduler-args")
#: Other ranks tell so much later than rank 0 what has stopped them before they met, s.
_AFTER_RANK_0_S = 5.0
#: What a shell reports for a program ended by SIGPIPE: the reader of its output has gone.
_BROKEN_PIPE = 141


def main() -> None:
    """Run the subcommand in sys.argv and exit with its code."""
    collect_garbage_less_often()
    use_utf8()
    keep_standard_streams()
    launch = announced()
    try:  # from here on, signals raise
        if sys.argv[1:2] == ["launch"]:  # which heeds warnings once it can tell ranks and batch system
            end_by_exception((signal.SIGTERM, signal.SIGHUP))
        elif launch is None or launch.size == 1:
            end_by_exception()
        elif is_ended_by_mpirun():
            end_by_exception((signal.SIGTERM, *WARNINGS))
        else:  # by others the launcher ends its ranks, and tells of it
            end_by_exception(WARNINGS)
        interrupts_raise()
        try:
            exit_code = run(sys.argv[1:])
        except SystemExit as stop:  # of an argument parser, also after --help
            exit_code = _exit_code_of(stop)
        ignore_signals()
    except (KeyboardInterrupt, Ended) as end:  # while `run` told of something else
        ignore_signals()
        leave_if_ended_by_mpirun(end)
        text, exit_code = describe_end(end)
        print_message(text)
    sys.stdout.flush()
    exit_code = _report_lost_output(exit_code)
    if exit_code in (0, exit_codes.STOPPED):
        leave(exit_code)
    sys.exit(exit_code)


def _exit_code_of(end: SystemExit) -> int:
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    print(end.code, file=sys.stderr)
    return exit_codes.FAILED


def _report_lost_output(exit_code: int) -> int:
    """Report lost output, unless that is done elsewhere; return the exit code for it."""
    lost = lost_output()
    if lost is None or exit_code != 0:
        return exit_code
    text, reader_has_gone = lost
    if reader_has_gone:  # `speechdp ... | head`
        return _BROKEN_PIPE
    if is_read(STDERR):
        print_message(f"{text}; free some space there, or send it elsewhere")
    return exit_codes.FAILED


def run(arguments: Sequence[str]) -> int:
    """Run a command line without the program's name; return the exit code."""
    name, *rest = arguments or ["--help"]
    if name in ("-h", "--help"):
        print(_overview())
        return 0
    if name == "--version":
        print(f"speechdp {__version__}")
        return 0
    if name not in SUBCOMMANDS:
        meant = did_you_mean(name, SUBCOMMANDS)
        print_message(f"unknown command {name!r}{meant}\n\n{_overview()}")
        return exit_codes.USAGE
    # OpenMP's threads spin while they wait: beside another busy process a rank would crawl.  Read by torch.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    options = set[str]()
    try:
        if name != "launch":
            end_by_held_warning()
        command = _parsed(name, _with_config(name, rest), _print_on_rank_0)
        heed_put_off()
        options = _options_of(command)
        with remedies.of_command(options):
            exit_code: int = command.run()
    except SpeechDPError as error:
        text, exit_code = _line_of(error, _of_forwarded(name, rest)), error.exit_code
        _let_rank_0_report()
    except OSError as error:
        line = cannot_be_used(error)
        if line is None:
            raise
        text, exit_code = line, exit_codes.FAILED
    except (KeyboardInterrupt, Ended) as end:
        leave_if_ended_by_mpirun(end)
        text, exit_code = describe_end(end)
        if name in _GOING_ON and isinstance(end, Ended) and end.is_warning and announced() is None:
            text, exit_code = STOPPED_BEFORE, exit_codes.STOPPED
        _let_rank_0_report()
    except (MemoryError, RuntimeError) as error:  # torch's are RuntimeErrors
        with remedies.of_command(options):
            line = shortage(error)
        if line is None:
            raise
        text, exit_code = line, exit_codes.CRASHED
    else:
        return exit_code
    print_message(text)
    return exit_code


def _line_of(error: SpeechDPError, arguments: Sequence[str]) -> str:
    """Return an error's line; where the value that it refuses stands in a --config file, with that."""
    return of_its_file(str(error), arguments) if isinstance(error, ConfigError) else str(error)


def _let_rank_0_report() -> None:
    """Wait on other ranks, in a job, until rank 0 has told what is wrong and the launcher has ended them.

    What stops a command before its ranks have met is mostly so on all of them, and one line says it.
    """
    launch = announced()
    wait_to_report(_AFTER_RANK_0_S if launch is not None and launch.rank > 0 else 0.0)


def _options_of(command: Any) -> set[str]:
    """Return the names of a command's options, those in its groups of options too."""
    names: set[str] = set()
    for field in dataclasses.fields(command):
        value = getattr(command, field.name)
        names |= _options_of(value) if dataclasses.is_dataclass(value) else {field.name}
    return names


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
    kind = _class_of(command, of_script=of_script)
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
    return with_config(arguments, lambda: _class_of(command, of_script=of_script), refused, _print_on_rank_0)


def _class_of(command: Subcommand, *, of_script: bool = False) -> type[Any]:
    """Return a subcommand's dataclass of options.  Imports its module alone: others may import torch."""
    module = importlib.import_module(f"speechdp.cli.{command.module}")
    found: type[Any] = getattr(module, command.script_class_name if of_script else command.class_name)
    return found


def _of_forwarded(name: str, arguments: Sequence[str]) -> Sequence[str]:
    """Return the arguments of the subcommand that another starts, or its own, among which --config may be."""
    if name not in _WITH_COMMAND or "--" not in arguments:
        return arguments
    inner = arguments[arguments.index("--") + 1 :]
    return _of_forwarded(inner[0], inner[1:]) if inner and inner[0] in SUBCOMMANDS else ()


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
    kind = _class_of(SUBCOMMANDS["train"])
    folders = arguments_of(arguments, kind)  # DATA RUN
    record = Path(folders[-1], "run.json") if len(folders) == 2 else None
    if record is None or not is_record_of_run(record):
        return parse(name, arguments)  # there is no run yet, or who reads it says what is wrong with it
    # What the options given here make is in the record as if it had been given.
    made = ["alignments"] if given & {"--flat-start", "--realign", "--context"} else []
    made += ["initial_model"] if "--realign-from" in given else []
    left_out = dict.fromkeys(made, "it is made by the options given")
    try:
        words = with_config([*arguments, f"--config={record}"], lambda: kind, left_out, lambda text: None)
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


def _print_on_rank_0(text: str) -> None:
    """Print a line to stderr that every rank of a job would have to print, not waiting for rank 0's."""
    launch = announced()
    if launch is None or launch.rank == 0:
        print_message(text)


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


def _refuse_others(name: str, refused: Mapping[str, str], arguments: Sequence[str]) -> None:
    """Refuse options that a command has no use for.  Raises UsageError."""
    for word in takewhile(lambda word: word != "--", arguments):  # after it comes another command
        shown = word.partition("=")[0].replace("_", "-")
        option = shown.lstrip("-").replace("-", "_")
        if word.startswith("-") and option in refused:
            raise UsageError(f"{shown} does not apply to {name}: {refused[option]}")


def _overview() -> str:
    lines = ["usage: speechdp COMMAND ...", "", "Train speech models data-parallel on several ranks.", ""]
    for heading, group in _OVERVIEW.items():
        lines += [f"{heading}:", *(f"  {name:<10} {command.summary}" for name, command in group.items()), ""]
    lines += ["speechdp COMMAND --help shows a command's options; --config FILE.json gives them by a file."]
    return "\n".join(lines)
