"""Prepare a corpus for recognition: features (or audio) and HMM states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from speechdp.data.corpora.corpus import CorpusUtterance
from speechdp.data.prepare.contents import Contents, ShardContent, deal_splits
from speechdp.data.prepare.divided_corpus import DividedCorpus, divide
from speechdp.data.prepare.jobs import Progress
from speechdp.data.prepare.language_model import (
    PreparedLanguageModel,
    prepare_language_model,
    texts_of,
    users_model,
)
from speechdp.data.prepare.plausibility import SpokenLength, warn_of_lengths
from speechdp.data.prepare.reading import read_whole_corpus
from speechdp.data.prepare.unreadable import AS_THE_OPTION_DOES
from speechdp.data.prepare.vocabulary import choose_vocabulary, given_lexicon, plainly_spelt
from speechdp.data.shards.dataset import FLAT, Manifest
from speechdp.data.shards.layout import AudioUtterance, ShardHeader, Utterance
from speechdp.data.signal.audio import AudioSource, edge_silence, read_audio, to_int16
from speechdp.data.signal.compute import compute_features
from speechdp.data.signal.features import FeatureConfig, check_mel_bins, num_frames_of
from speechdp.errors import ConfigError
from speechdp.labels.hmm import STATES_PER_PHONE, StateInventory, flat_alignment
from speechdp.labels.lexicon import Lexicon
from speechdp.options.prepare import PrepareOptions


@dataclass(frozen=True)
class RecognitionLabels:
    """What the targets of recognition stand for: HMM states of a lexicon's phones; and a language model."""

    lexicon: Lexicon
    inventory: StateInventory
    features: FeatureConfig
    sampling_rate: int
    language_model: PreparedLanguageModel | None = None

    def manifest(self, alignment: str, split: str, options: PrepareOptions) -> Manifest:
        """Return the manifest without its splits."""
        num_classes = self.inventory.num_classes
        return Manifest(
            self.sampling_rate, self.features, num_classes, alignment, split, {}, stored=options.store
        )

    def save(self, directory: Path) -> None:
        """Write the lexicon, the class list and the language model, if there is one."""
        self.lexicon.save(directory / "lexicon.txt")
        self.inventory.save(directory / "classes.txt")
        if self.language_model is not None:
            self.language_model.save(directory)


def read_corpus_for_recognition(options: PrepareOptions, scratch: Path, progress: Progress) -> Contents:
    """Read a corpus; targets are spread evenly over each utterance's words: a flat start.

    Raises:
        ConfigError: the corpus, its audio, the lexicon or the split cannot be used.
    """
    corpus = read_whole_corpus(options, scratch, progress, features=options.feature_config)
    given = given_lexicon(options.lexicon)
    division = divide(plainly_spelt(corpus, given), options)
    users = users_model(options.for_language_model)
    vocabulary = choose_vocabulary(division.splits, options, given, () if users is None else users.words)
    lexicon = vocabulary.lexicon
    model = prepare_language_model(options.for_language_model, lexicon, texts_of(vocabulary.splits), users)
    divided = DividedCorpus.probed(replace(division, splits=vocabulary.splits), options, progress)
    rate = divided.sampling_rate
    features = options.feature_config(rate)
    check_mel_bins(rate, features)
    num_frames = frames_of(divided, features)
    labels = RecognitionLabels(lexicon, StateInventory(lexicon.phones), features, rate, model)
    dealt = deal_splits(divided.splits, lambda u: num_frames[u.audio], options.shards, options.seed)
    return Contents(
        manifest=labels.manifest(FLAT, divided.rule, options),
        shards={
            name: [FlatShard.of(part, lexicon, labels.inventory) for part in parts]
            for name, parts in dealt.items()
        },
        stage=stage_of(options),
        save=labels.save,
        notices=(*vocabulary.notices, *divided.notices, *lengths_of(divided, num_frames, lexicon)),
    )


def stage_of(options: PrepareOptions) -> str:
    """Return what it takes to write the shards of a corpus, for progress messages."""
    return "computing features" if options.store == "features" else "reading audio"


