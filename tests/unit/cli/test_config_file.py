"""--config FILE.json: options of a file, as if they were given, and the command line wins over it."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from speechdp.cli import main
from speechdp.cli.prepare import PrepareCommand
from speechdp.cli.support import command_line, config_file
from speechdp.cli.support.config_file import arguments_of, options_of, refuse_empty
from speechdp.cli.support.subcommands import SUBCOMMANDS
from speechdp.cli.train import TrainCommand
from speechdp.errors import ConfigError
from speechdp.options.run import TrainOptions
from tests.helpers.tiny_data import write_tiny_data


def trained(*words: str) -> TrainCommand:
    command = command_line.read_command("train", ["D", "R", *words])
    assert isinstance(command, TrainCommand)
    return command


def file_of(folder: Path, content: Any) -> str:
    path = folder / "options.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def testoptions_of_a_file_are_as_if_they_were_given(tmp_path: Path) -> None:
    values = {"batch_size": 3, "flat-start": True, "spec_augment": False, "learning-rate": 1e-3, "seed": None}
    values["bidirectional"] = True  # no flag: it takes True or False
    file = file_of(tmp_path, {**values, "strategy": "model_averaging:period=4", "held_out": "train"})
    given = [
        "--batch-size",
        "3",
        "--bidirectional",
        "True",
        "--flat-start",
        "--no-spec-augment",
        "--learning-rate",
        "0.001",
    ]
    expected = trained(*given, "--strategy", "model_averaging:period=4", "--held-out", "train")
    for words in (["--config", file], [f"--config={file}"]):
        assert trained(*words) == expected
    assert expected.options.to_json()["batch"]["batch_size"] == 3  # as run.json records it


@pytest.mark.parametrize("before", [True, False])
def test_the_command_line_wins(before: bool, tmp_path: Path) -> None:
    config = ["--config", file_of(tmp_path, {"epochs": 3, "seed": 7, "flat_start": True})]
    own = ["--epochs", "5", "--no-flat-start"]
    options = trained(*(own + config if before else config + own)).options
    assert (options.epochs, options.seed, options.flat_start) == (5, 7, False)


def test_a_run_is_repeated_by_its_record(tmp_path: Path) -> None:
    words = ["--batch-size", "3", "--speed-perturb", "--strategy", "bmuf:period=2", "--epochs", "2"]
    options = trained(*words, "--seed", "5", "--optimizer", "sgd", "--slow-ranks", "1:2").options
    record = {"format": "speechdp-run", "seed": 1, "options": options.to_json(2)}
    again = trained("--config", file_of(tmp_path, record)).options
    assert again == options
    other = trained("--config", file_of(tmp_path, record), "--seed", "6").options
    assert other == dataclasses.replace(options, seed=6)


@pytest.mark.parametrize(
    ("command", "left_out"),
    [
        ("sweep", "--strategy bmuf:period=2"),
        ("compare", "--strategy bmuf:period=2, --seed 5"),
        ("tune", "--strategy bmuf:period=2, --seed 5"),
        ("profile", "--flat-start"),
    ],
)
def test_an_experiment_takes_of_a_run_s_record_what_it_has_a_use_for(
    command: str, left_out: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was refused by an option that nobody had given, as --realign 0."""
    options = trained("--cells", "8", "--strategy", "bmuf:period=2", "--seed", "5", "--flat-start").options
    file = file_of(tmp_path, {"format": "speechdp-run", "options": options.to_json(2)})
    taken = command_line.read_command(command, ["D", "OUT", "--config", file])
    assert taken.options.model.cells == 8
    line = f"speechdp: {file}: ignored, as they do not apply to this command: {left_out}\n"
    assert capsys.readouterr().err == line
    usual = file_of(tmp_path, {"format": "speechdp-run", "options": TrainOptions().to_json()})
    command_line.read_command(command, ["D", "OUT", "--config", usual])
    assert capsys.readouterr().err == ""


def test_a_command_that_does_not_train_refuses_the_record_of_a_run_as_a_whole(tmp_path: Path) -> None:
    """It said that 'preset' was no option, and asked for --nbest."""
    file = file_of(tmp_path, {"format": "speechdp-run", "options": TrainOptions().to_json()})
    with pytest.raises(ConfigError, match=r"options\.json: is the record of a run, whose options"):
        command_line._with_config("decode", ["R", "--config", file])


def test_an_option_that_does_not_apply_is_named_with_its_file(tmp_path: Path) -> None:
    file = file_of(tmp_path, {"strategy": "bmuf"})
    message = f"{file}: 'strategy' does not apply to this command: use --strategies"
    with pytest.raises(ConfigError, match=re.escape(message)):
        command_line._with_config("compare", ["D", "OUT", "--config", file])


