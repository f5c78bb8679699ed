"""Say texts with a trained model: symbols to spectrograms to samples.

Legend: T frames, M mel bins, L linear bins, N decoder steps, S symbols.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import soundfile
import torch

from speechdp.data.loading.batch import IGNORED_TARGET
from speechdp.data.signal.audio import to_int16
from speechdp.data.signal.features import shift_samples
from speechdp.data.signal.spectrogram import invert_linear
from speechdp.errors import ConfigError, RunError
from speechdp.files import atomic_path, cannot_be_written
from speechdp.labels.lexicon import Lexicon
from speechdp.models.evaluating import evaluating
from speechdp.options.seed import check_seed
from speechdp.synthesis.record import Ending
from speechdp.tasks.model_file import LoadedSynthesis

FloatArray = npt.NDArray[np.float32]
Symbols = npt.NDArray[np.int32]

#: Most symbols of a text: far more than attention can follow in one utterance.
MAX_SYMBOLS = 1000
_BATCH_SIZE = 32
#: A text is taken to be finished when attention has stayed on the last symbol for this long, s.
_REST_S = 0.25
#: Largest sample of a WAV: the output of Griffin-Lim may exceed 1.
_PEAK = 0.99
#: Held while torch's random generator runs from a seed: all threads share it.
_SEEDED = threading.Lock()


@dataclass(frozen=True)
class GenerateOptions:
    """How to synthesise; recorded in synthesis.json.

    Attributes:
        iterations: iterations of Griffin-Lim, which finds the phases.
        max_seconds: length at which an utterance is cut if the model does not stop, s.
        seed: seed of the dropout; nothing else is random.
        dropout: keep the dropout of the decoder's pre-net, so that each seed says a text differently.
        attention_end: if the stop prediction does not fire, end the speech once attention has stayed on the
            last symbol for a quarter of a second.
    """

    iterations: int = 60
    max_seconds: float = 20.0
    seed: int = 1
    dropout: bool = True
    attention_end: bool = True

    def __post_init__(self) -> None:
        if self.iterations < 1:
            raise ConfigError(f"--iterations {self.iterations}: must be at least 1")
        if not 0 < self.max_seconds <= 600:
            raise ConfigError(f"--max-seconds {self.max_seconds:g}: must be more than 0 and at most 600")
        check_seed(self.seed)


@dataclass(frozen=True)
class Speech:
    """The model's speech for one text.

    Attributes:
        mel: mel spectrogram (T, M), in [0, 1] as in data directories.
        linear: linear spectrogram (T, L), in [0, 1].
        attention: (N, S), rows sum to 1.
        ending: what ended it: the stop prediction, attention at the text's end, or `max_seconds`.
    """

    mel: FloatArray
    linear: FloatArray
    attention: FloatArray
    ending: Ending


@dataclass(frozen=True)
class Synthesiser:
    """Says texts with one model.

    Attributes:
        loaded: the model, its symbols and its features.
        options: how to say the texts.
    """

    loaded: LoadedSynthesis
    options: GenerateOptions

    def with_lexicon(self, texts: Sequence[str], lexicon: Lexicon) -> Synthesiser:
        """Return a synthesiser with a lexicon's pronunciations, by `SymbolInventory.with_words_of`."""
        symbols = self.loaded.symbols.with_words_of(texts, lexicon)
        return replace(self, loaded=replace(self.loaded, symbols=symbols))

    def encode(self, texts: Sequence[str]) -> list[Symbols]:
        """Convert texts to symbols.

        Raises:
            ConfigError: a text has no word, is too long, or has characters or words unknown to the model.
        """
        encoded = [self.loaded.symbols.encode(text) for text in texts]
        for text, symbols in zip(texts, encoded, strict=True):
            if len(symbols) > MAX_SYMBOLS:
                raise ConfigError(
                    f"the text beginning {text[:30]!r} has {len(symbols)} symbols; at most {MAX_SYMBOLS} "
                    "can be spoken at once, divide it into sentences"
                )
        return encoded

    def say(self, texts: Sequence[Symbols]) -> Iterator[tuple[int, Speech]]:
        """Yield (position in `texts`, speech), in any order: similar lengths are synthesised together.

        The speech for a text does not depend on the other texts, except with dropout.
        """
        order = sorted(range(len(texts)), key=lambda index: len(texts[index]), reverse=True)
        for first in range(0, len(order), _BATCH_SIZE):
            chosen = order[first : first + _BATCH_SIZE]
            yield from zip(chosen, self._say_together([texts[index] for index in chosen]), strict=True)

    def samples(self, linear: FloatArray) -> FloatArray:
        """Convert a linear spectrogram (T, L) to samples by Griffin-Lim: S = (T - 1) * samples per shift."""
        rate, features = self.loaded.sampling_rate, self.loaded.features
        shift = shift_samples(rate, features)
        # Griffin-Lim needs at least one whole window: silence is appended, and removed again.
        missing = max(0, -(-features.num_fft // shift) + 1 - len(linear))
        padded = np.pad(linear, ((0, missing), (0, 0)))
        found = invert_linear(padded, rate, features, num_iterations=self.options.iterations)
        return found[: (len(linear) - 1) * shift]

    @property
    def max_frames(self) -> int:
        """Frames after which an utterance is cut."""
        return max(1, round(self.options.max_seconds / self.loaded.features.frame_shift_s))

    def _say_together(self, texts: Sequence[Symbols]) -> Iterator[Speech]:
        model = self.loaded.model
        symbols = torch.nn.utils.rnn.pad_sequence(
            [torch.from_numpy(text.astype(np.int64)) for text in texts],
            batch_first=True,
            padding_value=IGNORED_TARGET,
        )
        device = next(model.parameters()).device
        dropout = self.options.dropout
        # fork_rng restores the program's own random state afterwards.
        with _SEEDED, torch.random.fork_rng([device] if device.type == "cuda" else []), evaluating(model):
            torch.manual_seed(self.options.seed)
            generated = model.generate(symbols.to(device), max_frames=self.max_frames, dropout=dropout)
        mel, linear, attention = (
            x.float().cpu().numpy() for x in (generated.mel, generated.linear, generated.attention)
        )
        if not np.isfinite(linear).all():
            raise RunError(
                "the model's output is NaN or infinite; train it again with a smaller learning rate"
            )
        for row, (text, num_frames) in enumerate(zip(texts, generated.lengths.tolist(), strict=True)):
            num_steps = model.config.num_steps(num_frames)
            attended = attention[row, :num_steps, : len(text)]
            if not generated.stopped[row] and self.options.attention_end:
                attended = attended[: self._end_of_text(attended)]
            kept = min(num_frames, len(attended) * model.config.reduction)
            shortened: Ending = "attention" if kept < num_frames else "limit"
            yield Speech(
                mel=np.clip(mel[row, :kept], 0.0, 1.0),
                linear=np.clip(linear[row, :kept], 0.0, 1.0),
                attention=attended,
                ending="stop" if generated.stopped[row] else shortened,
            )

    def _end_of_text(self, attention: FloatArray) -> int:
        """Return how many steps of attention (N, S) to keep: until it has stayed on the last symbol."""
        step_s = self.loaded.model.config.reduction * self.loaded.features.frame_shift_s
        rest = max(1, round(_REST_S / step_s))
        resting = 0
        for step, symbol in enumerate(attention.argmax(axis=1).tolist()):
            resting = resting + 1 if symbol == attention.shape[1] - 1 else 0
            if resting == rest:
                return step + 1
        return len(attention)


def write_wav(path: Path, samples: FloatArray, sampling_rate: int) -> None:
    """Write samples (S,) as 16-bit WAV; scaled down as a whole, not clipped, if any exceeds 0.99.

    Raises:
        RunError: a disk error.
    """
    peak = float(np.abs(samples).max(initial=0.0))
    samples = samples * (_PEAK / peak) if peak > _PEAK else samples
    encoded = io.BytesIO()  # libsndfile needs UTF-8 names, and does not report why a file cannot be written
    soundfile.write(encoded, to_int16(samples), sampling_rate, format="WAV", subtype="PCM_16")
    try:
        with atomic_path(path) as temporary:
            temporary.write_bytes(encoded.getvalue())  # as in data/prepare/recordings.py
    except OSError as error:
        raise RunError(cannot_be_written(path, error)) from error
