"""Batches made of audio, or changed on their way: what stands in them, in however many threads."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from speechdp.data.loading.reader import SplitReader
from speechdp.data.loading.source import SplitSource
from speechdp.data.loading.source_options import SourceOptions, open_local_source
from speechdp.data.loading.source_request import Context, SourceRequest
from speechdp.data.loading.threaded_source import ThreadedSource
from speechdp.data.plan.assignment import PlanPosition, augmentation_seed
from speechdp.data.plan.epoch_plan import EpochPlan, PlanOptions, plan_epoch
from speechdp.data.shards.dataset import Dataset
from speechdp.data.signal.features import FeatureConfig
from speechdp.data.transforms.augment import SpecAugment
from speechdp.data.transforms.perturb import perturbed_targets, speed_of_utterances
from speechdp.data.transforms.preprocess import AugmentOptions, InputOptions
from speechdp.errors import ConfigError
from speechdp.labels.hmm import count_frames_and_runs
from tests.helpers.corpora import stored_digits
from tests.helpers.waiting import no_thread_left

FEATURES = FeatureConfig(num_mel_bins=12, dtype="float32")
CHUNKS = PlanOptions(4, chunk_frames=11, seed=3)
TRAIN = SourceRequest("train", seed=5)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Dataset]:
    """The same corpus, once as features and once as audio."""
    return stored_digits(tmp_path_factory.mktemp("stored"), dtype="float32")


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    with no_thread_left():
        yield


def opened(dataset: Dataset, request: SourceRequest, num_threads: int = 1) -> SplitSource:
    return open_local_source(dataset, request, SourceOptions(num_threads=num_threads))


def plan_of(source: SplitSource, options: PlanOptions = CHUNKS) -> EpochPlan:
    return plan_epoch(source.index, options, 0, 1)


def places(plan: EpochPlan) -> list[PlanPosition]:
    return [PlanPosition(0, 0, index) for index in range(plan.num_steps)]


def test_plain_batches_read_by_several_threads_are_the_same(stored: dict[str, Dataset]) -> None:
    with (
        closing(opened(stored["features"], TRAIN, num_threads=3)) as threads,
        closing(opened(stored["features"], TRAIN)) as one,
    ):
        assert isinstance(threads, ThreadedSource)
        plan = plan_of(one)
        pending = [threads.start(plan.ranks[0].batch(p.index), p) for p in places(plan)]
        for place, item in zip(places(plan), pending, strict=True):
            expected, found = one.batch(plan.ranks[0].batch(place.index)), item.result()
            assert torch.equal(found.features, expected.features)
            assert torch.equal(found.targets, expected.targets)
        np.testing.assert_array_equal(threads.count_classes(60, 0, 1), one.count_classes(60, 0, 1))


@pytest.mark.parametrize("kind", ["features", "audio"])
@pytest.mark.parametrize("at_a_time", [1, 100, 1 << 20])
def test_classes_are_counted_by_pieces_with_a_sign_of_progress_each(
    stored: dict[str, Dataset], monkeypatch: pytest.MonkeyPatch, kind: str, at_a_time: int
) -> None:
    monkeypatch.setattr("speechdp.data.loading.reader._TARGETS_COUNTED", at_a_time)
    dataset = stored[kind]
    beats: list[int] = []
    expected = np.zeros((2, dataset.num_classes), np.int64)
    for number in range(len(dataset.shard_paths("train"))):
        with dataset.open_shard("train", number) as shard:
            for utterance in range(shard.num_utterances):
                targets = (shard.read_samples if kind == "audio" else shard.read)(utterance)[1]
                expected += np.stack(count_frames_and_runs(targets, dataset.num_classes))
    with closing(opened(dataset, TRAIN, num_threads=2)) as source:
        source.beat = lambda: beats.append(1)
        np.testing.assert_array_equal(source.count_classes(dataset.num_classes, 0, 1), expected)
        fewest, most = len(dataset.shard_paths("train")), len(source.index.num_frames)
    assert (
        len(beats) == {1: most, 1 << 20: fewest}.get(at_a_time, len(beats)) and fewest <= len(beats) <= most
    )


def test_nothing_to_do_needs_no_second_stage(stored: dict[str, Dataset]) -> None:
    with closing(opened(stored["features"], TRAIN)) as source:
        assert isinstance(source, SplitReader)
    with closing(opened(stored["audio"], TRAIN)) as source:
        assert not isinstance(source, SplitReader)


@pytest.mark.parametrize("options", [CHUNKS, PlanOptions(5)])
def test_batches_from_audio_are_those_from_features(stored: dict[str, Dataset], options: PlanOptions) -> None:
    request = dataclasses.replace(TRAIN, context=Context(4, 2))
    with (
        closing(opened(stored["audio"], request)) as audio,
        closing(opened(stored["features"], request)) as plain,
    ):
        assert audio.feature_dim == plain.feature_dim
        np.testing.assert_array_equal(audio.index.num_frames, plain.index.num_frames)
        plan = plan_of(plain, options)
        for place in places(plan):
            segments = plan.ranks[0].batch(place.index)
            one, other = audio.batch(segments, place), plain.batch(segments, place)
            torch.testing.assert_close(one.features, other.features, rtol=0, atol=5e-3)
            assert torch.equal(one.targets, other.targets) and torch.equal(one.lengths, other.lengths)
            assert one.num_frames == other.num_frames


@pytest.mark.parametrize("kind", ["features", "audio"])
def test_threads_and_order_of_asking_change_nothing(stored: dict[str, Dataset], kind: str) -> None:
    augment = AugmentOptions(spec_augment=True)
    if kind == "audio":
        augment = AugmentOptions(spec_augment=True, noise_snr_db="5-20")
    request = dataclasses.replace(TRAIN, augment=augment, inputs=InputOptions(deltas=1, splice=1))
    with closing(opened(stored[kind], request)) as source:
        plan = plan_of(source)
        alone = [source.batch(plan.ranks[0].batch(p.index), p) for p in places(plan)]
    with closing(opened(stored[kind], request, num_threads=3)) as source:
        pending = {p.index: source.start(plan.ranks[0].batch(p.index), p) for p in reversed(places(plan))}
        for index, batch in enumerate(alone):
            again = pending[index].result()
            assert torch.equal(again.features, batch.features) and torch.equal(again.targets, batch.targets)
    assert alone[0].features.shape[2] == source.feature_dim == 12 * 2 * 3


def test_masks_depend_on_the_place_alone_and_evaluation_has_none(stored: dict[str, Dataset]) -> None:
    request = dataclasses.replace(TRAIN, augment=AugmentOptions(spec_augment=True))
    with (
        closing(opened(stored["features"], request)) as masked,
        closing(opened(stored["features"], TRAIN)) as plain,
    ):
        segments = plan_of(plain, PlanOptions(6)).ranks[0].batch(0)
        original = plain.batch(segments)
        for place in (PlanPosition(0, 0, 0), PlanPosition(1, 0, 0), PlanPosition(0, 1, 0)):
            expected = original.features.clone()
            SpecAugment().apply(expected, original.lengths, augmentation_seed(TRAIN.seed, place))
            assert torch.equal(masked.batch(segments, place).features, expected)
            assert not torch.equal(expected, original.features)
        assert torch.equal(masked.batch(segments).features, original.features)


def test_utterances_at_another_speed_have_the_planned_frames_and_their_own_targets(
    stored: dict[str, Dataset],
) -> None:
    request = dataclasses.replace(TRAIN, augment=AugmentOptions(speed_perturb=True))
    with closing(opened(stored["audio"], request)) as source:
        speeds = speed_of_utterances(5, 0, len(source.index.num_frames))
        assert set(speeds.tolist()) == {90, 100, 110}
        plan = plan_epoch(source.index.at_speed(speeds), PlanOptions(3, chunk_frames=13, seed=1), 0, 1)
        learnt = 0
        for place in places(plan):
            segments = plan.ranks[0].batch(place.index)
            batch = source.batch(segments, place)
            learnt += batch.num_frames
            for row in range(len(segments)):
                shard, utterance = int(segments.shard[row]), int(segments.utterance[row])
                with stored["audio"].open_shard("train", shard) as file:
                    recorded = file.read_samples(utterance)[1]
                expected = perturbed_targets(
                    recorded,
                    int(segments.speed[row]),
                    int(segments.start[row]),
                    int(segments.num_frames[row]),
                )
                found = batch.targets[row, : int(batch.lengths[row])]
                np.testing.assert_array_equal(found.numpy(), expected)
        assert learnt == int(plan.frames.sum()) != int(source.index.num_frames.sum())


def test_recordings_cannot_be_perturbed_where_only_features_are_stored(stored: dict[str, Dataset]) -> None:
    for augment in (AugmentOptions(speed_perturb=True), AugmentOptions(noise_snr_db="5-20")):
        with pytest.raises(ConfigError, match="--store audio"):
            opened(stored["features"], dataclasses.replace(TRAIN, augment=augment))


def test_a_request_travels_as_json(tmp_path: Path) -> None:
    request = SourceRequest(
        "dev", tmp_path / "1", Context(3, 1), InputOptions(1, 2), AugmentOptions(True, True, "5-10"), 9
    )
    assert SourceRequest.from_json(request.to_json()) == request
    assert SourceRequest.from_json(TRAIN.to_json()) == TRAIN