def test_forwarded_commands_and_scripts_have_their_own(tmp_path: Path) -> None:
    file = file_of(tmp_path, {"epochs": 3})
    launch = ["-np", "2", "--", "train", "D", "R", "--config", file, "--seed", "2"]
    assert command_line._with_config("launch", launch) == [*launch[:6], "--epochs=3", *launch[8:]]
    script = ["--", "python", "train.py", "--config", file]
    assert command_line._with_config("launch", script) == script
    own = ["D", "--script", "train.py", "--", "--config", file]
    assert command_line._with_config("compare", own) == own


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"batchsize": 3}, "'batchsize' is not an option of this command; did you mean --batch-size?"),
        ({"model": {"cels": 3}}, "'cels' is not an option of this command; did you mean --cells?"),
        ({"qqqqqq": 3}, "'qqqqqq' is not an option of this command; leave it out"),
        ({"run_dir": "D"}, "'run_dir' is not an option of this command"),
        ({"strategy": ""}, "'strategy' is empty; give it a value, or leave it out"),
        ({"alignments": ""}, "'alignments' is empty; give it a value, or leave it out"),
        ({"epochs": []}, "'epochs' is empty; give it a value, or leave it out"),
        ({"epochs": [3, 4]}, '--epochs is [3, 4]; write one value, or "3,4" where it takes several'),
        ({"epochs": [[3]]}, "--epochs is [[3]]; write a text, a number, true or a list"),
        ([3], "holds no options; write a JSON object"),
        ({"format": "speechdp-run"}, "holds no options"),
        ("{", "is not JSON"),
    ],
)
def test_what_is_no_option_is_refused_by_name(content: Any, message: str, tmp_path: Path) -> None:
    file = file_of(tmp_path, content)
    with pytest.raises(ConfigError, match=re.escape(f"{file}: {message}")) as caught:
        trained("--config", file)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("command", "content", "says"),
    [
        *(
            (command, *refused)
            for command in ("train D R", "launch -np 2 -- train D R")
            for refused in (
                ({"epochs": "few"}, "--epochs: expected a whole number, got 'few'"),
                ({"epochs": -1}, "--epochs -1: must be at least 1"),
                ({"optimizer": "sdg"}, "--optimizer sdg: choose one of adam, adamw, sgd; did you mean sgd?"),
                ({"batch": {"batch_size": 0}}, "--batch-size 0: must be at least 1 segment"),
            )
        ),
        # Ranks look at what needs torch; launch would have given them the words alone.
        ("train D R", {"strategy": "bmuf:period=x"}, "bmuf:period: 'x' is not a period; write 16 (steps)"),
        ("train D R", {"strategy": "bmf"}, "unknown strategy 'bmf'; there are: "),
    ],
)
def test_a_wrong_value_is_told_with_its_file(
    command: str, content: Any, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was told as if it had been given, and a file may be shared by many commands."""
    file = file_of(tmp_path, content)
    assert main.run([*command.split(), "--config", file]) in (1, 2)
    assert capsys.readouterr().err.startswith(f"speechdp: {file}: {says}")


def test_a_wrong_value_that_is_given_beside_a_file_is_not_the_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = file_of(tmp_path, {"epochs": 3, "seed": 1})
    for given in ("--epochs=few", "--learning-rate=few"):
        assert main.run(["train", "D", "R", f"--config={file}", given]) == 2
        assert capsys.readouterr().err.startswith(f"speechdp: {given.partition('=')[0]}: expected a")


def test_a_learning_rate_of_a_file_beside_others_to_be_tried_is_told_with_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_tiny_data(tmp_path / "DATA")
    file = file_of(tmp_path, {"learning_rate": 0.003})
    words = ["compare", str(data.path), str(tmp_path / "OUT"), "--strategies=bmuf:period=4", "--ranks=2"]
    assert main.run([*words, f"--config={file}", "--learning-rates=0.001,0.002"]) == 1
    says = "--learning-rate: leave it out: --learning-rates tries others"
    assert capsys.readouterr().err == f"speechdp: {file}: {says}\n"
    assert main.run([*words, "--learning-rates="]) == 2
    assert capsys.readouterr().err.startswith("speechdp: --learning-rates is empty")


def test_an_option_that_may_be_repeated_may_be_so_no_times(tmp_path: Path) -> None:
    config = ["--config", file_of(tmp_path, {"path_map": [], "dev": ["E"]})]
    command = command_line.read_command("prepare", ["C", "D", *config])
    assert (command.files.path_map, command.dev) == ((), (Path("E"),))


def test_a_file_has_an_empty_value_where_the_command_line_may_have_one(tmp_path: Path) -> None:
    assert trained("--config", file_of(tmp_path, {"slow_ranks": "", "noise-snr-db": ""})) == trained()
    file = file_of(tmp_path, {"path_map": ["/a=/b", ""]})
    with pytest.raises(ConfigError, match="'path_map' is empty; give it a value, or leave it out"):
        command_line._with_config("prepare", ["C", "D", "--config", file])


def test_a_file_that_is_not_there_or_not_given(tmp_path: Path) -> None:
    for words, message in (
        (["--config", str(tmp_path / "none.json")], "none.json: cannot be read (No such file"),
        (["--config"], "--config needs a file"),
        (["--config", "a", "--config=b"], "--config is given 2 times"),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            trained(*words)


def test_every_option_of_help_may_stand_in_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    """But for those that start other commands: --config stands after -- there."""
    for name, command in SUBCOMMANDS.items():
        if name in ("launch", "submit", "doctor"):
            continue
        known = options_of(command.options_class()).keys()
        with pytest.raises(SystemExit):
            command_line.parse(name, ["--help"])
        shown = set(
            re.findall(r"^[│ ]{0,4}(?:-\w, )?(--[a-z][a-z0-9-]*)", capsys.readouterr().out, re.MULTILINE)
        )
        assert len(shown) > 2 or name in ("inspect", "report")
        assert shown - {"--help", "--script"} <= known  # --script: how another form is asked for


def test_paths_of_a_runs_record_are_relative_to_where_it_was_started(tmp_path: Path) -> None:
    options = {"alignments": "R/alignments/1", "initial_model": "/models/R", "epochs": 3}
    record = {"format": "speechdp-run", "directory": "/started/here", "options": options}
    options = trained("--config", file_of(tmp_path, record)).options
    assert str(options.alignments) == "/started/here/R/alignments/1"
    assert str(options.initial_model) == "/models/R"
    own = trained("--config", file_of(tmp_path, {"alignments": "R/alignments/1"})).options
    assert str(own.alignments) == "R/alignments/1"


def test_an_option_that_is_repeated_is_so_for_each_value(tmp_path: Path) -> None:
    def maps(*words: str) -> tuple[str, ...]:
        config = ["--config", file_of(tmp_path, {"path_map": ["/a=/b", "/c=/d"]})]
        command = command_line.read_command("prepare", ["C", "D", *config, *words])
        assert isinstance(command, PrepareCommand)
        return command.files.path_map

    assert maps() == ("/a=/b", "/c=/d")
    assert maps("--path-map", "/e=/f") == ("/e=/f",)


def test_the_file_of_a_launched_command_stands_after_two_dashes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = file_of(tmp_path, {"epochs": 3})
    assert main.run(["launch", "-np", "1", "train", "D", "R", "--config", file]) == 2
    assert "write -- before the command: ... -- train" in capsys.readouterr().err


def test_a_file_that_is_not_there_is_a_wrong_path(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refusal:
        trained("--config", str(tmp_path / "none.json"))
    assert str(refusal.value) == (
        f"--config {tmp_path}/none.json: cannot be read (No such file or directory); check the path"
    )


@pytest.mark.parametrize(
    ("command", "says"),
    [
        # Behind an unknown option its value is taken for DATA: that was said to be missing.
        ("train --straegy bmuf DATA RUN", "train has no option --straegy; did you mean --strategy?"),
        ("train DATA --epohcs=3 RUN", "train has no option --epohcs; did you mean --epochs?"),
        ("train -epochs 3 DATA RUN", "train has no option -epochs; did you mean --epochs?"),
        ("train --zzz DATA RUN", "train has no option --zzz; speechdp train --help lists them"),
        ("launch --intrface a -- train D R", "launch has no option --intrface; did you mean --interface?"),
        ("compare --script s.py --strategis a OUT", "compare has no option --strategis; did you mean"),
    ],
)
def test_an_unknown_option_is_named_wherever_it_stands(
    command: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(command.split()) == 2
    assert capsys.readouterr().err.startswith(f"speechdp: {says}")


def test_no_option_of_a_command_is_unknown() -> None:
    """All spellings: short and other names, underscores, what is switched off; numbers and - are values."""
    command_line.parse(
        "train", ["D", "R", "--flat_start", "--no-spec-augment", "--batch-size=3", "--seed", "1"]
    )
    command_line.parse("doctor", ["-np", "2", "--run", "R", "--json", "f.json", "--data", "D"])
    size = "--nodes 1 --ranks-per-node 1 --time 1:00:00"
    command_line.parse("submit", f"--partition p {size} -- python s.py --zzz".split())
    command_line.parse("launch", ["-np", "2", "--mpi-args", "--zzz 1", "--", "python", "s.py", "--zzz"])
    command_line.parse("decode", ["R", "D", "--insertion-log-prob", "-4"])
    command_line.parse("transcribe", ["R", "a.wav", "-o", "-"])


def test_annotations_of_a_command_are_evaluated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start that resumes a run asks for its options six times, and evaluating them takes long."""

    @dataclasses.dataclass
    class Command:
        folder: str = "out"

    evaluated, keep = list[type](), config_file.get_type_hints

    def hints(command: type, **how: Any) -> dict[str, Any]:
        evaluated.append(command)
        return keep(command, **how)

    monkeypatch.setattr(config_file, "get_type_hints", hints)
    words = ["--folder", "RUN", "DATA"]
    assert arguments_of(words, Command) == ["DATA"] and options_of(Command) == {"--folder": "value"}
    with pytest.raises(ConfigError, match="--folder"):
        refuse_empty(["--folder", ""], Command)
    assert evaluated == [Command]
