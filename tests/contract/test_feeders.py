"""Feeding with ranks as threads: bitwise the batches of local loading, balance, damage, and clean ends."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from speechdp.comm.packets import Packet
from speechdp.data.loading.buffers import BufferPool
from speechdp.data.loading.loader import Loader
from speechdp.data.loading.source import Pending, SplitSource
from speechdp.data.loading.source_options import SourceOptions, open_local_source
from speechdp.data.loading.source_request import Context, SourceRequest
from speechdp.data.plan.assignment import PlanPosition, planned
from speechdp.data.plan.epoch_plan import CorpusIndex, PlanOptions, Segments, plan_epoch
from speechdp.data.prepare.pipeline import prepare
from speechdp.data.shards.alignment_file import write_targets
from speechdp.data.shards.dataset import Dataset
from speechdp.data.shards.shard import Shard
from speechdp.data.transforms.perturb import speed_of_utterances
from speechdp.data.transforms.preprocess import AugmentOptions, InputOptions
from speechdp.feeding import feeder as feeding
from speechdp.feeding import feeders
from speechdp.feeding.fed_source import gather_feeder_times
from speechdp.feeding.feeder_link import DEPTH
from speechdp.options.prepare import PrepareOptions
from tests.helpers.corpora import digit_folder, no_progress
from tests.helpers.feeding import Trainer, assert_same_batch, fed
from tests.helpers.tiny_data import TinySizes, write_tiny_data
from tests.helpers.tiny_speech import write_tiny_speech
from tests.helpers.waiting import LIMIT_S, no_thread_left, wait_until

PLAN = PlanOptions(batch_size=3, chunk_frames=11, seed=1)
PLAIN = SourceRequest("train", context=Context(3, 2))
AUGMENTED = SourceRequest(
    "train", inputs=InputOptions(splice=1), augment=AugmentOptions(spec_augment=True), seed=5
)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return write_tiny_data(tmp_path_factory.mktemp("feeders") / "data", TinySizes(shards=3))


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    with no_thread_left():
        yield


@pytest.fixture
def only_feeders_open_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Dataset.open_shard

    def open_shard(self: Dataset, split: str, index: int) -> Shard:
        assert threading.current_thread().name == "speechdp-feeder", "a trainer opens a shard"
        return original(self, split, index)

    monkeypatch.setattr(Dataset, "open_shard", open_shard)


def segments_of(source: SplitSource, num: int) -> list[Segments]:
    """Return the first `num` batches of an epoch for one rank, epochs one after another."""
    plans = [plan_epoch(source.index, PLAN, epoch, 1).ranks[0] for epoch in range(3)]
    batches = [plan.batch(index) for plan in plans for index in range(plan.num_batches)]
    assert len(batches) >= num
    return batches[:num]


def index_of(source: SplitSource, wanted: SourceRequest, epoch: int) -> CorpusIndex:
    """Return the index an epoch is planned with."""
    if not wanted.augment.speed_perturb:
        return source.index
    return source.index.at_speed(speed_of_utterances(wanted.seed, epoch, len(source.index)))


def compare_epochs(trainer: Trainer, local: SplitSource, wanted: SourceRequest) -> int:
    """Take two epochs of this trainer's part through a loader and compare with local loading."""
    with closing(trainer.feeders.open(wanted)) as source:
        assert source.feature_dim == local.feature_dim
        for name in ("shard", "utterance", "num_frames"):
            ours, theirs = getattr(source.index, name), getattr(local.index, name)
            assert ours.dtype == theirs.dtype and np.array_equal(ours, theirs)
        plans = [plan_epoch(index_of(source, wanted, e), PLAN, e, trainer.comm.size) for e in range(2)]
        assignments = planned(plans.__getitem__, trainer.comm.rank, 2)
        with Loader(source, assignments, read_ahead=source.read_ahead) as loader:
            steps = list(loader)
        for step in steps:
            assert_same_batch(step.batch, local.batch(step.at.segments, step.at.place))
            assert_same_batch(source.batch(step.at.segments), local.batch(step.at.segments))
        assert_same_batch(source.batch(Segments.none()), local.batch(Segments.none()))
        return len(steps)


@pytest.mark.parametrize("num_feeders", [1, 2, 3])
@pytest.mark.parametrize("num_trainers", [1, 2, 3])
@pytest.mark.parametrize("wanted", [PLAIN, AUGMENTED], ids=["plain", "augmented"])
def test_batches_are_bitwise_those_of_local_loading(
    dataset: Dataset, wanted: SourceRequest, num_trainers: int, num_feeders: int
) -> None:
    with closing(open_local_source(dataset, wanted, SourceOptions())) as local:
        counts = fed(
            num_trainers, num_feeders, lambda feeder: dataset, lambda t: compare_epochs(t, local, wanted)
        )
    assert len(set(counts)) == 1 and counts[0] > 2


