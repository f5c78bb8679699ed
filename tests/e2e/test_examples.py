"""The examples run as they stand, and show what they are to show."""

from __future__ import annotations

import csv
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.strategies.own_loop import changed_lines
from speechdp.experiments.race.record import read_race
from speechdp.report.runs.folders import read_run
from tests.helpers.corpora import write_tone
from tests.helpers.jobs import SPEECHDP, by_launch, ended_within
from tests.helpers.mpi import REPOSITORY, job_environment, run_job
from tests.helpers.tiny_data import TINY_MODEL, TinySizes, write_tiny_data

ASR = REPOSITORY / "examples" / "asr_ctc"


def held_out_loss(script: Path, **settings: str) -> float:
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", script],
        env={**job_environment(), **settings},
        check=True,
        capture_output=True,
        text=True,
        timeout=500,
    )
    return float(re.findall(r"held-out loss ([\d.]+)", ended.stdout)[-1])


def test_the_recogniser_trains_as_in_plain_pytorch_and_on_two_ranks(tmp_path: Path) -> None:
    plain = held_out_loss(ASR / "plain.py")
    assert plain < 1.0
    assert abs(held_out_loss(ASR / "train.py") - plain) < 0.02  # one rank: the same but for rounding
    together = held_out_loss(
        ASR / "train.py",
        SPEECHDP_BACKEND="threads:2",
        SPEECHDP_STRATEGY="model_averaging:period=8",
        SPEECHDP_FOLDER=str(tmp_path / "run"),
    )
    run = read_run(tmp_path / "run")
    assert together < 1.0 and run.completed and (run.size, run.period) == (2, "8")


#: Reads its batches by a worker that is started afresh, as by default from Python 3.14 on.
WITH_WORKER = """
import speechdp
import torch

def main(comm):
    data = torch.utils.data.TensorDataset(torch.ones(8, 3))
    loader = torch.utils.data.DataLoader(data, 4, num_workers=1, multiprocessing_context="spawn")
    model = torch.nn.Linear(3, 1)
    with speechdp.DataParallel(model, torch.optim.SGD(model.parameters(), 0.1), comm) as run:
        for (x,) in run.batches(loader):
            with run.step(weight=len(x)) as step:
                step.backward(model(x).sum())
    print("steps", run.steps)

{guard}speechdp.run_ranks(main)
"""


@pytest.mark.parametrize("is_guarded", [True, False])
def test_a_worker_that_imports_the_script_is_no_rank(is_guarded: bool, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(WITH_WORKER.format(guard='if __name__ == "__main__":\n    ' if is_guarded else ""))
    ended = ended_within(500, [sys.executable, str(script)])
    told = "speechdp: a worker process (of a DataLoader, say) imported the script and called run_ranks(main)"
    found = ended.exit_code == 0, "steps 2" in ended.stdout, told not in ended.stderr
    assert found == (is_guarded,) * 3, ended.stderr


#: Signals its loader's workers, as launchers and batch systems do that signal all processes of a rank.
SIGNALLING = """
import multiprocessing, os
import speechdp
import torch

class Shown:  # as a progress bar does, which begins to read with the first batch
    def __init__(self, loader):
        self.loader = loader

    def __len__(self):
        return len(self.loader)

    def __iter__(self):
        yield from self.loader

def main(comm):
    loader = torch.utils.data.DataLoader(
        torch.ones(200, 3), 2, num_workers=2, multiprocessing_context="{start}"
    )
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    with speechdp.DataParallel(model, optimizer, comm) as run:
        for x in run.batches({batches}):
            with run.step(weight=len(x)) as step:
                step.backward(model(x).sum())
            if run.steps == 2:
                for worker in multiprocessing.active_children():
                    os.kill(worker.pid, {number})
    print("steps", run.steps)

if __name__ == "__main__":
    speechdp.run_ranks(main)
"""


@pytest.mark.parametrize(
    ("start", "batches"), [("fork", "loader"), ("spawn", "loader"), ("fork", "Shown(loader)")]
)
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGHUP])
def test_workers_take_no_notice_of_what_asks_ranks_to_stop(
    number: signal.Signals, start: str, batches: str, tmp_path: Path
) -> None:
    """One that it ended would end the rank, which is about to save."""
    script = tmp_path / "script.py"
    script.write_text(SIGNALLING.format(start=start, batches=batches, number=int(number)))
    ended = ended_within(500, [sys.executable, str(script)])
    assert (ended.exit_code, "steps 100" in ended.stdout) == (0, True), ended.stderr


def test_every_example_keeps_its_ranks_from_workers() -> None:
    """In scripts, and on the pages that show one."""
    pages = [REPOSITORY / "README.md", REPOSITORY / "docs" / "api.md"]
    calls = 0
    for file in [*(REPOSITORY / "examples").rglob("*.py"), *pages]:
        for before, line in itertools.pairwise(file.read_text().splitlines()):
            if line.strip() == "speechdp.run_ranks(main)":
                calls += 1
                assert (before, line[:4]) == ('if __name__ == "__main__":', "    "), file
    assert calls >= 7


def test_a_lightning_module_trains_on_two_ranks(tmp_path: Path) -> None:
    pytest.importorskip("pytorch_lightning")
    loss = held_out_loss(
        REPOSITORY / "examples" / "lightning" / "train.py",
        SPEECHDP_BACKEND="threads:2",
        SPEECHDP_STRATEGY="model_averaging:period=8",
        SPEECHDP_FOLDER=str(tmp_path / "run"),
    )
    run = read_run(tmp_path / "run")
    evaluated = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert run.completed and (run.size, run.period) == (2, "8")
    assert [line["step"] for line in evaluated] == [40, 80, 120]
    assert loss < 1.0 and abs(evaluated[-1]["valid_loss"] - loss) < 1e-3


