"""--tolerate-loss under Open MPI 5: training goes on without a killed rank, on one node and on two."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from speechdp.data.shards.dataset import Dataset
from tests.cluster.lab import Lab
from tests.helpers.gates import Gates
from tests.helpers.jobs import our_lines, started
from tests.helpers.killed import last_step
from tests.helpers.mpi import Ended
from tests.helpers.open_mpi_5 import NoOpenMpi5Error, python_with_open_mpi_5
from tests.helpers.tiny_data import TINY_MODEL

NUM_EPOCHS = 10
#: Of 300 steps and more, the one at which a job waits for its rank to be killed: an epoch has 120 batches, so
#: one that is over has left a checkpoint, however unevenly its batches were dealt.
GATE = 121
TRAIN = (*TINY_MODEL, "--batch-size", "1", "--epochs", str(NUM_EPOCHS), "--checkpoint-steps", "13")
TOLERANT = ("--strategy", "ad_psgd", "--backend", "mpi", "--tolerate-loss")


@pytest.fixture(scope="session")
def python(pytestconfig: pytest.Config, lab_folder: Path) -> Path:
    """A Python with Open MPI 5, kept in pytest's cache; skipped with the reason where there can be none."""
    cache = getattr(pytestconfig, "cache", None)
    # All nodes see both folders; of the rest of /tmp each has its own.
    folder = lab_folder / "open-mpi-5" if cache is None else cache.mkdir("speechdp-open-mpi-5")
    try:
        return python_with_open_mpi_5(folder / "environment")
    except NoOpenMpi5Error as error:
        pytest.skip(str(error))


def command(python: Path, ranks: tuple[str, ...], dataset: Dataset, run: Path) -> list[str]:
    launch = [str(python), "-m", "speechdp", "launch", *ranks, "--"]
    return [*launch, "train", str(dataset.path), str(run), *TRAIN, *TOLERANT]


def assert_went_on(ended: Ended, run: Path, dataset: Dataset, notice: str) -> None:
    assert ended.exit_code == 0, ended.output
    assert ended.stdout.splitlines().count(notice) == 1, ended.output
    assert our_lines(ended) == [], ended.output
    completed = json.loads((run / "completed.json").read_text())
    # Every batch of a step counts once, those that the lost rank had in hand included.
    assert completed["step"] == -(-NUM_EPOCHS * dataset.num_utterances("train") // 4), completed
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["heldout_frames"] == dataset.num_frames("dev")


def test_a_killed_rank_is_done_without(python: Path, dataset: Dataset, tmp_path: Path) -> None:
    run = tmp_path / "run"
    gates = Gates(tmp_path / "gates", GATE)
    with started(command(python, ("-np", "4"), dataset, run), run, gates) as job:
        job.wait_until(lambda: last_step(run), "a checkpoint")
        job.kill_rank(2)
        gates.open()
        ended = job.finish()
    assert_went_on(ended, run, dataset, f"rank 2 on {host()} is gone; continuing with 3 ranks")


def host() -> str:
    return os.uname().nodename.split(".")[0]


def test_without_rank_0_the_job_ends_and_says_so(python: Path, dataset: Dataset, tmp_path: Path) -> None:
    run = tmp_path / "run"
    gates = Gates(tmp_path / "gates", GATE)
    with started(command(python, ("-np", "3"), dataset, run), run, gates) as job:
        job.wait_until(lambda: last_step(run), "a checkpoint")
        job.kill_rank(0)
        gates.open()
        ended = job.finish()
    assert ended.exit_code != 0 and not (run / "completed.json").exists(), ended.output
    assert "rank 0 is gone, and only it deals the batches, evaluates and saves" in ended.stderr, ended.output


def test_a_rank_of_another_node_is_done_without(python: Path, lab: Lab, dataset: Dataset) -> None:
    run = lab.folder / "run-loss"
    hosts = ("--hostfile", str(lab.hostfile(2, ("n1", "n2"))))
    gates = Gates(lab.folder / "gates-loss", GATE)
    job = lab.start("n1", command(python, hosts, dataset, run), mark=run, gates=gates)
    try:
        job.wait_until(lambda: last_step(run), "a checkpoint")
        job.kill_rank(3)
        gates.open()
        ended = job.finish()
    finally:
        job.kill()
    assert_went_on(ended, run, dataset, "rank 3 on n2 is gone; continuing with 3 ranks")
