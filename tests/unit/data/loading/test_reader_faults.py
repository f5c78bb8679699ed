"""Disks that fail in mid-epoch, several threads on one reader, shared indices, memory over epochs."""

from __future__ import annotations

import errno
import os
import threading
import tracemalloc
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from speechdp.comm.base import Communicator
from speechdp.comm.threads.communicator import run_threads
from speechdp.data.loading import reader as reader_module
from speechdp.data.loading.loader import Loader
from speechdp.data.loading.reader import SplitReader
from speechdp.data.loading.source_request import Context
from speechdp.data.plan.assignment import planned
from speechdp.data.plan.epoch_plan import EpochPlan, PlanOptions, plan_epoch
from speechdp.data.shards import contiguous
from speechdp.data.shards.dataset import Dataset
from speechdp.errors import ShardError
from tests.helpers.tiny_data import TinySizes, write_tiny_data

OPTIONS = PlanOptions(3, chunk_frames=9, seed=4)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return write_tiny_data(tmp_path_factory.mktemp("faults") / "data", TinySizes(train=40, shards=3))


class FailingDisk:
    """Reads well for a while, then fails or comes back short."""

    def __init__(self, num_good: int, fault: int | None) -> None:
        self.left, self.fault = num_good, fault

    def __call__(self, fd: int, buffers: Sequence[memoryview], position: int) -> int:
        self.left -= 1
        if self.left >= 0:
            return os.preadv(fd, buffers, position)
        if self.fault is None:
            return 0
        raise OSError(self.fault, os.strerror(self.fault))


def plan_of(reader: SplitReader, epoch: int = 0, size: int = 1) -> EpochPlan:
    return plan_epoch(reader.index, OPTIONS, epoch, size)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (errno.EIO, r"train-0000\d\.h5: cannot be read \(Input/output error\); check the disk"),
        (errno.ESTALE, r"train-0000\d\.h5: cannot be read \(Stale file handle\)"),
        (None, r"train-0000\d\.h5: truncated"),
    ],
)
@pytest.mark.parametrize("num_good", [0, 150])
def test_a_disk_that_goes_away_ends_the_epoch_with_one_clear_error(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch, fault: int | None, message: str, num_good: int
) -> None:
    with closing(SplitReader(dataset, "train")) as reader:
        monkeypatch.setattr(contiguous, "preadv", FailingDisk(num_good, fault))
        with Loader(reader, planned(lambda epoch: plan_of(reader, epoch), 0, 5)) as loader:
            with pytest.raises(ShardError, match=message):
                for _ in loader:
                    pass
            with pytest.raises(StopIteration):
                next(loader)


def test_reads_that_come_back_short_are_gone_on_with(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(SplitReader(dataset, "train", context=Context(2, 1))) as reader:
        batches = [plan_of(reader).ranks[0].batch(i) for i in range(plan_of(reader).num_steps)]
        expected = [reader.batch(segments) for segments in batches]

        def short(fd: int, buffers: Sequence[memoryview], position: int) -> int:
            piece = buffers[0][: max(1, len(buffers[0]) // 3)]
            return os.preadv(fd, [piece], position)

        monkeypatch.setattr(contiguous, "preadv", short)
        for segments, batch in zip(batches, expected, strict=True):
            again = reader.batch(segments)
            assert torch.equal(again.features, batch.features) and torch.equal(again.targets, batch.targets)


def test_several_threads_read_the_same(dataset: Dataset) -> None:
    with closing(SplitReader(dataset, "train")) as reader:
        plan = plan_of(reader)
        batches = [plan.ranks[0].batch(i) for i in range(plan.num_steps)]
        with closing(SplitReader(dataset, "train")) as alone:
            sums = [float(alone.batch(segments).features.double().sum()) for segments in batches]
        found: dict[int, list[float]] = {}

        def read(number: int) -> None:
            found[number] = [float(reader.batch(segments).features.double().sum()) for segments in batches]

        threads = [threading.Thread(target=read, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [found[number] for number in range(4)] == [sums] * 4


def test_ranks_share_out_the_reading_of_the_indices_and_open_only_what_they_read(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: dict[int, list[int]] = {0: [], 1: []}
    names = threading.local()
    open_shard = Dataset.open_shard

    def note(self: Dataset, split: str, index: int) -> object:
        opened[names.rank].append(index)
        return open_shard(self, split, index)

    monkeypatch.setattr(Dataset, "open_shard", note)

    def run(comm: Communicator) -> None:
        names.rank = comm.rank
        with closing(SplitReader(dataset, "train", comm=comm)) as reader:
            lengths[comm.rank] = reader.index.num_frames

    lengths: dict[int, np.ndarray] = {}
    run_threads(2, run)
    assert opened == {0: [0, 2], 1: [1]}
    monkeypatch.undo()
    with closing(SplitReader(dataset, "train")) as reader:
        for rank in (0, 1):
            np.testing.assert_array_equal(lengths[rank], reader.index.num_frames)


def test_memory_and_files_do_not_grow_with_epochs(dataset: Dataset) -> None:
    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    with closing(SplitReader(dataset, "train")) as reader:

        def read_epochs(num: int) -> None:
            with Loader(reader, planned(lambda epoch: plan_of(reader, epoch), 0, num)) as loader:
                for _ in loader:
                    pass

        read_epochs(2)
        before = descriptors()
        tracemalloc.start()
        read_epochs(2)
        first, _ = tracemalloc.get_traced_memory()
        read_epochs(6)
        last, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert descriptors() == before
        assert last - first < 100_000


def test_a_slow_disk_is_told_what_will_be_read(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel is named every piece of a batch, once reads have been slower than memory is."""
    announced: list[tuple[int, int]] = []
    read: list[tuple[int, int]] = []

    def advise(fd: int, position: int, num_bytes: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_WILLNEED
        announced.append((position, num_bytes))

    def note(fd: int, buffers: Sequence[memoryview], position: int) -> int:
        read.append((position, len(buffers[0])))
        return os.preadv(fd, buffers, position)

    monkeypatch.setattr(os, "posix_fadvise", advise)
    monkeypatch.setattr(reader_module, "_TELLING_BYTES", 0)
    with closing(SplitReader(dataset, "train")) as reader:
        segments = plan_of(reader).ranks[0].batch(0)
        for rate, is_announced in ((0.0, False), (1e15, False), (1e15, True)):
            monkeypatch.setattr(reader_module, "_MEMORY_RATE", rate)
            reader.batch(segments)
            assert bool(announced) == is_announced
        monkeypatch.setattr(contiguous, "preadv", note)
        announced.clear()
        reader.batch(segments)
    assert announced == read[: len(segments)]
