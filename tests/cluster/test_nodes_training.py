"""Training over several nodes, by every launcher: the model is what the same ranks on one node come to."""

from __future__ import annotations

import pytest

from speechdp.data.shards.dataset import Dataset
from tests.cluster.lab import Lab
from tests.cluster.training import (
    HOROVODRUN_GLOO,
    HOROVODRUN_MPI,
    LONG,
    Training,
    assert_close_model,
    assert_nothing_left,
    assert_same_model,
    on_one_node,
)


@pytest.mark.parametrize(
    ("hosts", "slots", "backend"),
    [
        pytest.param(("n1", "n2", "n3"), 1, "mpi", id="3-nodes-mpi"),
        # Two ranks on n1 and one on n2.
        pytest.param(("n1", "n2"), 2, "horovod", id="2-nodes-horovod"),
    ],
)
def test_three_ranks_by_mpirun(
    lab: Lab, dataset: Dataset, hosts: tuple[str, ...], slots: int, backend: str
) -> None:
    training = Training(lab, dataset, hosts, slots, launch=("-np", "3"), train=LONG, backend=backend)
    run = training.to_the_end(lab.folder / f"run-{len(hosts)}-{backend}")
    assert_nothing_left(lab)
    # Horovod sums three and more ranks in an order that depends on time.
    compare = assert_same_model if backend == "mpi" else assert_close_model
    compare(run, on_one_node(lab, dataset, 3, LONG))


@pytest.mark.parametrize(
    "launch", [pytest.param(HOROVODRUN_MPI, id="mpi"), pytest.param(HOROVODRUN_GLOO, id="gloo")]
)
def test_two_ranks_by_horovodrun(lab: Lab, dataset: Dataset, launch: tuple[str, ...]) -> None:
    training = Training(lab, dataset, ("n1", "n2"), launch=launch, backend="horovod")
    run = training.to_the_end(lab.folder / f"run{''.join(launch)}")
    assert_nothing_left(lab)
    assert_same_model(run, on_one_node(lab, dataset, 2))


def test_a_slow_link_changes_nothing_but_the_time(lab: Lab, dataset: Dataset) -> None:
    lab.limit("n2", "10mbit")
    run = Training(lab, dataset, ("n1", "n2")).to_the_end(lab.folder / "run-slow")
    assert_same_model(run, on_one_node(lab, dataset, 2))
