"""The command line: help, what is unknown, errors of one line, exit codes, and output nobody reads."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import speechdp as package
from speechdp.cli import launch, main
from speechdp.cli.main import run as speechdp
from speechdp.cli.support.subcommands import SUBCOMMANDS
from speechdp.cli.train import TrainCommand
from speechdp.comm.startup.folder_owner import owner_of
from speechdp.data.shards.dataset import Dataset
from speechdp.errors import ConfigError, RunError
from speechdp.exit_codes import STOPPED
from speechdp.labels.hmm import StateInventory
from speechdp.labels.state_tying import StateTying
from speechdp.launching.cores import room_for_ranks
from speechdp.ownership.overwrite import COMPARISON, RUN, SWEEP, check_overwrite, empty
from speechdp.process.ending import Stopped
from tests.helpers.jobs import SPEECHDP
from tests.helpers.mpi import REPOSITORY, job_environment
from tests.helpers.tiny_data import TINY_MODEL, flip_byte, write_tiny_data

OPTIONS = (*TINY_MODEL, "--epochs", "1")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return write_tiny_data(tmp_path_factory.mktemp("cli") / "data")


# --- help and what is unknown -------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_the_overview_names_every_command(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert speechdp(arguments) == 0
    out = capsys.readouterr().out
    for name, command in SUBCOMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(command.summary)}$", out, re.MULTILINE)


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert speechdp(["--version"]) == 0
    assert capsys.readouterr().out == f"speechdp {package.__version__}\n"


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_every_command_has_help_for_every_option(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        speechdp([name, "--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith(f"usage: speechdp {name} ")
    command = getattr(importlib.import_module(f"speechdp.cli.{SUBCOMMANDS[name].module}"), class_name(name))
    for field in dataclasses.fields(command):
        if dataclasses.is_dataclass(field.default_factory):
            inner = [f.name for f in dataclasses.fields(field.default_factory)]
        else:
            inner = [field.name] if "Positional" not in str(field.type) else []
        for option in inner if field.name not in ("options", "num_ranks") else []:
            is_shown = f"--{option.replace('_', '-')}" in out
            assert is_shown == (option not in SUBCOMMANDS[name].internal), option


def class_name(name: str) -> str:
    return SUBCOMMANDS[name].class_name


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_commands_are_made_alike(name: str) -> None:
    module = importlib.import_module(f"speechdp.cli.{SUBCOMMANDS[name].module}")
    command = getattr(module, class_name(name))
    assert class_name(name) == f"{name.capitalize()}Command"
    assert dataclasses.is_dataclass(command) and inspect.getdoc(command)
    assert inspect.signature(command.run).return_annotation in ("int", "None")


def test_the_overview_does_not_wait_for_torch() -> None:
    code = "import sys; from speechdp.cli.main import run; run(['--help']); print('torch' in sys.modules)"
    ended = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=REPOSITORY
    )
    assert ended.stdout.splitlines()[-1] == "False"


def test_an_unknown_command_is_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert speechdp(["trian", "DATA", "RUN"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("speechdp: unknown command 'trian'; did you mean train?\n") and "  train " in err


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "DATA", "RUN", "--epoch-count", "3"],
        ["train", "DATA", "RUN", "--epochs", "many"],
        ["train", "DATA", "RUN", "--backend", "smoke-signals"],
        ["train", "DATA"],
        ["train", "DATA", "RUN", "EXTRA"],
        ["decode", "RUN", "DATA", "--grammar", "none"],
        ["report"],
    ],
)
def test_an_unknown_option_or_value_is_exit_code_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert speechdp(arguments) == 2
    assert "Traceback" not in capsys.readouterr().err


# --- errors -------------------------------------------------------------------------------------------


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    (line,) = capsys.readouterr().err.splitlines()
    return line


def train(dataset: Dataset, run: Path, *options: str) -> int:
    return speechdp(["train", str(dataset.path), str(run), *OPTIONS, *options])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--epochs", "0"], "--epochs 0: must be at least 1"),
        (["--learning-rate", "nan"], "--learning-rate nan: must be positive"),
        (["--momentum", "1"], "--momentum 1.0: must lie in [0, 1)"),
        (["--left-context", "-3"], "--left-context -3: must not be negative"),
        (["--strategy", "no_such"], "unknown strategy 'no_such'; there are: "),
        (["--strategy", "model_averaging:period=0"], "model_averaging:period: '0' is not a period; write"),
        (["--held-out", "eval"], "has no split 'eval', only train, dev, test"),
        (["--alignments", "nowhere"], "nowhere: no such alignment directory"),
        (["--device", "cuda"], "--device cuda: torch sees no GPU on this host"),
        (["--resume", "--overwrite"], "--resume and --overwrite exclude each other"),
    ],
)
def test_options_that_cannot_be_used_are_one_line(
    dataset: Dataset,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    message: str,
) -> None:
    import torch  # noqa: PLC0415

    if "cuda" in options and torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    assert train(dataset, tmp_path / "run", *options) == 1
    line = one_line(capsys)
    assert line.startswith("speechdp: ") and message in line
    # A run is begun only where nothing but its data can still be wrong.
    assert not (tmp_path / "run" / "run.json").exists() or "--alignments" in options


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["train", "DATA", "RUN", "--resume", "--overwrite"], "--resume and --overwrite exclude each other"),
        (["train", "DATA", "RUN", "--pause-at", "-1"], "--pause-at -1: must be at least 0"),
        (["sweep", "DATA", "OUT", "--periods", "4,4"], "--periods 4,4: a period is given twice"),
        (["sweep", "DATA", "OUT", "--race=-1"], "--race -1: "),
        (["decode", "RUN", "DATA", "--words", "words.txt"], "--words and --mdl go with --graph HCLG.fst"),
    ],
)
def test_options_that_cannot_be_used_are_told_before_ranks_are_started(
    command: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "run_job", None)
    assert speechdp(["launch", "-np", "2", "--", *command]) == 1
    assert message in one_line(capsys)


def test_more_ranks_than_there_is_memory_for_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "run_job", None)
    limit = tmp_path / "memory.max"
    limit.write_text(f"{2**30}\n")
    assert room_for_ranks(limit) == 16
    limit.write_text("max\n")
    assert room_for_ranks(limit) == room_for_ranks(tmp_path / "none") > 16
    assert speechdp(["launch", "-np", "1000000", "--", "train", "DATA", "RUN"]) == 1
    assert "1,000,000 ranks on this machine: its memory has room for" in one_line(capsys)


def test_data_that_are_not_there_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["train", "nowhere", "run"], ["inspect", "nowhere"], ["sweep", "nowhere", "out"]):
        assert speechdp([*arguments[:1], str(tmp_path / "nowhere"), *arguments[2:]]) == 1
        assert "is not a complete data directory, run speechdp prepare" in one_line(capsys)
    assert speechdp(["decode", str(tmp_path / "run"), str(tmp_path)]) == 1
    assert one_line(capsys).startswith(f"speechdp: {tmp_path}/")


def test_a_folder_that_holds_a_run_is_not_written_to(
    dataset: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert train(dataset, run) == 0
    before = {p: p.stat().st_mtime_ns for p in run.rglob("*")}
    capsys.readouterr()
    assert train(dataset, run) == 1
    assert (
        one_line(capsys) == f"speechdp: {run}: already holds a run; continue with --resume, or --overwrite it"
    )
    (run / "completed.json").rename(tmp_path / "completed.json")  # as if it had been interrupted
    assert train(dataset, run) == 1
    assert "already holds a run" in one_line(capsys)
    assert train(dataset, run, "--resume", "--seed", "5") == 1
    refused = one_line(capsys)
    was = "the run was begun with other options (--seed was 1, is 5)"
    assert f"{was}; give only --resume, which uses the run's own options, or choose another folder" in refused
    further = f"let the run end by its own command, then begin another run with --initial-model {run}"
    assert refused.endswith(f"to train its model further, {further}")
    (tmp_path / "completed.json").rename(run / "completed.json")
    assert {p: p.stat().st_mtime_ns for p in run.rglob("*")}.keys() == before.keys()
    assert train(dataset, run, "--overwrite", "--seed", "5") == 0
    assert json.loads((run / "run.json").read_text())["seed"] == 5


def test_resume_alone_goes_on_as_the_run_was_begun(
    dataset: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, whole = tmp_path / "run", tmp_path / "whole"
    assert train(dataset, whole, "--seed", "7", "--spec-augment") == 0
    assert train(dataset, run, "--seed", "7", "--spec-augment", "--pause-at", "1") == 75
    capsys.readouterr()
    bare = ["train", str(dataset.path), str(run), "--resume"]
    assert speechdp([*bare, "--seed", "5", "--max-steps", "9"]) == 1
    assert (
        "begun with other options (--seed was 7, is 5; --max-steps was 0, is 9); " in capsys.readouterr().err
    )
    assert speechdp([*bare, "--task", "synthesis"]) == 1  # with which some of the run's own do not go
    assert "leave it out" not in capsys.readouterr().err
    assert speechdp([*bare, "--hang-timeout", "500"]) == 0
    (taken,) = [line for line in capsys.readouterr().err.splitlines() if "options not given" in line]
    assert taken.startswith(f"speechdp: {run}/run.json: options not given are taken from this run: ")
    assert "--seed 7" in taken and "--spec-augment" in taken and "--hang-timeout" not in taken
    assert (run / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    "options",
    [
        ["--realign", "1", "--realign-epochs", "1", "--context", "left"],
        ["--realign", "1", "--realign-epochs", "1", "--realign-from", "throughout"],
    ],
)
def test_the_same_command_resumes_a_run_that_makes_its_targets(
    dataset: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    run, whole = tmp_path / "run", tmp_path / "whole"
    assert train(dataset, whole, *options) == 0
    assert train(dataset, run, *options, "--pause-at", "1", "--resume") == 75
    shutil.rmtree(run / "alignments" / "1")  # with what made it, it is made again
    assert train(dataset, run, *options, "--resume") == 0
    assert "options not given" not in capsys.readouterr().err
    assert (run / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    shutil.rmtree(run / "alignments")
    assert train(dataset, run, *options, "--resume") == 0  # complete


def test_what_a_command_changes_of_signals_is_its_own_process_alone(dataset: Dataset, tmp_path: Path) -> None:
    """Here it runs in that of the tests, which Ctrl-C has to end."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as tests/conftest.py has it
    before = [signal.getsignal(number) for number in signal.valid_signals()]
    assert train(dataset, tmp_path / "run") == 0
    assert [signal.getsignal(number) for number in signal.valid_signals()] == before


