"""A sweep over averaging periods on two ranks: stopped, gone on with, and repeated."""

from __future__ import annotations

import csv
import json
import signal
from pathlib import Path

import pytest

from speechdp.cli.main import run as speechdp
from speechdp.data.shards.dataset import Dataset
from speechdp.experiments.race.record import find_race
from speechdp.report.runs.folders import read_sweep
from tests.helpers.gates import Gates
from tests.helpers.jobs import DEADLINE_S, by_launch, ended_within, started
from tests.helpers.tiny_data import TinySizes, write_tiny_data

#: The run on one rank waits at a gate, so that the stop comes while the other rank waits for it.
OPTIONS = (
    *("--layers", "1", "--cells", "12", "--learning-rate", "0.02", "--batch-size", "1", "--epochs", "2"),
    *("--periods", "1,4", "--one-rank-steps", "150", "--checkpoint-steps", "10", "--backend", "mpi"),
    *("--race", "3", "--race-steps", "4"),
)
RUNS = ["one-rank", "gradient_averaging", "model_averaging-1", "model_averaging-4"]
STOPPED = 75


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return write_tiny_data(tmp_path_factory.mktemp("sweep") / "data", TinySizes(train=90))


@pytest.fixture(scope="module")
def swept(dataset: Dataset, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A sweep that was stopped in its first run and then went on to its end; and what it printed."""
    out = tmp_path_factory.mktemp("out") / "sweep"
    gates = Gates(out.with_name("gates"), 50)
    command = by_launch(2, "sweep", dataset.path, out, *OPTIONS)
    with started(command, out, gates) as job:
        job.wait_until(lambda: list(out.glob("one-rank/checkpoints/step-*")), "a checkpoint of one-rank")
        job.signal(signal.SIGTERM)
        stopped = job.finish()
    assert stopped.exit_code == STOPPED, stopped.output
    assert "stopped as requested; the same command continues" in stopped.stdout, stopped.output
    assert json.loads((out / "sweep.json").read_text())["completed"] is False
    ended = ended_within(DEADLINE_S, command)
    assert ended.exit_code == 0, ended.output
    return out, ended.stdout


def test_every_run_is_complete_and_decoded(dataset: Dataset, swept: tuple[Path, str]) -> None:
    out, _ = swept
    record = json.loads((out / "sweep.json").read_text())
    assert record["runs"] == RUNS and record["completed"] is True
    sweep = read_sweep(out)
    assert [(run.name, run.status) for run in sweep.runs] == [(name, "complete") for name in RUNS]
    assert [run.size for run in sweep.runs] == [1, 2, 2, 2]
    assert [run.period for run in sweep.runs][2:] == ["1", "4"]
    for run in sweep.runs[1:]:
        assert run.word_errors is not None and run.word_errors.split == "test"
        assert len(run.evaluations) == 2
    assert sweep.runs[0].word_errors is None
    assert json.loads((out / "one-rank" / "completed.json").read_text())["step"] == 150


def test_all_runs_begin_from_the_same_weights_and_data(swept: tuple[Path, str]) -> None:
    records = [json.loads((swept[0] / name / "run.json").read_text()) for name in RUNS[1:]]
    for name in ("seed", "data", "num_parameters", "batch_size", "size"):
        assert len({json.dumps(record[name]) for record in records}) == 1, name


def test_it_ends_with_the_table_and_the_report(swept: tuple[Path, str]) -> None:
    out, stdout = swept
    assert "[4/4] model_averaging-4" in stdout
    assert "[1/4] one-rank: rank 0 alone for " in stdout
    report = out / "report"
    (page,), (table,) = report.glob("*.html"), report.glob("*.csv")
    assert str(page) in stdout and str(table) in stdout
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(RUNS)


def test_its_settings_have_raced(swept: tuple[Path, str]) -> None:
    out, stdout = swept
    assert "race: 4 settings in turn, 3 rounds" in stdout and "race: done in" in stdout
    race = find_race(out, 2)
    assert race is not None and race.plan.baseline == "gradient_averaging"
    assert sorted(race.speeds()) == sorted(RUNS)
    turns = [(turn.round, turn.setting) for turn in race.turns]
    assert sorted(turns) == sorted((number, name) for number in range(4) for name in RUNS)
    assert {turn.frames[1] for turn in race.turns if turn.setting == "one-rank"} == {0}
    assert all(turn.steps == 4 for turn in race.turns)
    with (out / "report" / "report.csv").open(newline="") as file:
        rows = {row["run"]: row for row in csv.DictReader(file)}
    assert float(rows["gradient_averaging"]["raced_speed"]) == 1.0
    assert float(rows["model_averaging-4"]["raced_speed"]) > 0
    assert "had 3 rounds, too few for intervals" in stdout.replace("\n", " ")


def test_the_same_command_again_keeps_what_is_finished(dataset: Dataset, swept: tuple[Path, str]) -> None:
    out, _ = swept
    kept = [p for name in RUNS for p in (out / name).rglob("*") if p.is_file()]
    kept.append(out / "race" / "ranks-2.json")
    before = {path: path.stat().st_mtime_ns for path in kept}
    ended = ended_within(DEADLINE_S, by_launch(2, "sweep", dataset.path, out, *OPTIONS))
    assert ended.exit_code == 0, ended.output
    assert "rank 0 alone" not in ended.output  # nothing is timed again
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert json.loads((out / "sweep.json").read_text())["completed"] is True


def test_a_sweep_on_another_number_of_ranks_is_refused(
    dataset: Dataset, swept: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["sweep", str(dataset.path), str(swept[0]), "--periods", "2"]
    assert speechdp(arguments) == 1
    message = "sweep.json: was begun on 2 ranks, and runs on 1 would not compare with those"
    assert message in capsys.readouterr().err
    assert json.loads((swept[0] / "sweep.json").read_text())["runs"] == RUNS


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--periods", ","], "--periods: give at least one"),
        (["--periods", "4,4"], "--periods 4,4: a period is given twice"),
        (["--periods", "4,x"], "--periods 4,x: 'x' is not a period; write 16 (steps)"),
        (["--swept", "parameter_server"], "--swept parameter_server: has no period"),
        (["--swept", "gradient_averaging", "--periods", "5s"], "counts its period in steps"),
        (["--reference", "no_such"], "unknown strategy 'no_such'"),
        (["--race", "-1"], "--race -1: write a number of rounds, or 0 for no race"),
    ],
)
def test_what_cannot_be_swept_is_said_before_anything_is_written(
    dataset: Dataset,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    message: str,
) -> None:
    assert speechdp(["sweep", str(dataset.path), str(tmp_path / "out"), *options]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["", "model_averaging-4"])
def test_a_sweep_and_a_run_of_it_are_simulated(
    name: str, swept: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = swept[0] / name
    cluster = ("--ranks", "2,16", "--ranks-per-node", "1", "--bandwidth", "1gbit", "--latency", "50us")
    assert speechdp(["simulate", str(folder), *cluster, "--periods", "1,16"]) == 0
    assert "On 16 ranks over 1 Gbit/s, gradient averaging would train at" in capsys.readouterr().out
    rows = list(csv.DictReader((folder / "simulation" / "simulation.csv").read_text().splitlines()))
    # 11 strategies, 9 of them with a period.
    assert len(rows) == 2 * (2 + 9 * 2)
    assert all(float(row["frames_per_s"]) > 0 for row in rows)
