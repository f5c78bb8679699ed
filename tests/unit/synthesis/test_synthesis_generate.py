"""Saying texts: batches that change nothing, the cut, sound of any length, WAV files, pictures."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

from speechdp.data.signal.spectrogram import compute_spectrogram, spectrogram_config
from speechdp.errors import ConfigError, RunError
from speechdp.models.tacotron.model import Generated
from speechdp.synthesis.generate import MAX_SYMBOLS, GenerateOptions, Synthesiser, write_wav
from speechdp.synthesis.pictures import draw_picture
from speechdp.synthesis.showcase import picture_of
from speechdp.tasks.model_file import load_synthesis_model
from tests.helpers.corpora import tone
from tests.helpers.tiny_speech import write_tiny_speech
from tests.helpers.untrained_speech import SIZES, write_untrained_run

OPTIONS = GenerateOptions(iterations=2, max_seconds=0.02, dropout=False, attention_end=False)


def make_synthesiser(folder: Path, options: GenerateOptions = OPTIONS, *, stops: bool = False) -> Synthesiser:
    dataset = write_tiny_speech(folder / "data")
    run_dir = write_untrained_run(folder / "run", dataset, stops=stops)
    return Synthesiser(load_synthesis_model(run_dir, torch.device("cpu")), options)


@pytest.fixture(scope="module")
def synthesiser(tmp_path_factory: pytest.TempPathFactory) -> Synthesiser:
    return make_synthesiser(tmp_path_factory.mktemp("speech"))


def test_texts_said_together_or_alone_are_the_same(synthesiser: Synthesiser) -> None:
    texts = synthesiser.encode(["six", "one two six!", "2"])
    together = dict(synthesiser.say(texts))
    for number, text in enumerate(texts):
        ((_, alone),) = synthesiser.say([text])
        np.testing.assert_allclose(together[number].mel, alone.mel, atol=1e-5)
        np.testing.assert_allclose(together[number].linear, alone.linear, atol=1e-5)
        np.testing.assert_allclose(together[number].attention, alone.attention, atol=1e-5)
        assert alone.attention.shape[1] == len(text)
        np.testing.assert_allclose(alone.attention.sum(axis=1), 1, atol=1e-5)
        assert alone.mel.min() >= 0 and alone.mel.max() <= 1


def test_speech_that_never_stops_is_cut(synthesiser: Synthesiser, tmp_path: Path) -> None:
    ((_, cut),) = synthesiser.say(synthesiser.encode(["one"]))
    assert cut.ending == "limit" and len(cut.mel) == synthesiser.max_frames == 40
    stopping = make_synthesiser(tmp_path, stops=True)
    ((_, ended),) = stopping.say(stopping.encode(["one"]))
    assert ended.ending == "stop" and len(ended.mel) == SIZES.reduction and len(ended.attention) == 1


def test_speech_ends_where_attention_rests_on_the_last_symbol(
    synthesiser: Synthesiser, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step is 0.25 s here, so one that attends to the last symbol is the last."""
    features = dataclasses.replace(synthesiser.loaded.features, frame_shift_ms=250 / SIZES.reduction)
    loaded = dataclasses.replace(synthesiser.loaded, features=features)
    options = GenerateOptions(max_seconds=10 * 0.25)
    generate = loaded.model.generate
    attended = [0, 2, 1, 3, 3, 0, 1, 2, 3, 3]

    def attending(symbols: torch.Tensor, **options: Any) -> Generated:
        attention = torch.eye(4)[attended].expand(len(symbols), -1, -1)
        return dataclasses.replace(generate(symbols, **options), attention=attention)

    monkeypatch.setattr(loaded.model, "generate", attending)
    texts = [text[-4:] for text in synthesiser.encode(["one", "zero"])]
    for speaker, ending, steps in (
        (Synthesiser(loaded, options), "attention", 4),
        (Synthesiser(loaded, dataclasses.replace(options, attention_end=False)), "limit", 10),
    ):
        for _, speech in speaker.say(texts):
            assert (speech.ending, len(speech.attention)) == (ending, steps)
            assert len(speech.mel) == len(speech.linear) == steps * SIZES.reduction


