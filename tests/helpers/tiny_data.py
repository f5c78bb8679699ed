"""A data directory of two words that a tiny model learns in seconds, and ways to damage it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import h5py
import numpy as np

from speechdp.data.shards.dataset import Dataset, Manifest, ShardEntry, SplitEntry
from speechdp.data.shards.shard import AudioUtterance, Shard, ShardHeader, ShardWriter, Utterance
from speechdp.data.signal.features import FeatureConfig
from speechdp.labels.hmm import StateInventory, flat_alignment
from speechdp.labels.lexicon import Lexicon, lexicon_for

WORDS = ("one", "two")
FEATURES = FeatureConfig(num_mel_bins=6, dtype="float32")
#: The smallest model the command line makes, with dropout: random numbers are drawn at every step.
TINY_MODEL = ("--layers", "1", "--cells", "8", "--dropout", "0.2")


@dataclass(frozen=True)
class TinySizes:
    """How much data to make up: utterances of each split, and shards a split."""

    train: int = 24
    dev: int = 6
    test: int = 6
    shards: int = 2


def write_tiny_data(path: Path, sizes: TinySizes = TinySizes(), seed: int = 0) -> Dataset:
    """Write a data directory with splits train, dev and test; every class has a feature vector of its own."""
    path.mkdir(parents=True)
    lexicon = lexicon_for(WORDS)
    inventory = StateInventory(lexicon.phones)
    lexicon.save(path / "lexicon.txt")
    inventory.save(path / "classes.txt")
    rng = np.random.default_rng(seed)
    means = rng.standard_normal((inventory.num_classes, FEATURES.feature_dim))
    splits = {}
    for split in ("train", "dev", "test"):
        utterances = [
            _utterance(f"{split}-{number:03}", lexicon, inventory, means, rng)
            for number in range(getattr(sizes, split))
        ]
        splits[split] = _write_split(path, split, utterances, sizes.shards, inventory.num_classes)
    Manifest(8000, FEATURES, inventory.num_classes, "exact", "given", splits).write(path)
    return Dataset.open(path)


def _utterance(
    name: str, lexicon: Lexicon, inventory: StateInventory, means: np.ndarray, rng: np.random.Generator
) -> Utterance:
    words = rng.choice(WORDS, size=rng.integers(1, 3)).tolist()
    num_frames = int(rng.integers(14, 26)) * len(words)
    targets = flat_alignment(words, num_frames, lexicon, inventory)
    noise = 0.3 * rng.standard_normal((num_frames, means.shape[1]))
    features = (means[targets] + noise).astype(np.float32)
    return Utterance(name, f"speaker-{rng.integers(3)}", " ".join(words), features, targets)


def _write_split(
    path: Path, split: str, utterances: list[Utterance], num_shards: int, num_classes: int
) -> SplitEntry:
    entries = []
    for number in range(num_shards):
        writer = ShardWriter(
            path / f"{split}-{number:05}.h5", ShardHeader(FEATURES, 8000, num_classes, "exact", split)
        )
        with writer:
            for utterance in utterances[number::num_shards]:
                writer.add(utterance)
        entries.append(
            ShardEntry(writer.path.name, writer.num_utterances, writer.num_frames, writer.index_sha256)
        )
    speakers = {utterance.speaker for utterance in utterances}
    num_frames = sum(entry.frames for entry in entries)
    return SplitEntry(tuple(entries), len(utterances), num_frames, len(speakers))


AnyUtterance = Utterance | AudioUtterance


class _AnyShard(ShardWriter):
    """Writes a shard as another program might: every checksum is right, nothing else is guaranteed."""

    def _check(self, *_: object) -> None:
        pass


def rewrite_shard(
    dataset: Dataset, split: str, change: Callable[[list[AnyUtterance]], list[AnyUtterance]]
) -> Dataset:
    """Write a split's first shard and data.json anew with other utterances; the checksums are right again."""
    entry = dataset.splits[split].shards[0]
    with Shard(dataset.path / entry.file) as shard:
        utterances = [shard.read_utterance(number) for number in range(shard.num_utterances)]
        header = shard.header
    with _AnyShard(dataset.path / entry.file, header) as writer:
        for utterance in change(utterances):
            writer.add(utterance)
    values = json.loads((dataset.path / "data.json").read_text())
    entries = values["splits"][split]["shards"]
    entries[0] = dataclasses.asdict(ShardEntry.of(writer))
    for what in ("utterances", "frames"):
        values["splits"][split][what] = sum(entry[what] for entry in entries)
    (dataset.path / "data.json").write_text(json.dumps(values))
    return Dataset.open(dataset.path)


def flip_byte(path: Path, utterance: int, where: Literal["features", "targets"] = "features") -> str:
    """Change one bit of an utterance's frames; return the utterance's id.

    A target stays one of the classes, if these are an even number: it is found by the checksum alone.
    """
    with Shard(path) as shard:
        name, row = shard.utterance_ids[utterance], int(shard.offsets[utterance])
    with h5py.File(path, "r") as file:
        dataset = file[where]
        row_bytes = dataset.dtype.itemsize * int(np.prod(dataset.shape[1:]))
        position = dataset.id.get_offset() + row * row_bytes
    position, bit = (position, 0x01) if where == "targets" else (position + 1, 0x40)
    with path.open("rb+", buffering=0) as file:  # in place: whoever reads it meanwhile finds a whole file
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ bit]))
    return name


def truncate(path: Path, num_bytes: int = 400) -> None:
    """Cut the last bytes of a file off."""
    with path.open("rb+") as file:
        file.truncate(path.stat().st_size - num_bytes)
