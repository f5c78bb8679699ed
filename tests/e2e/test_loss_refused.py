"""--tolerate-loss where it cannot be: one line with the reason and the remedy, before the run begins."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from speechdp.data.shards.dataset import Dataset
from tests.helpers.jobs import DEADLINE_S, alone, ended_within, our_lines
from tests.helpers.tiny_data import TINY_MODEL, write_tiny_data


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return write_tiny_data(tmp_path_factory.mktemp("refused") / "data")


@pytest.mark.parametrize(
    ("strategy", "reason"),
    [
        # Not started by mpirun --with-ft, Open MPI 5 is refused as well.
        (
            "ad_psgd",
            r"(MPI \(Open MPI 4\.\S+\) has no ULFM; install|ULFM of MPI \(.*\) is switched off; start)",
        ),
        ("bmuf", r"bmuf waits for every rank in its exchanges; choose --strategy ad_psgd \(without groups\)"),
    ],
)
def test_the_reason_and_the_remedy_are_one_line(
    dataset: Dataset, tmp_path: Path, strategy: str, reason: str
) -> None:
    run = tmp_path / "run"
    options = (*TINY_MODEL, "--strategy", strategy, "--backend", "mpi", "--tolerate-loss")
    ended = ended_within(DEADLINE_S, alone("train", dataset.path, run, *options))
    (line,) = our_lines(ended)
    assert ended.exit_code == 1 and not run.exists(), ended.output
    assert re.match(f"speechdp: --tolerate-loss: {reason}", line), ended.output
