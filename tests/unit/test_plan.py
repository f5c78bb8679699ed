"""The epoch plan: every frame exactly once, whatever the shards, the ranks and the batches."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from speechdp.data.plan import CorpusIndex, EpochPlan, PlanOptions, plan_epoch
from speechdp.errors import ConfigError


@dataclass(frozen=True)
class Case:
    """A corpus and how it is dealt out."""

    shards: list[list[int]]
    size: int
    batch_size: int
    chunk_frames: int
    seed: int
    epoch: int

    @property
    def index(self) -> CorpusIndex:
        return CorpusIndex.of_lengths([np.array(lengths, dtype=np.int64) for lengths in self.shards])

    def plan(self, epoch: int | None = None) -> EpochPlan:
        options = PlanOptions(self.batch_size, self.chunk_frames, self.seed)
        return plan_epoch(self.index, options, self.epoch if epoch is None else epoch, self.size)


cases = st.builds(
    Case,
    shards=st.lists(st.lists(st.integers(1, 60), min_size=1, max_size=12), min_size=1, max_size=6),
    size=st.integers(1, 9),
    batch_size=st.integers(1, 7),
    chunk_frames=st.one_of(st.just(0), st.integers(1, 40)),
    seed=st.integers(0, 2**31),
    epoch=st.integers(0, 5),
)
more_ranks_than_utterances = example(Case([[5], [7]], 9, 2, 0, 1, 0))


@given(cases)
@more_ranks_than_utterances
def test_every_frame_is_dealt_exactly_once(case: Case) -> None:
    times_dealt = [[np.zeros(length, dtype=int) for length in lengths] for lengths in case.shards]
    plan = case.plan()
    for rank in plan.ranks:
        for step in range(plan.num_steps):
            batch = rank.batch(step)
            for row in range(len(batch)):
                start, end = batch.start[row], batch.start[row] + batch.num_frames[row]
                frames = times_dealt[batch.shard[row]][batch.utterance[row]]
                assert 0 <= start < end <= len(frames)
                frames[start:end] += 1
    assert all((frames == 1).all() for shard in times_dealt for frames in shard)


@given(cases)
@more_ranks_than_utterances
def test_batches_keep_to_their_sizes_and_all_ranks_take_the_same_number_of_steps(case: Case) -> None:
    plan = case.plan()
    assert len(plan.ranks) == case.size
    assert plan.frames.shape == (case.size, plan.num_steps)
    assert plan.num_steps == max(rank.num_batches for rank in plan.ranks)
    for rank, frames in zip(plan.ranks, plan.frames, strict=True):
        batches = [rank.batch(step) for step in range(plan.num_steps)]
        assert [int(batch.num_frames.sum()) for batch in batches] == frames.tolist()
        # Full batches but one; a rank that has fewer joins the others' steps with none.
        sizes = [len(batch) for batch in batches]
        assert all(size <= case.batch_size for size in sizes)
        assert sum(0 < size < case.batch_size for size in sizes) <= 1
        assert sum(sizes) == len(rank.segments)


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
        assert mine.bounds.tolist() == theirs.bounds.tolist()
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
