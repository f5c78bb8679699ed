"""Recognise recordings outside of a data directory with a model, its lexicon and its language model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from speechdp.data.shards.dataset import MANIFEST_NAME, Dataset
from speechdp.data.shards.description import COPY_AGAIN, SMALL_NAMES, check_contents, is_recorded
from speechdp.data.signal.audio import (
    AudioPart,
    AudioSource,
    num_channels,
    probe,
    read_audio,
    to_int16,
    with_channel,
)
from speechdp.data.signal.channel import Channel
from speechdp.data.signal.features import FeatureConfig, shift_s
from speechdp.data.signal.pieces import Piece, cut_at_pauses
from speechdp.data.transforms.preprocess import Preprocessor, inputs_of
from speechdp.decode.align import Aligner
from speechdp.decode.graphs.graph import Grammar
from speechdp.decode.kept_graph import KeptGraph
from speechdp.decode.language_model import StoredModel, language_model_path
from speechdp.decode.nbest import Candidate, joined, nbest_lines
from speechdp.decode.origin import check_classes, is_ctc
from speechdp.decode.recogniser import DecodingOptions, Recogniser, TrainedModel
from speechdp.decode.word_times import confidences, ctc_word_spans, word_spans
from speechdp.errors import ConfigError, RunError
from speechdp.labels.hmm import STATES_PER_PHONE, FloatArray, IntArray, StateInventory
from speechdp.labels.kaldi_pdfs import refuse_kaldi_pdfs
from speechdp.labels.lexicon import Lexicon
from speechdp.parallel.run_files import MODEL_NAME, TRAINED_ON

_MAX_PIECE_S = 3600.0
#: Pieces are at most one and a half times as long as the mean utterance of training, but between these
#: limits, s: each is normalised by itself, which does not work well for shorter ones.
_USUAL_PIECE_S, _OF_TRAINING = (5.0, 30.0), 1.5


def kept_description(run_dir: Path, names: Sequence[str] = (MANIFEST_NAME,)) -> Dataset:
    """Open the copy of the training data's description that a run keeps, without shards.

    Args:
        names: files of the copy that are about to be used.

    Raises:
        RunError: the run keeps none, or another one than it wrote.
        ShardError: damaged.
    """
    path = run_dir / TRAINED_ON / MANIFEST_NAME
    if not path.is_file():
        raise RunError(f"{path}: is missing; {COPY_AGAIN}")
    check_contents(path.parent, names)
    return Dataset.open(path.parent, remedy=COPY_AGAIN)


def kept_data(run_dir: Path) -> Dataset:
    """Open the copy of the training data's description that a run keeps, with a lexicon.

    Raises:
        RunError: the run keeps nothing, or no lexicon, or a file was removed, added or changed since.
        ConfigError: the run's classes are Kaldi pdfs.
        ShardError: damaged.
    """
    folder = run_dir / TRAINED_ON
    if (folder / "classes.txt").is_file():
        refuse_kaldi_pdfs(folder / "classes.txt", "transcribe")
    if not folder.is_dir():
        raise RunError(
            f"{folder}: is missing, so the run keeps no lexicon to recognise words with; copy it again if "
            "the run is a copy, else train again (early versions did not keep it), or prepare the recordings "
            "and their transcripts with --like RUN and use decode"
        )
    if not (folder / "lexicon.txt").is_file():
        raise RunError(f"{folder / 'lexicon.txt'}: is missing; {COPY_AGAIN}")
    return kept_description(run_dir, SMALL_NAMES)


def _check_same_data(config: Mapping[str, Any], kept: Dataset) -> None:
    """Refuse the description of other data than a model was trained on, e.g. that of another run.

    Without a record of its files, as in runs of earlier versions, it is not compared.

    Raises:
        RunError: the data are others.
    """
    if is_recorded(kept.path) and config.get("data_checksum", kept.checksum) != kept.checksum:
        raise RunError(
            f"{kept.path}: describes other data than the model beside it was trained on; copy "
            f"{kept.path.name} and {MODEL_NAME} again, both from the same run"
        )


def grammar_of(kept: Dataset) -> Grammar:
    """Return the grammar for recognition with the data that a run keeps."""
    return Grammar.WORD_LOOP if language_model_path(kept.path) is None else Grammar.NGRAM


def usual_piece_s(kept: Dataset) -> float:
    """Return the longest piece of a recording, s, that resembles the utterances the model was trained on.

    Args:
        kept: the description of the data that the run keeps.

    Example:
        A model trained on utterances of 4 s in the mean gets pieces of at most 6 s, one trained on digits
        pieces of at most 5 s.
    """
    utterances = max(1, sum(map(kept.num_utterances, kept.split_names)))
    mean_s = (
        sum(map(kept.num_frames, kept.split_names)) * shift_s(kept.sampling_rate, kept.features) / utterances
    )
    least, most = _USUAL_PIECE_S
    return min(max(_OF_TRAINING * mean_s, least), most)


@dataclass(frozen=True)
class Recording:
    """A recording to transcribe: a file, or one of its channels.

    Attributes:
        name: name of its transcript, without blanks.
        file: name of its file in CTM.
        audio: the file or channel.
    """

    name: str
    file: str
    audio: AudioSource


def recordings_of(name: str, path: Path, channel: Channel | Literal["each"] | None) -> list[Recording]:
    """Return the recordings to transcribe from a file: the chosen channel, or each channel by itself.

    Args:
        name: name of the file, without blanks; channels are named NAME-1, NAME-2 and so on.
        path: the file.
        channel: what is read if there are several; None: reading such a file fails.
    """
    if channel != "each":
        return [Recording(name, name, with_channel(path, channel))]
    try:
        count = num_channels(path)
    except ConfigError:
        count = 1  # transcribing the file reports why it cannot be read
    if count == 1:
        return [Recording(name, name, path)]
    return [
        Recording(
            f"{name}-{number}", name, AudioPart(path, channel=number - 1, name=f"{path}, channel {number}")
        )
        for number in range(1, count + 1)
    ]


@dataclass(frozen=True)
class TimedWord:
    """A recognised word.

    Attributes:
        word: as the lexicon writes it.
        start_s: seconds from the beginning of the recording.
        duration_s: seconds.
        confidence: 0 to 1; see `word_times.confidences`.
    """

    word: str
    start_s: float
    duration_s: float
    confidence: float


@dataclass(frozen=True)
class Transcription:
    """What was recognised in a recording.

    Attributes:
        name: name of the recording, without blanks.
        words: in order.
        duration_s: duration of the recording, seconds.
        sampling_rate: of its file, in Hz.
        failed_s: seconds of it for which nothing was found.
        candidates: the most probable word sequences of the recording, `words` first.
        is_too_short: whether it has not a single frame of features.
        file: name of its file, if the recording is one of its channels; "": as `name`.
        channel: channel of the file, counted from 1.
    """

    name: str
    words: tuple[TimedWord, ...]
    duration_s: float
    sampling_rate: int
    failed_s: float = 0.0
    candidates: tuple[Candidate, ...] = ()
    is_too_short: bool = False
    file: str = ""
    channel: int = 1

    @property
    def text(self) -> str:
        """The words, separated by blanks."""
        return " ".join(word.word for word in self.words)

    def line(self) -> str:
        """Return the recording's line in a text file: name and words."""
        return f"{self.name} {self.text}".rstrip() + "\n"

    def nbest(self) -> str:
        """Return the recording's lines in a file of n-best lists."""
        return nbest_lines(self.name, self.candidates)

    def ctm(self) -> str:
        """Return the recording's lines in a CTM file: name, channel, start, duration, word, confidence."""
        beginning = f"{self.file or self.name} {self.channel}"
        lines = (
            f"{beginning} {w.start_s:.2f} {w.duration_s:.2f} {w.word} {w.confidence:.2f}\n"
            for w in self.words
        )
        return "".join(lines)


