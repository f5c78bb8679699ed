"""Whole runs on real ranks: stopped, killed, resumed, and bitwise what they would have been."""

from __future__ import annotations

from pathlib import Path

import pytest

from speechdp.data.shards.dataset import Dataset
from tests.helpers.fork_server import BY_ITSELF
from tests.helpers.mpi import run_mpi
from tests.helpers.tiny_data import write_tiny_data
from tests.helpers.tiny_speech import write_tiny_speech
from tests.helpers.training_cases import CASES, SIZES, SYNTHESIS_CASES
from tests.parallel.test_communicator_backends import needs_horovod

PROGRAM = "-m", "tests.helpers.rank_programs.training"


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return write_tiny_data(tmp_path_factory.mktemp("training") / "data", SIZES)


@pytest.mark.parametrize(
    ("backend", "size"),
    [("serial", 1), ("mpi", 2), ("torch", 2), pytest.param("horovod", 2, marks=needs_horovod)],
)
def test_resumed_runs_are_bitwise_those_not_interrupted(
    dataset: Dataset, tmp_path: Path, backend: str, size: int
) -> None:
    program = [*PROGRAM, backend, str(size), dataset.path, tmp_path]
    # This program looks for what training must not import.  A fork has imported all, and trained alone once:
    # what a back-end imports besides is seen in forks, too, what all import in the process of its own.
    ended = run_mpi(size, program, env=BY_ITSELF if backend == "serial" else None, timeout_s=500)
    assert ended.exit_code == 0, ended.output
    assert f"{len(CASES)} runs resumed bitwise on {size} ranks" in ended.stdout, ended.output


@pytest.mark.parametrize("backend", ["mpi", pytest.param("horovod", marks=needs_horovod)])
def test_synthesis_resumes_bitwise_with_each_rank_s_own_statistics(tmp_path: Path, backend: str) -> None:
    dataset = write_tiny_speech(tmp_path / "data", SIZES)
    program = [*PROGRAM, backend, "2", dataset.path, tmp_path / "runs"]
    ended = run_mpi(2, program, timeout_s=400)
    assert ended.exit_code == 0, ended.output
    assert f"{len(SYNTHESIS_CASES)} runs resumed bitwise on 2 ranks" in ended.stdout, ended.output
