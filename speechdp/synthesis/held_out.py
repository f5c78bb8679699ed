"""Say the texts of a held-out split, and measure the resulting speech.

Legend: T frames, M mel bins, L linear bins, S symbols (or samples, of sound).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from speechdp.data.prepare.recordings import recording_path
from speechdp.data.shards.dataset import Dataset
from speechdp.data.shards.layout import printable
from speechdp.data.shards.shard import Shard
from speechdp.data.signal.audio import read_audio
from speechdp.decode.graphs.graph import Grammar
from speechdp.decode.wer import word_error_rate
from speechdp.errors import ConfigError, ShardError
from speechdp.labels.symbols import SymbolInventory
from speechdp.synthesis.generate import Speech, Synthesiser
from speechdp.synthesis.quality import diagonality, focus_rate, mel_cepstral_distortion
from speechdp.synthesis.recognition import Ear, SpeechListener
from speechdp.synthesis.record import SOURCES, SaidUtterance, Source, SynthesisResult
from speechdp.synthesis.showcase import Example, clear, show
from speechdp.tasks.model_file import LoadedSynthesis

FloatArray = npt.NDArray[np.float32]

#: Utterances whose spectrograms and samples are in memory at a time.
_GROUP_SIZE = 64


@dataclass(frozen=True)
class EvaluationRequest:
    """What is measured, and where results go.

    Attributes:
        run_dir: the run; pictures and sound go to RUN/synthesis.
        split: name of the split.
        max_utterances: most utterances, spread evenly over the split; 0: all.
        num_pictures: utterances to draw and to write as sound.
        listener: recogniser of the speech; None: no recognition.
        grammar: grammar of the listener; None: chosen by the texts.
    """

    run_dir: Path
    split: str
    max_utterances: int = 0
    num_pictures: int = 3
    listener: SpeechListener | None = None
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        if self.max_utterances < 0:
            raise ConfigError(f"--max-utterances {self.max_utterances}: give 0 (all) or more")


@dataclass(frozen=True)
class HeldOutSpeech:
    """An utterance of the split: id, text, symbols (S,), and its recording's mel (T, M) and linear (T, L)."""

    utterance_id: str
    text: str
    symbols: npt.NDArray[np.int32]
    mel: FloatArray
    linear: FloatArray


def check_data(dataset: Dataset, loaded: LoadedSynthesis) -> None:
    """Refuse data made with other settings than those of training.  Raises ConfigError."""
    if not dataset.has_texts:
        raise ConfigError(
            f"{dataset.path}: holds {dataset.stored}, not spectrograms; prepare it with --task synthesis"
        )
    rates = (loaded.sampling_rate, dataset.sampling_rate)
    if rates[0] != rates[1]:
        raise ConfigError(
            f"{dataset.path}: has {rates[1]} Hz, the model was trained on {rates[0]}; prepare the data "
            f"with --resample {rates[0]}"
        )
    ours = {
        "features": (loaded.features.to_dict(), dataset.features.to_dict()),
        "symbols": (loaded.symbols.names, SymbolInventory.load(dataset.symbols_path).names),
    }
    for name, (of_model, of_data) in ours.items():
        if of_model != of_data:
            raise ConfigError(
                f"{dataset.path}: the {name} differ from what the model was trained on; prepare the data "
                "with the settings of the training data"
            )


def evaluate_split(
    synthesiser: Synthesiser,
    dataset: Dataset,
    request: EvaluationRequest,
    advance: Callable[[int, int], None],
) -> SynthesisResult:
    """Say every held-out text (free running), compare with the recordings, and draw a few.

    Args:
        synthesiser: the model.
        dataset: a data directory made with the settings of the training data.
        request: what to measure.
        advance: called with the number of utterances done and the total number.

    Raises:
        ConfigError: the data do not fit the model or the listener.
        ShardError: a shard is damaged, or there is no such split.
        RunError: the model gives NaN, or a disk error.
    """
    check_data(dataset, synthesiser.loaded)
    with dataset.open_shards(request.split) as shards:
        everything = [(shard, i) for shard in shards for i in range(shard.num_utterances)]
        owners = [everything[i] for i in spread(len(everything), request.max_utterances)]
        if not owners:
            raise ConfigError(f"{dataset.path}: split {request.split!r} has no utterances; name another")
        for shard, i in owners:
            if any(offsets[i] == offsets[i + 1] for offsets in (shard.offsets, shard.target_offsets)):
                name = printable(shard.utterance_id(i))
                raise ShardError(f"{shard.path}: utterance {name} has no frame or no text; leave it out")
        evaluation = _Evaluation(synthesiser, request, dataset, [shard.text(i) for shard, i in owners])
        clear(request.run_dir, request.split)  # nothing can be refused after this point
        for first in range(0, len(owners), _GROUP_SIZE):
            advance(first, len(owners))
            group = owners[first : first + _GROUP_SIZE]
            evaluation.add([_read(shard, i, dataset.features.num_mel_bins) for shard, i in group])
        advance(len(owners), len(owners))
    return evaluation.result(len(everything))


