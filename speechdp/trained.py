"""Trained models for users' own code: what the commands do with a run, from Python (docs/api.md).

Legend: S samples, T frames, I input values per frame, C classes.
"""

from __future__ import annotations

import math
import numbers
import os
import re
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias, get_args, get_type_hints

import numpy as np
import numpy.typing as npt
import torch

from speechdp.data.shards.description import COPY_AGAIN
from speechdp.data.signal.audio import (
    LARGEST_SAMPLE,
    AudioSource,
    read_audio,
    resample,
    to_int16,
    with_channel,
)
from speechdp.data.signal.channel import Channel
from speechdp.data.signal.features import FeatureConfig, check_samples
from speechdp.data.transforms.preprocess import Preprocessor, inputs_of
from speechdp.decode.kept_graph import KeptGraph
from speechdp.decode.origin import check_classes, is_ctc
from speechdp.decode.scoring import AcousticScorer
from speechdp.decode.transcribe import (
    Recording,
    Transcriber,
    Transcription,
    grammar_of,
    kept_data,
    kept_description,
)
from speechdp.errors import ConfigError, RunError, SeveralChannelsError, SpeechDPError, one_line
from speechdp.labels.hmm import FloatArray
from speechdp.labels.kaldi_pdfs import load_classes
from speechdp.models.tacotron.model import Tacotron
from speechdp.options.recognition import WITHOUT_EFFECT_ON_CTC, RecognitionOptions
from speechdp.parallel.run_files import TRAINED_ON
from speechdp.synthesis.generate import GenerateOptions, Speech, Synthesiser
from speechdp.tasks.model_file import LoadedModel, load_model, load_synthesis_model
from speechdp.tasks.registry import networks_of

#: A file, or samples (S,): floating point in [-1, 1], or integers of 16 bits; of numpy or torch.
Audio: TypeAlias = "str | os.PathLike[str] | npt.ArrayLike | torch.Tensor"
_INT16_SCALE = np.float32(32768)
#: Lowest and highest sampling rate accepted, Hz: a lower number is probably meant in kHz, and would stretch
#: seconds to hours.
_RATES_HZ = (1_000, 10_000_000)
#: Options of the search, and of synthesis, which are arguments here.
_SEARCH = tuple(field.name for field in fields(RecognitionOptions))
_SAYING = tuple(field.name for field in fields(GenerateOptions))
#: By the type of an option, the types that it accepts, and their name in messages; a bool does not count as a
#: number.
_KINDS: dict[type, tuple[type | tuple[type, ...], str]] = {
    bool: (bool, "True or False"),
    int: (numbers.Integral, "a whole number"),
    float: (numbers.Real, "a number"),
    Path: ((str, os.PathLike), "a path"),
}


@contextmanager
def _as_in_commands() -> Iterator[None]:
    """Compute in the block, or function, as the commands do, whatever a program has set for its own models.

    This sets the default device and disables autocast and inference mode, in which no network can be made
    that is to be trained.
    """
    with (
        torch.inference_mode(False),
        torch.device("cpu"),
        torch.autocast("cpu", enabled=False),
        torch.autocast("cuda", enabled=False),
    ):
        yield


