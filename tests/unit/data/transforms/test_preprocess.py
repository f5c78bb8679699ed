"""Preprocessing: the same values in whatever threads and batches, and what deltas and splicing are."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import pytest
import torch

from speechdp.data.plan.assignment import PlanPosition
from speechdp.data.signal.compute import compute_features
from speechdp.data.signal.features import FeatureConfig, num_frames_of
from speechdp.data.transforms.inputs import FEATURES_ALONE
from speechdp.data.transforms.preprocess import (
    CACHE_BYTES,
    AugmentOptions,
    InputOptions,
    Preprocessor,
    UtteranceKey,
    inputs_of,
)
from speechdp.errors import ConfigError

RATE = 8000
CONFIG = FeatureConfig(num_mel_bins=12)
CPU = torch.device("cpu")
EVERYTHING = AugmentOptions(spec_augment=True, speed_perturb=True, noise_snr_db="10-30")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def recordings(num: int = 12) -> list[npt.NDArray[np.int16]]:
    rng = np.random.default_rng(0)
    return [rng.normal(0, 1000, size).astype(np.int16) for size in rng.integers(100, 9000, num)]


def keys(num: int = 12, epoch: int | None = 2) -> list[UtteranceKey]:
    return [UtteranceKey(epoch, n % 3, n, (90, 100, 110)[n % 3]) for n in range(num)]


def of_audio(
    augment: AugmentOptions = EVERYTHING,
    inputs: InputOptions = FEATURES_ALONE,
    cache_bytes: int = CACHE_BYTES,
) -> Preprocessor:
    return Preprocessor(CONFIG, RATE, "audio", inputs, augment, seed=4, cache_bytes=cache_bytes)


def of_features(inputs: InputOptions = FEATURES_ALONE, *, spec_augment: bool = False) -> Preprocessor:
    return Preprocessor(CONFIG, RATE, "features", inputs, AugmentOptions(spec_augment=spec_augment), seed=4)


def batch(lengths: list[int], dims: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(1)
    features = torch.zeros(len(lengths), max(lengths), dims)
    for row, length in enumerate(lengths):
        features[row, :length] = torch.from_numpy(rng.standard_normal((length, dims)).astype(np.float32))
    return features, torch.tensor(lengths)


def test_features_of_audio_as_recorded_are_those_prepared_without_it() -> None:
    samples = recordings()
    expected = [compute_features(x / np.float32(32768), RATE, CONFIG) for x in samples]
    names = [UtteranceKey(None, 0, n) for n in range(len(samples))]
    for want, found in zip(expected, of_audio().features_of(samples, names, CPU), strict=True):
        np.testing.assert_allclose(found, want, atol=2e-4)


def test_frames_are_those_the_plan_counts_at_every_speed() -> None:
    samples = recordings()
    for x, key, found in zip(samples, keys(), of_audio().features_of(samples, keys(), CPU), strict=True):
        recorded = num_frames_of(len(x), RATE, CONFIG)
        assert found.shape == ((recorded * 100 + key.speed // 2) // key.speed, 12)
        assert found.dtype == torch.float32


def test_features_do_not_depend_on_order_neighbours_threads_or_what_is_kept() -> None:
    samples, names = recordings(), keys()
    expected = of_audio().features_of(samples, names, CPU)
    alone = [of_audio().features_of([x], [key], CPU)[0] for x, key in zip(samples, names, strict=True)]
    shared = of_audio()
    backwards = shared.features_of(samples[::-1], names[::-1], CPU)[::-1]
    with ThreadPoolExecutor(4) as threads:
        jobs = [
            threads.submit(of_audio().features_of, samples[n : n + 3], names[n : n + 3], CPU)
            for n in range(10)
        ]
        again = [threads.submit(shared.features_of, samples, names, CPU) for _ in range(4)]
        for n, job in enumerate(jobs):
            assert all(map(torch.equal, job.result(), expected[n : n + 3]))
        for job in again:
            assert all(map(torch.equal, job.result(), expected))
    assert all(map(torch.equal, alone, expected)) and all(map(torch.equal, backwards, expected))


def test_noise_is_new_in_each_epoch_and_another_with_another_seed() -> None:
    samples = recordings(1)
    first, second = (of_audio().features_of(samples, [UtteranceKey(n, 0, 0)], CPU)[0] for n in (0, 1))
    assert not torch.equal(first, second)
    seeded = Preprocessor(CONFIG, RATE, "audio", augment=EVERYTHING, seed=5)
    assert not torch.equal(first, seeded.features_of(samples, [UtteranceKey(0, 0, 0)], CPU)[0])


def test_features_are_kept_over_epochs_unless_there_is_noise() -> None:
    samples = recordings(1)
    for augment, kept in ((AugmentOptions(speed_perturb=True), True), (EVERYTHING, False)):
        made = of_audio(augment)
        first, second = (made.features_of(samples, [UtteranceKey(n, 0, 0, 90)], CPU)[0] for n in (0, 1))
        assert (first is second) == kept
        assert made.features_of(samples, [UtteranceKey(1, 0, 0, 90)], CPU)[0] is second
        assert made.features_of(samples, [UtteranceKey(1, 0, 0, 110)], CPU)[0] is not second


def test_what_is_kept_is_bounded() -> None:
    samples, names, made = recordings(), keys(), of_audio(cache_bytes=20_000)
    first = made.features_of(samples, names, CPU)
    kept = sum(
        made.features_of([x], [key], CPU)[0] is features
        for x, key, features in reversed(list(zip(samples, names, first, strict=True)))
    )
    assert 0 < kept < len(samples)


def expected_deltas(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Compute deltas and delta-deltas frame by frame, as Kaldi's documentation words it."""
    num = len(x)
    at = lambda t: x[min(max(t, 0), num - 1)]  # noqa: E731
    first = [sum(j * at(t + j) for j in range(-2, 3)) / 10 for t in range(num)]
    second = [
        sum(j * k * at(t + j + k) for j in range(-2, 3) for k in range(-2, 3)) / 100 for t in range(num)
    ]
    return np.concatenate([x, first, second], axis=1)


