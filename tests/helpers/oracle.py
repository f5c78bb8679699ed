"""A data directory of known utterances and a model that knows their classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from speechdp.data.shards.dataset import Dataset, Manifest, ShardEntry, SplitEntry
from speechdp.data.shards.shard import ShardHeader, ShardWriter, Utterance
from speechdp.data.signal.features import FeatureConfig
from speechdp.labels.hmm import StateInventory, flat_alignment, log_priors
from speechdp.labels.lexicon import lexicon_for
from speechdp.labels.state_tying import StateTying

FEATURES = FeatureConfig(num_mel_bins=4, dtype="float32")


class OracleModel(torch.nn.Module):
    """Reads the class from the first feature and is sure of it; other features do not matter."""

    def __init__(self, num_classes: int, confidence: float = 8.0) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(confidence * torch.eye(num_classes))
        self.batch_shapes: list[tuple[int, int]] = []

    def forward(self, features: Tensor, lengths: Tensor) -> Tensor:
        assert lengths.device.type == "cpu" and features.dtype == torch.float32
        self.batch_shapes.append((features.shape[0], features.shape[1]))
        return self.table[features[..., 0].long()]


@dataclass(frozen=True)
class Oracle:
    """The parts of a loaded model, as `load_model` returns them."""

    model: OracleModel
    class_log_prior: Tensor
    self_loop: Tensor
    config: dict[str, object]
    tying: StateTying | None = None


def oracle(num_classes: int) -> Oracle:
    """Make a model with a uniform prior and self-loops of a half."""
    prior = torch.from_numpy(log_priors(np.ones(num_classes, np.int64)))
    return Oracle(OracleModel(num_classes), prior, torch.full((num_classes,), 0.5), {})


@dataclass(frozen=True)
class Spoken:
    """An utterance whose frames say `said` although its transcript is `text`."""

    utterance_id: str
    text: str
    said: str
    num_frames: int = 40
    speaker: str = "s"


def _num_speakers(shards: Sequence[Sequence[Spoken]]) -> int:
    return len({spoken.speaker for shard in shards for spoken in shard})


def write_dataset(path: Path, shards: Sequence[Sequence[Spoken]], split: str = "test") -> Dataset:
    """Write a data directory with one split; stored targets are all class 0."""
    path.mkdir()
    words = {
        word for shard in shards for spoken in shard for word in (spoken.text + " " + spoken.said).split()
    }
    lexicon = lexicon_for(words)
    inventory = StateInventory(lexicon.phones)
    lexicon.save(path / "lexicon.txt")
    inventory.save(path / "classes.txt")
    header = ShardHeader(FEATURES, 8000, inventory.num_classes, "flat", split)
    entries = []
    for number, utterances in enumerate(shards):
        file = path / f"{split}-{number:05}.h5"
        writer = ShardWriter(file, header)
        with writer:
            for spoken in utterances:
                classes = flat_alignment(spoken.said.split(), spoken.num_frames, lexicon, inventory, 3, 3)
                features = np.zeros((spoken.num_frames, FEATURES.feature_dim), np.float32)
                features[:, 0] = classes
                targets = np.zeros(spoken.num_frames, np.int32)
                writer.add(Utterance(spoken.utterance_id, spoken.speaker, spoken.text, features, targets))
        entries.append(ShardEntry(file.name, writer.num_utterances, writer.num_frames, writer.index_sha256))
    num_utterances = sum(entry.utterances for entry in entries)
    whole = SplitEntry(
        tuple(entries), num_utterances, sum(entry.frames for entry in entries), _num_speakers(shards)
    )
    Manifest(8000, FEATURES, inventory.num_classes, "flat", "given", {split: whole}).write(path)
    return Dataset.open(path)
