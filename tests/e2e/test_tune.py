"""`speechdp tune` from the command line: a whole search, its page, going on, refusals."""

from __future__ import annotations

import csv
import json
import shlex
import shutil
from pathlib import Path

import pytest

from speechdp.cli.main import run as speechdp
from speechdp.data.shards.dataset import Dataset
from tests.helpers.jobs import alone, ended_within
from tests.helpers.mpi import Ended
from tests.helpers.tiny_data import TINY_MODEL, TinySizes, write_tiny_data

OPTIONS = (
    *TINY_MODEL,
    *(
        "--learning-rates",
        "0.01,0.02",
        "--batch-size",
        "2",
        "--epochs",
        "4",
        "--backends",
        "mpi",
        "--ranks",
        "2",
    ),
    *("--strategies", "model_averaging,gradient_averaging:compression=fp16,ad_psgd", "--periods", "4"),
    *("--batch-sizes", "4", "--race", "6", "--race-steps", "4", "--budget", "1h"),
)
#: Some twenty processes that load torch, a few at a time.
pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return write_tiny_data(tmp_path_factory.mktemp("tune") / "data", TinySizes(train=80))


@pytest.fixture(scope="module")
def tuned(dataset: Dataset, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ended]:
    out = tmp_path_factory.mktemp("out") / "tuned"
    ended = ended_within(900, alone("tune", dataset.path, out, *OPTIONS))
    assert ended.exit_code == 0, ended.output
    return out, ended


def test_a_search_ends_with_a_setting_and_the_command_that_trains_with_it(tuned: tuple[Path, Ended]) -> None:
    out, ended = tuned
    record = json.loads((out / "tune.json").read_text())
    assert record["completed"] is True
    tried = {one["name"]: one for one in record["tried"]}
    chosen = tried[record["chosen"]]
    assert len(chosen["times_s"]) == len(chosen["scores"]) == 2 and not chosen["out_in"]
    words = shlex.split(record["command"])
    assert words[:6] == ["speechdp", "launch", "-np", "2", "--", "train"] and "--backend=mpi" in words
    assert record["command"] in " ".join(ended.stdout.split())
    assert f"--learning-rate={chosen['learning_rate']}" in words
    # Every setting went as far as its record says, and what was ruled out has a reason.
    assert all(one["why"] for one in tried.values() if one["out_in"])
    # What the race left was trained with each learning rate, and nothing else was.
    first = [tried[name] for name in record["rungs"][0]["settings"]]
    assert {one["learning_rate"] for one in first} == {0.01, 0.02}
    assert all(one["learning_rate"] or one["out_in"] for one in tried.values())
    for rung in record["rungs"]:
        assert set(rung["scores"]) == set(rung["settings"])


def test_runs_stop_where_their_rung_ends(tuned: tuple[Path, Ended]) -> None:
    out, _ = tuned
    record = json.loads((out / "tune.json").read_text())
    first = record["rungs"][0]
    for one in record["tried"]:
        if one["rungs"] == 1:
            (folder,) = one["runs"].values()
            lines = (out / "runs" / folder / "metrics.jsonl").read_text().splitlines()
            last = json.loads(lines[-1])
            due = max(1, round(first["seconds"] * one["steps_per_s"]))
            # Ranks at their own pace that have begun to leave an epoch stop where it ends.
            ends_epoch = one["strategy"] == "ad_psgd" and float(last["epoch"]).is_integer()
            assert (
                last["step"] == due
                or (ends_epoch and due < last["step"] <= due + 2)
                or (out / "runs" / folder / "completed.json").is_file()
            )