class AcousticModel:
    """The acoustic model of a run: makes features from audio, and class probabilities and words from them.

    May be pickled and copied for other processes; each of them makes its own decoding graph.

    Args:
        run_dir: folder of the run.
        device: device that the network computes on, as torch names it: `"cpu"`, `"cuda"`, `"cuda:1"`.
        task: task that it was trained for, `NAME` or `MODULE:CLASS`, if the network is one of your own: the
            run's files never make speechdp import code.
        search: options of `speechdp transcribe`, such as `beam=12.0` or `lm_scale=0.8`.  As there, unless a
            scale or score is given, those that `speechdp decode --tune-on` chose for the run are used.

    Attributes:
        network: `network(features (B, T, I), lengths (B,)) -> logits (B, T, C)`, in evaluation mode.
        class_names: name of each class: a phone's state, `AH_1`; if states are tied in context, the state and
            a number, `AH_1.0`; for CTC the blank, `<blank>`, and phones; for Kaldi's classes `pdf-0`.
        log_priors: (C,) float32, natural logarithms of the classes' relative frequencies in training; 0 for
            CTC.
        sampling_rate: sampling rate of the audio that the model was trained on, Hz.

    Raises:
        RunError: the run has no finished acoustic model, or a damaged one.
        ConfigError: a search option is unknown, of another type or out of range, or the device or the task
            cannot be used.

    Example:
        >>> model = speechdp.AcousticModel("RUN")  # doctest: +SKIP
        >>> model.transcribe("talk.wav").text  # doctest: +SKIP
        'three five seven'
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        device: str | torch.device = "cpu",
        *,
        task: str | None = None,
        **search: Any,
    ) -> None:
        self._run_dir = Path(run_dir)
        if not isinstance(task, str | None):
            raise ConfigError(f"task={task!r}: must be a name or MODULE:CLASS, in quotes")
        with _as_in_commands(), _in_terms_of_arguments((*_SEARCH, "task")):
            self._search = _recognition_options(search)
            self._loaded = load_model(self._run_dir, _device(device), ctc=True, own=networks_of(task))
            if is_ctc(self._loaded.config):
                self._search.refuse_weights(*WITHOUT_EFFECT_ON_CTC)
        self.log_priors = self._loaded.class_log_prior.numpy().astype(np.float32)
        self.sampling_rate = int(self._loaded.config["sampling_rate"])

    def __getstate__(self) -> dict[str, Any]:
        made_again = ("_preprocessor", "_transcriber")  # from the rest; they hold locks, and graphs in C++
        return {name: value for name, value in vars(self).items() if name not in made_again}

    @property
    def network(self) -> torch.nn.Module:
        """The network; see the class."""
        return self._loaded.model

    @cached_property
    def class_names(self) -> tuple[str, ...]:
        """The name of each class; see the class."""
        return _class_names(self._loaded, self._run_dir / TRAINED_ON / "classes.txt")

    @_as_in_commands()
    def features(self, audio: Audio, sampling_rate: int | None = None) -> FloatArray:
        """Return the network's input for audio, made as in training: normalised, with deltas and context.

        Args:
            audio: a file, or samples (S,) of one channel.
            sampling_rate: rate of samples, Hz, which are resampled; None for a file.

        Returns:
            (T, I) float32; T is 0 if the audio is shorter than a frame.

        Raises:
            ConfigError: it is not audio, or a file without samples; or the model was trained on features that
                Kaldi made.
            RunError: it is a file, and the run's record of its data (`trained_on/data.json`) is missing or
                was changed.
            ShardError: that record is damaged.
        """
        return self._preprocessor.whole(to_int16(self._samples(audio, sampling_rate)))

    def log_posteriors(self, features: npt.ArrayLike | torch.Tensor) -> FloatArray:
        """Return the log-probability of each class in each frame, in nats.

        Kaldi's decoders take these minus `log_priors`; `speechdp posteriors` writes the difference.

        Args:
            features: (T, I), as the method `features` makes them.

        Returns:
            (T, C) float32.

        Raises:
            ConfigError: the number of values per frame differs from the network's, or one is NaN or infinite.
        """
        return self.log_posteriors_of_all([features])[0]

    @_as_in_commands()
    def log_posteriors_of_all(self, utterances: Iterable[npt.ArrayLike | torch.Tensor]) -> list[FloatArray]:
        """Return `log_posteriors` for each utterance, computing many at a time, mainly for a GPU.

        Args:
            utterances: features (T, I) of each; read as they are needed.

        Returns:
            (T, C) float32 each, in the order of the utterances.

        Raises:
            ConfigError: as for `log_posteriors`.

        Example:
            >>> files = ["a.wav", "b.wav"]  # doctest: +SKIP
            >>> model.log_posteriors_of_all(model.features(file) for file in files)  # doctest: +SKIP
        """
        device = next(self.network.parameters(), torch.empty(0)).device  # further training may have moved it
        scorer = AcousticScorer(self.network, np.zeros_like(self.log_priors), 0.0, device)
        found = dict(scorer.score(map(self._rows, utterances)))
        return [found[number] for number in range(len(found))]

    @_as_in_commands()
    def transcribe(self, audio: Audio, sampling_rate: int | None = None) -> Transcription:
        """Recognise a recording of any length with the run's lexicon and language model.

        The first call makes the decoding graph, or reads it if the run has kept it.

        Args:
            audio: a file, or samples (S,) of one channel.
            sampling_rate: rate of samples, Hz, which are resampled; None for a file.

        Returns:
            `.text`; `.words`, each with `word`, `start_s`, `duration_s`, `confidence`; with `nbest=N`,
            `.candidates`; `.failed_s`, the seconds for which nothing was found; `.is_too_short`, whether the
            audio is shorter than a frame.

        Raises:
            ConfigError: it is not audio, or a file without samples; or `rescore_lm` cannot be used; or the
                run's classes are Kaldi's, or not those of the model.
            RunError: the run keeps no lexicon, or no record of its data, or a file in `trained_on` was
                removed, added or changed.
            ShardError: that record is damaged.
        """
        if not isinstance(audio, (str, os.PathLike)):
            found = self._transcriber.hear("samples", self._samples(audio, sampling_rate))
            return replace(found, sampling_rate=round(sampling_rate or self.sampling_rate))
        name = "_".join(Path(audio).stem.split())
        with _one_channel():
            return self._transcriber.transcribe(Recording(name, name, self._source(audio, sampling_rate)))

    def _samples(self, audio: Audio, sampling_rate: int | None) -> npt.NDArray[np.float32]:
        if not isinstance(audio, (str, os.PathLike)):
            return _resampled(audio, sampling_rate, self.sampling_rate)
        with _one_channel():
            return read_audio(self._source(audio, sampling_rate), self.sampling_rate)

    def _source(self, file: str | os.PathLike[str], sampling_rate: int | None) -> AudioSource:
        """Return a file as a source; of several channels, the one that training read.  Raises ConfigError."""
        if sampling_rate is not None:
            raise ConfigError(f"{file}: the file states its own sampling rate; leave sampling_rate out")
        if Path(file).is_dir():
            raise ConfigError(f"{file}: is a folder; give a file in it")
        return with_channel(Path(file), self._channel)

    def _rows(self, features: npt.ArrayLike | torch.Tensor) -> FloatArray:
        """Return the features of an utterance, (T, I).  Raises ConfigError."""
        values = _as_array(features)
        if values.dtype.kind not in "fiu":
            raise ConfigError(f"features of {values.dtype}; give floating point")
        rows = values.astype(np.float32, copy=False)
        width = int(self._loaded.config["feature_dim"])
        if rows.ndim != 2 or rows.shape[1] != width:
            raise ConfigError(f"features of shape {rows.shape}: the network takes (frames, {width})")
        finite = np.isfinite(rows).all(axis=1)
        if not finite.all():  # an LSTM would carry it into all that follows, without a word
            raise ConfigError(f"features have NaN or infinity, first in frame {finite.argmin()}; fix them")
        return rows

    @cached_property
    def _channel(self) -> Channel | None:
        """The channel that training read of files with several, or their mean; None: not chosen."""
        return kept_description(self._run_dir).channel

    @cached_property
    def _preprocessor(self) -> Preprocessor:
        config = self._loaded.config
        features = FeatureConfig.from_dict(config["features"])
        return Preprocessor(features, self.sampling_rate, "audio", inputs_of(config))

    @cached_property
    def _transcriber(self) -> Transcriber:
        kept = kept_data(self._run_dir)
        earlier = self._search.earlier_weights(self._run_dir, grammar_of(kept))
        options = self._search.with_weights(earlier.weights).decoding()
        with _in_terms_of_arguments(_SEARCH):
            transcriber = Transcriber(self._loaded, kept, options, kept_graph=KeptGraph(self._run_dir))
        not_used = "" if earlier.weights or self._search.weights else earlier.line
        for remark in filter(None, (_with_arguments(not_used, _SEARCH), transcriber.remark)):
            warnings.warn(remark, stacklevel=5)  # cached_property, the method, its decorator
        return transcriber


class SynthesisModel:
    """The synthesis model of a run: makes audio from text.

    Args:
        run_dir: folder of the run.
        device: device that the network computes on, as torch names it.
        options: options of `speechdp synthesize`: `iterations`, `max_seconds`, `seed`, `dropout`,
            `attention_end`.

    Attributes:
        network: the Tacotron, in evaluation mode.
        sampling_rate: sampling rate of its audio, Hz.

    Raises:
        RunError: the run has no finished synthesis model, or a damaged one.
        ConfigError: an option is unknown, of another type or out of range, or the device cannot be used.

    Example:
        >>> voice = speechdp.SynthesisModel("RUN")  # doctest: +SKIP
        >>> soundfile.write("out.wav", voice.say("three five seven"), voice.sampling_rate)  # doctest: +SKIP
    """

    def __init__(
        self, run_dir: str | os.PathLike[str], device: str | torch.device = "cpu", **options: Any
    ) -> None:
        with _as_in_commands(), _in_terms_of_arguments(_SAYING):
            how = GenerateOptions(**_options_of(GenerateOptions, options))
            loaded = load_synthesis_model(Path(run_dir), _device(device))
        self._synthesiser = Synthesiser(loaded, how)
        self.sampling_rate = loaded.sampling_rate

    @property
    def network(self) -> Tacotron:
        """The network; see the class."""
        return self._synthesiser.loaded.model

    def say(self, text: str) -> FloatArray:
        """Return the samples (S,) of a spoken text, by Griffin-Lim; loud ones may lie outside [-1, 1].

        Raises:
            ConfigError: as for `spectrograms`.
            RunError: as for `spectrograms`.
        """
        return self._synthesiser.samples(self.spectrograms(text).linear)

    @_as_in_commands()
    def spectrograms(self, text: str) -> Speech:
        """Return the spectrograms of a spoken text, for a vocoder of your own.

        Returns:
            `.mel` (T, M) and `.linear` (T, L), in [0, 1] as in data directories (docs/data-format.md);
            `.attention`; `.ending`, which is `stop` if the model stopped by itself.

        Raises:
            ConfigError: the text has no word, has characters or words that the model does not know, or is too
                long.
            RunError: the output is NaN or infinite.
        """
        if not isinstance(text, str):
            raise ConfigError(f"a text of type {type(text).__name__}; give a str")
        return dict(self._synthesiser.say(self._synthesiser.encode([text])))[0]


def _recognition_options(given: Mapping[str, Any]) -> RecognitionOptions:
    """Return the options of the search.  Raises ConfigError."""
    options = RecognitionOptions(**_options_of(RecognitionOptions, given))
    options.decoding()  # refuses what is out of range
    return options


def _options_of(kind: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return options for a dataclass, of the types that it declares.  Raises ConfigError."""
    known = get_type_hints(kind)
    for name in given:
        if name not in known:
            raise ConfigError(f"there is no option {name}; there are {', '.join(known)}")
    return {name: _option_of(name, value, known[name]) for name, value in given.items()}


