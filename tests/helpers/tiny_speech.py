"""Made-up spectrograms of short texts: data that a small synthesis model trains on in seconds."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from speechdp.data.shards.dataset import Dataset, Manifest, ShardEntry, SplitEntry
from speechdp.data.shards.shard import ShardWriter, Utterance
from speechdp.labels.symbols import SymbolInventory
from speechdp.options.batch import BatchOptions
from speechdp.options.model import ModelOptions
from speechdp.options.run import TrainOptions
from speechdp.testing.tasks import TINY_SPECTROGRAMS
from tests.helpers.tiny_data import TinySizes

#: Options of a synthesis run on these data, the smallest that command line and library take.
TINY_SYNTHESIS = TrainOptions(
    ModelOptions(reduction=2), BatchOptions(batch_size=4), task="synthesis", epochs=2
)


_SIZES = TinySizes()


def write_tiny_speech(path: Path, sizes: TinySizes = _SIZES, seed: int = 0) -> Dataset:
    """Write a data directory of spectrograms: each symbol has a sound of its own for some frames."""
    path.mkdir(parents=True)
    inventory = SymbolInventory.of_kind("characters")
    inventory.save(path / "symbols.json")
    inventory.save_classes(path / "classes.txt")
    rng = np.random.default_rng(seed)
    sounds = rng.random((inventory.num_symbols, TINY_SPECTROGRAMS.feature_dim))
    manifest = Manifest(8000, TINY_SPECTROGRAMS, inventory.num_symbols, "text", "given", {}, "spectrograms")
    splits = {}
    for split in ("train", "dev", "test"):
        utterances = [
            _utterance(f"{split}-{number:03}", inventory, sounds, rng)
            for number in range(getattr(sizes, split))
        ]
        entries = []
        for number in range(sizes.shards):
            writer = ShardWriter(path / f"{split}-{number:05}.h5", manifest.header(split))
            with writer:
                for utterance in utterances[number :: sizes.shards]:
                    writer.add(utterance)
            entries.append(ShardEntry.of(writer))
        splits[split] = SplitEntry.of(entries, (u.speaker for u in utterances))
    Manifest(8000, TINY_SPECTROGRAMS, inventory.num_symbols, "text", "given", splits, "spectrograms").write(
        path
    )
    return Dataset.open(path)


def _utterance(
    name: str, inventory: SymbolInventory, sounds: np.ndarray, rng: np.random.Generator
) -> Utterance:
    text = " ".join(rng.choice(["one", "two", "six"], size=rng.integers(1, 4)))
    symbols = inventory.encode(text)
    frames = np.repeat(symbols, rng.integers(1, 3, len(symbols)))
    noise = 0.05 * rng.standard_normal((len(frames), sounds.shape[1]))
    features = np.clip(sounds[frames] + noise, 0, 1).astype(np.float16)
    return Utterance(name, "speaker", text, features, symbols)
