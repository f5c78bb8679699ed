"""`speechdp launch --max-restarts`: a lost rank costs the steps since the last checkpoint, no more."""

from __future__ import annotations

import json
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
#: The same while the models of the epochs that end with steps 160, 200 and 240 are averaged: one is in the
#: mean by then, and two.
GATES_OF_AVERAGE = (176, 216)
#: Before each gate there is a checkpoint in so many steps, which is waited for.
STEPS_TO_GATE = 16


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return write_tiny_data(tmp_path_factory.mktemp("restart") / "data", TinySizes(train=80))


def launched(launch: list[str], dataset: Dataset, run: Path, *more: str) -> list[str]:
    return [*SPEECHDP, "launch", *launch, "--", "train", str(dataset.path), str(run), *OPTIONS, *more]


def metrics(run: Path) -> list[dict[str, float]]:
    """Return the lines of a run's metrics, without times."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [{name: value for name, value in line.items() if name != "time_s"} for line in lines]


def model(run: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(run / "model.safetensors")


@pytest.mark.parametrize(
    ("more", "steps"), [((), GATES), (("--average-epochs", "3"), GATES_OF_AVERAGE)], ids=["last", "mean"]
)
def test_killed_ranks_change_nothing(
    dataset: Dataset, tmp_path: Path, more: tuple[str, ...], steps: tuple[int, int]
) -> None:
    undisturbed, disturbed = tmp_path / "undisturbed", tmp_path / "disturbed"
    ended = ended_within(DEADLINE_S, launched(["-np", "2"], dataset, undisturbed, *more))
    assert ended.exit_code == 0, ended.output
    # The first start comes no further than the first gate: a checkpoint behind it is the second one's.
    gates = Gates(tmp_path / "gates", *steps)
    command = launched(["-np", "2", "--max-restarts", "2"], dataset, disturbed, *more)
    with started(command, disturbed, gates) as job:
        for rank, gate in zip((1, 0), steps, strict=True):
            job.wait_until(
                lambda gate=gate: last_step(disturbed) >= gate - STEPS_TO_GATE, f"a checkpoint before {gate}"
            )
            job.kill_rank(rank)
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
    assert metrics(disturbed) == metrics(undisturbed)
    assert any("averaged_epochs" in line for line in metrics(disturbed)) == bool(more)


def test_what_is_refused_is_not_started_again(dataset: Dataset, tmp_path: Path) -> None:
    arguments = launched(
        ["-np", "2", "--max-restarts", "5"], dataset, tmp_path / "run", "--held-out", "nothing"
    )
    ended = ended_within(DEADLINE_S, arguments)
    assert ended.exit_code == 1, ended.output
    assert ended.stderr.count("has no split 'nothing'") == 1
    assert "not restarted: it would fail in the same way" in our_lines(ended)[-1], ended.output
