"""Feeding with ranks as threads: bitwise the batches of local loading, balance, damage, and clean ends."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from speechdp.comm.base import Communicator
from speechdp.comm.roles import Roles, assign_roles
from speechdp.comm.threads import run_threads
from speechdp.data import feeding
from speechdp.data.alignment_file import write_targets
from speechdp.data.assignment import Place, planned
from speechdp.data.batch import Batch
from speechdp.data.buffers import BufferPool
from speechdp.data.dataset import Dataset
from speechdp.data.fed_source import Feeders, FedSource, gather_feeder_times
from speechdp.data.loader import Loader
from speechdp.data.plan import PlanOptions, plan_epoch
from speechdp.data.preprocess import AugmentOptions, InputOptions
from speechdp.data.reader import Context
from speechdp.data.shards import Shard
from speechdp.data.source import SplitSource
from speechdp.data.source_options import SourceRequest, Workshop, open_local_source
from speechdp.errors import CommunicationError, ShardError
from speechdp.train.feeders import open_link, serve_trainers
from tests.helpers.feeding import Trainer, assert_same_batch, fed
from tests.helpers.tiny_data import TinySizes, flip_byte, write_tiny_data

PLAN = PlanOptions(batch_size=3, chunk_frames=11, seed=1)
PLAIN = SourceRequest("train", context=Context(3, 2))
AUGMENTED = SourceRequest(
    "train", inputs=InputOptions(splice=1), augment=AugmentOptions(spec_augment=True), seed=5
)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return write_tiny_data(tmp_path_factory.mktemp("feeders") / "data")


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + 5
    while set(threading.enumerate()) - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert set(threading.enumerate()) - before == set()


def assert_identical(trainer: Trainer, local: SplitSource, request: SourceRequest) -> int:
    """Take two epochs of this trainer's part through a loader and compare with local loading."""
    with closing(trainer.feeders.open(request)) as source:
        assert source.feature_dim == local.feature_dim
        for name in ("shard", "utterance", "num_frames"):
            ours, theirs = getattr(source.index, name), getattr(local.index, name)
            assert ours.dtype == theirs.dtype and np.array_equal(ours, theirs)
        plans = [plan_epoch(source.index, PLAN, epoch, trainer.comm.size) for epoch in range(2)]
        with Loader(
            source, planned(plans.__getitem__, trainer.comm.rank, 2), read_ahead=source.read_ahead
        ) as loader:
            steps = list(loader)
        for step in steps:
            assert_same_batch(step.batch, local.batch(step.at.segments, step.at.place))
            assert_same_batch(source.batch(step.at.segments), local.batch(step.at.segments))
        return len(steps)


@pytest.mark.parametrize("num_feeders", [1, 2, 3])
@pytest.mark.parametrize("num_trainers", [1, 2, 3])
@pytest.mark.parametrize("request_", [PLAIN, AUGMENTED], ids=["plain", "augmented"])
def test_batches_are_bitwise_those_of_local_loading(
    dataset: Dataset, request_: SourceRequest, num_trainers: int, num_feeders: int
) -> None:
    local = open_local_source(dataset, request_, Workshop())

    def train(trainer: Trainer) -> int:
        return assert_identical(trainer, local, request_)

    with closing(local):
        counts = fed(num_trainers, num_feeders, dataset, train)
    assert len(set(counts)) == 1 and counts[0] > 2
