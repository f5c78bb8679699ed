"""Made-up decodings: what was recognised is given, nothing is searched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from speechdp.data.shards.dataset import Dataset, Manifest, ShardEntry, SplitEntry
from speechdp.data.shards.shard import AudioUtterance, ShardWriter, Utterance
from speechdp.data.signal.features import FeatureConfig, num_frames_of
from speechdp.decode.graphs.graph import Grammar
from speechdp.decode.nbest import Candidate
from speechdp.decode.results import DecodingResult, Hypothesis
from speechdp.decode.wer import errors_by_group, word_error_rate

RATE = 8000
_FEATURES = FeatureConfig(num_mel_bins=4, dtype="float32")


@dataclass(frozen=True)
class Heard:
    """A spoken utterance, and what was recognised."""

    utterance_id: str
    speaker: str
    said: str
    heard: str
    seconds: float = 0.5


def decoding_of(heard: Sequence[Heard], run_dir: Path, *, unknown_words: int = 0) -> DecodingResult:
    """Return the result of decoding the split "test"."""
    hypotheses = [
        Hypothesis.of(one.utterance_id, one.speaker, one.said, [Candidate(tuple(one.heard.split()), 0.0)])
        for one in heard
    ]
    said, found = [one.said for one in heard], [one.heard for one in heard]
    run_dir.mkdir()
    return DecodingResult(
        split="test",
        name="test",
        data={"path": "DATA", "checksum": "1"},
        grammar=Grammar.WORD_LOOP,
        wer=word_error_rate(said, found),
        speakers=errors_by_group([one.speaker for one in heard], said, found),
        retried=0,
        failed=0,
        unknown_words=unknown_words,
        hypotheses=run_dir / "hypotheses" / "test.txt",
        utterances=tuple(hypotheses),
        settings={"graph": {"states": 3}, "options": {"beam": 16.0}, "tuning": {"split": "dev"}},
    )


def data_of(heard: Sequence[Heard], path: Path, *, audio: bool) -> Dataset:
    """Write the utterances in two shards, with noise as their audio or features of zeros."""
    path.mkdir()
    manifest = Manifest(RATE, _FEATURES, 3, "flat", "given", {}, "audio" if audio else "features")
    rng = np.random.default_rng(0)
    entries = []
    for number in range(2):
        writer = ShardWriter(path / f"test-{number:05}.h5", manifest.header("test"))
        with writer:
            for one in heard[number::2]:
                samples = rng.integers(-999, 999, int(RATE * one.seconds)).astype(np.int16)
                targets = np.zeros(int(num_frames_of(len(samples), RATE, _FEATURES)), np.int32)
                names = one.utterance_id, one.speaker, one.said
                features = np.zeros((len(targets), 4), np.float32)
                writer.add(
                    AudioUtterance(*names, samples, targets)
                    if audio
                    else Utterance(*names, features, targets)
                )
        entries.append(ShardEntry.of(writer))
    splits = {"test": SplitEntry.of(entries, (one.speaker for one in heard))}
    Manifest(RATE, _FEATURES, 3, "flat", "given", splits, manifest.stored).write(path)
    return Dataset.open(path)
