"""Audio files: what is read, what is refused, and where speech starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile

from speechdp.data.signal.audio import (
    AudioPart,
    common_sampling_rate,
    edge_silence,
    probe,
    read_audio,
    read_through,
    resample,
)
from speechdp.data.signal.features import FeatureConfig
from speechdp.data.signal.sound_header import sound_bytes
from speechdp.errors import ConfigError
from tests.helpers.corpora import tone, write_tone


@pytest.mark.parametrize("suffix", [".wav", ".flac"])
def test_samples_come_back(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    soundfile.write(path, tone(0.5, 16000), 16000, subtype="PCM_16")
    info = probe(path)
    assert (info.sampling_rate, info.num_samples) == (16000, 8000)
    samples = read_audio(path, 16000)
    assert samples.dtype == np.float32
    np.testing.assert_allclose(samples, tone(0.5, 16000), atol=1 / 32768)


def test_long_recordings_are_in_memory_once(tmp_path: Path) -> None:
    with soundfile.SoundFile(tmp_path / "long.wav", "w", 16000, 1, "PCM_16") as file:
        for number in range(10):
            file.write(np.full(5_000_000, number / 16, np.float32))
    program = (
        "import sys; from pathlib import Path\n"
        "from speechdp.data.signal.audio import read_audio\n"
        "from speechdp.timing.memory import peak_rss_bytes\n"
        "before = peak_rss_bytes(); samples = read_audio(Path(sys.argv[1]), 16000)\n"
        "assert samples[::5_000_000].tolist() == [number / 16 for number in range(10)]\n"
        "print((peak_rss_bytes() - before) / samples.nbytes)"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "long.wav")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert 0.9 < float(done.stdout) < 1.5


def test_resampling_keeps_a_sine() -> None:
    time = np.arange(22050) / 22050
    sine = np.sin(2 * np.pi * 440 * time).astype(np.float32)
    changed = resample(sine, 22050, 16000)
    assert len(changed) == 16000
    expected = np.sin(2 * np.pi * 440 * np.arange(16000) / 16000)
    np.testing.assert_allclose(changed[500:-500], expected[500:-500], atol=1e-3)


def test_file_is_resampled_when_read(tmp_path: Path) -> None:
    assert len(read_audio(write_tone(tmp_path / "a.wav", 0.5, 16000), 8000)) == 4000


@pytest.mark.parametrize("content", [b"RIFF", b"this is no audio at all", b"fLaC" + bytes(50)])
def test_what_is_not_audio_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.wav"
    path.write_bytes(content)
    for read in (probe, lambda p: read_audio(p, 8000)):
        with pytest.raises(ConfigError, match=r"bad\.wav: unreadable audio .*; convert it") as raised:
            read(path)
        assert "\n" not in str(raised.value)


def test_raw_samples_and_names_in_no_encoding_are_refused(tmp_path: Path) -> None:
    (tmp_path / "talk.raw").write_bytes(bytes(1000))
    latin = os.fsdecode(bytes(tmp_path) + b"/caf\xe9.wav")
    write_tone(tmp_path / "a.wav", 0.1, 8000).rename(latin)
    for read in (probe, lambda p: read_audio(p, 8000)):
        with pytest.raises(ConfigError, match=r"talk\.raw: unreadable audio .*; convert it"):
            read(tmp_path / "talk.raw")
        with pytest.raises(ConfigError, match="its name is not UTF-8; rename it"):
            read(Path(latin))


def test_missing_file_is_refused(tmp_path: Path) -> None:
    for read in (probe, lambda p: read_audio(p, 8000)):
        with pytest.raises(ConfigError, match=r"gone\.wav: no such audio file"):
            read(tmp_path / "gone.wav")


def test_empty_audio_is_refused(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "a.wav", np.zeros(0, np.float32), 8000)
    for read in (probe, lambda p: read_audio(p, 8000)):
        with pytest.raises(ConfigError, match=r"a\.wav: holds no samples; copy or record it again"):
            read(tmp_path / "a.wav")
    (tmp_path / "a.wav").write_bytes(b"")
    for read in (probe, lambda p: read_audio(p, 8000)):
        with pytest.raises(ConfigError, match=r"a\.wav: is empty; copy or record it again"):
            read(tmp_path / "a.wav")


def test_flac_cut_short_is_refused(tmp_path: Path) -> None:
    path = write_tone(tmp_path / "a.flac", 4.0)
    path.write_bytes(path.read_bytes()[:-9000])
    with pytest.raises(ConfigError, match=r"a\.flac: unreadable audio"):
        read_audio(path, 8000)


@pytest.mark.parametrize("suffix", [".wav", ".aiff", ".au", ".nist", ".rf64", ".w64"])
def test_audio_cut_short_is_refused(tmp_path: Path, suffix: str) -> None:
    path = write_tone(tmp_path / f"a{suffix}", 2.0)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    for read in (read_through, lambda p: read_audio(p, 8000), lambda p: read_audio(AudioPart(p, 0.5), 8000)):
        with pytest.raises(
            ConfigError, match=rf"a\{suffix}.*: is cut short \(\d\d,.* of 32,.* copy or record"
        ):
            read(path)
    assert len(read_audio(AudioPart(path, 0.0, 0.5), 8000)) == 4000  # what is there
    path.write_bytes(whole[:-100])  # a writer that counted its header as sound
    assert len(read_audio(path, 8000)) == 16000 - 50


@pytest.mark.parametrize("kind", ["NIST", "RF64", "W64"])
def test_whole_files_have_all_that_their_headers_announce(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"a.{kind.lower()}"
    for coding in soundfile.available_subtypes(kind):
        for channels in (1,) if coding in ("IMA_ADPCM", "MS_ADPCM", "GSM610") else (1, 3):
            # Of an odd number of bytes where samples have one.
            soundfile.write(path, np.zeros((1001, channels)), 8000, coding, format=kind)
            counts = sound_bytes(path, kind)
            assert counts is not None and counts[1] - 1 <= counts[0] <= counts[1], (coding, channels)


def test_w64_of_unknown_length_is_read(tmp_path: Path) -> None:
    path = write_tone(tmp_path / "a.w64", 0.5)
    data = bytearray(path.read_bytes())
    assert int.from_bytes(data[96:104], "little") == 8000 + 24
    data[96:104] = b"\xff" * 8
    path.write_bytes(data)
    assert sound_bytes(path, "W64") is None
    assert len(read_audio(path, 8000)) == 4000


@pytest.mark.parametrize("announced", [0x7FFFF000, 0x7FFFFFFF, 0xFFFFFFFF])
def test_audio_written_to_a_pipe_is_read(tmp_path: Path, announced: int) -> None:
    path = write_tone(tmp_path / "a.wav", 0.5)
    data = bytearray(path.read_bytes())
    data[40:44] = announced.to_bytes(4, "little")
    path.write_bytes(data)
    assert len(read_audio(path, 8000)) == 4000


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.wav")
    for read in (probe, read_through, lambda p: read_audio(p, 8000)):
        with pytest.raises(
            ConfigError, match=r"a\.wav: is a pipe or a device; write its sound to a file first"
        ):
            read(tmp_path / "a.wav")


def test_nan_is_refused(tmp_path: Path) -> None:
    samples = tone(0.2)
    samples[7] = np.nan
    soundfile.write(tmp_path / "a.wav", samples, 8000, subtype="FLOAT")
    with pytest.raises(ConfigError, match="NaN or infinite"):
        read_audio(tmp_path / "a.wav", 8000)


def test_samples_of_another_scale_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.wav"
    soundfile.write(path, tone(0.2) * 4, 8000, subtype="FLOAT")  # too loud, but sound
    assert np.abs(read_audio(path, 8000)).max() > 1
    samples = np.round(tone(0.2) * 32768)
    soundfile.write(path, samples, 8000, subtype="FLOAT")
    peak = f"{int(np.abs(samples).max()):,}"
    for read in (read_through, lambda p: read_audio(p, 8000)):
        with pytest.raises(
            ConfigError, match=rf"a\.wav: holds samples up to {peak}, where 1 is full scale; divide"
        ):
            read(path)


def test_two_channels_are_refused(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "a.wav", np.zeros((80, 2), np.float32), 8000)
    for read in (probe, lambda p: read_audio(p, 8000)):
        with pytest.raises(ConfigError, match=r"a\.wav: has 2 channels"):
            read(tmp_path / "a.wav")


def test_mixed_rates_name_two_files(tmp_path: Path) -> None:
    infos = [probe(write_tone(tmp_path / f"{rate}.wav", 0.1, rate)) for rate in (8000, 16000)]
    with pytest.raises(
        ConfigError, match=r"8000\.wav has 8000 Hz, .*16000\.wav has 16000 Hz; add --resample 8000"
    ):
        common_sampling_rate(infos, None)
    assert common_sampling_rate(infos, 16000) == 16000
    assert common_sampling_rate(infos[1:], None) == 16000
    with pytest.raises(ConfigError, match="--resample 16"):
        common_sampling_rate(infos, 16)


def test_silence_at_the_edges_is_found() -> None:
    config = FeatureConfig()
    speech = np.random.default_rng(0).standard_normal(4000).astype(np.float32) * 0.1
    quiet = np.random.default_rng(1).standard_normal(1600).astype(np.float32) * 1e-4  # 60 dB under
    samples = np.concatenate([quiet, speech, quiet[:800]])
    leading, trailing = edge_silence(samples, 8000, config, 80)
    assert (leading, trailing) == (19, 9)  # a window that touches the speech is speech


def test_silence_is_counted_in_the_frames_that_features_have() -> None:
    """At 11,025 Hz frames are 110 samples apart, not 110.25."""
    rate, num_frames = 11_025, 4000
    samples = np.zeros(num_frames * 110, np.float32)
    samples[3000 * 110 : 3500 * 110] = 0.5
    leading, trailing = edge_silence(samples, rate, FeatureConfig(), num_frames)
    assert abs(leading - 3000) <= 2 and abs(trailing - 500) <= 2


def test_short_and_loud_edges_are_not_silence() -> None:
    config = FeatureConfig()
    speech = np.random.default_rng(0).standard_normal(4000).astype(np.float32) * 0.1
    assert edge_silence(speech, 8000, config, 50) == (0, 0)
    gap = np.zeros(400, np.float32)  # 5 frames, 4 of which do not touch the speech
    assert edge_silence(np.concatenate([gap, speech, gap]), 8000, config, 60) == (0, 0)
    assert edge_silence(np.concatenate([speech, speech * 0.03]), 8000, config, 100) == (0, 0)  # 30 dB
    assert edge_silence(np.zeros(4000, np.float32), 8000, config, 50) == (0, 0)
