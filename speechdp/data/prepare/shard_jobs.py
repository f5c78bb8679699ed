"""Turn lists of utterances into shards, one process a shard."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from speechdp.data.corpora.corpus import CorpusUtterance
from speechdp.data.shards.dataset import ShardEntry
from speechdp.data.shards.layout import Stored
from speechdp.data.shards.shard import AudioUtterance, ShardHeader, ShardWriter, Utterance
from speechdp.data.signal.audio import edge_silence, read_audio, to_int16
from speechdp.data.signal.compute import compute_features
from speechdp.data.signal.features import num_frames_of
from speechdp.errors import ConfigError
from speechdp.labels.hmm import STATES_PER_PHONE, StateInventory, flat_alignment
from speechdp.labels.lexicon import Lexicon

STAGES: dict[Stored, str] = {"features": "computing features", "audio": "reading audio"}


@dataclass(frozen=True)
class ShardResult:
    """A shard written: its line of data.json, and how many utterances had fewer frames than states."""

    entry: ShardEntry
    num_too_short: int


@dataclass(frozen=True)
class ShardJob:
    """One shard to write from audio, with flat-start targets."""

    path: Path
    header: ShardHeader
    utterances: tuple[CorpusUtterance, ...]
    lexicon: Lexicon
    inventory: StateInventory

    @property
    def num_utterances(self) -> int:
        """Number of utterances of the shard."""
        return len(self.utterances)

    def run(self, advance: Callable[[], None]) -> ShardResult:
        """Write the shard, utterance by utterance, calling `advance` after each."""
        num_too_short = 0
        with ShardWriter(self.path, self.header) as writer:
            for utterance in self.utterances:
                ready, too_short = _make_utterance(utterance, self)
                writer.add(ready)
                num_too_short += too_short
                advance()
        return ShardResult(ShardEntry.of(writer), num_too_short)


def _make_utterance(utterance: CorpusUtterance, job: ShardJob) -> tuple[Utterance | AudioUtterance, bool]:
    header = job.header
    samples = read_audio(utterance.audio, header.sampling_rate)
    num_frames = num_frames_of(len(samples), header.sampling_rate, header.features)
    if num_frames == 0:
        raise ConfigError(f"{utterance.audio}: is shorter than one frame; leave it out of the corpus")
    leading, trailing = edge_silence(samples, header.sampling_rate, header.features, num_frames)
    phones = (phone for word in utterance.words for phone in job.lexicon.pronunciations[word][0])
    num_states = STATES_PER_PHONE * sum(1 for _ in phones)
    if num_frames - leading - trailing < num_states:
        leading = trailing = 0  # the words need the room
    targets = flat_alignment(utterance.words, num_frames, job.lexicon, job.inventory, leading, trailing)
    names = (utterance.utterance_id, utterance.speaker, utterance.text)
    too_short = num_frames < num_states
    if header.stored == "audio":
        return AudioUtterance(*names, to_int16(samples), targets), too_short
    features = compute_features(samples, header.sampling_rate, header.features)
    return Utterance(*names, features, targets), too_short
