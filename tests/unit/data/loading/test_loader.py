"""Reading ahead in a thread: the same batches, the errors in the right place, and nothing left behind."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from speechdp.data.loading.batch import IGNORED_TARGET, Batch
from speechdp.data.loading.loader import Loader, Step
from speechdp.data.loading.reader import SplitReader
from speechdp.data.loading.source import Ready
from speechdp.data.loading.source_request import Context
from speechdp.data.plan.assignment import PlanPosition, Position, planned
from speechdp.data.plan.epoch_plan import CorpusIndex, EpochPlan, PlanOptions, Segments, plan_epoch
from speechdp.data.shards.alignment_file import write_targets
from speechdp.data.shards.dataset import Dataset
from speechdp.errors import ShardError
from tests.helpers.tiny_data import TinySizes, flip_byte, truncate, write_tiny_data
from tests.helpers.waiting import no_thread_left, wait_until

OPTIONS = PlanOptions(batch_size=4, chunk_frames=0, seed=1)
EPOCHS = 2


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return write_tiny_data(tmp_path_factory.mktemp("loader") / "data")


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Any:
    with no_thread_left():
        yield


def opened(
    dataset: Dataset, alignments: Path | None = None, context: Context | None = None
) -> AbstractContextManager[SplitReader]:
    return closing(SplitReader(dataset, "train", alignments, context))


def planner(reader: SplitReader, options: PlanOptions = OPTIONS, size: int = 2) -> Callable[[int], EpochPlan]:
    return lambda epoch: plan_epoch(reader.index, options, epoch, size)


def assert_same_batch(one: Batch, other: Batch) -> None:
    assert torch.equal(one.features, other.features)
    assert torch.equal(one.targets, other.targets)
    assert torch.equal(one.lengths, other.lengths)
    assert one.num_frames == other.num_frames


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("options", [OPTIONS, PlanOptions(5, 7, 3)])
def test_batches_are_those_read_directly(dataset: Dataset, options: PlanOptions, rank: int) -> None:
    context = Context(3, 2)
    with opened(dataset, context=context) as reader:
        plan = planner(reader, options)
        with Loader(reader, planned(plan, rank, EPOCHS)) as loader:
            steps = list(loader)
        expected = []
        for epoch in range(EPOCHS):
            for index in range(plan(epoch).num_steps):
                expected.append((epoch, index, reader.batch(plan(epoch).ranks[rank].batch(index))))
        assert [(step.epoch, step.at.index) for step in steps] == [(e, i) for e, i, _ in expected]
        for step, (epoch, index, batch) in zip(steps, expected, strict=True):
            assert_same_batch(step.batch, batch)
            frames = plan(epoch).frames[:, index]
            assert (step.at.total_frames, step.at.mean_frames) == (frames.sum(), frames.mean())
            assert step.at.num_steps == plan(epoch).num_steps
            assert step.ends_epoch == (index == step.at.num_steps - 1)


def test_what_is_read_is_what_stands_in_the_shards(dataset: Dataset) -> None:
    """Every learnt frame of an epoch, found in the shard through h5py's own reading."""
    with opened(dataset, context=Context(4, 3)) as reader:
        plan = plan_epoch(reader.index, PlanOptions(3, 8, 0), 0, 1)
        learnt = 0
        for index in range(plan.num_steps):
            segments = plan.ranks[0].batch(index)
            batch = reader.batch(segments)
            for row in range(len(segments)):
                learnt += check_row(dataset, segments, batch, row)
        assert learnt == dataset.num_frames("train")


def check_row(dataset: Dataset, segments: Segments, batch: Batch, row: int) -> int:
    shard = dataset.open_shard("train", int(segments.shard[row]))
    features, targets = shard.read(int(segments.utterance[row]))
    start, num = int(segments.start[row]), int(segments.num_frames[row])
    begin, end = max(0, start - 4), min(len(targets), start + num + 3)
    assert int(batch.lengths[row]) == end - begin
    np.testing.assert_array_equal(batch.features[row, : end - begin], features[begin:end])
    assert not batch.features[row, end - begin :].any()
    expected = np.full(batch.targets.shape[1], IGNORED_TARGET)
    expected[start - begin : start - begin + num] = targets[start : start + num]
    np.testing.assert_array_equal(batch.targets[row], expected)
    return num


