"""`speechdp launch --max-restarts`: a lost rank costs the steps since the last checkpoint, no more."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import safetensors.torch
import torch

from speechdp.data.shards.dataset import Dataset
from tests.helpers.gates import Gates
from tests.helpers.jobs import DEADLINE_S, SPEECHDP, ended_within, our_lines, started
from tests.helpers.killed import last_step
from tests.helpers.tiny_data import TINY_MODEL, TinySizes, write_tiny_data

OPTIONS = (*TINY_MODEL, "--batch-size", "1", "--epochs", "6", "--checkpoint-steps", "29", "--backend", "mpi")
#: Steps at which the first and the second start wait to be killed; there are 240.
GATES = (60, 160)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return write_tiny_data(tmp_path_factory.mktemp("restart") / "data", TinySizes(train=80))


def launched(launch: list[str], dataset: Dataset, run: Path, *more: str) -> list[str]:
    return [*SPEECHDP, "launch", *launch, "--", "train", str(dataset.path), str(run), *OPTIONS, *more]


def model(run: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(run / "model.safetensors")


def test_killed_ranks_change_nothing(dataset: Dataset, tmp_path: Path) -> None:
    undisturbed, disturbed = tmp_path / "undisturbed", tmp_path / "disturbed"
    ended = ended_within(DEADLINE_S, launched(["-np", "2"], dataset, undisturbed))
    assert ended.exit_code == 0, ended.output
    # The first start comes no further than the first gate: a checkpoint behind it is the second one's.
    gates = Gates(tmp_path / "gates", *GATES)
    command = launched(["-np", "2", "--max-restarts", "2"], dataset, disturbed)
    with started(command, disturbed, gates) as job:
        for rank, before, gate in zip((1, 0), (0, GATES[0]), GATES, strict=True):
            job.wait_until(lambda before=before: last_step(disturbed) > before, "a checkpoint")
            job.signal(signal.SIGKILL, job.rank_pid(rank))
            gates.open(gate)
        ended = job.finish()
    assert ended.exit_code == 0, ended.output
    lines = our_lines(ended)
    assert sum("was killed by SIGKILL" in line for line in lines) == 2, ended.output
    assert any("start 3 of 3: 2 ranks on localhost (2)" in line for line in lines), ended.output
    assert "noticed that process" not in ended.stderr and "start again" not in ended.stderr
    theirs = model(undisturbed)
    for name, tensor in model(disturbed).items():
        assert torch.equal(tensor, theirs[name]), name


def test_what_is_refused_is_not_started_again(dataset: Dataset, tmp_path: Path) -> None:
    arguments = launched(
        ["-np", "2", "--max-restarts", "5"], dataset, tmp_path / "run", "--held-out", "nothing"
    )
    ended = ended_within(DEADLINE_S, arguments)
    assert ended.exit_code == 1, ended.output
    assert ended.stderr.count("has no split 'nothing'") == 1
    assert "not started again: it would fail in the same way" in our_lines(ended)[-1], ended.output
