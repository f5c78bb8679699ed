"""Features: Kaldi's definitions, against references made by HTK."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import soundfile

from speechdp.data.signal import features
from speechdp.data.signal.compute import compute_features
from speechdp.data.signal.features import (
    SILENCE_ALONE,
    FeatureConfig,
    check_mel_bins,
    kaldi_features,
    mel_of,
    normalise,
    num_frames_of,
)
from speechdp.errors import ConfigError
from tests.helpers.corpora import shared_data, tone


@pytest.mark.parametrize("num_samples", [1, 39, 40, 79, 80, 1152, 8000, 8039, 8040])
@pytest.mark.parametrize("kind", ["log_mel", "mfcc"])
def test_number_of_frames_is_the_duration_over_the_shift_rounded(num_samples: int, kind: str) -> None:
    config = FeatureConfig(kind=kind)  # type: ignore[arg-type]
    features = compute_features(np.full(num_samples, 0.1, np.float32), 8000, config)
    assert features.shape == (num_frames_of(num_samples, 8000, config), config.feature_dim)
    assert features.shape[0] == int(num_samples / 80 + 0.5)


def test_same_samples_give_the_same_bytes() -> None:
    samples = tone(0.5)
    first, second = (compute_features(samples, 8000, FeatureConfig()) for _ in range(2))
    assert first.tobytes() == second.tobytes()


def test_mel_filters_are_looked_at_once_for_all_utterances_of_a_rate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[int] = []
    monkeypatch.setattr(features, "mel_of", lambda hz: (calls.append(len(hz)), mel_of(hz))[1])
    for _ in range(3):
        compute_features(tone(0.2), 8123, FeatureConfig())  # a rate that no other test has
    assert len(calls) == 2  # the points of the spectrum, and the ends of the scale


def test_normalisation_takes_the_level_out() -> None:
    config = FeatureConfig()
    loud, quiet = (compute_features(tone(0.5) * gain, 8000, config) for gain in (1.0, 0.1))
    np.testing.assert_allclose(loud.mean(axis=0), 0, atol=1e-5)
    np.testing.assert_allclose(loud.std(axis=0), 1, atol=1e-4)
    np.testing.assert_allclose(loud, quiet, atol=2e-2)


def test_normalisation_can_be_left_out() -> None:
    raw = np.array([[5, 6], [7, 10]], np.float32)
    only_mean = FeatureConfig(variance_normalise=False)
    neither = FeatureConfig(mean_normalise=False, variance_normalise=False)
    np.testing.assert_array_equal(normalise(raw, only_mean), [[-1, -2], [1, 2]])
    np.testing.assert_array_equal(normalise(raw, FeatureConfig()), [[-1, -1], [1, 1]])
    np.testing.assert_array_equal(normalise(raw, neither), raw)


def test_digital_silence_is_finite() -> None:
    features = compute_features(np.zeros(800, np.float32), 8000, FeatureConfig())
    np.testing.assert_array_equal(features, SILENCE_ALONE)


@pytest.mark.parametrize("samples", [np.zeros(0, np.float32), np.zeros((10, 2), np.float32)])
def test_wrong_shape_is_refused(samples: np.ndarray) -> None:
    with pytest.raises(ConfigError, match="one channel"):
        compute_features(samples, 8000, FeatureConfig())


def test_nan_is_refused() -> None:
    with pytest.raises(ConfigError, match="NaN"):
        compute_features(np.array([0, np.nan], np.float32), 8000, FeatureConfig())


def test_more_mel_bins_than_the_spectrum_holds_are_refused_not_fatal() -> None:
    message = "200 mel bins are too many for 8000 Hz and a window of 25 ms; give .*, or --num-mel-bins 95"
    with pytest.raises(ConfigError, match=message):
        compute_features(tone(0.2), 8000, FeatureConfig(num_mel_bins=200))
    for num_mel_bins in (23, 40, 64, 80):
        check_mel_bins(16000, FeatureConfig(num_mel_bins=num_mel_bins))


@pytest.mark.parametrize("frame_length_ms", [4.0, 10.0, 25.0])
def test_the_number_of_mel_bins_proposed_is_the_most_that_fit(frame_length_ms: float) -> None:
    def config(num_mel_bins: int) -> FeatureConfig:
        return FeatureConfig(num_mel_bins=num_mel_bins, frame_length_ms=frame_length_ms)

    with pytest.raises(
        ConfigError, match=r"give a longer --frame-length-ms, or --num-mel-bins \d+$"
    ) as caught:
        check_mel_bins(8000, config(10**9))
    proposed = int(str(caught.value).rpartition(" ")[2])
    check_mel_bins(8000, config(proposed))
    with pytest.raises(ConfigError, match=f"or --num-mel-bins {proposed}$"):
        check_mel_bins(8000, config(proposed + 1))


def test_where_no_number_of_mel_bins_fits_a_longer_window_is_proposed() -> None:
    with pytest.raises(ConfigError, match=r"a window of 0\.5 ms; give a longer --frame-length-ms$"):
        check_mel_bins(8000, FeatureConfig(frame_length_ms=0.5))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"frame_shift_ms": 0.01}, "--frame-shift-ms 0.01: is less than 1 sample at 8000 Hz; give more"),
        ({"frame_length_ms": 0.01}, "--frame-length-ms 0.01: is less than 2 samples at 8000 Hz; give more"),
        ({"frame_shift_ms": float("nan")}, "--frame-shift-ms nan: must be a number above 0"),
        ({"frame_shift_ms": 0.0}, "--frame-shift-ms 0: must be a number above 0"),
        ({"frame_length_ms": float("nan")}, "--frame-length-ms nan: must be a number above 0"),
        ({"frame_length_ms": float("inf")}, "--frame-length-ms inf: must be a number above 0"),
        ({"num_mel_bins": 2}, "--num-mel-bins 2: must be at least 3"),
    ],
)
def test_frames_that_cannot_be_are_refused_with_the_option(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_mel_bins(8000, FeatureConfig(**values))


@pytest.mark.parametrize(
    "values", [{"kind": "plp"}, {"dtype": "int8"}, {"num_mel_bins": 0}, {"kind": "mfcc", "num_ceps": 50}]
)
def test_settings_that_make_no_sense_are_refused(values: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        FeatureConfig.from_dict(values)


def test_settings_survive_json() -> None:
    config = FeatureConfig(kind="mfcc", num_ceps=20, dtype="float32")
    assert FeatureConfig.from_dict(config.to_dict()) == config
    with pytest.raises(ConfigError, match="another version"):
        FeatureConfig.from_dict({"colour": "blue"})


@dataclass(frozen=True)
class Recipe:
    """What a log-mel spectrum depends on, beside the samples."""

    num_bins: int
    low_hz: float
    pre_emphasis: float
    remove_mean: bool
    window: np.ndarray


HTK = Recipe(23, 0.0, 0.0, False, np.hamming(400))
KALDI = Recipe(40, 20.0, 0.97, True, np.hanning(400) ** 0.85)


def log_mel_by_definition(samples: np.ndarray, recipe: Recipe) -> np.ndarray:
    """Compute log-mel energies at 16 kHz straight from the definition: 25 ms every 10 ms, 512-point FFT."""
    num_frames = 1 + (len(samples) - 400) // 160
    frames = np.stack([samples[160 * t : 160 * t + 400] for t in range(num_frames)]).astype(np.float64)
    if recipe.remove_mean:
        frames -= frames.mean(axis=1, keepdims=True)
    before = np.concatenate([frames[:, :1], frames[:, :-1]], axis=1)
    frames = (frames - recipe.pre_emphasis * before) * recipe.window
    power = np.abs(np.fft.rfft(frames, 512)) ** 2
    mel = 1127 * np.log(1 + np.arange(257) * 16000 / 512 / 700)
    edges = np.linspace(1127 * np.log(1 + recipe.low_hz / 700), mel[-1], recipe.num_bins + 2)
    left, centre, right = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    weights = np.maximum(0, np.minimum((mel - left) / (centre - left), (right - mel) / (right - centre)))
    weights[:, 256] = 0  # neither takes the point at half the sampling rate
    return np.log(power @ weights.T)


def test_the_definition_gives_what_htk_gave() -> None:
    samples, htk = _kaldi_test_data("test.wav.fbank_htk.1")
    np.testing.assert_allclose(log_mel_by_definition(samples, HTK), htk, atol=0.02)


def test_log_mel_follows_the_definition_with_kaldi_s_settings() -> None:
    samples, _ = _kaldi_test_data("test.wav.fbank_htk.1")
    ours = kaldi_features(samples, 16000, FeatureConfig(num_mel_bins=40), snip_edges=True)
    np.testing.assert_allclose(ours, log_mel_by_definition(samples, KALDI), atol=2e-3)


def test_mfcc_is_the_liftered_cosine_transform_of_log_mel() -> None:
    """HTK and Kaldi: orthonormal DCT, then 1 + 11 sin(pi i / 22); C0 is the frame's log energy."""
    samples, _ = _kaldi_test_data("test.wav.fbank_htk.1")
    ours = kaldi_features(samples, 16000, FeatureConfig(kind="mfcc"), snip_edges=True)
    log_mel = log_mel_by_definition(samples, KALDI)
    order = np.arange(13)[:, None]
    cosine = np.sqrt(2 / 40) * np.cos(np.pi * order * (np.arange(40) + 0.5) / 40)
    cepstra = log_mel @ (cosine * (1 + 11 * np.sin(np.pi * order / 22))).T
    np.testing.assert_allclose(ours[:, 1:], cepstra[:, 1:], atol=2e-2)


def test_features_are_kaldi_s_from_the_16_bit_scale() -> None:
    samples, _ = _kaldi_test_data("test.wav.fbank_htk.1")
    config = FeatureConfig(mean_normalise=False, variance_normalise=False)
    ours = compute_features((samples / 32768).astype(np.float32), 16000, config)
    inner = kaldi_features(samples, 16000, config, snip_edges=True)
    # Without snipped edges frame t is centred at (t + 1/2) shifts, with them at t shifts + 12.5 ms.
    assert abs(ours.mean() - inner.mean()) < 0.1
    assert ours.shape[0] == round(len(samples) / 160)


def _kaldi_test_data(name: str) -> tuple[np.ndarray, np.ndarray]:
    folder = shared_data("kaldi", "kaldi_test_data", "feat")
    samples, _ = soundfile.read(folder / "test.wav", dtype="float32")
    content = (folder / name).read_bytes()
    num_frames, _, row_bytes, _ = np.frombuffer(content[:12], np.dtype(">i4,>i4,>i2,>i2"))[0]
    rows = np.frombuffer(content[12:], ">f4").reshape(num_frames, row_bytes // 4)
    return samples * 32768.0, rows