@dataclass(frozen=True)
class _FoundPiece:
    """Words of a piece of a recording, None if no path was found, and its candidates."""

    num_frames: int
    words: list[TimedWord] | None
    candidates: list[Candidate]


class Transcriber:
    """Recognises audio files with a run's model.

    Args:
        trained: the model.
        kept: description of the training data that the run keeps: lexicon, classes, language model.
        options: how to decode.
        longest_s: recordings are cut at pauses into pieces of at most this length, s; None: `usual_piece_s`.
        kept_graph: cache for the graph of a large language model; None: no cache.

    Raises:
        ConfigError: the model was trained on features that cannot be computed from audio, or on other classes
            than those of `kept`.
    """

    def __init__(
        self,
        trained: TrainedModel,
        kept: Dataset,
        options: DecodingOptions,
        longest_s: float | None = None,
        kept_graph: KeptGraph | None = None,
    ) -> None:
        if longest_s is None:
            longest_s = usual_piece_s(kept)
        if not 1 <= longest_s < _MAX_PIECE_S:
            raise ConfigError(f"--longest {longest_s:g}: 1 to {_MAX_PIECE_S:g} seconds")
        self._lexicon = Lexicon.load(kept.lexicon_path)
        self._inventory = StateInventory.load(kept.classes_path)
        check_classes(trained.config, kept.classes_path, self._inventory, COPY_AGAIN)
        _check_same_data(trained.config, kept)
        self._inventory_states: IntArray = np.arange(self._inventory.num_classes, dtype=np.int32)
        self._tying, self._is_ctc = trained.tying, is_ctc(trained.config)
        self._longest_s = longest_s
        self._sampling_rate = int(trained.config["sampling_rate"])
        self._features = FeatureConfig.from_dict(trained.config["features"])
        self._preprocessor = Preprocessor(
            self._features, self._sampling_rate, "audio", inputs_of(trained.config)
        )
        language_model = StoredModel.in_folder(kept.path)
        self._recogniser = Recogniser(
            trained, self._lexicon, self._inventory, options, [], language_model, kept_graph
        )
        self._aligner = Aligner(self._recogniser.transducer)
        self._acoustic_scale = options.acoustic_scale
        self._num_candidates = options.num_candidates

    @property
    def remark(self) -> str:
        """Message about the language model used for rescoring; "": none."""
        return self._recogniser.rescoring_remark

    def transcribe(self, recording: Recording) -> Transcription:
        """Recognise a recording of any length and sampling rate.

        Raises:
            SeveralChannelsError: the file has several channels, and none is chosen.
            ConfigError: not audio, or without the chosen channel.
        """
        info = probe(recording.audio)
        found = self.hear(recording.name, read_audio(recording.audio, self._sampling_rate))
        return replace(
            found,
            sampling_rate=info.sampling_rate,
            file=recording.file,
            channel=info.channel if isinstance(info.channel, int) else 1,
        )

    def hear(self, name: str, samples: npt.NDArray[np.float32]) -> Transcription:
        """Recognise samples (S,) in [-1, 1] at the sampling rate of the model.

        Args:
            name: name of the recording, without blanks.
            samples: any number of samples.
        """
        pieces = cut_at_pauses(samples, self._sampling_rate, self._longest_s)
        words: list[TimedWord] = []
        candidates: list[Candidate] = []
        failed = 0
        found = dict(self._recognise(to_int16(samples[p.first : p.end]) for p in pieces))
        for number, piece in enumerate(pieces):
            timed = found[number].words
            if timed is None:
                failed += piece.end - piece.first
            else:
                words += _moved(timed, piece, self._sampling_rate)
                candidates = joined(candidates, found[number].candidates, max(self._num_candidates, 1))
        rate = self._sampling_rate
        return Transcription(
            name,
            tuple(words),
            len(samples) / rate,
            rate,
            failed / rate,
            tuple(candidates),
            is_too_short=not any(piece.num_frames for piece in found.values()),
        )

    def _recognise(self, pieces: Iterable[npt.NDArray[np.int16]]) -> Iterator[tuple[int, _FoundPiece]]:
        """Yield (number of the piece, its results), in any order."""
        inputs = (self._preprocessor.whole(piece) for piece in pieces)
        for number, scores in self._recogniser.score(inputs):
            found = self._recogniser.candidates(scores)
            if len(scores) == 0:
                yield number, _FoundPiece(0, [], [])
            else:
                words = self._timed(found[0].words, scores) if found else None
                yield number, _FoundPiece(len(scores), words, found)

    def _timed(self, words: tuple[str, ...], scores: FloatArray) -> list[TimedWord] | None:
        classes = self._aligner.align(words, scores * np.float32(self._acoustic_scale))
        if classes is None:
            return None
        if self._is_ctc:
            spans = ctc_word_spans(words, classes, self._lexicon, self._inventory)
            phones: IntArray = np.arange(scores.shape[1], dtype=np.int32)
        else:
            states = self._inventory_states if self._tying is None else self._tying.states
            spans = word_spans(words, states[classes], self._lexicon, self._inventory)
            phones = states // STATES_PER_PHONE
        shift = shift_s(self._sampling_rate, self._features)
        sure = confidences(spans, classes, scores, phones)
        return [
            TimedWord(span.word, span.first * shift, (span.end - span.first) * shift, confidence)
            for span, confidence in zip(spans, sure, strict=True)
        ]


def _moved(words: Sequence[TimedWord], piece: Piece, sampling_rate: int) -> list[TimedWord]:
    """Convert times from the beginning of the piece to the beginning of the recording."""
    offset = piece.first / sampling_rate
    return [TimedWord(w.word, w.start_s + offset, w.duration_s, w.confidence) for w in words]
