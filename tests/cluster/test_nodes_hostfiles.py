"""Hostfiles that name a host that is not there, or one that ssh does not trust: one line, soon, says so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from speechdp.data.shards.dataset import Dataset
from tests.cluster.lab import Lab
from tests.cluster.training import HOROVODRUN_GLOO, MPIRUN, Training
from tests.helpers.jobs import our_lines

SECONDS = 240.0
LAUNCHERS = [pytest.param(MPIRUN, "mpi", id="mpirun"), pytest.param(HOROVODRUN_GLOO, "horovod", id="gloo")]


#: What ssh says of a host; launch's own line refers to it.
FROM_SSH = re.compile(r"ssh: .*|Host key verification failed\.|No \S+ host key is known for .*")


def assert_not_reached(lab: Lab, training: Training, run: Path, reason: str) -> None:
    """Start a training that cannot be; launch must say so in one line, and why, with ssh's words."""
    ended = lab.on("n1", training.command(run), timeout_s=SECONDS)
    assert ended.exit_code != 0, ended.output
    assert not run.exists()
    (line,) = our_lines(ended)
    assert "host could not be reached" in line, ended.output
    assert reason in ended.stdout + ended.stderr, ended.output
    others = [text for text in ended.stderr.splitlines() if text != line and not FROM_SSH.fullmatch(text)]
    assert others == [], ended.output


@pytest.mark.parametrize(("launch", "backend"), LAUNCHERS)
def test_a_host_that_does_not_exist(
    lab: Lab, dataset: Dataset, tmp_path: Path, launch: tuple[str, ...], backend: str
) -> None:
    training = Training(lab, dataset, ("n1", "n9"), launch=launch, backend=backend)
    assert_not_reached(lab, training, tmp_path / "run", "Could not resolve hostname n9")


def test_a_host_with_an_unknown_key(lab: Lab, dataset: Dataset, tmp_path: Path) -> None:
    other_name = f"echo '{lab.address('n2')} stranger' >>/etc/hosts"
    assert lab.on("n1", ["sh", "-c", other_name]).exit_code == 0
    training = Training(lab, dataset, ("n1", "stranger"))
    assert_not_reached(lab, training, tmp_path / "run", "host key is known for stranger")
