"""The epoch plan: every frame exactly once, whatever the order, the shards, the ranks, the batches, the windows."""

from __future__ import annotations

import hashlib
import tracemalloc
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from speechdp.data import windows
from speechdp.data.plan import (
    ORDERS,
    CorpusIndex,
    EpochPlan,
    Order,
    PlanOptions,
    Segments,
    padding_share,
    plan_epoch,
)
from speechdp.errors import ConfigError

Row = tuple[int, int, int, int]


@dataclass(frozen=True)
class Case:
    """A corpus and how it is dealt out."""

    shards: list[list[int]]
    size: int
    options: PlanOptions
    epoch: int = 0
    window_segments: int = windows.WINDOW_SEGMENTS

    @property
    def index(self) -> CorpusIndex:
        return CorpusIndex.of_lengths([np.array(lengths, dtype=np.int64) for lengths in self.shards])

    def plan(self, epoch: int | None = None) -> EpochPlan:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(windows, "WINDOW_SEGMENTS", self.window_segments)
            return plan_epoch(self.index, self.options, self.epoch if epoch is None else epoch, self.size)


def case(shards: list[list[int]], size: int, *options: int, epoch: int = 0) -> Case:
    return Case(shards, size, PlanOptions(*options), epoch)


def rows(segments: Segments) -> list[Row]:
    columns = (segments.shard, segments.utterance, segments.start, segments.num_frames)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def batches(plan: EpochPlan, rank: int) -> list[list[Row]]:
    return [rows(plan.ranks[rank].batch(step)) for step in range(plan.num_steps)]


all_options = st.builds(
    PlanOptions,
    batch_size=st.integers(1, 7),
    chunk_frames=st.one_of(st.just(0), st.integers(1, 40)),
    seed=st.integers(0, 2**31),
    order=st.sampled_from(ORDERS),
    batch_frames=st.one_of(st.just(0), st.integers(1, 400)),
    window_frames=st.one_of(st.just(0), st.integers(1, 400)),
)
cases = st.builds(
    Case,
    shards=st.lists(st.lists(st.integers(1, 60), min_size=1, max_size=12), min_size=1, max_size=6),
    size=st.integers(1, 9),
    options=all_options,
    epoch=st.integers(0, 5),
    window_segments=st.sampled_from([1, 5, 40, windows.WINDOW_SEGMENTS]),
)
more_ranks_than_utterances = example(case([[5], [7]], 9, 2, 0, 1))
#: Three windows; the second begins inside the second utterance.
across_windows = example(Case([[50], [50, 9]], 1, PlanOptions(2, 5, 1, window_frames=40)))


def whole_corpus(case: Case) -> Counter[Row]:
    """What a plan is to contain: utterances cut into chunks."""
    chunk = case.options.chunk_frames
    return Counter(
        (shard, utterance, start, min(chunk or length, length - start))
        for shard, lengths in enumerate(case.shards)
        for utterance, length in enumerate(lengths)
        for start in range(0, length, chunk or length)
    )


@given(cases)
@more_ranks_than_utterances
@across_windows
def test_every_segment_is_dealt_exactly_once_whatever_the_ranks(case: Case) -> None:
    plan = case.plan()
    dealt = Counter(row for rank in range(case.size) for batch in batches(plan, rank) for row in batch)
    assert dealt == whole_corpus(case)


@given(cases)
@across_windows
def test_segments_of_a_rank_are_those_of_its_batches(case: Case) -> None:
    plan = case.plan()
    for rank in range(case.size):
        assert rows(plan.ranks[rank].segments) == [row for batch in batches(plan, rank) for row in batch]


@given(cases)
@more_ranks_than_utterances
@across_windows
def test_frames_of_all_ranks_and_steps_are_those_of_the_batches(case: Case) -> None:
    plan = case.plan()
    assert len(plan.ranks) == case.size
    assert plan.frames.shape == plan.padded_frames.shape == (case.size, plan.num_steps)
    for rank, part in enumerate(plan.ranks):
        assert part.num_batches == plan.num_steps
        lengths = [[row[3] for row in batch] for batch in batches(plan, rank)]
        assert part.frames.tolist() == plan.frames[rank].tolist() == [sum(batch) for batch in lengths]
        padded = [len(batch) * max(batch, default=0) for batch in lengths]
        assert part.padded_frames.tolist() == plan.padded_frames[rank].tolist() == padded


@given(cases.filter(lambda case: case.options.batch_frames == 0))
@more_ranks_than_utterances
@across_windows
def test_batches_are_full_but_one(case: Case) -> None:
    plan, batch_size = case.plan(), case.options.batch_size
    sizes = np.array([[len(batch) for batch in batches(plan, rank)] for rank in range(case.size)])
    assert sizes.max() <= batch_size
    # A rank that has fewer joins the others' steps with none.
    assert (((sizes > 0) & (sizes < batch_size)).sum(axis=1) <= 1).all()
    assert plan.num_steps == (sizes > 0).sum(axis=1).max()