def test_dropout_follows_the_seed(synthesiser: Synthesiser) -> None:
    def say(seed: int) -> np.ndarray:
        options = dataclasses.replace(OPTIONS, dropout=True, seed=seed)
        ((_, speech),) = dataclasses.replace(synthesiser, options=options).say(synthesiser.encode(["one"]))
        return speech.mel

    np.testing.assert_array_equal(say(1), say(1))
    assert np.abs(say(1) - say(2)).max() > 0


@pytest.mark.parametrize(
    ("text", "message"),
    [("drei § µ", "'§'"), ("  ", "no word"), ("one " * MAX_SYMBOLS, "divide it into sentences")],
)
def test_texts_that_cannot_be_said(synthesiser: Synthesiser, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        synthesiser.encode(["one", text])
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("values", "option"),
    [
        ({"iterations": 0}, "--iterations 0"),
        ({"max_seconds": 0.0}, "--max-seconds 0"),
        ({"seed": -1}, r"--seed -1: must lie in 0\.\.4294967295"),
    ],
)
def test_options_out_of_range_are_named(values: dict[str, float], option: str) -> None:
    with pytest.raises(ConfigError, match=option):
        GenerateOptions(**values)  # type: ignore[arg-type]


def test_sound_comes_back_however_short(synthesiser: Synthesiser) -> None:
    """Griffin-Lim of a real spectrogram has its spectrogram, roughly; one frame is no sound."""
    features = spectrogram_config(8000)
    loaded = dataclasses.replace(synthesiser.loaded, features=features, sampling_rate=8000)
    real = Synthesiser(loaded, GenerateOptions(iterations=20))
    spectrogram = compute_spectrogram(tone(0.5), 8000, features)
    linear = spectrogram[:, features.num_mel_bins :]
    for num_frames in (len(linear), 3, 1):
        assert len(real.samples(linear[:num_frames])) == (num_frames - 1) * 100
    again = compute_spectrogram(real.samples(linear), 8000, features)[:, features.num_mel_bins :]
    assert np.corrcoef(again.ravel(), linear[: len(again)].ravel())[0, 1] > 0.8


def test_a_wav_is_16_bit_and_never_clipped(tmp_path: Path) -> None:
    path = tmp_path / "a.wav"
    loud = np.array([0.0, 4.0, -2.0], dtype=np.float32)
    write_wav(path, loud, 8000)
    samples, rate = soundfile.read(path)
    assert rate == 8000 and soundfile.info(path).subtype == "PCM_16"
    np.testing.assert_allclose(samples, 0.99 * loud / 4, atol=1e-4)
    write_wav(path, loud / 10, 8000)
    np.testing.assert_allclose(soundfile.read(path)[0], loud / 10, atol=1e-4)
    write_wav(path, loud[:0], 8000)
    assert soundfile.info(path).frames == 0
    latin = Path(os.fsdecode(bytes(tmp_path) + b"/caf\xe9.wav"))
    write_wav(latin, loud, 8000)
    assert latin.stat().st_size == 44 + 6
    with pytest.raises(RunError, match="cannot be written"):
        write_wav(tmp_path / "no" / "a.wav", loud, 8000)


def test_a_picture_of_any_text(synthesiser: Synthesiser, tmp_path: Path) -> None:
    for number, text in enumerate(["6", "six two one, " * 20]):
        (symbols,) = synthesiser.encode([text])
        ((_, speech),) = synthesiser.say([symbols])
        recorded = speech.mel[: 5 * number + 1] if number else None
        path = tmp_path / f"{number}.png"
        draw_picture(picture_of(text, symbols, speech, synthesiser.loaded, recorded), path)
        assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000
