"""Data directories of made-up speech whose true states are known."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from speechdp.data.shards.dataset import Dataset, Manifest, ShardEntry, SplitEntry
from speechdp.data.shards.shard import ShardHeader, ShardWriter, Utterance
from speechdp.data.signal.features import FeatureConfig
from speechdp.labels.hmm import FloatArray, IntArray, StateInventory, flat_alignment, states_of
from speechdp.labels.lexicon import SILENCE, Lexicon, lexicon_for

FEATURES = FeatureConfig(num_mel_bins=20, mean_normalise=False, variance_normalise=False, dtype="float32")
WORDS = ("one", "two", "three", "four", "five", "six")


def exact_states(words: list[str], lexicon: Lexicon, inventory: StateInventory, seed: int) -> IntArray:
    """Speak `words`: every state lasts 1 to 12 frames, silence stands at both ends and in some gaps."""
    rng = np.random.default_rng(seed)
    phones = [SILENCE]
    for word in words:
        phones += [*lexicon.pronunciations[word][0], *([SILENCE] if rng.random() < 0.3 else [])]
    states = states_of(phones + ([] if phones[-1] == SILENCE else [SILENCE]), inventory)
    return np.repeat(states, rng.integers(1, 13, len(states))).astype(np.int32)


def write_spoken(
    path: Path,
    num_utterances: int = 40,
    *,
    alignment: str = "flat",
    sound_of: Callable[[IntArray], FloatArray] | None = None,
) -> tuple[Dataset, dict[str, list[IntArray]]]:
    """Write utterances whose states sound different; return the data and the true states by shard.

    Args:
        path: the data directory.
        num_utterances: of all four shards together.
        alignment: flat, or exact: the true states are the targets.
        sound_of: the mean of each frame, (T, F), of the states of an utterance; None: of each state one.
    """
    path.mkdir()
    lexicon = lexicon_for(set(WORDS))
    inventory = StateInventory(lexicon.phones)
    lexicon.save(path / "lexicon.txt")
    inventory.save(path / "classes.txt")
    sound = np.random.default_rng(5).normal(0, 2.0, (inventory.num_classes, FEATURES.feature_dim))
    truth: dict[str, list[IntArray]] = {}
    if sound_of is None:
        sound_of = sound.__getitem__
    splits = {}
    for split, shards in (("train", 3), ("dev", 1)):
        header = ShardHeader(FEATURES, 8000, inventory.num_classes, alignment, split)
        entries = []
        for number in range(shards):
            file = path / f"{split}-{number:05}.h5"
            truth[file.name] = []
            writer = ShardWriter(file, header)
            with writer:
                for u in range(num_utterances // 4):
                    seed = 1000 * number + u + (500 if split == "dev" else 0)
                    rng = np.random.default_rng(seed)
                    words = rng.choice(WORDS, rng.integers(2, 6)).tolist()
                    states = exact_states(words, lexicon, inventory, seed)
                    features = (sound_of(states) + rng.normal(0, 1.0, (len(states), 20))).astype(np.float32)
                    exact = alignment == "exact"
                    targets = states if exact else flat_alignment(words, len(states), lexicon, inventory)
                    writer.add(Utterance(f"{split}{number}-{u}", "s", " ".join(words), features, targets))
                    truth[file.name].append(states)
            entry = ShardEntry(file.name, writer.num_utterances, writer.num_frames, writer.index_sha256)
            entries.append(entry)
        counts = (sum(e.utterances for e in entries), sum(e.frames for e in entries))
        splits[split] = SplitEntry(tuple(entries), *counts, 1)
    Manifest(8000, FEATURES, inventory.num_classes, alignment, "given", splits).write(path)
    return Dataset.open(path), truth
