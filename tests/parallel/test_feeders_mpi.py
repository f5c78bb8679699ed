"""Feeding on real ranks: packets over MPI, and runs that are bitwise those of ranks that read themselves."""

from __future__ import annotations

from pathlib import Path

import pytest

from speechdp.data.shards.dataset import Dataset
from tests.helpers.mpi import run_mpi
from tests.helpers.tiny_data import TinySizes, write_tiny_data
from tests.parallel.test_communicator_backends import needs_horovod

PROGRAM = "-m", "tests.helpers.rank_programs.feeding"


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    # All of it in one batch is what the program calls large.
    return write_tiny_data(tmp_path_factory.mktemp("fed") / "data", TinySizes(train=1100))


@pytest.mark.parametrize(
    ("backend", "size", "num_feeders"),
    [
        ("mpi", 2, 1),
        ("mpi", 3, 1),
        ("mpi", 4, 2),
        ("torch", 3, 1),
        pytest.param("horovod", 3, 1, marks=needs_horovod),
        pytest.param("horovod", 2, 1, marks=needs_horovod),
    ],
)
def test_fed_runs_are_bitwise_those_that_read_themselves(
    dataset: Dataset, tmp_path: Path, backend: str, size: int, num_feeders: int
) -> None:
    ended = run_mpi(size, [*PROGRAM, backend, str(num_feeders), dataset.path, tmp_path], timeout_s=400)
    assert ended.exit_code == 0, ended.output
    expected = f"{size - num_feeders} trainers over {backend}, fed by {num_feeders}: the same bits"
    assert expected in ended.stdout, ended.output


@needs_horovod
def test_horovod_over_mpi_knows_the_trainers_only(dataset: Dataset, tmp_path: Path) -> None:
    over_mpi = {"HOROVOD_CONTROLLER": "mpi", "HOROVOD_CPU_OPERATIONS": "mpi"}
    program = [*PROGRAM, "horovod", "1", dataset.path, tmp_path]
    ended = run_mpi(3, program, env=over_mpi, timeout_s=400)
    assert ended.exit_code == 0, ended.output


def test_a_job_without_room_for_a_trainer_is_refused() -> None:
    ended = run_mpi(2, [*PROGRAM, "mpi", "2", "nowhere", "nowhere"])
    assert ended.exit_code == 1, ended.output
    (line,) = [line for line in ended.stderr.splitlines() if "speechdp: rank" in line]
    assert "--feeders 2: of the ranks on" in line and "start at least 3 on each host" in line, line