def test_deltas_are_those_computed_frame_by_frame() -> None:
    features, lengths = batch([9, 1, 4])
    found = of_features(InputOptions(deltas=2)).finish(features.clone(), lengths)
    assert found.shape == (3, 9, 36)
    for row, length in enumerate(lengths.tolist()):
        expected = expected_deltas(features[row, :length].double().numpy())
        np.testing.assert_allclose(found[row, :length], expected, atol=1e-5)
        assert not found[row, length:].any()


def test_spliced_frames_lie_in_the_order_of_time_and_the_outermost_are_repeated() -> None:
    features, lengths = batch([9, 1, 4])
    features[1, 1:], features[2, 4:] = 5.0, 6.0  # what lies behind a segment is not looked at
    found = of_features(InputOptions(splice=2)).finish(features.clone(), lengths)
    assert found.shape == (3, 9, 60)
    for row, length in enumerate(lengths.tolist()):
        for t in range(length):
            around = [features[row, min(max(t + j, 0), length - 1)] for j in range(-2, 3)]
            assert torch.equal(found[row, t], torch.cat(around))
        assert not found[row, length:].any()


def test_deltas_come_before_splicing() -> None:
    features, lengths = batch([9, 4])
    deltas = of_features(InputOptions(deltas=1)).finish(features.clone(), lengths)
    both = of_features(InputOptions(deltas=1, splice=1))
    assert both.output_dim == 72
    assert torch.equal(both.finish(features, lengths)[:, :, 24:48], deltas)


def test_masks_come_last_from_the_place_and_only_in_training() -> None:
    made = of_features(InputOptions(splice=1), spec_augment=True)
    features, lengths = batch([60, 30])
    plain = made.finish(features.clone(), lengths)
    first, same, other = (
        made.finish(features.clone(), lengths, PlanPosition(1, 0, index)) for index in (3, 3, 4)
    )
    assert torch.equal(first, same) and not torch.equal(first, other)
    hidden = first != plain
    assert hidden.any() and not first[hidden].any()


