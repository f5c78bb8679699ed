"""Faults on several nodes: the job ends soon, one line says which rank, host and reason, nothing is left."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from speechdp.data.shards.dataset import Dataset
from tests.cluster.lab import Lab
from tests.cluster.training import (
    ENDLESS,
    HOROVODRUN_GLOO,
    HOROVODRUN_MPI,
    MPIRUN,
    Training,
    assert_nothing_left,
    last_word,
)
from tests.helpers.tiny_data import flip_byte

#: The promise is 10 s, or 7 s more after a cut link (keepalive probes, launching/command.py); the rest is for
#: a machine that has other things to do.  Left to itself no such job would end in minutes.
SECONDS = 120.0
#: Of --hang-timeout: nodes that share few cores may do nothing for some, and do not hang.
HANG_S = 15
LAUNCHERS = [
    pytest.param(MPIRUN, "mpi", id="mpirun"),
    pytest.param(HOROVODRUN_MPI, "horovod", id="horovodrun-mpi"),
    pytest.param(HOROVODRUN_GLOO, "horovod", id="horovodrun-gloo"),
]


@pytest.fixture
def run(lab: Lab, request: pytest.FixtureRequest) -> Path:
    """The folder of a run, on all nodes."""
    return lab.folder / re.sub(r"\W+", "-", request.node.name)


def endless(lab: Lab, dataset: Dataset, *options: str) -> Training:
    """Return a training of two ranks, on n1 and n2."""
    return Training(lab, dataset, ("n1", "n2"), train=(*ENDLESS, *options))


@pytest.mark.parametrize(("launch", "backend"), LAUNCHERS)
def test_a_rank_is_killed_on_another_node(
    lab: Lab, dataset: Dataset, run: Path, launch: tuple[str, ...], backend: str
) -> None:
    training = Training(lab, dataset, ("n1", "n2"), launch=launch, train=ENDLESS, backend=backend)
    with training.begun(run) as job:
        job.kill_rank(1)
        ended = job.finish(within_s=SECONDS)
        assert_nothing_left(lab)
    line = last_word(ended, run)
    assert line.startswith("speechdp launch: rank 1 on n2 "), line
    if launch != HOROVODRUN_GLOO:  # it starts ranks by ssh, which does not tell how they ended
        assert ended.exit_code == 137, ended.output
        assert "was killed by SIGKILL" in line, line


def test_a_rank_fails_with_an_exception(lab: Lab, dataset: Dataset, run: Path) -> None:
    shutil.copytree(dataset.path, lab.folder / "damaged")
    damaged = Dataset.open(lab.folder / "damaged")
    with endless(lab, damaged).begun(run) as job:
        # In the shards as they are, found in the next epoch by the rank whose turn it is.
        names = [flip_byte(path, 3) for path in damaged.shard_paths("train")]
        ended = job.finish(within_s=SECONDS)
        assert_nothing_left(lab)
    assert ended.exit_code == 1, ended.output
    said = [line for line in ended.stderr.splitlines() if line.startswith("speechdp: ")]
    assert re.match(rf"speechdp: rank [01] on n[12]: .*utterance ({'|'.join(names)}) is damaged", said[0])
    assert len(said) == 1, ended.output
    assert re.match(r"speechdp launch: rank [01] on n[12] failed, its message", last_word(ended, run))


def test_a_node_dies(lab: Lab, dataset: Dataset, run: Path) -> None:
    with endless(lab, dataset).begun(run) as job:
        lab.kill_node("n2")
        ended = job.finish(within_s=SECONDS)
        assert_nothing_left(lab, ["n1"])
    assert last_word(ended, run).startswith("speechdp launch: host n2 was lost")


def test_a_link_is_cut(lab: Lab, dataset: Dataset, run: Path) -> None:
    with endless(lab, dataset).begun(run) as job:
        lab.cut("n2")
        ended = job.finish(within_s=SECONDS)
        # The node that is cut off notices by its own daemon's keepalive.
        assert_nothing_left(lab, within_s=SECONDS)
    assert last_word(ended, run).startswith("speechdp launch: host n2 was lost")


def test_a_node_is_frozen(lab: Lab, dataset: Dataset, run: Path) -> None:
    if lab.why_not_freeze is not None:
        pytest.skip(lab.why_not_freeze)
    with endless(lab, dataset, "--hang-timeout", str(HANG_S)).begun(run) as job:
        lab.freeze("n2")
        ended = job.finish(within_s=HANG_S + SECONDS)
        lab.thaw("n2")
        assert_nothing_left(lab)
    assert ended.exit_code == 124, ended.output
    (said,) = [line for line in ended.stderr.splitlines() if line.startswith("speechdp: ")]
    assert re.match(r"speechdp: rank 0 on n1: no step ended for \d+ s .*late: rank 1 on n2", said), said
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith("speechdp launch: ")]
    assert f"; last checkpoint: {run}/checkpoints/step-" in line, ended.output
