"""What is missing or wrong on a command line is told in a line, which names what could stand there."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import get_type_hints

import pytest
import tyro

from speechdp.cli import main
from speechdp.cli.support import command_line, config_file
from speechdp.cli.support.refusals import line_of
from speechdp.cli.support.subcommands import SUBCOMMANDS
from speechdp.cli.sweep import SweepCommand
from speechdp.parallel.registry import StrategyChoice
from tests.helpers.jobs import DEADLINE_S, ended_within, our_lines, under_mpirun


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("train", "train needs DATA and RUN; speechdp train --help says what that is"),
        ("train DATA", "train needs RUN; speechdp train --help says what that is"),
        ("shard DATA OUT", "shard needs --shards N; speechdp shard --help says what that is"),
        ("posteriors RUN DATA", "posteriors needs --out FILE; speechdp posteriors --help says what that is"),
        (
            "posteriors RUN DATA one two",
            "posteriors needs --out FILE, and does not take one, two; speechdp posteriors --help says what "
            "that is",
        ),
        ("train DATA RUN more", "train does not take more; speechdp train --help says what it takes"),
        (
            "train DATA RUN --optimizer sdg",
            "--optimizer sdg: choose one of adam, adamw, sgd; did you mean sgd?",
        ),
        ("train DATA RUN --device tpu", "--device tpu: choose one of auto, cpu, cuda; did you mean cpu?"),
        ("train DATA RUN --precision zzz", "--precision zzz: choose one of bf16, fp16, fp32"),
        ("train DATA RUN --epochs", "--epochs needs a value"),
        ("train DATA RUN --resume=yes", "--resume takes no value; leave =yes out"),
        ("report --help=yes", "--help takes no value; leave =yes out"),
        ("train DATA RUN --no-resume=yes", "--no-resume takes no value; leave =yes out"),
        ("train DATA RUN --epochs few", "--epochs: expected a whole number, got 'few'"),
        ("train DATA RUN --learning-rate few", "--learning-rate: expected a number, got 'few'"),
        ("launch -np few -- train DATA RUN", "--np: expected a whole number, got 'few'"),
        ("launch -np few -- train DATA RUN --help", "--np: expected a whole number, got 'few'"),
        ("launch -np 2 -- train DATA RUN --epochs few", "--epochs: expected a whole number, got 'few'"),
        ("launch -np 2 train DATA RUN --epochs 3", "launch: write -- before the command: ... -- train ..."),
        ("submit train DATA RUN", "submit: write -- before the command: ... -- train ..."),
    ],
)
@pytest.mark.parametrize("columns", ["40", "200"])
def test_a_refusal_is_one_line(
    command: str,
    says: str,
    columns: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert main.run(command.split()) == 2
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", f"speechdp: {says}\n")


#: What follows an option that a command of these needs to be one.
WHOLE = {
    "prepare": "SOURCE DATA",
    "train": "DATA RUN",
    "decode": "RUN DATA",
    "synthesize": "RUN text",
    "transcribe": "RUN FILE",
    "doctor": "",
}


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("prepare", "prepare takes SOURCE and DATA, not 0 paths; or --synthetic HOURS DATA"),
        ("prepare SOURCE", "prepare takes SOURCE and DATA, not 1 paths; or --synthetic HOURS DATA"),
        ("prepare --synthetic 1", "prepare --synthetic HOURS takes one path, the DATA folder to make"),
        ("transcribe RUN", "no audio files given; name some after RUN, or a folder that holds some"),
        ("launch", "nothing to launch; write it after --, e.g. speechdp launch -np 2 -- train DATA RUN"),
        ("launch -np 2 -- launch", "launch cannot start launch; write train, sweep or another subcommand "),
        ("launch -np 2 -- train DATA", "train needs two folders, but got only DATA: speechdp launch "),
        ("launch -np 2 -- train RUN --resume", "train needs two folders, but got only RUN: "),
        ("launch -np 2 -- train --resume DATA RUN", "write the folders right after the subcommand, options "),
        ("launch -np 2 -- compare DATA OUT", "compare starts its own jobs: give the command without launch"),
        ("launch -- train DATA RUN", "give the number of ranks: -np N, or --hostfile FILE (see hostfiles/)"),
        ("submit --nodes 1 --ranks-per-node 1 --time 1:00:00 --scheduler slurm --", "nothing to submit; "),
        ("sweep DATA OUT --strategy bmuf", "--strategy does not apply to sweep: use --swept, "),
        ("compare DATA OUT -- a", "what follows -- are arguments of a script, but there is no --script: "),
        ("train --config", "--config needs a file: --config FILE.json"),
        ("nope", "unknown command 'nope'"),
    ],
)
def test_a_command_line_that_is_none_ends_with_2(
    command: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(command.split()) == 2
    assert capsys.readouterr().err.startswith(f"speechdp: {says}")


@pytest.mark.parametrize("command", ["train D R --strategy", "sweep D O --swept", "sweep D O --reference"])
def test_an_unknown_strategy_is_refused_before_ranks_are_started(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["launch", "-np", "2", "--dry-run", "--", *command.split(), "bmf"]) == 1
    told = capsys.readouterr()
    assert told.err.startswith("speechdp: unknown strategy 'bmf'; there are: ") and told.out == ""


def _options_with_a_path() -> list[tuple[str, str]]:
    """Return each option of a command of WHOLE that takes a path, also where it may be given again."""
    found = []
    for name in WHOLE:
        found += [(name, option) for option in paths_of(SUBCOMMANDS[name].options_class())]
    return found


def paths_of(kind: type) -> Iterator[str]:
    """Yield the options of a dataclass whose type speaks of paths."""
    for name, hint in get_type_hints(kind, include_extras=True).items():
        marks = getattr(hint, "__metadata__", ())
        bare = hint.__origin__ if marks else hint
        if isinstance(bare, type) and dataclasses.is_dataclass(bare):
            yield from () if bare is StrategyChoice else paths_of(bare)
        elif "Path" in str(bare) and tyro.conf.Positional not in marks:
            names = [mark.name for mark in marks if getattr(mark, "name", None)]
            yield "--" + (names[-1] if names else name).replace("_", "-")


def test_commands_have_options_with_a_path() -> None:
    assert {("prepare", "--like"), ("prepare", "--dev"), ("train", "--alignments")} <= set(
        _options_with_a_path()
    )


@pytest.mark.parametrize(("name", "option"), _options_with_a_path())
@pytest.mark.parametrize("is_one_word", [False, True])
def test_an_empty_path_is_not_the_current_folder(
    name: str, option: str, is_one_word: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a job's script has it whose variable is not set: --like "$RUN"."""
    words = [f"{option}="] if is_one_word else [option, ""]
    for line in ([*WHOLE[name].split(), *words], [*words, *WHOLE[name].split()]):
        assert main.run([name, *line]) == 2
        assert capsys.readouterr().err == f"speechdp: {option} is empty; is a variable of the shell unset?\n"