def _option_of(name: str, value: Any, hint: Any) -> Any:
    """Return a value as the declared type, e.g. a str as a path.  Raises ConfigError."""
    (kind, *others) = get_args(hint) or (hint,)
    if value is None and type(None) in others:
        return None
    taken, meaning = _KINDS[kind]
    if not isinstance(value, taken) or (isinstance(value, bool) and kind is not bool):
        raise ConfigError(f"{name}={value!r}: must be {meaning}")
    return kind(value)


def _device(device: str | torch.device) -> torch.device:
    """Return a device that torch can compute on here.  Raises ConfigError."""
    try:
        found = torch.device(device)
        torch.empty(1, device=found).cpu()
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
        reason = one_line(error).partition(". ")[0]  # some errors then list all of torch's devices
        raise ConfigError(
            f'device="{device}": torch cannot compute there ({reason}); give "cpu", or another'
        ) from error
    return found


@contextmanager
def _in_terms_of_arguments(names: Collection[str]) -> Iterator[None]:
    """In messages of the block's errors, replace options such as --lm-scale by arguments, lm_scale.

    Raises:
        SpeechDPError: the block's error, with that message.
    """
    try:
        yield
    except (ConfigError, RunError) as error:
        kind: type[SpeechDPError] = RunError if isinstance(error, RunError) else ConfigError
        raise kind(_with_arguments(str(error), names)) from error


