"""`speechdp compare` from the command line: jobs of its own, kept and failed runs, refusals, the page."""

from __future__ import annotations

import csv
import json
import signal
from pathlib import Path

import pytest

from speechdp import exit_codes
from speechdp.cli.main import run as speechdp
from speechdp.data.shards.dataset import Dataset
from speechdp.experiments.race.record import find_race
from tests.helpers.gates import Gates
from tests.helpers.jobs import alone, ended_within, started
from tests.helpers.mpi import Ended
from tests.helpers.tiny_data import TINY_MODEL, TinySizes, write_tiny_data

OPTIONS = (
    *TINY_MODEL,
    *("--learning-rate", "0.02", "--global-batch", "4", "--epochs", "2", "--backend", "mpi"),
    *("--ranks", "1,2", "--strategies", "gradient_averaging,model_averaging:period=4,momentum=reset"),
    *("--realign", "1", "--realign-epochs", "1", "--modes", "frames", "--race", "3", "--race-steps", "4"),
)
FOLDERS = [
    "frames-1x-gradient_averaging-seed1-2ep",
    "frames-2x-gradient_averaging-seed1-2ep",
    "frames-2x-model_averaging-period=4-momentum=reset-seed1-2ep",
]

#: A dozen processes that load torch, one after another: 50 s on 2 idle cores, minutes on busy ones.
pytestmark = pytest.mark.timeout(1200)
#: Exit code of a job that was asked to stop and saved.
STOPPED = 75


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return write_tiny_data(tmp_path_factory.mktemp("compare") / "data", TinySizes(train=40))


@pytest.fixture(scope="module")
def compared(dataset: Dataset, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ended]:
    out = tmp_path_factory.mktemp("out") / "compared"
    ended = ended_within(560, alone("compare", dataset.path, out, *OPTIONS))
    assert ended.exit_code == 0, ended.output
    return out, ended


def test_every_run_is_an_ordinary_run_folder(compared: tuple[Path, Ended]) -> None:
    out, _ = compared
    record = json.loads((out / "compare.json").read_text())
    assert [run["folder"] for run in record["runs"]] == FOLDERS
    assert {run["state"] for run in record["runs"]} == {"complete"} and record["completed"] is True
    for run in record["runs"]:
        folder = out / run["folder"]
        assert (folder / "completed.json").is_file() and (folder / "wer-test.json").is_file()
        facts = json.loads((folder / "run.json").read_text())
        assert facts["size"] == run["ranks"]
        # 4 segments per step of all ranks together, on the same targets.
        assert facts["batch_size"] * run["ranks"] == 4
        assert facts["options"]["alignments"].endswith("alignment/alignments/1")


def test_one_line_says_what_came_of_each_run(compared: tuple[Path, Ended]) -> None:
    _, ended = compared
    lines = ended.stdout.splitlines()
    assert lines[0].startswith(
        "3 runs; segments per step: 4 on each of 1 training rank (4 together), 2 on each of 2"
    )
    for number in (1, 2, 3):
        mine = [line for line in lines if line.startswith(f"[{number}/3] equal frames")]
        assert len(mine) == 2, ended.output
        assert mine[0].split("seed 1: ")[1].startswith("started")
        assert mine[0].endswith(".log shows how far it is")
        assert "frames/s" in mine[1] and "WER" in mine[1]
    assert any("started; about" in line and " left; " in line for line in lines)
    (alignment,) = [line for line in lines if line.startswith("alignment: started; ")]
    assert alignment.endswith("alignment.log shows how far it is")


