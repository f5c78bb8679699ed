"""Speed and noise: lengths, pitch, targets, signal-to-noise ratios."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from speechdp.data.plan.segments import size_at_speed
from speechdp.data.signal.features import FeatureConfig, num_frames_of
from speechdp.data.transforms.augment_options import NoiseLevel
from speechdp.data.transforms.perturb import (
    NoiseDraw,
    add_noise,
    at_speed,
    draw_noise,
    perturbed_targets,
    speed_of_utterances,
)
from speechdp.errors import ConfigError


def sine(frequency_hz: float, num: int, rate: int = 8000) -> torch.Tensor:
    return torch.from_numpy(np.sin(2 * np.pi * frequency_hz * np.arange(num) / rate).astype(np.float32))


@pytest.mark.parametrize("percent", [90, 110])
@pytest.mark.parametrize("frequency_hz", [100.0, 1000.0, 2500.0])
def test_a_tone_is_shorter_and_higher_or_longer_and_lower_and_as_loud(
    percent: int, frequency_hz: float
) -> None:
    (found,) = at_speed([sine(frequency_hz, 8000)], percent)
    assert len(found) == size_at_speed(8000, percent)
    expected = sine(frequency_hz * percent / 100, len(found))
    np.testing.assert_allclose(found[100:-100], expected[100:-100], atol=2e-3)


def test_what_a_faster_recording_cannot_hold_is_cut_off_and_a_constant_stays() -> None:
    (found,) = at_speed([sine(3900.0, 8000)], 110)
    assert found[100:-100].abs().max() < 0.05
    (constant,) = at_speed([torch.full((8000,), 7.0)], 90)
    np.testing.assert_allclose(constant[100:-100], 7.0, rtol=1e-5)


@pytest.mark.parametrize("percent", [90, 110])
def test_recordings_resampled_together_are_as_one_by_one(percent: int) -> None:
    rng = np.random.default_rng(0)
    waves = [torch.from_numpy(rng.standard_normal(n).astype(np.float32)) for n in (5000, 1, 37, 801)]
    for wave, found in zip(waves, at_speed(waves, percent), strict=True):
        np.testing.assert_allclose(found, at_speed([wave], percent)[0], atol=1e-6)


@pytest.mark.parametrize("percent", [90, 100, 110])
def test_frames_of_the_new_recording_are_those_of_the_plan_to_within_one(percent: int) -> None:
    config = FeatureConfig()
    for size in range(80, 4000, 7):
        frames = size_at_speed(num_frames_of(size, 8000, config), percent)
        assert frames > 0
        assert abs(frames - num_frames_of(size_at_speed(size, percent), 8000, config)) <= 1


def test_each_frame_has_the_target_of_the_recorded_frame_under_its_centre() -> None:
    targets = np.arange(1000, 1047, dtype=np.int32)
    for percent in (90, 100, 110):
        num = size_at_speed(len(targets), percent)
        centres = (np.arange(num) + 0.5) * percent / 100  # in recorded frames
        expected = targets[np.clip(np.floor(centres + 1e-9).astype(int), 0, 46)]
        found = perturbed_targets(targets, percent, 0, num)
        np.testing.assert_array_equal(found, expected)
        np.testing.assert_array_equal(perturbed_targets(targets, percent, 11, 20), found[11:31])
    np.testing.assert_array_equal(perturbed_targets(targets, 100, 0, 47), targets)


def test_speeds_depend_on_seed_and_epoch_alone_and_are_about_even() -> None:
    speeds = speed_of_utterances(3, 5, 3000)
    np.testing.assert_array_equal(speeds, speed_of_utterances(3, 5, 3000))
    assert not np.array_equal(speeds, speed_of_utterances(3, 6, 3000))
    assert not np.array_equal(speeds, speed_of_utterances(4, 5, 3000))
    values, counts = np.unique(speeds, return_counts=True)
    assert values.tolist() == [90, 100, 110] and counts.min() > 900


@pytest.mark.parametrize("pink", [False, True])
def test_noise_is_as_loud_as_drawn_in_every_recording(pink: bool) -> None:
    rng = np.random.default_rng(0)
    waves = [torch.from_numpy(rng.normal(0, 900, n).astype(np.float32)) for n in (4000, 123, 300_000)]
    draws = [NoiseDraw(pink, 100, 10.0), NoiseDraw(pink, 131_000, 25.0), NoiseDraw(pink, 7, 0.0)]
    for wave, noisy, draw in zip(waves, add_noise(waves, draws, seed=1), draws, strict=True):
        noise = (noisy - wave).double()
        snr_db = 10 * torch.log10(wave.double().square().mean() / noise.square().mean())
        assert snr_db.item() == pytest.approx(draw.snr_db, abs=1e-3)


def test_pink_noise_has_the_same_power_in_every_octave_white_twice_as_much_in_the_next() -> None:
    wave = sine(50.0, 1 << 17)
    for pink, ratio in ((True, 1.0), (False, 2.0)):
        (noisy,) = add_noise([wave], [NoiseDraw(pink, 0, 0.0)], seed=1)
        power = np.abs(np.fft.rfft((noisy - wave).numpy())) ** 2
        octaves = [power[start : 2 * start].sum() for start in (4096, 8192, 16384)]
        np.testing.assert_allclose(np.divide(octaves[1:], octaves[:-1]), ratio, rtol=0.1)


def test_silence_stays_silent() -> None:
    (found,) = add_noise([torch.zeros(500)], [NoiseDraw(True, 0, 10.0)], seed=1)
    assert not found.any()


def test_noise_is_drawn_from_seed_and_name_within_its_range() -> None:
    level = NoiseLevel(10, 30)
    draws = [draw_noise(level, 1, (0, 0, utterance)) for utterance in range(200)]
    assert draws == [draw_noise(level, 1, (0, 0, utterance)) for utterance in range(200)]
    assert draws[0] != draw_noise(level, 2, (0, 0, 0)) and draws[0] != draw_noise(level, 1, (1, 0, 0))
    assert all(10 <= draw.snr_db <= 30 for draw in draws)
    assert 60 < sum(draw.pink for draw in draws) < 140


@pytest.mark.parametrize("text", ["10", "30-10", "-5-10", "a-b", "10-", "-", "1-inf", "nan-3", "5--3"])
def test_a_range_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"write LOW-HIGH in dB.*e\.g\. 10-30"):
        NoiseLevel.parse(text)


def test_a_range_may_have_fractions_and_be_a_single_value() -> None:
    assert NoiseLevel.parse("7.5-20") == NoiseLevel(7.5, 20)
    assert NoiseLevel.parse("15-15") == NoiseLevel(15, 15)