def test_it_goes_on_from_the_middle_of_an_epoch(dataset: Dataset) -> None:
    with opened(dataset) as reader:
        with Loader(reader, planned(planner(reader), 1, 3)) as loader:
            whole = list(loader)
        with Loader(reader, planned(planner(reader), 1, 3, Position(1, 2))) as loader:
            rest = list(loader)
    first = next(i for i, step in enumerate(whole) if (step.epoch, step.at.index) == (1, 2))
    assert len(rest) == len(whole) - first
    for one, other in zip(rest, whole[first:], strict=True):
        assert (one.epoch, one.at.index) == (other.epoch, other.at.index)
        assert_same_batch(one.batch, other.batch)


def test_a_position_behind_the_last_epoch_yields_nothing(dataset: Dataset) -> None:
    with opened(dataset) as reader, Loader(reader, planned(planner(reader), 0, 2, Position(2, 0))) as loader:
        assert list(loader) == []


def test_a_rank_without_data_joins_with_no_frames(dataset: Dataset) -> None:
    with opened(dataset) as reader:
        size = dataset.num_utterances("train") + 5
        empty = next(
            r for r, plan in enumerate(planner(reader, size=size)(0).ranks) if len(plan.segments) == 0
        )
        with Loader(reader, planned(planner(reader, size=size), empty, 1)) as loader:
            steps = list(loader)
    assert [step.batch.num_frames for step in steps] == [0] and steps[0].at.total_frames > 0


# --- the thread ---------------------------------------------------------------------------------------


class CountingReader:
    """Counts the batches read; the first `num_good` are good."""

    def __init__(self, num_good: int = 1000) -> None:
        self.num_read = 0
        self.num_good = num_good

    def start(self, segments: Segments, place: PlanPosition) -> Ready:
        self.num_read += 1
        if self.num_read > self.num_good:
            raise ShardError("train-00000.h5: is damaged")
        return Ready(Batch(torch.zeros(1, 1, 1), torch.zeros(1, 1), torch.ones(1), 1))


def counting_loader(reader: CountingReader, read_ahead: int = 4) -> Loader:
    index = CorpusIndex.of_lengths([np.full(200, 3)])
    any_reader: Any = reader
    return Loader(
        any_reader,
        planned(lambda epoch: plan_epoch(index, PlanOptions(1), epoch, 1), 0, 1),
        read_ahead=read_ahead,
    )


def assert_reads(reader: CountingReader, num_batches: int) -> None:
    """Wait until so many batches have been read, and see that no more are."""
    wait_until(lambda: reader.num_read >= num_batches, f"{num_batches} batches")
    time.sleep(0.15)  # longer than the thread waits between two looks
    assert reader.num_read == num_batches


def test_reading_ahead_is_bounded() -> None:
    reader = CountingReader()
    with counting_loader(reader, read_ahead=3) as loader:
        assert_reads(reader, 3)
        next(loader)
        assert_reads(reader, 3 + 1)


def test_an_error_is_raised_after_the_batches_before_it_and_once() -> None:
    with counting_loader(CountingReader(num_good=6)) as loader:
        steps: list[Step] = [next(loader) for _ in range(6)]
        assert [step.at.index for step in steps] == list(range(6))
        with pytest.raises(ShardError, match=r"train-00000\.h5: is damaged"):
            next(loader)
        with pytest.raises(StopIteration):
            next(loader)


def test_closing_early_joins_the_thread_and_ends_the_iteration() -> None:
    reader = CountingReader()
    loader = counting_loader(reader, read_ahead=1)
    next(loader)
    loader.close()
    loader.close()
    num_read = reader.num_read
    assert num_read <= 3
    with pytest.raises(StopIteration):
        next(loader)
    time.sleep(0.2)
    assert reader.num_read == num_read


def test_an_error_of_the_plan_is_raised_too() -> None:
    any_reader: Any = CountingReader()

    def plan(epoch: int) -> EpochPlan:
        raise MemoryError("no room for a plan")

    with Loader(any_reader, planned(plan, 0, 1)) as loader, pytest.raises(MemoryError, match="no room"):
        next(loader)


def test_the_body_of_with_may_raise(dataset: Dataset) -> None:
    with (
        opened(dataset) as reader,
        pytest.raises(KeyError),
        Loader(reader, planned(planner(reader), 0, 50)) as loader,
    ):
        next(loader)
        raise KeyError("training failed")


# --- damage -------------------------------------------------------------------------------------------


def read_all(dataset: Dataset, alignments: Path | None = None) -> int:
    with (
        opened(dataset, alignments) as reader,
        Loader(reader, planned(planner(reader, size=1), 0, 1)) as loader,
    ):
        return sum(1 for _ in loader)