@pytest.mark.parametrize(
    ("words", "place"),
    [
        (["train", "DATA", "RUN", "--strategy", ""], "--strategy"),
        (["train", "DATA", "RUN", "--held_out="], "--held_out"),
        (["launch", "--hostfile", "", "--", "train", "DATA", "RUN"], "--hostfile"),
        (["launch", "-np", "2", "--", "train", "DATA", ""], "the argument after 'DATA'"),
        (["compare", "DATA", "OUT", "--script", ""], "--script"),
        (["train", "DATA", "RUN", "--config", ""], "--config"),
        (["report", ""], "the first argument"),
        (["transcribe", "RUN", ""], "the argument after 'RUN'"),
        (["transcribe", "RUN", "FILE", "-o", ""], "-o"),
        (["transcribe", "RUN", "FILE", "-o="], "-o"),
    ],
)
def test_other_empty_words_are_refused(
    words: list[str], place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(words) == 2
    assert capsys.readouterr().err == f"speechdp: {place} is empty; is a variable of the shell unset?\n"


def test_an_option_that_is_empty_where_it_is_not_given_may_be_given_so() -> None:
    command = command_line.parse("launch", ["--mpi-args", "", "-np", "2", "--", "python", "own.py", ""])
    assert (command.mpi_args, command.command) == ("", ("python", "own.py", ""))
    command = command_line.parse("sweep", ["DATA", "OUT", "--decode-split", "", "--reference="])
    assert (command.decode_split, command.reference) == ("", "")


@pytest.mark.parametrize(
    "command",
    ["train DATA RUN --optimizer sdg --help", "train --epochs -h", "launch -np few -h -- train DATA"],
)
def test_who_asks_for_help_gets_it_beside_wrong_values(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main.run(command.split())
    said = capsys.readouterr()
    assert (ended.value.code, said.err) == (0, "")
    assert said.out.startswith(f"usage: speechdp {command.split(maxsplit=1)[0]} [-h]")


def test_what_is_told_in_another_box_stays() -> None:
    lines = ("\x1b[31m╭─ Anything else ──╮\x1b[0m", "│ one               │", "│     two           │")
    more = ("│ ───────────────── │", "│ For full helptext │", "╰───────────────────╯")
    assert line_of("\n".join([*lines, *more]), "train") == "Anything else: one two"
    # Where standard output is not UTF-8.
    lines, more = (
        (" Anything else ", " ------ ", "  one", "      two"),
        ("  ------", "  For full helptext", " "),
    )
    assert line_of("\n".join([*lines, *more]), "train") == "Anything else: one two"


def test_a_refusal_of_all_ranks_is_told_once() -> None:
    ended = ended_within(DEADLINE_S, under_mpirun(2, "train", "DATA"))
    assert ended.exit_code == 2, ended.output
    assert our_lines(ended) == ["speechdp: train needs RUN; speechdp train --help says what that is"]


def test_types_of_options_are_read_only_where_a_word_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[type] = []
    monkeypatch.setattr(
        config_file, "_may_be_empty", lambda command: (read.append(command), {"--reference"})[1]
    )
    config_file.refuse_empty(["DATA", "--reference", "name", "--epochs=3", "--", ""], SweepCommand)
    assert read == []
    config_file.refuse_empty(["DATA", "--reference", ""], SweepCommand)
    assert read == [SweepCommand]
