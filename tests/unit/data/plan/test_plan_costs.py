"""What a plan costs: waiting for the longest, padding, memory."""

from __future__ import annotations

import tracemalloc

import numpy as np
import numpy.typing as npt
import pytest

from speechdp.data.plan import windows
from speechdp.data.plan.epoch_plan import ORDERS, CorpusIndex, Order, PlanOptions, padding_share, plan_epoch


def speech(num_utterances: int, num_shards: int, seed: int = 0) -> CorpusIndex:
    """Utterances about as long as people's: lognormal."""
    lengths = np.exp(np.random.default_rng(seed).normal(5.5, 0.5, num_utterances)).astype(np.int64) + 1
    return CorpusIndex.of_lengths(np.array_split(lengths, num_shards))


def wait(padded: npt.NDArray[np.int32]) -> float:
    """Return how much longer synchronous steps take than if ranks waited for nobody; 1: no longer."""
    return float(padded.max(axis=0).sum() / padded.mean(axis=0).sum())


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("several_windows", [False, True])
def test_in_a_step_ranks_have_batches_of_about_the_same_cost(
    order: Order, several_windows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if several_windows:
        monkeypatch.setattr(windows, "WINDOW_SEGMENTS", 1024)
    plan = plan_epoch(speech(20_000, 7), PlanOptions(16, seed=3, order=order), 0, 4)
    assert (plan.ranks[0].windows.num_windows > 1) == several_windows
    strangers = np.stack([np.roll(plan.padded_frames[rank], 13 * rank) for rank in range(4)])
    assert wait(plan.padded_frames) < 1.12
    assert wait(strangers) > 1.25


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("chunk_frames", [0, 21])
def test_batches_by_frames_cost_the_same_in_every_step(order: Order, chunk_frames: int) -> None:
    options = PlanOptions(0, chunk_frames, seed=3, order=order, batch_frames=6000)
    padded = plan_epoch(speech(20_000, 7), options, 0, 4).padded_frames
    assert padded.max() <= 6000
    assert wait(padded) < 1.07
    assert padded.mean() > 6000 * (0.85 if order == "shuffled" else 0.94)


@pytest.mark.parametrize(
    ("order", "batch_frames", "most"),
    [
        ("pooled", 0, 0.13),
        ("laplace", 0, 0.13),
        ("blocking-sort", 0, 0.08),
        ("pooled", 6000, 0.07),
        ("laplace", 6000, 0.07),
        ("blocking-sort", 6000, 0.05),
    ],
)
def test_sorting_leaves_little_padding(order: Order, batch_frames: int, most: float) -> None:
    index = speech(20_000, 7)
    plan = plan_epoch(index, PlanOptions(16, order=order, batch_frames=batch_frames), 0, 4)
    lengths = [part.batch(step).num_frames for part in plan.ranks for step in range(plan.num_steps)]
    computed = sum(len(batch) * int(batch.max(initial=0)) for batch in lengths)
    assert padding_share(plan) == pytest.approx(1 - index.num_frames.sum() / computed, abs=1e-12)
    assert padding_share(plan) < most
    assert padding_share(plan_epoch(index, PlanOptions(16, order="shuffled"), 0, 4)) > 0.4


@pytest.mark.parametrize(
    "options", [PlanOptions(32), PlanOptions(256, 20), PlanOptions(0, order="laplace", batch_frames=20_000)]
)
def test_memory_grows_by_few_bytes_an_utterance(options: PlanOptions) -> None:
    index = speech(200_000, 16)
    columns = (index.shard, index.utterance, index.num_frames)
    assert sum(column.nbytes for column in columns) == 12 * len(index)
    tracemalloc.start()
    try:
        plan = plan_epoch(index, options, 0, 8)
        held, peak = tracemalloc.get_traced_memory()
        plan.ranks[3].batch(0)
        with_a_window = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    # 2.8 million chunks of 20 frames are not held at once anywhere; windows do not grow with the corpus.
    assert held - plan.frames.nbytes - plan.padded_frames.nbytes < 4.2 * len(index) + 200_000
    assert peak < 24 * len(index) + 12_000_000
    assert with_a_window - held < 12 * windows.WINDOW_SEGMENTS + 200_000
