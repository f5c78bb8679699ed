"""The epoch plan: every frame exactly once, whatever the order, shards, ranks, batches and windows."""

from __future__ import annotations

import hashlib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from speechdp.data.plan import windows
from speechdp.data.plan.epoch_plan import (
    ORDERS,
    CorpusIndex,
    EpochPlan,
    Order,
    PlanOptions,
    Segments,
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
    chunk_frames=st.one_of(st.just(0), st.integers(4, 40)),
    seed=st.integers(0, 2**31),
    order=st.sampled_from(ORDERS),
    batch_frames=st.one_of(st.just(0), st.integers(1, 400)),
    window_frames=st.one_of(st.just(0), st.integers(1, 400)),
)
cases = st.builds(
    Case,
    shards=st.lists(st.lists(st.integers(1, 60), min_size=1, max_size=9), min_size=1, max_size=5),
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


# --- who gets what, and when --------------------------------------------------------------------------


@given(cases)
def test_ranks_get_equal_numbers_of_frames_to_within_an_utterance(case: Case) -> None:
    longest = max(max(lengths) for lengths in case.shards)
    frames = case.plan().frames.sum(axis=1)
    # Each end of a rank's stretch is at most half an utterance away from where it should be.
    assert np.abs(frames - frames.sum() / case.size).max() <= longest


def test_a_rank_reads_few_shards() -> None:
    """Its stretch of the shards laid end to end: with as many shards as ranks about one."""
    plan = case([[10] * 20 for _ in range(8)], 4, 5, 0, 1, epoch=2).plan()
    for rank in plan.ranks:
        assert len(set(rank.segments.shard.tolist())) == 2


def test_chunks_of_an_utterance_come_in_one_window() -> None:
    index = CorpusIndex.of_lengths([np.full(300, 50)])
    options = PlanOptions(8, 10, batch_frames=0, window_frames=2000)  # 200 chunks: 40 utterances, 25 batches
    plan = plan_epoch(index, options, 0, 1)
    steps_of: dict[int, list[int]] = {}
    for step, batch in enumerate(batches(plan, 0)):
        for _, utterance, _, _ in batch:
            steps_of.setdefault(utterance, []).append(step)
    first_step = plan.ranks[0].windows.first_step
    assert np.diff(first_step).tolist() == [25] * 7 + [13]
    assert all(max(steps) // 25 == min(steps) // 25 for steps in steps_of.values())
    # And yet every window has utterances from all over the corpus, and its chunks are shuffled.
    first = [row[1] for batch in batches(plan, 0)[:25] for row in batch]
    assert len(set(first)) == 40 and max(first) - min(first) > 200
    assert sum(one == other for one, other in pairwise(first)) < 40


# --- the same plan for the same arguments -------------------------------------------------------------


@given(cases)
def test_the_plan_follows_from_seed_and_epoch_alone(case: Case) -> None:
    one, other = case.plan(), case.plan()
    for rank in range(case.size):
        # Batches may be asked for in any order.
        backwards = [rows(other.ranks[rank].batch(step)) for step in reversed(range(other.num_steps))]
        assert batches(one, rank) == backwards[::-1]


def utterances(plan: EpochPlan) -> list[tuple[int, int]]:
    return [row[:2] for row in rows(plan.ranks[0].segments)]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("window_segments", [1, windows.WINDOW_SEGMENTS])
def test_another_epoch_or_seed_is_another_order(order: Order, window_segments: int) -> None:
    lengths = np.random.default_rng(0).integers(5, 50, size=(4, 40)).tolist()
    one = Case(lengths, 1, PlanOptions(1, 0, 3, order), 0, window_segments)
    found = [utterances(one.plan(epoch)) for epoch in range(3)]
    found.append(utterances(replace(one, options=PlanOptions(1, 0, 4, order)).plan()))
    assert len({tuple(o) for o in found}) == 4
    assert len({frozenset(o) for o in found}) == 1


def test_a_rank_gets_other_data_in_another_epoch() -> None:
    one = case([[10] * 10 for _ in range(8)], 2, 4, 0, 1)
    shards = [frozenset(shard for shard, _ in utterances(one.plan(epoch))) for epoch in range(4)]
    assert len(set(shards)) > 1


def fingerprint(options: PlanOptions, epoch: int, size: int) -> str:
    rng = np.random.default_rng(11)
    counts = (180, 40, 95, 260, 7)
    lengths = [np.round(np.exp(rng.normal(4.5, 0.6, n))).astype(np.int64) + 1 for n in counts]
    plan = plan_epoch(CorpusIndex.of_lengths(lengths), options, epoch, size)
    digest = hashlib.sha256()
    for part in plan.ranks:
        for step in range(plan.num_steps):
            batch = part.batch(step)
            for column in (batch.shard, batch.utterance, batch.start, batch.num_frames):
                digest.update(column.astype("<i8").tobytes())
    digest.update(plan.frames.astype("<i8").tobytes())
    return digest.hexdigest()[:16]


@pytest.mark.parametrize(
    ("options", "epoch", "golden"),
    [
        (PlanOptions(8, 0, 3), 0, ["a9cfc735497a46fb", "ccb04c1ca8cb0d61", "d5fb1b0dd1d734aa"]),
        (PlanOptions(16, 21, 5), 2, ["e211b968a88b512b", "00a14f0267d92b4b", "75c75103f182e23b"]),
    ],
)
def test_plans_stay_what_runs_were_made_with(options: PlanOptions, epoch: int, golden: list[str]) -> None:
    """A run goes on with the batches it would have had, whatever has been done to the code meanwhile."""
    assert [fingerprint(options, epoch, size) for size in (1, 2, 4)] == golden


# --- large corpora ------------------------------------------------------------------------------------


def test_threads_get_the_batches_one_thread_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "_KEPT_SEGMENTS", 128)
    plan = Case([[5, 9, 30] * 200], 2, PlanOptions(2, 3, 1), window_segments=64).plan()
    assert plan.ranks[0].windows.num_windows > 20
    expected = [batches(plan, rank) for rank in range(2)]

    def walk(seed: int) -> bool:
        order = np.random.default_rng(seed).integers(0, plan.num_steps, 150).tolist()
        return all(rows(plan.ranks[seed % 2].batch(i)) == expected[seed % 2][i] for i in order)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(walk, range(4)))