def test_the_page_the_table_and_the_report_command(
    tuned: tuple[Path, Ended], capfd: pytest.CaptureFixture[str]
) -> None:
    out, _ = tuned
    record = json.loads((out / "tune.json").read_text())
    with (out / "tune" / "tune.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["strategy"] for row in rows] == [one["strategy"] for one in record["tried"]]
    assert [row["strategy"] for row in rows if row["chosen"] == "1"] == [
        one["strategy"] for one in record["tried"] if one["name"] == record["chosen"]
    ]
    page = (out / "tune" / "tune.html").read_text()
    assert "<svg" in page and "Train with it" in page and (out / "tune" / "tune.png").is_file()
    (out / "tune" / "tune.html").unlink()
    assert speechdp(["report", str(out)]) == 0
    assert (out / "tune" / "tune.html").is_file()
    assert "soonest" in " ".join(capfd.readouterr().out.split())
    assert speechdp(["report", str(out), "--target=-1"]) != 0
    assert "is a search, which was made for one target" in capfd.readouterr().err


def test_the_same_command_changes_nothing_and_another_is_refused(
    dataset: Dataset, tuned: tuple[Path, Ended]
) -> None:
    out, _ = tuned
    before = (out / "tune.json").read_bytes()
    ended = ended_within(200, alone("tune", dataset.path, out, *OPTIONS))
    assert ended.exit_code == 0 and (out / "tune.json").read_bytes() == before
    ended = ended_within(200, alone("tune", dataset.path, out, *OPTIONS, "--epochs", "5"))
    assert ended.exit_code != 0
    assert f"{out / 'tune.json'}: was started with other options (epochs was 4, is 5)" in ended.stderr


def test_another_target_is_judged_by_the_runs_that_are_there(
    dataset: Dataset, tuned: tuple[Path, Ended], tmp_path: Path
) -> None:
    out = tmp_path / "copy"
    shutil.copytree(tuned[0], out)
    before = {path: path.read_bytes() for path in out.glob("runs/*/metrics.jsonl")}
    ended = ended_within(200, alone("tune", dataset.path, out, *OPTIONS, "--target=-1.25"))
    assert ended.exit_code == 0, ended.output
    assert "its runs are judged by the target given now" in " ".join(ended.output.split())
    record = json.loads((out / "tune.json").read_text())
    assert record["target"] == record["settings"]["target"] == -1.25 and record["completed"] is True
    assert {path: path.read_bytes() for path in out.glob("runs/*/metrics.jsonl")} == before
    page = (out / "tune" / "tune.html").read_text().replace("\u00a0", " ")
    assert "1.250 nats/frame" in page


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--target", "0.9"], "--target 0.9: the log-probability is below 0, e.g. --target=-0.45"),
        (["--target", "nan"], "--target nan: give a number"),
        (["--seeds", "1,1"], "--seeds: 1 is given twice"),
        (
            ["--strategies", "delayed_averaging:delay=8"],
            "--strategies delayed_averaging:delay=8 with --periods 4: ",
        ),
        (["--budget", "soon"], "--budget soon: is no time; write 90s, 20m or 2h"),
        (["--ranks", "1"], "--ranks 1: one rank has nothing to exchange; give 2 at least"),
        (["--backends", "nccl"], "--backends 'nccl': choose among horovod, mpi, torch"),
        (
            ["--learning-rate", "0.1", "--learning-rates", "0.1,0.2"],
            "--learning-rate: leave it out: --learning-rates tries others",
        ),
        (["--learning-rates", "0.1"], "--learning-rates 0.1: a single rate leaves nothing to choose"),
        (["--race", "3"], "--race 3: intervals need 6 rounds at least"),
        (["--strategy", "bmuf"], "--strategy does not apply to tune: use --strategies"),
        (
            ["--batch-frames", "500", "--batch-sizes", "4"],
            "--batch-sizes: not with --global-batch or --batch-frames",
        ),
    ],
)
def test_refused(
    dataset: Dataset, tmp_path: Path, capfd: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert speechdp(["tune", str(dataset.path), str(tmp_path / "out"), *options]) != 0
    assert message in " ".join(capfd.readouterr().err.split())
    assert not (tmp_path / "out").exists()


SCRIPT = """
import os
import torch
import speechdp


def main(comm):
    generator = torch.Generator().manual_seed(int(os.environ["SPEECHDP_SEED"]))
    model = torch.nn.Linear(8, 8)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    run = speechdp.DataParallel(model, torch.optim.SGD(model.parameters(), lr=0.05), comm)
    run.load_checkpoint()
    with run:
        while run.steps < 400:
            generator = torch.Generator().manual_seed(1000 * comm.rank + run.steps)
            x = torch.randn(4, 8, generator=generator)
            with run.step(weight=len(x)) as step:
                step.backward((model(x) - x).square().sum())
            if run.should_stop:
                run.save_checkpoint()
                return
            if run.steps % 5 == 0:
                with run.evaluating(), torch.no_grad():
                    run.log(valid_loss=(model(torch.eye(8)) - torch.eye(8)).square().mean())


speechdp.run_ranks(main)
"""


def test_a_script_is_paused_and_continued_and_the_command_that_is_shown_trains_it(tmp_path: Path) -> None:
    script, out = tmp_path / "own.py", tmp_path / "out"
    script.write_text(SCRIPT)
    # Ranks as threads of one process: nothing but the script starts.
    words = ["tune", "--script", script, out, "--backend", "threads", "--ranks", "2", "--budget", "1h"]
    words += ["--strategies", "bmuf,ad_psgd", "--periods", "4", "--race", "1", "--race-steps", "8"]
    ended = ended_within(900, alone(*words, "--metric", "valid_loss"))
    assert ended.exit_code == 0, ended.output
    record = json.loads((out / "tune.json").read_text())
    tried = {one["name"]: one for one in record["tried"]}
    assert record["completed"] is True and set(tried) == {"gradient_averaging", "bmuf:period=4", "ad_psgd"}
    assert len(tried[record["chosen"]]["times_s"]) == 2
    told = f"SPEECHDP_STRATEGY={record['chosen']} SPEECHDP_FOLDER=NEW_RUN SPEECHDP_BACKEND=threads:2"
    assert record["command"].startswith(told)
    for one in (out / "measure").glob("*/timing.json"):
        assert not one.with_name("completed.json").exists(), "a measuring run was trained to its end"
    before = (out / "tune.json").read_bytes()
    assert ended_within(200, alone(*words, "--metric", "valid_loss")).exit_code == 0
    assert (out / "tune.json").read_bytes() == before
    assert "valid_loss" in (out / "tune" / "tune.html").read_text()


def test_a_script_that_does_not_pause_is_refused_with_what_to_do(tmp_path: Path) -> None:
    script, out = tmp_path / "own.py", tmp_path / "out"
    script.write_text(SCRIPT.replace("if run.should_stop", "if False"))
    words = ["tune", "--script", script, out, "--backend", "threads", "--ranks", "2"]
    ended = ended_within(200, alone(*words))
    assert ended.exit_code != 0
    line = " ".join(ended.stderr.split())
    logs = "".join(path.read_text()[-5000:] for path in (out / "measure" / "logs").glob("*.log"))
    wanted = "own.py trained to its end and did not pause at step 48: let it look at run.should_stop"
    assert wanted in line, ended.stderr + logs