def test_what_is_given_to_resume_goes_with_the_runs_own_options(
    dataset: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--average-epochs goes with --epochs, which is not given again."""
    run = tmp_path / "run"
    assert train(dataset, run, "--epochs", "14", "--average-epochs", "13", "--pause-at", "1") == 75
    bare = ["train", "--hang-timeout", "500", str(dataset.path), str(run), "--resume"]
    assert speechdp([*bare, "--average-epochs", "13", "--pause-at", "2"]) == 75
    taken = [line for line in capsys.readouterr().err.splitlines() if "options not given" in line]
    assert len(taken) == 1 and "--epochs 14" in taken[0] and "--average-epochs" not in taken[0]
    assert speechdp([*bare, "--average-epochs=15"]) == 1
    assert one_line(capsys).startswith("speechdp: --average-epochs 15: the training has 14 epochs; ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--held-out", "eval"], "has no split 'eval', only train, dev, test"),
        (["--alignments", "nowhere"], "nowhere: no such alignment directory"),
        (["--initial-model", "nowhere"], "nowhere: no such folder"),
        (["--strategy", "ad_psgd:groups=2"], "1 ranks cannot be divided into groups of that size"),
        (["--strategy", "ad_psgd", "--tolerate-loss"], "the serial back-end cannot continue without a lost"),
        (["--alignments", "TIED", "--realign", "1"], "has states in context already"),
    ],
)
def test_a_run_is_overwritten_only_by_one_that_can_begin(
    dataset: Dataset,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    message: str,
) -> None:
    run, tied = tmp_path / "run", tmp_path / "tied"
    tied.mkdir()
    inventory = StateInventory.load(dataset.classes_path)
    StateTying(inventory, "left", [], list(range(inventory.num_classes))).save(tied)
    (run / "checkpoints").mkdir(parents=True)
    (run / "run.json").write_text("{}")
    assert train(dataset, run, "--overwrite", *(str(tied) if o == "TIED" else o for o in options)) == 1
    assert message in one_line(capsys)
    assert sorted(path.name for path in run.iterdir()) == ["checkpoints", "run.json"]


@pytest.mark.parametrize("split", ["train", "dev"])
def test_a_run_is_overwritten_only_where_all_shards_are_there(
    dataset: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str], split: str
) -> None:
    """A finished run was deleted for one that could not begin."""
    shutil.copytree(dataset.path, data := tmp_path / "data")
    shard = Dataset.open(data).shard_paths(split)[-1]
    shard.unlink()
    for kind, *command in ((RUN, "train"), (SWEEP, "sweep", "--decode-split", ""), (COMPARISON, "compare")):
        made = tmp_path / command[0]
        made.mkdir()
        (made / kind.record).write_text("{}")
        assert speechdp([*command, str(data), str(made), "--overwrite"]) == 1
        assert f"{shard}: no such shard" in one_line(capsys)
        assert [path.name for path in made.iterdir()] == [kind.record]


def test_a_run_that_has_stopped_says_how_it_goes_on(
    dataset: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, pause = tmp_path / "run", ("--pause-at", "1")
    for options, resume in (
        ((), "--resume"),
        (("--resume",), "--resume"),  # which stands there already
        (("--overwrite",), "--resume in place of --overwrite"),
    ):
        assert train(dataset, run, *pause, *options) == STOPPED
        assert (
            f"stopped as requested: --pause-at 1 is reached; give a later --pause-at, or none, and {resume} "
            f"to continue: {run}"
        ) in " ".join(capsys.readouterr().out.split())
        command = TrainCommand(dataset.path, run, overwrite="--overwrite" in options)
        assert command._describe_stop(Stopped()) == (
            f"stopped as requested; the same command with {resume} continues"
        )


def test_overwrite_deletes_nothing_but_runs(tmp_path: Path) -> None:
    check_overwrite(tmp_path / "nothing", RUN)
    corpus = tmp_path / "corpus"
    (corpus / "alignments" / "0").mkdir(parents=True)
    (corpus / "alignments" / "0" / "ali.1.gz").write_text("")
    (corpus / "wav.scp").write_text("")
    with pytest.raises(ConfigError, match="--overwrite deletes only folders that hold a run"):
        check_overwrite(corpus, RUN)
    for name in RUN.records:
        run = tmp_path / "run"
        record = run / name.replace("*", "1")
        record.parent.mkdir(parents=True)
        record.write_text("{}")
        check_overwrite(run, RUN)
        with owner_of(run, "train", print) as owner:
            assert empty(owner, RUN) == ""
            assert [path.name for path in run.iterdir()] == ["owner.json"]
        run.rmdir()


def test_an_interrupt_is_exit_code_130(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(out: Path, target: float | None, metric: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("speechdp.cli.report.print_report", interrupt)
    assert speechdp(["report", str(tmp_path)]) == 130
    assert one_line(capsys) == "speechdp: interrupted"


def test_an_interrupted_training_names_its_checkpoint_and_how_to_go_on(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    run = tmp_path / "run"
    assert train(dataset, run) == 0
    (run / "completed.json").unlink()
    monkeypatch.setattr("speechdp.train.realign.train_with_realignment", interrupt)
    for folder, known in (
        (run, f"last checkpoint: {run}/checkpoints/step-"),
        (tmp_path / "new", "no checkpoint in"),
    ):
        capsys.readouterr()
        assert train(dataset, folder, "--resume") == 130
        printed = capsys.readouterr()
        said = " ".join(printed.out.split())
        assert known in said and said.endswith("; the same command with --resume continues")
        assert printed.err == "speechdp: interrupted\n"


def test_a_failure_before_the_first_checkpoint_says_how_to_go_on(
    dataset: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(dataset.path, tmp_path / "data")
    mine, run = Dataset.open(tmp_path / "data"), tmp_path / "run"
    shard = mine.shard_paths("train")[0]
    whole = shard.read_bytes()
    flip_byte(shard, 0, "features")
    assert train(mine, run) == 1
    said = one_line(capsys)
    assert "is damaged (checksum); " in said
    assert said.endswith("copy the file again; afterwards the same command with --resume continues")
    shard.write_bytes(whole)
    assert train(mine, run) == 1
    assert train(mine, run, "--resume") == 0


def test_errors_of_the_users_making_are_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(out: Path, target: float | None, metric: str) -> None:
        raise RunError("run/model.safetensors: damaged; train again")

    monkeypatch.setattr("speechdp.cli.report.print_report", fail)
    assert speechdp(["report", str(tmp_path)]) == 1
    assert one_line(capsys) == "speechdp: run/model.safetensors: damaged; train again"


# --- pipes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["inspect", "DATA"]])
def test_output_that_nobody_reads_is_no_failure_to_talk_about(dataset: Dataset, arguments: list[str]) -> None:
    """As in `speechdp ... | head -1`."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        ended = subprocess.run(
            [*SPEECHDP, *(str(dataset.path) if a == "DATA" else a for a in arguments)],
            check=False,
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
            env=job_environment(),
        )
    finally:
        os.close(writing)
    assert ended.stderr == ""
    assert ended.returncode == 141


def test_main_exits_with_the_code_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["speechdp", "no-such-command"])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 2
