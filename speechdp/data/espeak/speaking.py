"""Speak one shard's utterances in a separate process: eSpeak NG is deterministic only in a new one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from speechdp.data.espeak.espeak import EspeakSpeech, Voice, start_espeak
from speechdp.data.espeak.synthetic_plan import EDGE_S, PlannedUtterance
from speechdp.data.shards.layout import Stored
from speechdp.data.signal.audio import resample, to_int16
from speechdp.data.signal.compute import compute_features
from speechdp.data.signal.features import FeatureConfig, num_frames_of

#: Range of the signal-to-noise ratio, in dB: without noise, digital silence would distort the normalisation.
_SNR_DB = (25.0, 45.0)
#: Time kept after the last phone, in seconds: its decay.
_DECAY_S = 0.03


@dataclass(frozen=True)
class SpokenUtterance:
    """One spoken utterance: its number of frames and each word's (phone, start_s, end_s)."""

    utterance: PlannedUtterance
    num_frames: int
    words: tuple[tuple[str, tuple[tuple[str, float, float], ...]], ...]


@dataclass(frozen=True)
class SpeakingJob:
    """One shard to speak: features or samples go to `stem`.rows, the rest to `stem`.jsonl."""

    stem: Path
    utterances: tuple[PlannedUtterance, ...]
    sampling_rate: int
    features: FeatureConfig
    seed: int
    stored: Stored = "features"

    @property
    def path(self) -> Path:
        """File for features or samples."""
        return self.stem.with_suffix(".rows")

    @property
    def num_utterances(self) -> int:
        """Number of utterances to speak."""
        return len(self.utterances)

    def run(self, advance: Callable[[], None]) -> None:
        """Speak all utterances; call `advance` after each."""
        espeak = start_espeak()
        with (
            self.stem.with_suffix(".jsonl").open("w", encoding="utf-8") as text,
            self.path.open("wb") as rows,
        ):
            for number, utterance in enumerate(self.utterances):
                voice = Voice(utterance.voice, utterance.rate_wpm, utterance.pitch)
                speech = espeak.speak(utterance.text.split(), voice, seed=number + 1)
                rng = np.random.default_rng([self.seed, *utterance.utterance_id.encode()])
                samples, words = _finish(speech, espeak.sampling_rate, self.sampling_rate, rng)
                content = _content(samples, self)
                rows.write(content.data)
                num_frames = num_frames_of(len(samples), self.sampling_rate, self.features)
                values = {"num_frames": num_frames, "num_bytes": content.nbytes, "words": words}
                text.write(json.dumps(values) + "\n")
                advance()

    def spoken(self) -> Iterator[tuple[SpokenUtterance, npt.NDArray[Any]]]:
        """Yield the output of `run`, with features (T, D) or samples (S,), in the order of the job."""
        audio = self.stored == "audio"
        dtype = np.int16 if audio else np.dtype(self.features.dtype)
        shape = (-1,) if audio else (-1, self.features.feature_dim)
        lines = self.stem.with_suffix(".jsonl")
        with lines.open(encoding="utf-8") as text, self.path.open("rb") as rows:
            for utterance, line in zip(self.utterances, text, strict=True):
                values = json.loads(line)
                words = tuple(
                    (word, tuple((p, s, e) for p, s, e in phones)) for word, phones in values["words"]
                )
                content = np.frombuffer(rows.read(values["num_bytes"]), dtype=dtype).reshape(shape)
                yield SpokenUtterance(utterance, values["num_frames"], words), content

    def samples(self, _sampling_rate: int) -> Iterator[npt.NDArray[np.float32]]:
        """Yield the samples (S,) in [-1, 1] of each utterance, for a job that stored audio."""
        for _, content in self.spoken():
            yield content.astype(np.float32) / np.float32(32768.0)


def _content(samples: npt.NDArray[np.float32], job: SpeakingJob) -> npt.NDArray[Any]:
    """Return what the shard stores for (S,) samples."""
    if job.stored == "audio":
        return to_int16(samples)
    features = compute_features(samples, job.sampling_rate, job.features)
    return np.ascontiguousarray(features, dtype=job.features.dtype)


_TimedWords = list[tuple[str, list[tuple[str, float, float]]]]


def _finish(
    speech: EspeakSpeech, from_hz: int, to_hz: int, rng: np.random.Generator
) -> tuple[npt.NDArray[np.float32], _TimedWords]:
    """Trim eSpeak's pauses, pad the edges, resample and add noise; shift the times accordingly.

    eSpeak begins with 13 ms and ends with 0.39 s of silence; here both edges get 50 to 250 ms.
    """
    spoken = [phone for word in speech.words for phone in word.phones]
    first, last = spoken[0][1], spoken[-1][2]
    kept = speech.samples[first : last + round(_DECAY_S * from_hz)]
    leading, trailing = (round(rng.uniform(*EDGE_S) * from_hz) for _ in range(2))
    samples = resample(np.pad(kept, (leading, trailing)), from_hz, to_hz)
    level = float(np.sqrt(np.mean(np.square(kept)))) * 10.0 ** (-rng.uniform(*_SNR_DB) / 20.0)
    samples = samples + (level * rng.standard_normal(len(samples))).astype(np.float32)
    shift = leading - first
    words = [
        (
            word.word,
            [
                (phone, (start + shift) / from_hz, (end + shift) / from_hz)
                for phone, start, end in word.phones
            ],
        )
        for word in speech.words
    ]
    return np.clip(samples, -1.0, 1.0), words