@given(cases.filter(lambda case: case.options.batch_frames > 0))
@example(Case([[60, 60, 60, 1, 1, 1, 1, 1]], 2, PlanOptions(0, batch_frames=60)))
def test_batches_by_frames_hold_no_more_and_ranks_have_as_many(case: Case) -> None:
    plan = case.plan()
    sizes = np.array([[len(batch) for batch in batches(plan, rank)] for rank in range(case.size)])
    assert (plan.padded_frames[sizes > 1] <= case.options.batch_frames).all()
    assert (sizes > 0).any(axis=0).all()
    if plan.ranks[0].windows.num_windows == 1:
        # Only who cannot halve a batch any more has steps without one.
        for of_rank in sizes:
            assert (of_rank > 0).all() or of_rank.max() <= 1


def test_in_a_step_ranks_have_batches_of_about_the_same_length() -> None:
    lengths = np.random.default_rng(5).integers(20, 200, size=4000)
    frames = plan_epoch(CorpusIndex.of_lengths([lengths]), PlanOptions(10, seed=3), 0, 4).frames[:, :-1]
    own_steps = frames.std() / frames.mean()
    waited = (frames.max(axis=0) - frames.mean(axis=0)).mean() / frames.mean()
    # Without matching the longest of 4 would be about one standard deviation longer than their mean.
    assert waited < own_steps / 4, (waited, own_steps)


@given(cases)
def test_ranks_get_equal_numbers_of_frames_to_within_an_utterance(case: Case) -> None:
    longest = max(max(lengths) for lengths in case.shards)
    frames = case.plan().frames.sum(axis=1)
    # Each end of a rank's stretch is at most half an utterance away from where it should be.
    assert np.abs(frames - frames.sum() / case.size).max() <= longest


@given(cases)
def test_the_plan_follows_from_seed_and_epoch_alone(case: Case) -> None:
    one, other = case.plan(), case.plan()
    assert one.frames.tolist() == other.frames.tolist()
    for mine, theirs in zip(one.ranks, other.ranks, strict=True):
        for name in ("shard", "utterance", "start", "num_frames"):
            assert getattr(mine.segments, name).tolist() == getattr(theirs.segments, name).tolist()


def order(plan: EpochPlan) -> list[tuple[int, int]]:
    segments = plan.ranks[0].segments
    return list(zip(segments.shard.tolist(), segments.utterance.tolist(), strict=True))


def test_another_epoch_or_seed_is_another_order() -> None:
    lengths = np.random.default_rng(0).integers(5, 50, size=(4, 20)).tolist()
    case = Case(lengths, 1, 4, 0, 3, 0)
    orders = [order(case.plan(epoch)) for epoch in range(3)]
    orders.append(order(Case(lengths, 1, 4, 0, 4, 0).plan()))
    assert len({tuple(o) for o in orders}) == 4
    assert len({frozenset(o) for o in orders}) == 1


def test_a_rank_gets_other_data_in_another_epoch() -> None:
    case = Case([[10] * 10 for _ in range(8)], 2, 4, 0, 1, 0)
    parts = [frozenset(order(case.plan(epoch))) for epoch in range(4)]
    assert len(set(parts)) > 1


def test_a_rank_reads_few_shards() -> None:
    """Its stretch of the shards laid end to end: with as many shards as ranks about one."""
    plan = Case([[10] * 20 for _ in range(8)], 4, 5, 0, 1, 2).plan()
    for rank in plan.ranks:
        assert len(set(rank.segments.shard.tolist())) == 2


@given(cases.filter(lambda case: case.chunk_frames > 0))
def test_chunks_are_whole_but_the_last_of_an_utterance(case: Case) -> None:
    for rank in case.plan().ranks:
        segments = rank.segments
        lengths = np.array(
            [case.shards[s][u] for s, u in zip(segments.shard, segments.utterance, strict=True)]
        )
        assert (segments.start % case.chunk_frames == 0).all()
        ends_utterance = segments.start + segments.num_frames == lengths
        assert (segments.num_frames[~ends_utterance] == case.chunk_frames).all()
        assert (segments.num_frames <= case.chunk_frames).all()


def test_segments_of_a_batch_are_of_similar_length() -> None:
    """Little padding: sorted inside pools, which shuffled batches alone would not give."""
    lengths = np.random.default_rng(0).integers(10, 300, size=(1, 512)).tolist()
    rank = Case(lengths, 1, 8, 0, 0, 0).plan().ranks[0]
    batches = [rank.batch(step).num_frames for step in range(rank.num_batches)]
    padded = sum(len(batch) * batch.max() for batch in batches)
    assert padded < 1.12 * sum(lengths[0])
    # Yet short and long batches come in random order.
    longest = [int(batch.max()) for batch in batches]
    assert longest != sorted(longest)


@pytest.mark.parametrize(
    ("options", "message"),
    [((0, 0), "--batch-size 0: a batch holds at least 1"), ((1, -1), "--chunk-frames -1: 0")],
)
def test_impossible_options_are_named(options: tuple[int, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PlanOptions(*options)