@pytest.mark.parametrize("where", ["features", "targets"])
def test_a_flipped_byte_is_found_when_its_utterance_is_first_read(tmp_path: Path, where: Any) -> None:
    dataset = write_tiny_data(tmp_path / "data")
    path = dataset.shard_paths("train")[1]
    name = flip_byte(path, 3, where)
    with pytest.raises(ShardError, match=rf"{path}: utterance {name} is damaged \(checksum\)"):
        read_all(dataset)


def test_a_flipped_byte_in_a_chunk_that_is_not_the_first_to_be_read(tmp_path: Path) -> None:
    """The whole utterance is verified with whichever of its chunks comes first."""
    dataset = write_tiny_data(tmp_path / "data", TinySizes(train=2, shards=1))
    path = dataset.shard_paths("train")[0]
    flip_byte(path, 1)
    with opened(dataset) as reader:
        last = int(reader.index.num_frames[1]) - 1
        one = np.ones(1, dtype=np.int64)
        with pytest.raises(ShardError, match="checksum"):
            reader.batch(Segments(0 * one, one, last * one, one))


def test_a_shard_truncated_before_training_is_refused_on_opening(tmp_path: Path) -> None:
    dataset = write_tiny_data(tmp_path / "data")
    path = dataset.shard_paths("train")[1]
    truncate(path)
    with pytest.raises(ShardError, match=rf"{path}: .*truncated.*prepare the data again"):
        SplitReader(dataset, "train")


def test_a_shard_truncated_during_training_is_an_error_of_next(tmp_path: Path) -> None:
    dataset = write_tiny_data(tmp_path / "data", TinySizes(train=60))
    path = dataset.shard_paths("train")[0]
    one_by_one = PlanOptions(1)
    with (
        opened(dataset) as reader,
        Loader(reader, planned(planner(reader, one_by_one, 1), 0, 1), read_ahead=1) as loader,
    ):
        next(loader)
        truncate(path, path.stat().st_size // 2)
        with pytest.raises(ShardError, match=rf"{path}: .*prepare the data again"):
            for _ in loader:
                pass


# --- targets of another alignment ---------------------------------------------------------------------


def align_anew(dataset: Dataset, folder: Path, value: int) -> None:
    """Write targets that are `value` in every frame."""
    folder.mkdir()
    for number, path in enumerate(dataset.shard_paths("train")):
        with dataset.open_shard("train", number) as shard:
            targets = [np.full(n, value, dtype=np.int32) for n in np.diff(shard.offsets)]
            write_targets(folder / path.name, shard, targets, "realigned-1")


def test_targets_of_another_alignment_take_the_place_of_the_shards(dataset: Dataset, tmp_path: Path) -> None:
    align_anew(dataset, tmp_path / "1", 7)
    context = Context(2, 0)
    with opened(dataset, tmp_path / "1", context) as reader, opened(dataset, context=context) as plain:
        plan = plan_epoch(reader.index, PlanOptions(4, 5), 0, 1)
        for index in range(plan.num_steps):
            batch = reader.batch(plan.ranks[0].batch(index))
            original = plain.batch(plan.ranks[0].batch(index))
            assert torch.equal(batch.features, original.features)
            assert torch.equal(batch.targets == 7, original.targets != IGNORED_TARGET)


def test_missing_and_damaged_alignments_are_named(tmp_path: Path) -> None:
    dataset = write_tiny_data(tmp_path / "data")
    with pytest.raises(ShardError, match=r"no such alignment directory; make it with train --flat-start"):
        SplitReader(dataset, "train", tmp_path / "1")
    (run := tmp_path / "run").mkdir()
    (run / "run.json").write_text("{}")
    with pytest.raises(ShardError, match=rf"{run}: is a run, not an alignment directory; it has made none"):
        SplitReader(dataset, "train", run)
    (run / "alignments" / "1").mkdir(parents=True)
    (run / "alignments" / "1" / "completed.json").write_text("{}")
    with pytest.raises(ShardError, match=rf"not an alignment directory; give its {run}/alignments/1$"):
        SplitReader(dataset, "train", run)
    align_anew(dataset, tmp_path / "1", 7)
    path = tmp_path / "1" / dataset.shard_paths("train")[0].name
    content = path.read_bytes()
    path.write_bytes(content.replace(bytes([7, 0, 0, 0] * 5), bytes([8, 0, 0, 0] * 5), 1))
    with pytest.raises(ShardError, match=rf"{path}: targets of utterance train-\d+ are damaged"):
        read_all(dataset, tmp_path / "1")
    path.unlink()
    with pytest.raises(ShardError, match=rf"{path}: cannot be read .*align again"):
        read_all(dataset, tmp_path / "1")
