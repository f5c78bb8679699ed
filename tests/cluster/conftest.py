"""Nodes for the tests of a file, and data that they share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from speechdp.data.shards.dataset import Dataset
from tests.cluster.lab import Lab, why_not
from tests.helpers.tiny_data import TinySizes, write_tiny_data

NUM_NODES = 3


@pytest.fixture(scope="session")
def lab_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the nodes share: one folder for all files, so that a run to compare with is made once."""
    return tmp_path_factory.mktemp("lab")


@pytest.fixture(scope="session")
def dataset(lab_folder: Path) -> Dataset:
    """Two words' worth of data, on all nodes."""
    return write_tiny_data(lab_folder / "data", TinySizes(train=120))


@pytest.fixture(scope="module")
def shared_lab(lab_folder: Path) -> Iterator[Lab]:
    """Three nodes n1, n2, n3; skipped with the reason where there can be none."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with Lab(NUM_NODES, lab_folder) as lab:
        yield lab


@pytest.fixture
def lab(shared_lab: Lab) -> Iterator[Lab]:
    """The nodes, up, joined and idle; nothing of the test is left on them afterwards."""
    yield shared_lab
    shared_lab.restore()