def frames_of(divided: DividedCorpus, features: FeatureConfig) -> dict[AudioSource, int]:
    """Return the number of frames of each utterance's audio.  Raises ConfigError if one has none."""
    rate = divided.sampling_rate
    num_frames = {
        audio: num_frames_of(round(seconds * rate), rate, features)
        for audio, seconds in divided.seconds.items()
    }
    _refuse_empty(divided.splits, num_frames)
    return num_frames


@dataclass(frozen=True)
class FlatShard:
    """A shard of features or audio with flat-start targets."""

    utterances: tuple[CorpusUtterance, ...]
    lexicon: Lexicon
    inventory: StateInventory

    @classmethod
    def of(
        cls, utterances: tuple[CorpusUtterance, ...], lexicon: Lexicon, inventory: StateInventory
    ) -> ShardContent:
        """Make a shard with the part of the lexicon that its words need."""
        words = {word for utterance in utterances for word in utterance.words}
        return cls(utterances, lexicon.restrict(lexicon.pronounceable(words)), inventory)

    def ready(self, _path: Path, header: ShardHeader) -> Iterator[Utterance | AudioUtterance]:
        """Yield each utterance with its features (or samples) and targets.  Raises ConfigError."""
        for utterance in self.utterances:
            yield self._ready(utterance, header)

    def _ready(self, utterance: CorpusUtterance, header: ShardHeader) -> Utterance | AudioUtterance:
        samples, num_frames = read_samples(utterance, header)
        leading, trailing = edge_silence(samples, header.sampling_rate, header.features, num_frames)
        if num_frames - leading - trailing < _num_states(utterance, self.lexicon):
            leading = trailing = 0  # the words need these frames
        words = self.lexicon.pronounceable(utterance.words)
        targets = flat_alignment(words, num_frames, self.lexicon, self.inventory, leading, trailing)
        return stored_utterance(utterance, samples, targets, header)


def read_samples(utterance: CorpusUtterance, header: ShardHeader) -> tuple[npt.NDArray[np.float32], int]:
    """Return an utterance's samples (S,) and its number of frames.  Raises ConfigError if it has none."""
    samples = read_audio(utterance.audio, header.sampling_rate)
    num_frames = num_frames_of(len(samples), header.sampling_rate, header.features)
    if num_frames == 0:
        raise ConfigError(f"{utterance.audio}: is shorter than one frame; leave it out of the corpus")
    return samples, num_frames


def stored_utterance(
    utterance: CorpusUtterance,
    samples: npt.NDArray[np.float32],
    targets: npt.NDArray[np.int32],
    header: ShardHeader,
) -> Utterance | AudioUtterance:
    """Return an utterance as a shard stores it: with features of its samples (S,), or with the samples."""
    names = (utterance.utterance_id, utterance.speaker, utterance.text)
    if header.stored == "audio":
        return AudioUtterance(*names, to_int16(samples), targets)
    return Utterance(*names, compute_features(samples, header.sampling_rate, header.features), targets)


def _num_states(utterance: CorpusUtterance, lexicon: Lexicon) -> int:
    words = lexicon.pronounceable(utterance.words)
    return STATES_PER_PHONE * sum(len(lexicon.pronunciations[word][0]) for word in words)


def _refuse_empty(
    splits: Mapping[str, Sequence[CorpusUtterance]], num_frames: Mapping[AudioSource, int]
) -> None:
    for name, utterances in splits.items():
        short = [utterance.audio for utterance in utterances if num_frames[utterance.audio] == 0]
        if short:
            others = f", as are {len(short) - 1} others of {name}" if len(short) > 1 else ""
            option = AS_THE_OPTION_DOES if any(num_frames.values()) else ""
            raise ConfigError(
                f"{short[0]}: is shorter than one frame{others}; leave it out of the corpus{option}"
            )


def lengths_of(
    divided: DividedCorpus, num_frames: Mapping[AudioSource, int], lexicon: Lexicon
) -> tuple[str, ...]:
    """Warn of transcripts that do not fit the length of their audio."""

    def length(utterance: CorpusUtterance) -> SpokenLength:
        num_states = _num_states(utterance, lexicon)
        return SpokenLength(
            utterance.utterance_id,
            divided.seconds[utterance.audio],
            num_frames[utterance.audio],
            len(utterance.words),
            num_states // STATES_PER_PHONE,
            num_states,
        )

    return warn_of_lengths([length(u) for utterances in divided.splits.values() for u in utterances])
