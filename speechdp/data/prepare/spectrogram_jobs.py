"""Turn lists of utterances into shards of spectrograms and symbols, one process a shard."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from speechdp.data.corpora.joining import JoinedUtterance, join_recordings
from speechdp.data.prepare.recordings import keep_recording
from speechdp.data.prepare.shard_jobs import ShardResult
from speechdp.data.shards.dataset import ShardEntry
from speechdp.data.shards.layout import ShardHeader, Utterance
from speechdp.data.shards.shard import ShardWriter
from speechdp.data.signal.audio import read_audio
from speechdp.data.signal.spectrogram import compute_spectrogram
from speechdp.labels.symbols import SymbolInventory


@dataclass(frozen=True)
class SpectrogramJob:
    """One shard to write from audio.

    Attributes:
        joined: recordings are brought to one level and joined with pauses; else each is taken as it is.
        seed: of the pauses.
        keep_train: keep the recordings of train, too.
    """

    path: Path
    header: ShardHeader
    utterances: tuple[JoinedUtterance, ...]
    symbols: SymbolInventory
    joined: bool
    seed: int
    keep_train: bool = False

    @property
    def num_utterances(self) -> int:
        """Number of utterances of the shard."""
        return len(self.utterances)

    def run(self, advance: Callable[[], None]) -> ShardResult:
        """Write the shard, utterance by utterance, calling `advance` after each."""
        with ShardWriter(self.path, self.header) as writer:
            for utterance in self.utterances:
                samples = self._samples(utterance)
                name, folder = utterance.utterance_id, self.path.parent
                keep_recording(folder, self.header, name, samples, of_train=self.keep_train)
                features = compute_spectrogram(samples, self.header.sampling_rate, self.header.features)
                symbols = self.symbols.encode(utterance.text)
                writer.add(Utterance(name, utterance.speaker, utterance.text, features, symbols))
                advance()
        return ShardResult(ShardEntry.of(writer), num_too_short=0)

    def _samples(self, utterance: JoinedUtterance) -> npt.NDArray[np.float32]:
        rate = self.header.sampling_rate
        recordings = [read_audio(path, rate) for path in utterance.recordings]
        if not self.joined:
            (samples,) = recordings
            return samples
        rng = np.random.default_rng([self.seed, *utterance.utterance_id.encode()])
        return join_recordings(recordings, rate, rng)
