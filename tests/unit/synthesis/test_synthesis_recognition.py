"""What a recogniser makes of sound: words that are sequences of tones, and a model that knows the tones."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from speechdp.data.shards.dataset import Dataset, Manifest
from speechdp.data.signal.audio import resample
from speechdp.data.signal.compute import compute_features
from speechdp.data.signal.features import FeatureConfig
from speechdp.decode.language_model import save_language_model
from speechdp.errors import ConfigError, RunError
from speechdp.labels.hmm import StateInventory, log_priors
from speechdp.labels.lexicon import SILENCE, Lexicon, lexicon_for
from speechdp.language.kneser_ney import estimate
from speechdp.synthesis.recognition import SpeechListener
from tests.helpers.oracle import Oracle
from tests.helpers.tiny_speech import write_tiny_speech
from tests.helpers.untrained_speech import write_untrained_run

RATE = 8000
FEATURES = FeatureConfig(num_mel_bins=24, mean_normalise=False, variance_normalise=False)
LEXICON = lexicon_for(["one", "two", "six"])
INVENTORY = StateInventory(LEXICON.phones)
TONES_HZ = {
    phone: 300.0 * (2.0 ** (0.45 * number)) for number, phone in enumerate((SILENCE, *LEXICON.phones))
}


def say(words: str, rate: int = RATE) -> np.ndarray:
    """Every phone is a tone of 80 ms; the noise keeps other bands from the logarithm's floor."""
    phones = [SILENCE, *(p for word in words.split() for p in LEXICON.pronunciations[word][0]), SILENCE]
    seconds = np.arange(int(0.08 * rate)) / rate
    tones = [np.sin(2 * np.pi * TONES_HZ[phone] * seconds) for phone in phones]
    noise = 0.01 * np.random.default_rng(0).standard_normal(len(tones) * len(seconds))
    return (0.3 * np.concatenate(tones) + noise).astype(np.float32)


class NearestTone(torch.nn.Module):
    """Finds the phone whose tone sounds most like a frame, among all three states alike."""

    def __init__(self) -> None:
        super().__init__()
        middles = [compute_features(_tone(hz), RATE, FEATURES).mean(axis=0) for hz in TONES_HZ.values()]
        self.means = torch.nn.Parameter(torch.from_numpy(np.repeat(np.stack(middles), 3, axis=0)))

    def forward(self, features: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return -torch.cdist(features, self.means.expand(len(features), -1, -1))


def _tone(hz: float) -> np.ndarray:
    noise = 0.01 * np.random.default_rng(1).standard_normal(RATE // 2)
    return (0.3 * np.sin(2 * np.pi * hz * np.arange(RATE // 2) / RATE) + noise).astype(np.float32)


@pytest.fixture
def listener(tmp_path: Path) -> SpeechListener:
    LEXICON.save(tmp_path / "lexicon.txt")
    INVENTORY.save(tmp_path / "classes.txt")
    Manifest(RATE, FEATURES, INVENTORY.num_classes, "exact", "given", {}).write(tmp_path)
    prior = torch.from_numpy(log_priors(np.ones(INVENTORY.num_classes, np.int64)))
    trained = Oracle(NearestTone(), prior, torch.full((INVENTORY.num_classes,), 0.5), {})  # type: ignore[arg-type]
    return SpeechListener(tmp_path, trained, Dataset.open(tmp_path), Lexicon.load(tmp_path / "lexicon.txt"))


def test_words_are_heard_at_any_rate_and_silence_is_not(listener: SpeechListener) -> None:
    said = ["one two", "six", "two six one", "one"]
    ear = listener.ear(said)
    assert ear.recogniser.grammar.value == "digit-loop"
    assert ear.hear([say(words) for words in said], RATE) == said
    assert ear.hear([resample(say(words), RATE, 24000) for words in said], 24000) == said
    silent = np.zeros(4000, dtype=np.float32)
    assert ear.hear([silent, say("six"), silent[:0], say("six")[:30]], RATE) == ["", "six", "", ""]


def test_references_are_spelt_as_the_lexicon_has_them(listener: SpeechListener) -> None:
    assert listener.references(["One, 2: six!", "6"]) == ["one two six", "six"]
    shouting = Lexicon({word.upper(): variants for word, variants in LEXICON.pronunciations.items()})
    assert dataclasses.replace(listener, lexicon=shouting).references(["one 2."]) == ["ONE TWO"]
    assert listener.references(["one three", "nine"]) == ["one three", "nine"]
    assert listener.ear(["one three", "nine"]).unknown(["one three", "nine"]) == 2
    none = r"lexicon\.txt: has none of the 2 words of the texts, first 'nine'; give a recogniser that"
    with pytest.raises(ConfigError, match=none):
        listener.references(["nine three", "nine"])


def test_a_language_model_and_weights_are_used_as_by_decode(listener: SpeechListener) -> None:
    path = listener.dataset.path
    save_language_model(estimate([["one", "two"], ["six"]], 2, LEXICON.words), path)
    ear = listener.ear(["one two", "two six"])
    assert ear.recogniser.grammar.value == "ngram"
    assert ear.hear([say("one two"), say("two six")], RATE) == ["one two", "two six"]
    # Without the sound's help the model's sentences are all that is heard.
    deaf = dataclasses.replace(listener, weights={"acoustic_scale": 1e-4, "lm_scale": 50.0})
    assert set(deaf.ear(["one two"]).hear([say("two six")], RATE)) <= {"one two", "six"}


def test_what_cannot_listen_is_refused(listener: SpeechListener, tmp_path: Path) -> None:
    speech = write_tiny_speech(tmp_path / "speech")
    run = write_untrained_run(tmp_path / "run", speech)
    with pytest.raises(ConfigError, match=r"its features \(spectrogram\) are not those of a recogniser"):
        SpeechListener.load(run, speech.path, torch.device("cpu"))
    with pytest.raises(RunError, match="is a synthesis model"):
        SpeechListener.load(run, listener.dataset.path, torch.device("cpu"))
