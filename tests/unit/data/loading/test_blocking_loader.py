"""The poster's trainloader: whole groups read while training waits, the same batches as any other loader."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
import torch

from speechdp.data.loading.batch import Batch
from speechdp.data.loading.loader import BlockingLoader, Loader
from speechdp.data.loading.reader import SplitReader
from speechdp.data.loading.source import Ready
from speechdp.data.plan.assignment import Assignment, PlanPosition, planned
from speechdp.data.plan.epoch_plan import EpochPlan, PlanOptions, Segments, plan_epoch
from speechdp.data.plan.orders import GROUP_BATCHES
from speechdp.data.shards.dataset import Dataset
from tests.helpers.tiny_data import TinySizes, write_tiny_data

OPTIONS = PlanOptions(1, seed=2, order="blocking-sort")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return write_tiny_data(tmp_path_factory.mktemp("blocking") / "data", TinySizes(train=GROUP_BATCHES + 9))


class Counting(SplitReader):
    """Counts the batches it has made."""

    made = 0

    def start(self, segments: Segments, place: PlanPosition | None = None) -> Ready:
        self.made += 1
        return super().start(segments, place)


def assignments(reader: SplitReader) -> Iterator[Assignment]:
    def plan(epoch: int) -> EpochPlan:
        return plan_epoch(reader.index, OPTIONS, epoch, 1)

    return planned(plan, 0, 2)


def test_a_group_is_read_at_its_first_batch_and_groups_end_with_the_epoch(dataset: Dataset) -> None:
    with closing(Counting(dataset, "train")) as reader, BlockingLoader(reader, assignments(reader)) as loader:
        made = []
        for _ in loader:
            made.append(reader.made)
    size = GROUP_BATCHES
    assert made == [size] * size + [size + 9] * 9 + [2 * size + 9] * size + [2 * size + 18] * 9


def test_its_batches_are_those_of_the_loader_that_reads_ahead(dataset: Dataset) -> None:
    with closing(SplitReader(dataset, "train")) as reader:
        with Loader(reader, assignments(reader)) as loader:
            ahead = list(loader)
        with BlockingLoader(reader, assignments(reader)) as loader:
            blocking = list(loader)
    assert len(ahead) == len(blocking) > 2 * GROUP_BATCHES
    for one, other in zip(ahead, blocking, strict=True):
        assert one.at.place == other.at.place
        assert torch.equal(one.batch.features, other.batch.features)
        assert torch.equal(one.batch.targets, other.batch.targets)


def test_batches_are_moved_one_by_one(dataset: Dataset) -> None:
    moved: list[int] = []

    def move(batch: Batch) -> Batch:
        moved.append(batch.num_frames)
        return batch

    with (
        closing(SplitReader(dataset, "train")) as reader,
        BlockingLoader(reader, assignments(reader), to_device=move) as loader,
    ):
        assert [next(loader).batch.num_frames for _ in range(3)] == moved
