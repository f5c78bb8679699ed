"""Features in torch: the values of kaldi_native_fbank, whatever else is computed beside them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import soundfile
import torch

from speechdp.data.signal.features import (
    SILENCE_ALONE,
    FeatureConfig,
    kaldi_features,
    normalise,
    num_frames_of,
)
from speechdp.data.transforms import torch_features
from speechdp.data.transforms.moments import Moments, sums_of
from speechdp.data.transforms.torch_features import normalise_rows, raw_features
from speechdp.errors import ConfigError
from tests.helpers.corpora import fsdd_dir, shared_data, tone

CONFIGS = [
    (8000, FeatureConfig(num_mel_bins=24)),
    (8000, FeatureConfig(kind="mfcc", num_mel_bins=23)),
    (16000, FeatureConfig()),
    (16000, FeatureConfig(kind="mfcc")),
    (16000, FeatureConfig(snip_edges=True)),
    (16000, FeatureConfig(frame_length_ms=8.0, frame_shift_ms=12.5, num_mel_bins=12)),
    (11025, FeatureConfig(frame_length_ms=20.0, num_mel_bins=20)),
]


def in_torch(
    waves: Sequence[npt.NDArray[np.float32]], rate: int, config: FeatureConfig
) -> list[npt.NDArray[np.float32]]:
    frames = [num_frames_of(len(wave), rate, config) for wave in waves]
    rows = raw_features([torch.from_numpy(wave) for wave in waves], frames, rate, config)
    return [part.numpy() for part in torch.split(rows, frames)]


def speech_like(seconds: float, rate: int, seed: int = 0) -> npt.NDArray[np.float32]:
    """Make a swelling hum with an offset over a little noise, rounded as in a recording."""
    rng, t = np.random.default_rng(seed), np.arange(round(seconds * rate)) / rate
    hum = sum(np.sin(2 * np.pi * 120 * k * t + k) / k for k in range(1, 20))
    wave = 3000 * np.hanning(len(t)) * hum + rng.normal(0, 20, len(t)) + 50
    return np.round(wave).astype(np.float32)


@pytest.mark.parametrize(("rate", "config"), CONFIGS)
@pytest.mark.parametrize("seconds", [0.013, 0.03, 0.5, 3.7])
def test_values_are_those_of_kaldi(rate: int, config: FeatureConfig, seconds: float) -> None:
    wave = speech_like(max(seconds, config.frame_length_ms / 1000 if config.snip_edges else 0), rate)
    expected = kaldi_features(wave, rate, config, snip_edges=config.snip_edges)
    np.testing.assert_allclose(in_torch([wave], rate, config)[0], expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize(("rate", "config"), CONFIGS)
def test_the_transform_by_products_that_a_gpu_does_gives_these_values(
    rate: int, config: FeatureConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = torch_features._tables

    def tables(rate: int, config: FeatureConfig, device: torch.device) -> Any:
        made = make(rate, config, device)
        return dataclasses.replace(made, waves=torch_features._waves(len(made.window), made.num_fft, device))

    wave = speech_like(0.7, rate)
    expected = kaldi_features(wave, rate, config, snip_edges=config.snip_edges)
    by_fft = in_torch([wave], rate, config)[0]
    monkeypatch.setattr(torch_features, "_tables", tables)
    by_products = in_torch([wave], rate, config)[0]
    np.testing.assert_allclose(by_products, expected, rtol=0, atol=1e-3)
    assert not np.array_equal(by_fft, by_products)  # other roundings: it was not the FFT


@pytest.mark.parametrize("num_samples", [1, 2, 79, 80, 119, 121, 200, 201])
def test_hardly_any_samples_are_mirrored_as_often_as_it_takes(num_samples: int) -> None:
    wave = np.random.default_rng(num_samples).normal(0, 1000, num_samples).astype(np.float32)
    config = FeatureConfig(num_mel_bins=24)
    expected = kaldi_features(wave, 8000, config)
    if len(expected):
        np.testing.assert_allclose(in_torch([wave], 8000, config)[0], expected, rtol=0, atol=1e-3)


def test_digital_silence_is_at_the_floor_of_the_logarithm() -> None:
    for kind in ("log_mel", "mfcc"):
        config = FeatureConfig(kind=kind)  # type: ignore[arg-type]
        silence = np.zeros(1600, np.float32)
        np.testing.assert_allclose(
            in_torch([silence], 16000, config)[0], kaldi_features(silence, 16000, config), atol=1e-4
        )


def test_values_of_real_speech_are_those_of_kaldi() -> None:
    for path in sorted(fsdd_dir().glob("*_0.flac"))[:20]:
        wave, rate = soundfile.read(path, dtype="int16")
        for kind in ("log_mel", "mfcc"):
            config = FeatureConfig(kind=kind, num_mel_bins=24)  # type: ignore[arg-type]
            wave = wave.astype(np.float32)
            expected = kaldi_features(wave, rate, config)
            np.testing.assert_allclose(in_torch([wave], rate, config)[0], expected, rtol=0, atol=1e-3)


def test_values_of_kaldis_own_test_recording_are_those_of_kaldi() -> None:
    wave, rate = soundfile.read(shared_data("kaldi", "kaldi_test_data", "feat", "test.wav"), dtype="int16")
    expected = kaldi_features(wave.astype(np.float32), rate, FeatureConfig())
    found = in_torch([wave.astype(np.float32)], rate, FeatureConfig())[0]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize(("rate", "config"), CONFIGS)
def test_many_at_once_are_as_many_one_by_one(rate: int, config: FeatureConfig) -> None:
    waves = [speech_like(seconds, rate, seed) for seed, seconds in enumerate([0.3, 0.03, 1.1, 0.026, 0.4])]
    for wave, found in zip(waves, in_torch(waves, rate, config), strict=True):
        np.testing.assert_allclose(found, in_torch([wave], rate, config)[0], rtol=0, atol=1e-4)


@pytest.mark.parametrize("mean", [True, False])
@pytest.mark.parametrize("variance", [True, False])
def test_normalisation_is_that_of_numpy(mean: bool, variance: bool) -> None:
    config = FeatureConfig(mean_normalise=mean, variance_normalise=variance)
    rows = np.random.default_rng(0).normal(5, 3, (60, 40)).astype(np.float32)
    rows[:9, 3] = 2.5  # no deviation: divided by the floor
    frames = [9, 1, 50]
    parts = np.split(rows, np.cumsum(frames)[:-1])
    expected = np.concatenate([normalise(part, config) for part in parts])
    np.testing.assert_allclose(normalise_rows(torch.from_numpy(rows), frames, config), expected, atol=1e-5)
    alone = normalise_rows(torch.from_numpy(parts[2]), frames[2:], config)
    np.testing.assert_allclose(alone, expected[10:], atol=1e-5)


def test_threads_within_an_operation_change_no_bit() -> None:
    wave = tone(4.0, 16000) * 32768
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            rows = torch.from_numpy(in_torch([wave], 16000, FeatureConfig())[0])
            found.append(normalise_rows(rows, [len(rows)], FeatureConfig()))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_more_filters_than_the_spectrum_can_fill_are_refused() -> None:
    with pytest.raises(ConfigError, match="mel bins are too many"):
        in_torch([tone(0.1)], 8000, FeatureConfig(num_mel_bins=120))


def padded(wave: npt.NDArray[np.float32], rate: int, fill: str) -> npt.NDArray[np.float32]:
    """Put 0.3 s before and behind of what gates and codecs leave where nothing is heard."""
    num = round(0.3 * rate)
    rng = np.random.default_rng(5)
    silence = {
        "zeros": np.zeros(num),
        "an offset": np.full(num, 3.0),
        "a step here and there": (np.arange(num) % 1000 == 0).astype(float),
        "what an MP3 leaves": rng.normal(0, 0.03, num),
    }[fill].astype(np.float32)
    return np.concatenate([silence, wave, silence])


@pytest.mark.parametrize("kind", ["log_mel", "mfcc"])
@pytest.mark.parametrize("rate", [8000, 16000])
@pytest.mark.parametrize("fill", ["zeros", "an offset", "a step here and there", "what an MP3 leaves"])
def test_digital_silence_does_not_change_how_speech_is_normalised(kind: str, rate: int, fill: str) -> None:
    config = FeatureConfig(kind=kind, num_mel_bins=24)  # type: ignore[arg-type]
    wave = speech_like(1.2, rate) - 50  # without its offset, a step between which and silence would be heard
    alone = normalise(kaldi_features(wave, rate, config), config)
    raw = kaldi_features(padded(wave, rate, fill), rate, config)
    found = normalise(raw, config)

    def differs(features: npt.NDArray[np.float32]) -> float:
        return float(np.abs(features[33 : 27 + len(alone)] - alone[3:-3]).mean())  # frames that see it alone

    assert differs(found) < 0.1
    assert differs((raw - raw.mean(axis=0)) / raw.std(axis=0)) > 0.35
    quiet = found[:27]
    assert np.array_equal(quiet, np.broadcast_to(quiet[0], quiet.shape))
    assert np.array_equal(quiet[0], found.min(axis=0))


def test_the_quietest_background_of_a_recording_is_no_digital_silence() -> None:
    config = FeatureConfig()
    noise = np.round(np.random.default_rng(1).normal(0, 0.5, 16000)).astype(np.float32)
    wave = np.concatenate([noise, speech_like(1.0, 16000)])
    raw = kaldi_features(wave, 16000, config)
    expected = (raw - raw.mean(axis=0)) / raw.std(axis=0)
    np.testing.assert_allclose(normalise(raw, config), expected, atol=1e-4)


@pytest.mark.parametrize("kind", ["log_mel", "mfcc"])
def test_digital_silence_among_several_utterances_is_treated_as_in_numpy(kind: str) -> None:
    config = FeatureConfig(kind=kind)  # type: ignore[arg-type]
    waves = [
        speech_like(0.5, 16000),
        np.zeros(4000, np.float32),
        padded(speech_like(0.7, 16000), 16000, "zeros"),
    ]
    raw = in_torch(waves, 16000, config)
    frames = [len(part) for part in raw]
    found = torch.split(normalise_rows(torch.from_numpy(np.concatenate(raw)), frames, config), frames)
    for part, rows in zip(found, raw, strict=True):
        np.testing.assert_allclose(part.numpy(), normalise(rows, config), rtol=0, atol=1e-5)
    assert (found[1] == SILENCE_ALONE).all()


def test_features_that_are_not_normalised_keep_their_silence() -> None:
    config = FeatureConfig(mean_normalise=False, variance_normalise=False)
    (raw,) = in_torch([np.zeros(4000, np.float32)], 16000, config)
    rows = torch.from_numpy(raw)
    assert torch.equal(normalise_rows(rows, [len(raw)], config), rows)
    assert np.array_equal(normalise(raw, config), raw)


def test_features_that_kaldi_has_made_have_no_silence_that_could_be_told() -> None:
    config = FeatureConfig(kind="kaldi", kaldi_dim=3)
    rows = np.concatenate([np.full((5, 3), -20.0), np.random.default_rng(0).normal(size=(9, 3))])
    rows = rows.astype(np.float32)
    expected = (rows - rows.mean(axis=0)) / rows.std(axis=0)
    np.testing.assert_allclose(normalise(rows, config), expected, atol=1e-5)


def test_digital_silence_does_not_count_in_a_speakers_moments() -> None:
    config = FeatureConfig()
    heard, silent = speech_like(0.5, 16000), np.zeros(8000, np.float32)
    raw = [
        torch.from_numpy(x) for x in in_torch([heard, padded(heard, 16000, "zeros"), silent], 16000, config)
    ]
    assert torch.equal(sums_of(raw[2], config), torch.zeros(81, dtype=torch.float64))
    assert 50 <= sums_of(raw[1], config)[0] < 60 and sums_of(raw[0], config)[0] == 50
    moments = Moments(raw[0].mean(0), raw[0].std(0, correction=0))
    found = moments.normalise(raw[1], config)
    torch.testing.assert_close(found[33:77], moments.normalise(raw[0], config)[3:47], rtol=0, atol=1e-3)
    assert torch.equal(found[:27], found.amin(0).expand(27, 40))
    assert (moments.normalise(raw[2], config) == SILENCE_ALONE).all()