def test_it_ends_with_table_and_report(compared: tuple[Path, Ended]) -> None:
    out, ended = compared
    assert str(out / "compare" / "compare.html") in ended.stdout
    with (out / "compare" / "compare.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["ranks"], row["finished"]) for row in rows] == [("1", "1"), ("2", "1"), ("2", "1")]
    assert all(row["heldout_log_prob_mean"] and row["wer_mean"] for row in rows)
    assert float(rows[2]["replica_distance_mean"]) > 0 == float(rows[1]["replica_distance_mean"])
    assert float(rows[1]["sent_bytes_per_s_mean"]) > 0


def test_strategies_and_one_rank_have_raced(compared: tuple[Path, Ended]) -> None:
    out, ended = compared
    assert "race on 2 ranks: 3 settings in turn, " in ended.stdout
    assert "race-2.log shows the time left" in ended.stdout
    assert "race on 2 ranks: done" in ended.stdout
    race = find_race(out, 2)
    assert race is not None and race.plan.baseline == "gradient_averaging"
    strategies = ["gradient_averaging", "model_averaging:period=4,momentum=reset"]
    assert [setting.name for setting in race.plan.settings] == ["one-rank", *strategies]
    assert race.plan.training["options"]["alignments"].endswith("alignment/alignments/1")
    with (out / "compare" / "compare.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [bool(row["raced_speed"]) for row in rows] == [False, True, True]
    assert (out / "logs" / "race-2.log").is_file()


def test_it_goes_on_keeps_what_is_finished_and_records_what_fails(
    dataset: Dataset, compared: tuple[Path, Ended]
) -> None:
    out, _ = compared
    kept = [path for name in FOLDERS for path in (out / name).rglob("*") if path.is_file()]
    before = {path: path.stat().st_mtime_ns for path in kept}
    # A second seed's folder is in the way of one run: it holds a run with other options.
    blocked = out / FOLDERS[1].replace("seed1", "seed2")
    blocked.mkdir()
    facts = json.loads((out / FOLDERS[1] / "run.json").read_text())
    (blocked / "run.json").write_text(json.dumps({**facts, "fingerprint": "other"}))
    ended = ended_within(
        300,
        alone(
            "compare", dataset.path, out, *OPTIONS, "--seeds", "1,2", "--ranks", "2", "--decode-split", "test"
        ),
    )
    assert ended.exit_code == 1, ended.output
    assert "1 of 4 runs failed" in ended.stderr
    assert "the run was begun with other options" in ended.stdout
    assert {path: path.stat().st_mtime_ns for path in before} == before
    states = {run["folder"]: run["state"] for run in json.loads((out / "compare.json").read_text())["runs"]}
    assert states.pop(blocked.name) == "failed"
    assert set(states.values()) == {"complete"} and len(states) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--strategies", "no_such"], "unknown strategy 'no_such'"),
        (["--strategies", "gradient_averaging,every=2"], "'every=2' follows no strategy with options"),
        (["--strategies", "model_averaging,model_averaging:period=16"], "are the same"),
        (["--strategy", "model_averaging"], "--strategy does not apply to compare: use --strategies"),
        (["--seed", "3"], "--seed does not apply to compare: use --seeds"),
        (["--max-steps", "3"], "--max-steps does not apply to compare"),
        (["--ranks", "0"], "--ranks '0': write whole numbers from 1 on"),
        (["--ranks", "1,3", "--global-batch", "4"], "is not divisible by 3 ranks"),
        (["--modes", "time"], "--modes: write frames, or frames,time"),
        (["--decode-split", "nothing"], "nothing"),
        (["--launch-args", "'"], "cannot be split into words"),
    ],
)
def test_what_cannot_be_compared_is_said_before_anything_is_written(
    dataset: Dataset,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    message: str,
) -> None:
    # Options of other commands make a command line that cannot be read.
    expected = exit_codes.USAGE if "does not apply" in message else exit_codes.FAILED
    assert speechdp(["compare", str(dataset.path), str(tmp_path / "out"), *options]) == expected
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_another_comparison_in_the_same_folder_is_refused(
    dataset: Dataset, compared: tuple[Path, Ended], capsys: pytest.CaptureFixture[str]
) -> None:
    before = (compared[0] / "compare.json").read_text()
    assert speechdp(["compare", str(dataset.path), str(compared[0]), *OPTIONS, "--epochs", "3"]) == 1
    expected = "was started with other options (epochs was 2, is 3); choose another folder, or --overwrite"
    assert expected in capsys.readouterr().err
    assert (compared[0] / "compare.json").read_text() == before


def test_overwrite_deletes_only_a_comparison(
    dataset: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.txt").write_text("x")
    assert speechdp(["compare", str(dataset.path), str(tmp_path), *OPTIONS, "--overwrite"]) == 1
    assert "--overwrite deletes only folders that hold a comparison" in capsys.readouterr().err
    assert (tmp_path / "mine.txt").is_file()


def test_it_is_not_run_under_a_launcher(
    dataset: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    assert speechdp(["compare", str(dataset.path), str(tmp_path / "out"), *OPTIONS]) == 1
    assert "compare starts its own jobs" in capsys.readouterr().err


def test_a_stop_saves_the_run_under_way_and_the_same_command_goes_on(
    dataset: Dataset, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    command = alone(
        *("compare", dataset.path, out, *TINY_MODEL, "--ranks", "2", "--strategies", "gradient_averaging"),
        *(
            "--backend",
            "mpi",
            "--modes",
            "frames",
            "--decode-split",
            "",
            "--epochs",
            "60",
            "--batch-size",
            "2",
        ),
    )
    with started(command, out, Gates(tmp_path / "gates", 100)) as job:
        job.wait_until(lambda: list(out.glob("*/checkpoints/step-*")), "a checkpoint")
        job.signal(signal.SIGTERM)
        stopped = job.finish()
    assert stopped.exit_code == STOPPED, stopped.output
    assert "stopped as requested; the same command continues" in stopped.stdout
    (run,) = json.loads((out / "compare.json").read_text())["runs"]
    assert run["state"] == "pending"
    ended = ended_within(500, command)
    assert ended.exit_code == 0, ended.output
    assert "resuming from step" in (out / "logs" / f"{run['folder']}.log").read_text()