def test_few_lines_differ_from_plain_pytorch() -> None:
    added = changed_lines()
    assert len(added) <= 8, added


def test_the_readme_shows_the_example_as_it_is() -> None:
    (shown,) = re.findall(r"```python\n(.*?)```", (REPOSITORY / "README.md").read_text(), re.DOTALL)
    assert shown in (ASR / "train.py").read_text()


def test_the_recogniser_is_compared_over_strategies_unedited(tmp_path: Path) -> None:
    command = ["--script", str(ASR / "train.py"), str(tmp_path / "out"), "--ranks", "2"]
    strategies = "gradient_averaging,bmuf:period=8,diloco:period=16"
    # Two ranks as threads of one process: nothing but the script starts.
    options = ["--strategies", strategies, "--backend", "threads", "--race", "1"]
    ended = run_job([*SPEECHDP, "compare", *command, *options])
    assert ended.exit_code == 0, ended.output
    # It never looks at should_stop, and races nevertheless.
    race = read_race(tmp_path / "out" / "race" / "ranks-2.json")
    assert set(race.speeds()) == {*strategies.split(",")} and not race.plan.left_out
    assert {turn.steps for turn in race.turns} == {32} and len(race.turns) == 3
    record = json.loads((tmp_path / "out" / "compare.json").read_text())
    runs = [read_run(tmp_path / "out" / run["folder"]) for run in record["runs"]]
    assert [run.strategy for run in runs] == ["gradient_averaging", "bmuf", "diloco"]
    assert all(run.size == 2 and run.completed and run.evaluations[-1].score for run in runs)
    rows = list(csv.DictReader((tmp_path / "out" / "compare" / "compare.csv").open()))
    assert all(0 < float(row["heldout_loss_mean"]) < 3 and float(row["items_per_s_mean"]) > 0 for row in rows)
    assert (
        "heldout_loss" in ended.stdout
        and "seems the best choice, judging by one seed and a race of 1 round"
        in " ".join(ended.stdout.split())
    )


def installed(example: str, tmp_path: Path) -> dict[str, str]:
    """Install an example package in a folder; return the environment that finds it."""
    source, site = tmp_path / "source", tmp_path / "site"
    shutil.copytree(REPOSITORY / "examples" / example, source)
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation",
         "--target", site, source],
        check=True, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    return {"PYTHONPATH": f"{REPOSITORY}{os.pathsep}{site}"}


def test_a_strategy_of_an_installed_package_is_used_by_name(tmp_path: Path) -> None:
    environment = installed("own_strategy", tmp_path)
    data, run = tmp_path / "data", tmp_path / "run"
    write_tiny_data(data, TinySizes(train=48, dev=4, test=4))
    strategy = "growing_averaging:period=1,stay=1,longest=4"
    options = (*TINY_MODEL, "--batch-size", "2", "--epochs", "1", "--backend", "mpi")
    ended = run_job(by_launch(2, "train", data, run, *options, "--strategy", strategy), env=environment)
    assert ended.exit_code == 0, ended.output
    assert json.loads((run / "run.json").read_text())["strategy_name"] == "growing_averaging"
    refused = run_job(by_launch(2, "train", data, tmp_path / "other", *options, "--strategy", strategy))
    assert refused.exit_code != 0 and "unknown strategy 'growing_averaging'" in refused.output


def test_a_corpus_of_an_installed_package_is_prepared_by_name(tmp_path: Path) -> None:
    environment = installed("own_corpus", tmp_path)
    rows = ["id,speaker,split,audio,text"]
    for number, split in enumerate(("train", "dev", "test")):
        write_tone(tmp_path / "corpus" / f"{number}.wav")
        rows.append(f"u{number},ann,{split},{number}.wav,one two")
    (tmp_path / "corpus" / "all.csv").write_text("\n".join(rows))
    prepare = [*SPEECHDP, "prepare", tmp_path / "corpus", tmp_path / "data", "--corpus"]
    ended = run_job([*prepare, "table_corpus:file=all.csv"], env=environment)
    assert ended.exit_code == 0, ended.output
    assert json.loads((tmp_path / "data" / "data.json").read_text())["split"] == "corpus"
    refused = run_job([*prepare, "table_corpus:file=all.csv", "--overwrite"])
    assert refused.exit_code != 0 and "unknown corpus 'table_corpus'" in refused.output


def test_a_task_of_an_installed_package_is_trained_and_reported_by_name(tmp_path: Path) -> None:
    environment = installed("own_task", tmp_path)
    data, run = tmp_path / "data", tmp_path / "run"
    write_tiny_data(data, TinySizes(train=48, dev=4, test=4))
    options = ("--batch-size", "2", "--epochs", "2", "--backend", "mpi")
    task = ("--task", "predictive_coding:width=8")
    ended = run_job(by_launch(2, "train", data, run, *options, *task), env=environment)
    assert ended.exit_code == 0 and "prediction error 0." in ended.output, ended.output
    settings = json.loads((run / "run.json").read_text())
    assert (settings["task"], settings["metrics"][0]["higher_is_better"]) == ("predictive_coding", False)
    # The report needs no package: runs say what they were judged by.
    reported = run_job([sys.executable, "-m", "speechdp", "report", str(run)])
    assert reported.exit_code == 0 and "prediction error" in reported.output, reported.output
    refused = run_job(by_launch(2, "train", data, tmp_path / "other", *options, *task))
    assert refused.exit_code != 0 and "unknown task 'predictive_coding'" in refused.output
