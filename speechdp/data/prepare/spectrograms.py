"""Prepare spectrograms of speech, with the symbols of the texts, for synthesis."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from speechdp.data.prepare.contents import Contents, Named
from speechdp.data.prepare.recordings import keep_recording, list_recordings
from speechdp.data.shards.dataset import SYMBOLS_NAME, Manifest
from speechdp.data.shards.layout import ShardHeader, Utterance
from speechdp.data.signal.features import FeatureConfig
from speechdp.data.signal.spectrogram import compute_spectrogram
from speechdp.labels.lexicon import Lexicon
from speechdp.labels.symbols import SymbolInventory


class Sound(Protocol):
    """The utterances of one shard, and their sound."""

    @property
    def utterances(self) -> Sequence[Named]:
        """All utterances, in the shard's order."""
        ...

    def samples(self, sampling_rate: int) -> Iterator[npt.NDArray[np.float32]]:
        """Yield the samples (S,) in [-1, 1] of each utterance."""
        ...


@dataclass(frozen=True)
class SpectrogramShard:
    """A shard of spectrograms and symbols; with `keep_train`, recordings of train are kept, too."""

    sound: Sound
    symbols: SymbolInventory
    keep_train: bool

    @property
    def utterances(self) -> Sequence[Named]:
        """All utterances, in the shard's order."""
        return self.sound.utterances

    def ready(self, path: Path, header: ShardHeader) -> Iterator[Utterance]:
        """Yield each utterance with its spectrogram and symbols; keep recordings beside the shard."""
        rate = header.sampling_rate
        for utterance, samples in zip(self.utterances, self.sound.samples(rate), strict=True):
            name = utterance.utterance_id
            keep_recording(path.parent, header, name, samples, of_train=self.keep_train)
            features = compute_spectrogram(samples, rate, header.features)
            symbols = self.symbols.encode(utterance.text)
            yield Utterance(name, utterance.speaker, utterance.text, features, symbols)


@dataclass(frozen=True)
class SynthesisLabels:
    """What the targets of synthesis stand for: symbols of texts; and the lexicon if these are phones."""

    symbols: SymbolInventory
    lexicon: Lexicon | None
    features: FeatureConfig
    sampling_rate: int

    def contents(
        self,
        rule: str,
        sounds: Mapping[str, Sequence[Sound]],
        *,
        keep_train: bool,
        notices: tuple[str, ...] = (),
    ) -> Contents:
        """Return the contents to be written, from the sounds of each split; `rule` divided them."""
        num_symbols = self.symbols.num_symbols
        splits = {
            name: [u for sound in of_split for u in sound.utterances] for name, of_split in sounds.items()
        }
        return Contents(
            manifest=Manifest(
                self.sampling_rate, self.features, num_symbols, "text", rule, {}, stored="spectrograms"
            ),
            shards={
                name: [SpectrogramShard(sound, self.symbols, keep_train) for sound in of_split]
                for name, of_split in sounds.items()
            },
            stage="computing spectrograms",
            save=partial(self._save, splits),
            notices=(*notices, *_new_texts(splits)),
        )

    def _save(self, splits: Mapping[str, Sequence[Named]], directory: Path) -> None:
        list_recordings(directory, splits)
        if self.lexicon is not None:
            self.lexicon.save(directory / "lexicon.txt")
        self.symbols.save(directory / SYMBOLS_NAME)
        self.symbols.save_classes(directory / "classes.txt")


def _new_texts(splits: Mapping[str, Sequence[Named]]) -> tuple[str, ...]:
    """Report how many held-out texts do not occur in train: one line, or none without held-out splits."""
    known = {utterance.text for utterance in splits["train"]}
    counts = [
        f"{sum(u.text not in known for u in utterances)} of {len(utterances)} in {name}"
        for name, utterances in splits.items()
        if name != "train"
    ]
    return (f"texts that do not occur in train: {', '.join(counts)}",) if counts else ()