def test_features_made_of_audio_are_bitwise_the_same(tmp_path: Path) -> None:
    folder = digit_folder(tmp_path / "in")
    options = PrepareOptions((folder, tmp_path / "data"), shards=2, workers=1, store="audio")
    audio = prepare(options, no_progress).dataset
    augment = AugmentOptions(spec_augment=True, speed_perturb=True, noise_snr_db="10-30")
    wanted = SourceRequest("train", inputs=InputOptions(deltas=1), augment=augment, seed=2)
    with closing(open_local_source(audio, wanted, SourceOptions())) as local:
        fed(2, 2, lambda feeder: audio, lambda t: compare_epochs(t, local, wanted))


def test_alignments_and_several_sources_at_a_time(dataset: Dataset, tmp_path: Path) -> None:
    for path in dataset.shard_paths("train"):
        with Shard(path) as shard:
            targets = [np.roll(shard.read(u)[1], 3) for u in range(shard.num_utterances)]
            write_targets(tmp_path / path.name, shard, targets, "rolled")
    aligned = SourceRequest("train", alignments=tmp_path)
    held_out = SourceRequest("dev")

    def train(trainer: Trainer) -> None:
        for _ in range(2):  # as rounds of realignment: opened, closed, opened again
            one, two = (trainer.feeders.open(wanted) for wanted in (aligned, held_out))
            with closing(one), closing(two):
                for mine, theirs in zip(segments_of(one, 2), segments_of(two, 2), strict=True):
                    assert_same_batch(one.batch(mine, PlanPosition(0, 0, 0)), locals_[0].batch(mine))
                    assert_same_batch(two.batch(theirs), locals_[1].batch(theirs))

    locals_ = [open_local_source(dataset, wanted, SourceOptions()) for wanted in (aligned, held_out)]
    fed(2, 2, lambda feeder: dataset, train)
    shards_own = open_local_source(dataset, PLAIN, SourceOptions())
    batch = segments_of(shards_own, 1)[0]
    assert not torch.equal(locals_[0].batch(batch).targets, shards_own.batch(batch).targets)


@pytest.mark.usefixtures("only_feeders_open_shards")
def test_trainers_open_no_shard(dataset: Dataset) -> None:
    def train(trainer: Trainer) -> Any:
        with closing(trainer.feeders.open(PLAIN)) as source:
            for segments in segments_of(source, 4):
                source.batch(segments)
            comm = trainer.comm
            counts = torch.from_numpy(source.count_classes(dataset.num_classes, comm.rank, comm.size))
            comm.allreduce(counts, name="counts")
            return counts

    (mine, other) = fed(2, 3, lambda feeder: dataset, train)
    assert torch.equal(mine, other)
    assert int(mine[0].sum()) == dataset.num_frames("train")


def test_classes_are_counted_as_locally(dataset: Dataset) -> None:
    with closing(open_local_source(dataset, PLAIN, SourceOptions())) as local:
        expected = [local.count_classes(dataset.num_classes, share, 2) for share in range(2)]

    def train(trainer: Trainer) -> None:
        with closing(trainer.feeders.open(PLAIN)) as source:
            beats: list[int] = []
            source.beat = lambda: beats.append(1)
            for share in range(2):
                np.testing.assert_array_equal(
                    source.count_classes(dataset.num_classes, share, 2), expected[share]
                )
            assert len(beats) == len(dataset.shard_paths("train"))

    fed(1, 2, lambda feeder: dataset, train)


class Gated(SplitSource):
    """A source that stands still until it is let go."""

    def __init__(self, source: SplitSource, gate: threading.Event) -> None:
        self._source, self._gate = source, gate
        self.index, self.feature_dim, self.times = source.index, source.feature_dim, source.times

    def start(self, segments: Segments, place: PlanPosition | None = None) -> Pending:
        assert self._gate.wait(LIMIT_S)
        return self._source.start(segments, place)

    def count_classes(self, num_classes: int, share: int, num_shares: int) -> Any:
        return self._source.count_classes(num_classes, share, num_shares)

    def close(self) -> None:
        self._source.close()


