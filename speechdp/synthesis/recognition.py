"""Measure synthetic speech with our own recogniser: word errors of waveforms.

Legend: S samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from speechdp.counting import counted
from speechdp.data.shards.dataset import Dataset
from speechdp.data.shards.description import check_description
from speechdp.data.signal.audio import resample
from speechdp.data.signal.compute import compute_features
from speechdp.data.signal.features import num_frames_of
from speechdp.data.transforms.preprocess import Preprocessor, inputs_of
from speechdp.decode.graphs.graph import Grammar
from speechdp.decode.origin import check_origin
from speechdp.decode.recogniser import Recogniser, TrainedModel, recogniser_for
from speechdp.errors import ConfigError
from speechdp.labels.hmm import FloatArray, StateInventory
from speechdp.labels.kaldi_pdfs import refuse_kaldi_pdfs
from speechdp.labels.lexicon import Lexicon
from speechdp.labels.text_normalise import normalise, plain_words
from speechdp.options.recognition import RecognitionOptions
from speechdp.tasks.model_file import load_model

Samples = npt.NDArray[np.float32]


@dataclass(frozen=True)
class SpeechListener:
    """A trained recogniser, with the settings it was trained with.

    Attributes:
        run_dir: the recogniser's run.
        trained: the model.
        dataset: its data directory, which determines classes, features and sampling rate.
        lexicon: the words it knows.
        weights: scales and scores of the search, named as in `DecodingOptions`; others have the defaults.
    """

    run_dir: Path
    trained: TrainedModel
    dataset: Dataset
    lexicon: Lexicon
    weights: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def load(cls, run_dir: Path, data: Path, device: torch.device) -> SpeechListener:
        """Load a recogniser's run and its data directory.

        Raises:
            ConfigError: the two do not belong together, or the features are Kaldi's own.
            RunError: it is not a finished run of a recogniser, or a file of the data directory was changed.
            ShardError: it is not a complete data directory.
        """
        dataset = Dataset.open(data)
        if dataset.features.kind not in ("log_mel", "mfcc"):
            raise ConfigError(
                f"{data}: its features ({dataset.features.kind}) are not those of a recogniser that can use "
                "samples; give one trained on log_mel or mfcc, and its data"
            )
        refuse_kaldi_pdfs(dataset.classes_path, "recognise speech")
        check_description(dataset)
        trained = load_model(run_dir, device)
        check_origin(trained.config, dataset, StateInventory.load(dataset.classes_path))
        return cls(run_dir, trained, dataset, Lexicon.load(dataset.lexicon_path))

    def references(self, texts: Iterable[str]) -> list[str]:
        """Convert texts to words as the lexicon spells them: normalised, without punctuation.

        Words that the lexicon lacks are kept: each will count as an error.

        Raises:
            ConfigError: the lexicon has none of the words.
        """
        spoken = [plain_words(normalise(text)) for text in texts]
        spelt = {word: self.lexicon.spelling_of(word) for words in spoken for word in words}
        if spelt and not any(spelt.values()):
            raise ConfigError(
                f"{self.dataset.lexicon_path}: has none of the {counted(len(spelt), 'word')} of the texts, "
                f"first {min(spelt)!r}; give a recogniser that knows them"
            )
        return [" ".join(spelt[word] or word for word in words) for words in spoken]

    def ear(self, references: Sequence[str], grammar: Grammar | None = None) -> Ear:
        """Return a recogniser for the words of `references`.

        Args:
            references: words in the lexicon's spelling, from `references`.
            grammar: allowed word sequences; None: chosen as by `speechdp decode`: n-grams if the data
                directory has a language model, else digit-loop if all references are digits, else word-loop.
        """
        options = RecognitionOptions().with_weights(self.weights).decoding(grammar=grammar)
        transcripts = [text.split() for text in references]
        return Ear(self, recogniser_for(self.trained, self.dataset, options, transcripts))


@dataclass(frozen=True)
class Ear:
    """A listener with one grammar."""

    listener: SpeechListener
    recogniser: Recogniser

    def unknown(self, references: Iterable[str]) -> int:
        """Count the words of references that cannot be recognised: each is an error."""
        return sum(word not in self.recogniser.words for text in references for word in text.split())

    def hear(self, utterances: Sequence[Samples], sampling_rate: int) -> list[str]:
        """Recognise utterances.

        Args:
            utterances: samples (S,) in [-1, 1] of each.
            sampling_rate: their rate, in Hz; they are resampled to the recogniser's.

        Returns:
            The words of each; "" if no path was found, or if the utterance is shorter than a frame or only
            digital silence.
        """
        own_rate = self.listener.dataset.sampling_rate
        resampled = [resample(samples, sampling_rate, own_rate) for samples in utterances]
        audible = [index for index, samples in enumerate(resampled) if self._is_audible(samples)]
        hypotheses = [""] * len(utterances)
        for position, found in self.recogniser.recognise(self._inputs(resampled[i] for i in audible)):
            # The references have words without hyphens.
            hypotheses[audible[position]] = " ".join(found[0].words).replace("-", " ") if found else ""
        return hypotheses

    def _is_audible(self, samples: Samples) -> bool:
        dataset = self.listener.dataset
        return num_frames_of(len(samples), dataset.sampling_rate, dataset.features) > 0 and bool(
            samples.any()
        )

    def _inputs(self, utterances: Iterable[Samples]) -> Iterator[FloatArray]:
        """Yield the model's input for each utterance, computed as for its training data."""
        rate, features = self.listener.dataset.sampling_rate, self.listener.dataset.features
        inputs = inputs_of(self.listener.trained.config)
        preprocessor = Preprocessor(features, rate, "features", inputs)
        for samples in utterances:
            yield preprocessor.whole(compute_features(samples, rate, features))