def _with_arguments(message: str, names: Collection[str]) -> str:
    options = "|".join(name.replace("_", "-") for name in names)
    return re.sub(rf"--({options})(?![\w-])", _as_argument, message)


def _as_argument(option: re.Match[str]) -> str:
    return option[1].replace("-", "_")


def _class_names(loaded: LoadedModel, class_list: Path) -> tuple[str, ...]:
    """Return the names of a model's classes: the data's, or their tied states, or CTC's blank and phones."""
    classes = load_classes(class_list)
    check_classes(loaded.config, class_list, classes, COPY_AGAIN)
    names = classes.class_names()
    if is_ctc(loaded.config):
        phones = dict.fromkeys(name.rpartition("_")[0] for name in names)
        return ("<blank>", *list(phones)[1:])
    if loaded.tying is None:
        return names
    so_far: Counter[int] = Counter()
    tied = []
    for state in loaded.tying.states.tolist():
        tied.append(f"{names[state]}.{so_far[state]}")
        so_far[state] += 1
    return tuple(tied)


@contextmanager
def _one_channel() -> Iterator[None]:
    """Replace the remedy for files of several channels by one for Python.  Raises ConfigError."""
    try:
        yield
    except SeveralChannelsError as error:
        raise ConfigError(f"{error.fault}; give the samples of one channel, with sampling_rate=") from error