# --- speed, and mistakes ------------------------------------------------------------------------------


def test_utterances_played_faster_are_shorter() -> None:
    index = CorpusIndex.of_lengths([np.array([100, 3]), np.array([1, 55, 7])])
    fast = index.at_speed(np.array([90, 100, 110, 110, 90]))
    assert fast.num_frames.tolist() == [111, 3, 1, 50, 8]
    plan = plan_epoch(fast, PlanOptions(2, 20), 0, 2)
    speeds = {(0, 0): 90, (0, 1): 100, (1, 0): 110, (1, 1): 110, (1, 2): 90}
    parts = [rank.segments for rank in plan.ranks]
    assert sum(int(part.num_frames.sum()) for part in parts) == 173
    for part in parts:
        keys = zip(part.shard.tolist(), part.utterance.tolist(), strict=True)
        assert part.speed.tolist() == [speeds[key] for key in keys]
    assert fast.num_frames.dtype == np.int32 and parts[0].speed.dtype == np.int64


def test_speed_is_as_recorded_where_nothing_is_said() -> None:
    one = np.ones(3, dtype=np.int64)
    segments = Segments(one, one, one, one)
    assert segments.speed.tolist() == [100, 100, 100]
    assert segments.take(np.array([1, 0])).speed.tolist() == [100, 100]
    assert len(Segments.none().speed) == 0
    assert case([[5, 6]], 1, 2).plan().ranks[0].batch(0).speed.tolist() == [100, 100]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "--batch-size 0: must be at least 1"),
        ({"batch_size": -1, "batch_frames": 100}, "--batch-size -1: must be"),
        ({"batch_size": 1, "chunk_frames": -1}, "--chunk-frames -1: must be 0"),
        ({"batch_size": 1, "batch_frames": -1}, "--batch-frames -1: must be 0"),
        ({"batch_size": 1, "window_frames": -1}, "window of -1 frames: must be 0"),
        (
            {"batch_size": 1, "order": "sorted"},
            "--order sorted: not known; choose from shuffled, pooled, laplace, blocking",
        ),
    ],
)
def test_impossible_options_are_named(options: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PlanOptions(**options)  # type: ignore[arg-type]
