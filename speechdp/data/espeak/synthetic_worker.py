"""Speak one shard's utterances in a process of its own: python -m ...synthetic_worker JOB.json.

eSpeak NG repeats itself only in a fresh process (espeak.py), so each shard gets one.  Standard output
carries a line of JSON an utterance, {"done": n}, or {"error": message}.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from speechdp.data.espeak.espeak import Espeak, EspeakSpeech, Voice
from speechdp.data.espeak.synthetic_plan import EDGE_S, PlannedUtterance
from speechdp.data.shards.layout import Stored
from speechdp.data.signal.audio import resample, to_int16
from speechdp.data.signal.compute import compute_features
from speechdp.data.signal.features import FeatureConfig, num_frames_of
from speechdp.errors import SpeechDPError

#: Of the speech over the noise added to it, in dB: digital silence would distort the normalisation.
_SNR_DB = (25.0, 45.0)
#: Kept after the last phone, in seconds: its decay.
_DECAY_S = 0.03


@dataclass(frozen=True)
class SpeakingJob:
    """One shard to speak: features or samples go to `stem`.rows, the rest to `stem`.jsonl."""

    stem: Path
    utterances: tuple[PlannedUtterance, ...]
    sampling_rate: int
    features: FeatureConfig
    seed: int
    stored: Stored = "features"

    def write(self, path: Path) -> None:
        """Write the job for another process to read."""
        values = {
            "stem": str(self.stem),
            "utterances": [asdict(utterance) for utterance in self.utterances],
            "sampling_rate": self.sampling_rate,
            "features": self.features.to_dict(),
            "seed": self.seed,
            "stored": self.stored,
        }
        path.write_text(json.dumps(values), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> SpeakingJob:
        """Read what `write` wrote."""
        values = json.loads(path.read_text(encoding="utf-8"))
        return cls(
            stem=Path(values["stem"]),
            utterances=tuple(PlannedUtterance(**utterance) for utterance in values["utterances"]),
            sampling_rate=values["sampling_rate"],
            features=FeatureConfig.from_dict(values["features"]),
            seed=values["seed"],
            stored=values["stored"],
        )


@dataclass(frozen=True)
class SpokenUtterance:
    """One utterance as spoken: its number of frames and each word's (phone, start_s, end_s)."""

    utterance: PlannedUtterance
    num_frames: int
    words: tuple[tuple[str, tuple[tuple[str, float, float], ...]], ...]


def read_spoken(job: SpeakingJob) -> Iterator[tuple[SpokenUtterance, npt.NDArray[Any]]]:
    """Yield what `run_job` wrote, with features (T, D) or samples (S,), in the order of the job."""
    audio = job.stored == "audio"
    dtype = np.int16 if audio else np.dtype(job.features.dtype)
    shape = (-1,) if audio else (-1, job.features.feature_dim)
    lines = job.stem.with_suffix(".jsonl")
    with lines.open(encoding="utf-8") as text, job.stem.with_suffix(".rows").open("rb") as rows:
        for utterance, line in zip(job.utterances, text, strict=True):
            values = json.loads(line)
            words = tuple((word, tuple((p, s, e) for p, s, e in phones)) for word, phones in values["words"])
            content = np.frombuffer(rows.read(values["num_bytes"]), dtype=dtype).reshape(shape)
            yield SpokenUtterance(utterance, values["num_frames"], words), content


def run_job(job: SpeakingJob) -> Iterator[int]:
    """Speak all utterances of a job; yields how many are done."""
    espeak = Espeak()
    with (
        job.stem.with_suffix(".jsonl").open("w", encoding="utf-8") as text,
        job.stem.with_suffix(".rows").open("wb") as rows,
    ):
        for number, utterance in enumerate(job.utterances):
            voice = Voice(utterance.voice, utterance.rate_wpm, utterance.pitch)
            speech = espeak.speak(utterance.text.split(), voice, seed=number + 1)
            rng = np.random.default_rng([job.seed, *utterance.utterance_id.encode()])
            samples, words = _finish(speech, espeak.sampling_rate, job.sampling_rate, rng)
            content = _content(samples, job)
            rows.write(content.data)
            num_frames = num_frames_of(len(samples), job.sampling_rate, job.features)
            values = {"num_frames": num_frames, "num_bytes": content.nbytes, "words": words}
            text.write(json.dumps(values) + "\n")
            yield number + 1


def _content(samples: npt.NDArray[np.float32], job: SpeakingJob) -> npt.NDArray[Any]:
    """Return what the shard stores of (S,) samples."""
    if job.stored == "audio":
        return to_int16(samples)
    features = compute_features(samples, job.sampling_rate, job.features)
    return np.ascontiguousarray(features, dtype=job.features.dtype)


_TimedWords = list[tuple[str, list[tuple[str, float, float]]]]


def _finish(
    speech: EspeakSpeech, from_hz: int, to_hz: int, rng: np.random.Generator
) -> tuple[npt.NDArray[np.float32], _TimedWords]:
    """Trim eSpeak's pauses, pad the edges, resample and add noise; times move along.

    eSpeak leads in with 13 ms and trails with 0.39 s of nothing; here both edges get 50 to 250 ms.
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


def main(arguments: list[str]) -> int:
    """Run the job in the file named on the command line."""
    try:
        for done in run_job(SpeakingJob.read(Path(arguments[0]))):
            sys.stdout.write(json.dumps({"done": done}) + "\n")
            sys.stdout.flush()
    except BrokenPipeError:  # whoever reads was killed
        os._exit(1)
    except (SpeechDPError, OSError) as error:
        sys.stdout.write(json.dumps({"error": str(error)}) + "\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