def test_a_slow_feeder_gets_fewer_batches(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """One feeder stands still: it keeps the two batches it was asked for, the other makes all the rest."""
    gate = threading.Event()
    slow = Dataset.open(dataset.path)

    def open_source(data: Dataset, wanted: SourceRequest, options: SourceOptions) -> SplitSource:
        source = open_local_source(data, wanted, options)
        return Gated(source, gate) if data is slow else source

    monkeypatch.setattr(feeding, "open_local_source", open_source)

    def train(trainer: Trainer) -> dict[str, int]:
        with closing(trainer.feeders.open(PLAIN)) as source:
            pendings = [source.start(segments) for segments in segments_of(source, 20)]
            answers = [pending._answer for pending in pendings]
            wait_until(lambda: sum(a.done() for a in answers) >= 20 - DEPTH, "the other feeder")
            assert sum(a.done() for a in answers) == 20 - DEPTH
            gate.set()
            for pending in pendings:
                pending.result()
            return dict(source.times.facts["batches_of_feeders"])

    (counts,) = fed(1, 2, lambda feeder: slow if feeder == 1 else dataset, train)
    assert counts == {"1": 20 - DEPTH, "2": DEPTH}


def test_equal_feeders_take_turns(dataset: Dataset) -> None:
    def train(trainer: Trainer) -> dict[str, int]:
        with closing(trainer.feeders.open(PLAIN)) as source:
            for segments in segments_of(source, 12):
                source.batch(segments)
            return dict(source.times.facts["batches_of_feeders"])

    (counts,) = fed(1, 3, lambda feeder: dataset, train)
    assert counts == {"1": 4, "2": 4, "3": 4}


def test_epochs_leave_nothing_behind(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers are used again and again, and no packet outlives its batch."""
    monkeypatch.setattr(feeders, "_SMALL_BYTES", 0)
    taken: list[Any] = []
    original = BufferPool._find

    def find(self: BufferPool, num_bytes: int) -> Any:
        memory = original(self, num_bytes)
        if threading.current_thread().name == "speechdp-fed" and not any(memory is m for m in taken):
            taken.append(memory)
        return memory

    monkeypatch.setattr(BufferPool, "_find", find)

    def train(trainer: Trainer) -> None:
        with closing(trainer.feeders.open(PLAIN)) as source:
            plan = plan_epoch(source.index, PLAN, 0, 1)
            for _ in range(4):
                with Loader(source, planned(lambda epoch: plan, 0, 1)) as loader:
                    for step in loader:
                        assert step.batch.features.shape[0] > 0
                    del step
                gc.collect()
                # A thread that has just handed one over may still be on its way to the next.
                wait_until(
                    lambda: not [thing for thing in gc.get_objects() if type(thing) is Packet],
                    "the end of packets whose batches are gone",
                )
            # 3 tensors a batch; a few batches are held at a time, and some need larger buffers than others.
            assert 0 < len(taken) <= 3 * 10 < 3 * 4 * plan.num_steps / 2

    fed(1, 1, lambda feeder: dataset, train)


def test_times_of_every_feeder_are_gathered_once(dataset: Dataset) -> None:
    def train(trainer: Trainer) -> list[dict[str, Any]]:
        with closing(trainer.feeders.open(PLAIN)) as source:
            for segments in segments_of(source, 6):
                source.batch(segments)
            return gather_feeder_times(source, trainer.comm)

    mine, other = fed(2, 2, lambda feeder: dataset, train)
    assert mine == other
    assert [entry["rank"] for entry in mine] == [2, 3]
    assert sum(entry["data"]["batches"] for entry in mine) == 12
    assert all({"read", "send"} <= entry["data"]["stages_s"].keys() for entry in mine)


def test_spectrograms_are_fed_with_their_texts(tmp_path: Path) -> None:
    speech = write_tiny_speech(tmp_path / "data", TinySizes(shards=2))
    wanted, whole = SourceRequest("train"), PlanOptions(batch_size=3, chunk_frames=0, seed=1)

    def train(trainer: Trainer) -> int:
        with closing(trainer.feeders.open(wanted)) as source:
            plan = plan_epoch(source.index, whole, 0, 1).ranks[0]
            batches = [plan.batch(index) for index in range(plan.num_batches)]
            for segments in batches:
                assert_same_batch(source.batch(segments), local.batch(segments))
            assert source.times.summary()["computed_frames"] >= source.times.summary()["frames"] > 0
            return len(batches)

    with closing(open_local_source(speech, wanted, SourceOptions())) as local:
        assert fed(2, 1, lambda feeder: speech, train) == [8, 8]
