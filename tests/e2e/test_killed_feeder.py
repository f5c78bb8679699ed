"""A killed feeder ends the job clearly; one asked to stop serves on; a failing one says what it is."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from speechdp import exit_codes
from speechdp.comm.environment import host_name
from speechdp.data.shards.dataset import Dataset
from tests.helpers.gates import Gates
from tests.helpers.jobs import DEADLINE_S, by_launch, ended_within, our_lines, started
from tests.helpers.killed import assert_ended_by_a_kill, assert_goes_on_to_the_end, last_step
from tests.helpers.mpi import run_mpi
from tests.helpers.tiny_data import TINY_MODEL, TinySizes, flip_byte, write_tiny_data

OPTIONS = (*TINY_MODEL, "--batch-size", "1", "--epochs", "10", "--checkpoint-steps", "37")
FED = ("--feeders", "1", "--backend", "mpi")
#: Of 3 ranks on one host the last.
FEEDER = 2


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return write_tiny_data(tmp_path_factory.mktemp("killed_feeder") / "data", TinySizes(train=200))


def test_a_killed_feeder_ends_the_job_and_the_run_goes_on(tmp_path: Path) -> None:
    dataset, run = write_tiny_data(tmp_path / "data", TinySizes(train=60)), tmp_path / "run"
    arguments = ["train", dataset.path, run, *OPTIONS, *FED]
    # At half of its 300 steps the run waits for the kill.
    with started(by_launch(3, *arguments), run, Gates(tmp_path / "gates", 150)) as job:
        job.wait_until(lambda: last_step(run), "a checkpoint")
        job.kill_rank(FEEDER)
        ended = job.finish()
    assert_ended_by_a_kill(ended, run)
    assert f"rank {FEEDER} on {host_name()} was killed by SIGKILL" in ended.stderr, ended.output
    assert_goes_on_to_the_end(by_launch(3, *arguments), run, dataset.num_frames("train"))


def test_a_stop_request_reaches_the_trainers_and_feeders_serve_to_the_end(
    dataset: Dataset, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    arguments = ["train", dataset.path, run, *OPTIONS, *FED]
    # Not later: the trainers agree on a stop at ever rarer steps, and must do so before the last.
    with started(by_launch(3, *arguments), run, Gates(tmp_path / "gates", 100)) as job:
        job.wait_until(lambda: last_step(run), "a checkpoint")
        job.signal(signal.SIGTERM)
        ended = job.finish()
    assert ended.exit_code == 75, ended.output
    assert "stopped as requested" in ended.stdout, ended.output
    assert last_step(run) > 0
    facts = json.loads((run / "run.json").read_text())
    assert facts["size"] == 2 and facts["hosts"] == [host_name()] * 2
    assert facts["feeders"] == {"ranks": [FEEDER], "hosts": [host_name()]}
    assert "2 ranks and 1 feeder on" in ended.stdout, ended.output


def test_damaged_data_is_told_by_the_trainer_with_file_and_feeder(tmp_path: Path) -> None:
    dataset = write_tiny_data(tmp_path / "data", TinySizes(shards=1))
    name = flip_byte(dataset.shard_paths("train")[0], 3)
    ended = ended_within(DEADLINE_S, by_launch(2, "train", dataset.path, tmp_path / "run", *OPTIONS, *FED))
    assert ended.exit_code == 1, ended.output
    line = next(line for line in our_lines(ended) if line.startswith("speechdp: rank"))
    assert line.startswith(f"speechdp: rank 0 on {host_name()}: feeder rank 1: "), line
    assert dataset.shard_paths("train")[0].name in line and name in line, line
    assert "Traceback" not in ended.stderr, ended.output


def test_a_defect_on_a_feeder_names_it_as_one(dataset: Dataset, tmp_path: Path) -> None:
    """What reads as no error of the user's: a source of batches that breaks down."""
    program = tmp_path / "broken.py"
    program.write_text(_BROKEN)
    ended = run_mpi(2, [program, dataset.path, tmp_path / "run"])
    assert ended.exit_code == exit_codes.CRASHED, ended.output
    assert f"speechdp: rank 1 (feeder) on {host_name()}: ended by an unexpected ValueError" in ended.stderr


_BROKEN = """
import sys
from speechdp.cli.main import main
from speechdp.feeding import feeder as feeding


def broken(*args):
    raise ValueError("a defect")


feeding.open_local_source = broken
sys.argv = ["speechdp", "train", *sys.argv[1:], "--layers", "1", "--cells", "8", "--feeders", "1"]
sys.exit(main())
"""