def _resampled(
    samples: npt.ArrayLike | torch.Tensor, from_hz: int | None, to_hz: int
) -> npt.NDArray[np.float32]:
    """Return samples (S,), integers or floating point, as float32 in [-1, 1] at another rate.

    Raises:
        ConfigError: the samples' rate is unknown, or they have several channels, are not numbers, or are of
            another scale.
    """
    values = _as_array(samples)
    is_int16 = values.dtype.kind == "i" and values.dtype.itemsize == 2  # of either byte order
    if values.dtype.kind != "f" and not is_int16:
        raise ConfigError(f"samples of {values.dtype}; give floating point in [-1, 1], or int16")
    if from_hz is None:
        raise ConfigError("samples without their rate; add sampling_rate=, in Hz")
    if not isinstance(from_hz, numbers.Real) or not 0 < from_hz < math.inf:
        raise ConfigError(f"sampling_rate={from_hz!r}: must be a number above 0, in Hz")
    lowest, highest = _RATES_HZ
    if not lowest <= from_hz <= highest:
        raise ConfigError(
            f"sampling_rate={from_hz!r}: must be {lowest:,} to {highest:,} Hz; 16 kHz are sampling_rate=16000"
        )
    with np.errstate(over="ignore"):  # becomes infinity, which is refused
        found = values.astype(np.float32) / (_INT16_SCALE if is_int16 else np.float32(1))
    if found.shape == (0,):  # no samples: treated as audio that is shorter than a frame
        return found
    check_samples(found)
    if (peak := float(np.abs(found).max())) > LARGEST_SAMPLE:
        raise ConfigError(f"samples up to {peak:,.0f}, where 1 is full scale; divide them")
    return resample(found, from_hz, to_hz)


def _as_array(values: npt.ArrayLike | torch.Tensor) -> npt.NDArray[Any]:
    """Return an array or tensor as a numpy array; floating-point tensors, e.g. of bfloat16, as float32.

    Raises:
        ConfigError: the values are not an array, e.g. lists of different lengths or a sparse tensor.
    """
    try:
        if not isinstance(values, torch.Tensor):
            return np.asarray(values)
        found = values.detach().cpu()
        return np.asarray((found.float() if found.is_floating_point() else found).numpy())
    except (ValueError, TypeError, RuntimeError) as error:
        raise ConfigError(
            f"not an array of numbers ({one_line(error)}); give a numpy array or torch tensor"
        ) from error
