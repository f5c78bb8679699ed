"""A rank killed while other threads exchange: the job ends clearly, nothing saved is lost, and it goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from speechdp.data.shards.dataset import Dataset
from tests.helpers.gates import Gates
from tests.helpers.jobs import by_launch, started
from tests.helpers.killed import assert_ended_by_a_kill, assert_goes_on_to_the_end, last_step
from tests.helpers.tiny_data import TINY_MODEL, TinySizes, write_tiny_data

OPTIONS = (*TINY_MODEL, "--batch-size", "1", "--epochs", "10", "--checkpoint-steps", "37")
#: Strategy, back-end, and the rank that is killed: one that answers, that serves, that deals.
CASES = [
    ("ad_psgd", "mpi", 1),
    ("ad_psgd", "torch", 0),
    ("parameter_server", "mpi", 0),
    ("easgd:period=2", "mpi", 1),
    ("dpsgd", "mpi", 1),
    ("delayed_averaging:period=4", "mpi", 0),
]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return write_tiny_data(tmp_path_factory.mktemp("killed") / "data", TinySizes(train=60))


@pytest.mark.parametrize(("strategy", "backend", "rank"), CASES)
def test_a_killed_rank_ends_the_job_and_the_run_goes_on(
    dataset: Dataset, tmp_path: Path, strategy: str, backend: str, rank: int
) -> None:
    run = tmp_path / "run"
    arguments = ["train", dataset.path, run, *OPTIONS, "--strategy", strategy, "--backend", backend]
    # At half of its 300 steps the run waits for the kill.
    with started(by_launch(2, *arguments), run, Gates(tmp_path / "gates", 150)) as job:
        job.wait_until(lambda: last_step(run), "a checkpoint")
        job.kill_rank(rank)
        ended = job.finish()
    assert_ended_by_a_kill(ended, run)
    assert_goes_on_to_the_end(by_launch(2, *arguments), run, dataset.num_frames("train"))