def spread(size: int, at_most: int) -> list[int]:
    """Choose `at_most` of `size` places, 0: all, evenly spaced: shards may be sorted by speaker or text."""
    if at_most == 0 or at_most >= size:
        return list(range(size))
    return [number * size // at_most for number in range(at_most)]


class _Evaluation:
    """Collects the results group by group; `texts` are all texts to come, in order."""

    def __init__(
        self, synthesiser: Synthesiser, request: EvaluationRequest, dataset: Dataset, texts: Sequence[str]
    ) -> None:
        self._synthesiser, self._request, self._dataset = synthesiser, request, dataset
        self._ear: Ear | None = None
        self._references: list[str] = []
        if request.listener is not None:
            self._references = request.listener.references(texts)
            self._ear = request.listener.ear(self._references, request.grammar)
        self._drawn = set(spread(len(texts), request.num_pictures)) if request.num_pictures else set()
        self._said: list[SaidUtterance] = []
        self._pictures: list[str] = []

    def add(self, group: Sequence[HeldOutSpeech]) -> None:
        """Say a group's texts; measure, recognise and draw the speech."""
        speeches = dict(self._synthesiser.say([one.symbols for one in group]))
        drawn = {number for number in range(len(group)) if len(self._said) + number in self._drawn}
        wanted = set(range(len(group))) if self._ear is not None else drawn
        sound = {number: self._sound(group[number], speeches[number]) for number in sorted(wanted)}
        heard = self._listen(sound)
        for number, one in enumerate(group):
            if number in drawn:
                self._pictures.append(self._show(one, speeches[number], sound[number]))
            self._said.append(self._measure(one, speeches[number], heard.get(number, {})))

    def result(self, of_split: int) -> SynthesisResult:
        """Return the overall result."""
        errors = {}
        for source in SOURCES if self._ear is not None else ():
            heard = [one.heard.get(source) for one in self._said]
            # A source missing for some utterances would be counted over other words than the other sources.
            if None not in heard:
                errors[source] = word_error_rate(self._references, [words or "" for words in heard])
        said = tuple(sorted(self._said, key=lambda one: one.utterance_id))
        return SynthesisResult(
            self._request.split, of_split, said, errors, self._facts(), tuple(self._pictures)
        )

    def _sound(self, one: HeldOutSpeech, speech: Speech) -> dict[Source, FloatArray]:
        """Make the samples of an utterance from each available source."""
        sound: dict[Source, FloatArray] = {
            "synthetic": self._synthesiser.samples(speech.linear),
            "copy": self._synthesiser.samples(one.linear),
        }
        path = recording_path(self._dataset.path, one.utterance_id)
        if path.is_file():
            sound["recorded"] = read_audio(path, self._dataset.sampling_rate)
        return sound

    def _listen(self, sound: Mapping[int, Mapping[Source, FloatArray]]) -> dict[int, dict[Source, str]]:
        heard: dict[int, dict[Source, str]] = {number: {} for number in sound}
        if self._ear is None:
            return heard
        for source in SOURCES:
            numbers = [number for number in sound if source in sound[number]]
            rate = self._synthesiser.loaded.sampling_rate
            words = self._ear.hear([sound[number][source] for number in numbers], rate)
            for number, text in zip(numbers, words, strict=True):
                heard[number][source] = text
        return heard

    def _measure(self, one: HeldOutSpeech, speech: Speech, heard: Mapping[Source, str]) -> SaidUtterance:
        return SaidUtterance(
            utterance_id=one.utterance_id,
            text=one.text,
            frames=len(speech.mel),
            recorded_frames=len(one.mel),
            mcd_db=mel_cepstral_distortion(speech.mel, one.mel, self._synthesiser.loaded.features),
            focus_rate=focus_rate(speech.attention),
            diagonality=diagonality(speech.attention),
            ending=speech.ending,
            heard=heard,
        )

    def _show(self, one: HeldOutSpeech, speech: Speech, sound: Mapping[Source, FloatArray]) -> str:
        example = Example(one.utterance_id, one.text, one.symbols, speech, one.mel, sound)
        return show(example, self._synthesiser.loaded, self._request.run_dir, self._request.split)

    def _facts(self) -> dict[str, object]:
        listener = self._request.listener
        hearing = None
        if listener is not None and self._ear is not None:
            hearing = {
                "run": str(listener.run_dir),
                "data": str(listener.dataset.path),
                "grammar": self._ear.recogniser.grammar.value,
                "weights": dict(listener.weights),
                "unknown_words": self._ear.unknown(self._references),
            }
        return {
            "data": {"path": str(self._dataset.path), "checksum": self._dataset.checksum},
            "options": asdict(self._synthesiser.options),
            "recogniser": hearing,
        }


def _read(shard: Shard, utterance: int, num_mel_bins: int) -> HeldOutSpeech:
    rows, symbols = shard.read(utterance)
    values = rows.astype(np.float32)
    name, text = shard.utterance_id(utterance), shard.text(utterance)
    return HeldOutSpeech(name, text, symbols, values[:, :num_mel_bins], values[:, num_mel_bins:])