def test_a_batch_without_segments_has_the_shape_of_the_models_input() -> None:
    made = of_features(InputOptions(deltas=2, splice=1), spec_augment=True)
    found = made.finish(torch.zeros(0, 0, 12), torch.zeros(0, dtype=torch.int64), PlanPosition(0, 0, 0))
    assert found.shape == (0, 0, 108)


def test_whole_utterances_are_those_of_evaluation() -> None:
    inputs = InputOptions(deltas=1, splice=1)
    samples = recordings(1)[0]
    audio = of_audio(inputs=inputs)
    features = audio.features_of([samples], [UtteranceKey(None, 0, 0)], CPU)[0]
    expected = audio.finish(features.unsqueeze(0).clone(), torch.tensor([len(features)]))[0]
    np.testing.assert_array_equal(audio.whole(samples), expected)
    assert np.array_equal(of_features(inputs).whole(features.numpy()), expected)
    stored = features.numpy().astype(np.float16)
    plain = of_features().whole(stored)
    assert plain.dtype == np.float32 and np.array_equal(plain, stored.astype(np.float32))


def test_nothing_to_do_is_known() -> None:
    assert of_features().is_plain
    assert not of_features(InputOptions(deltas=1)).is_plain
    assert not of_features(spec_augment=True).is_plain
    assert not of_audio(AugmentOptions()).is_plain


@pytest.mark.parametrize("augment", [AugmentOptions(speed_perturb=True), AugmentOptions(noise_snr_db="5-9")])
def test_perturbing_features_is_refused(augment: AugmentOptions) -> None:
    with pytest.raises(ConfigError, match=r"--(speed-perturb|noise-snr-db): needs .* --store audio"):
        Preprocessor(CONFIG, RATE, "features", augment=augment)


def test_kaldis_features_cannot_be_computed() -> None:
    with pytest.raises(ConfigError, match="cannot be computed from audio"):
        Preprocessor(FeatureConfig(kind="kaldi", kaldi_dim=13), RATE, "audio")


@pytest.mark.parametrize("options", [{"deltas": -1}, {"deltas": 5}, {"splice": -1}])
def test_inputs_that_there_are_not_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=f"--{next(iter(options))}"):
        InputOptions(**options)
    with pytest.raises(ConfigError, match="--noise-snr-db x"):
        AugmentOptions(noise_snr_db="x")


def test_models_that_say_nothing_of_their_input_see_the_features_alone() -> None:
    assert inputs_of({"feature_dim": 40}) == InputOptions()
    assert inputs_of({"inputs": {"deltas": 2, "splice": 3}}) == InputOptions(2, 3)


@pytest.mark.parametrize("kind", ["log_mel", "mfcc"])
def test_utterances_computed_together_as_on_a_gpu_are_those_computed_one_by_one(kind: str) -> None:
    config = FeatureConfig(kind=kind, num_mel_bins=12, num_ceps=12)  # type: ignore[arg-type]
    made = Preprocessor(config, RATE, "audio", augment=EVERYTHING, seed=4)
    samples, names = recordings(), keys()
    together = made.compute_together(samples, names, CPU)
    for want, values in zip(made.features_of(samples, names, CPU), together, strict=True):
        np.testing.assert_allclose(values, want, atol=1e-3)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("kind", ["log_mel", "mfcc"])
def test_a_gpu_computes_what_the_cpu_does(kind: str) -> None:
    config = FeatureConfig(kind=kind, num_mel_bins=12, num_ceps=12)  # type: ignore[arg-type]
    made = Preprocessor(config, RATE, "audio", InputOptions(2, 2), EVERYTHING, seed=4)
    samples, names = recordings(), keys()
    expected = made.features_of(samples, names, CPU)
    found = made.features_of(samples, names, torch.device("cuda"))
    for want, values in zip(expected, found, strict=True):
        np.testing.assert_allclose(values.cpu(), want, atol=1e-3)
    features, lengths = batch([40, 17, 1])
    on_cpu = made.finish(features.clone(), lengths, PlanPosition(0, 1, 2))
    on_gpu = made.finish(features.cuda(), lengths, PlanPosition(0, 1, 2))
    np.testing.assert_allclose(on_gpu.cpu(), on_cpu, atol=1e-5)
