"""The trained model as a file: weights, sizes, and the class counts that decoding needs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, get_type_hints

import numpy as np
import numpy.typing as npt
import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from speechdp import remedies
from speechdp.data.shards.dataset import MANIFEST_NAME
from speechdp.data.signal.features import FeatureConfig
from speechdp.data.transforms.inputs import InputOptions
from speechdp.decode.origin import is_ctc
from speechdp.errors import ConfigError, RunError, one_line
from speechdp.files import (
    atomic_path,
    cannot_be_read,
    cannot_be_written,
    is_of_disk,
    no_memory_to_read,
    why_no_folder,
)
from speechdp.json_input import parse_json
from speechdp.labels.hmm import log_priors, self_loop_probabilities
from speechdp.labels.state_tying import StateTying
from speechdp.labels.symbols import SymbolInventory
from speechdp.models.lstm_am import LstmAcousticModel, LstmConfig
from speechdp.models.tacotron.config import TacotronConfig
from speechdp.models.tacotron.model import Tacotron
from speechdp.models.without_weights import without_weights
from speechdp.ownership.overwrite import COMPARISON, SWEEP, TUNE, how_to_continue
from speechdp.ownership.owner import OWNER_FILE
from speechdp.parallel.run_files import MODEL_NAME

_FORMAT = "speechdp-model"
_VERSION = 1
#: Sizes up to this are accepted even if no weight has them: strides, widths of filters.
_LARGEST_SMALL_SIZE = 1000

#: Types in JSON of an option, by its type; those of other options are texts.
_JSON_TYPES: dict[type, tuple[type, ...]] = {bool: (bool,), int: (int,), float: (float, int)}

ModelT = TypeVar("ModelT", bound=nn.Module)
OptionsT = TypeVar("OptionsT", LstmConfig, TacotronConfig, FeatureConfig, InputOptions)
#: From a task's name and options in a model file to a function that makes its network, given the size of a
#: frame and the number of classes; None: the file is of another task than the one given.
Networks: TypeAlias = Callable[[str, str], Callable[[int, int], nn.Module] | None]


@dataclass(frozen=True)
class ClassCounts:
    """How often each class occurs in the training targets.

    Attributes:
        frames: (C,) frames of each class.
        runs: (C,) uninterrupted runs of each class; frames / runs is its mean duration.
    """

    frames: npt.NDArray[np.int64]
    runs: npt.NDArray[np.int64]


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to decode with.

    Attributes:
        model: in evaluation mode; maps features (B, T, F) and lengths (B,) to logits (B, T, C).
        class_log_prior: (C,) log-probability of each class in training; 0 for a CTC model, which has none.
        self_loop: (C,) probability of staying in an HMM state for another frame; 0 for a CTC model.
        config: sizes and the data it was trained on.
        tying: tying of its states if they depend on context; None: they do not.
    """

    model: nn.Module
    class_log_prior: Tensor
    self_loop: Tensor
    config: dict[str, Any]
    tying: StateTying | None = None


@dataclass(frozen=True)
class LoadedWeights:
    """The weights of a trained acoustic model, from which another training can start.

    Attributes:
        weights: weights by their names in the network's state_dict.
        config: sizes and the data it was trained on.
        tying: tying of its states if they depend on context; None: they do not.
    """

    weights: dict[str, Tensor]
    config: dict[str, Any]
    tying: StateTying | None


@dataclass(frozen=True)
class LoadedSynthesis:
    """A model ready to synthesise with.

    Attributes:
        model: in evaluation mode.
        symbols: symbols of its texts.
        features: definition of the spectrograms that it makes.
        sampling_rate: sampling rate of the speech it was trained on, Hz.
        config: the whole head of the file.
    """

    model: Tacotron
    symbols: SymbolInventory
    features: FeatureConfig
    sampling_rate: int
    config: dict[str, Any]


def save_model(run_dir: Path, model: nn.Module, counts: ClassCounts | None, facts: dict[str, Any]) -> Path:
    """Write RUN/model.safetensors of an acoustic model atomically.

    Args:
        run_dir: the run.
        model: an LstmAcousticModel, or another network; `facts` then include its task and the task's options.
        counts: class counts of the training targets, for decoding; None: a CTC model, which has neither
            states nor priors.
        facts: JSON-like values, recorded beside the sizes (feature_dim, num_classes, data checksum, ...).

    Raises:
        RunError: the disk is full.
    """
    tensors = {}
    if counts is not None:
        tensors = {
            "class_frames": torch.from_numpy(counts.frames),
            "class_runs": torch.from_numpy(counts.runs),
        }
    sizes = {"lstm": dataclasses.asdict(model.config)} if isinstance(model, LstmAcousticModel) else {}
    return _save(run_dir, model, {**sizes, **facts}, tensors)


def save_synthesis_model(run_dir: Path, model: Tacotron, facts: dict[str, Any]) -> Path:
    """Write RUN/model.safetensors of a synthesis model atomically; otherwise as `save_model`."""
    sizes = {
        "task": "synthesis",
        "tacotron": dataclasses.asdict(model.config),
        "num_symbols": model.num_symbols,
        "mel_dim": model.mel_dim,
        "linear_dim": model.linear_dim,
    }
    return _save(run_dir, model, {**sizes, **facts}, {})


def save_any_model(run_dir: Path, model: nn.Module, facts: dict[str, Any]) -> Path:
    """Write RUN/model.safetensors of a user's task: weights `model.NAME`, and `facts` in the header."""
    return _save(run_dir, model, facts, {})


def _save(run_dir: Path, model: nn.Module, facts: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    path = run_dir / MODEL_NAME
    # Contiguous copies: safetensors accepts neither views of one storage nor other strides.
    weights = {
        f"model.{name}": value.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, value in model.state_dict().items()
    }
    head = {"format": _FORMAT, "version": _VERSION, **facts}
    tensors = {**weights, **tensors}
    content = safetensors.torch.save(tensors, {"speechdp": json.dumps(head)})
    try:
        with atomic_path(path) as temporary:
            temporary.write_bytes(content)
    except OSError as error:
        raise RunError(cannot_be_written(path, error, remedies.resuming())) from error
    return path


def load_model(
    run_dir: Path, device: torch.device, *, ctc: bool = False, own: Networks | None = None
) -> LoadedModel:
    """Load RUN/model.safetensors of an acoustic model.

    Args:
        run_dir: the run.
        device: device for the model.
        ctc: accept a model of --criterion ctc, too, which has neither states nor priors: for callers that
            need only words.
        own: result of `networks_of` for the task whose network it may be; None: only ours.  The file alone,
            which others may have written, does not decide what code is imported.

    Raises:
        RunError: the file is missing, damaged, or of another version or task; or of CTC without `ctc`.
        ConfigError: the user's task fails to make the network.
    """
    with _reading(run_dir) as file:
        head, is_ours = file.head, not _is_of_another_class(file)
        if not ctc:
            _refuse_ctc(file)
        if is_ours:
            config = file.options("lstm", LstmConfig)
            model: nn.Module = file.built(
                lambda: LstmAcousticModel(head["feature_dim"], head["num_classes"], config)
            )
        else:
            file.check_own()
        if is_ctc(head):
            prior = self_loop = torch.zeros(head["num_classes"], dtype=torch.float64)
        else:
            frames, runs = file.tensors["class_frames"].numpy(), file.tensors["class_runs"].numpy()
            prior = torch.from_numpy(log_priors(frames))
            self_loop = torch.from_numpy(self_loop_probabilities(frames, runs))
        tying = _tying(head)
        file.check_input()
    if not is_ours:  # outside the block: an error in the user's code is not damage to the file
        model = _network_of(file, own)
    return LoadedModel(model.to(device).eval(), prior, self_loop, head, tying)


def load_weights(run_dir: Path) -> LoadedWeights:
    """Load the contents of RUN/model.safetensors of an acoustic model with any network.

    Raises:
        RunError: the file is missing, damaged, or of another version or task, or of CTC.
    """
    with _reading(run_dir) as file:
        _is_of_another_class(file)
        _refuse_ctc(file)
        file.check_input()
        return LoadedWeights(file.weights, file.head, _tying(file.head))


def load_synthesis_model(run_dir: Path, device: torch.device) -> LoadedSynthesis:
    """Load RUN/model.safetensors of a synthesis model.

    Raises:
        RunError: the file is missing, damaged, or of another version or task.
    """
    with _reading(run_dir) as file:
        head = file.head
        _check_task(file, "synthesis")
        config = file.options("tacotron", TacotronConfig)
        sizes = (head["num_symbols"], head["mel_dim"], head["linear_dim"])
        model = file.built(lambda: Tacotron(*sizes, config))
        symbols = SymbolInventory.from_dict(head["symbols"])
        if symbols.num_symbols != model.num_symbols:
            raise ValueError(f"{symbols.num_symbols} symbols for a model of {model.num_symbols}")
        features = file.options("features", FeatureConfig)
        sampling_rate = int(head["sampling_rate"])
    return LoadedSynthesis(model.to(device).eval(), symbols, features, sampling_rate, head)


@dataclass(frozen=True)
class _ModelFile:
    path: Path
    head: dict[str, Any]
    tensors: dict[str, Tensor]

    @property
    def weights(self) -> dict[str, Tensor]:
        """The model's state_dict."""
        return {k.removeprefix("model."): v for k, v in self.tensors.items() if k.startswith("model.")}

    def options(self, key: str, kind: type[OptionsT]) -> OptionsT:
        """Return an entry of the head as the dataclass of options that was written.

        Raises:
            RunError: it has an option that this version does not know.
            KeyError, TypeError, ValueError, AttributeError, ConfigError: damaged.
        """
        values, kinds = self.head[key], get_type_hints(kind)
        unknown = sorted(values.keys() - kinds.keys())
        if unknown:
            raise RunError(
                f"{self.path}: has an option {unknown[0]!r} ({key}) that this speechdp does not know, so it "
                "is from a newer version or was edited by hand; use the speechdp that wrote it, or copy the "
                "file again"
            )
        for name, value in values.items():
            if type(value) not in _JSON_TYPES.get(kinds[name], (str,)):
                raise ValueError(f"{name} is {value!r} ({key})")
        return kind(**values)

    def check_input(self) -> None:
        """Check the entries about the model's input, which training writes.  Raises as `options`."""
        head = self.head
        if "data_checksum" in head:
            self.options("features", FeatureConfig)
            rate = head["sampling_rate"]
            if type(rate) is not int or rate < 0:  # 0: that of Kaldi's features is unknown
                raise ValueError(f"sampling_rate is {rate!r}")
        if "inputs" in head:
            self.options("inputs", InputOptions)

    def built(self, make: Callable[[], ModelT]) -> ModelT:
        """Make a model of the sizes in the head, after checking that the weights have these sizes.

        Copies of the weights become its parameters.  So no random numbers are drawn, and the parameters have
        the weights' number format, whatever the program's default is.

        Args:
            make: makes the model; called without memory for weights.

        Raises:
            ValueError: the weights have other sizes; nothing of the sizes in the head has been allocated.
        """
        self._check_sizes()
        with without_weights():
            model = make()
        if shapes_of(model.state_dict()) != shapes_of(self.weights):
            raise ValueError("its weights do not have the sizes of its head")
        # Copies get their own memory, aligned as in any other model.
        model.load_state_dict({name: value.clone() for name, value in self.weights.items()}, assign=True)
        return model

    def check_own(self) -> None:
        """Check the entries that a user's network is made from.  Raises KeyError, ValueError: damaged."""
        self._check_sizes()
        for key, kind in {"task": str, "options": str, "feature_dim": int, "num_classes": int}.items():
            if not isinstance(self.head[key], kind):
                raise ValueError(f"{key} is {self.head[key]!r}")

    def _check_sizes(self) -> None:
        shapes = shapes_of(self.tensors)  # those of the counts, too: a network may divide its classes
        most = max([_LARGEST_SMALL_SIZE, len(shapes), *(size for shape in shapes.values() for size in shape)])
        if any(not 0 <= number <= most for number in _numbers(self.head)):
            raise ValueError("its head names sizes that its weights do not have")


def shapes_of(weights: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each of a model's weights."""
    return {name: tuple(weight.shape) for name, weight in weights.items()}


#: What a model of each of our tasks is, and the command that uses it, for messages.
_USES = {
    "acoustic": "an acoustic model; use it with speechdp decode",
    "synthesis": "a synthesis model; use it with speechdp synthesize",
}


def _check_task(file: _ModelFile, expected: str) -> None:
    """Refuse another task's model.  Raises RunError."""
    task = file.head.get("task", "acoustic")
    if task != expected:
        own = f"a model of --task {task}; load it with safetensors, in a program of that task's"
        raise RunError(f"{file.path}: is {_USES.get(str(task), own)}")


def _refuse_ctc(file: _ModelFile) -> None:
    if is_ctc(file.head):
        raise RunError(
            f"{file.path}: is a --criterion ctc model, which has no states, so only decode and transcribe "
            "can use it; train with another criterion"
        )


def _tying(head: Mapping[str, Any]) -> StateTying | None:
    """Return the tying of a model's states, or None.  Raises ValueError if it has other classes."""
    tying = StateTying.from_json(head["tying"]) if "tying" in head else None
    if tying is not None and tying.num_classes != head["num_classes"]:
        raise ValueError(f"{tying.num_classes} tied states for {head['num_classes']} classes")
    return tying


def _is_of_another_class(file: _ModelFile) -> bool:
    """Return whether an acoustic model is of a user's class.  Raises RunError if it is not acoustic."""
    is_acoustic = is_ctc(file.head) or "class_frames" in file.tensors
    if is_acoustic and file.head.get("task", "acoustic") not in _USES:
        return True
    _check_task(file, "acoustic")
    return False


def _network_of(file: _ModelFile, own: Networks | None) -> nn.Module:
    """Make a user's network with the weights of a file that has been checked.

    Raises:
        RunError: its task was not given, was given with other options, or makes another network.
        ConfigError: the task fails to make one.
    """
    head, weights = file.head, file.weights
    try:
        make = None if own is None else own(head["task"], head["options"])
    except ConfigError as error:
        raise RunError(f"{file.path}: {error}") from error
    if make is None:
        raise RunError(
            f"{file.path}: its network belongs to a task of your own, {head['task']}; give the --task of "
            "the training"
        )
    sizes = (head["feature_dim"], head["num_classes"])
    try:
        with without_weights():
            outline = make(*sizes)
    except ConfigError:  # some need values while they are made: those are made on a real device at once
        outline = None
    if outline is not None:
        _refuse_unlike(file, outline)
    model = _as_trained(make(*sizes))
    _refuse_unlike(file, model)
    model.load_state_dict(weights)
    return model


def _as_trained(model: ModelT) -> ModelT:
    """Return a new network in float32, the format of training, if the program has set another default."""
    return model if torch.get_default_dtype() == torch.float32 else model.float()


def _refuse_unlike(file: _ModelFile, model: nn.Module) -> None:
    """Refuse a network with other weights, by name and shape, than a file.  Raises RunError."""
    expected, found = shapes_of(model.state_dict()), shapes_of(file.weights)
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise RunError(
                f"{file.path}: --task {file.head['task']} now makes another network: {name} has shape "
                f"{expected.get(name, 'none')} in it, but {found.get(name, 'none')} in the file; give the "
                "class that it was trained with, or train again"
            )


def _numbers(head: dict[str, Any]) -> Iterator[int]:
    """Yield every size in a head that weights depend on; not others, such as the sampling rate."""
    for key in ("feature_dim", "num_classes", "num_symbols", "mel_dim", "linear_dim"):
        if key in head:
            yield head[key]
    for key in ("lstm", "tacotron"):
        yield from (value for value in head.get(key, {}).values() if isinstance(value, int))


def _run_in(folder: Path) -> str:
    """Return, for a remedy, what to give instead of the folder of a sweep, comparison or search."""
    models = (path for runs in (folder, folder / "runs") for path in sorted(runs.glob(f"*/{MODEL_NAME}")))
    model = next(models, None)
    return "the folder of a run" if model is None else f"the folder of a run, such as {model.parent}"


def _refuse_absent(run_dir: Path, path: Path) -> None:
    """Refuse a folder without a model; say what it holds instead.  Raises RunError."""
    if not run_dir.is_dir():
        raise RunError(f"{run_dir}: {why_no_folder(run_dir)}; give that of a finished run")
    if (run_dir / MANIFEST_NAME).is_file():
        raise RunError(f"{run_dir}: is a data directory, not a run; give the folder that train wrote")
    if path.is_file():
        return
    if (run_dir / "completed.json").is_file():
        raise RunError(
            f"{path}: no such model, though the run is complete; the command that trained it writes it "
            "again from the last checkpoint (train: with --resume)"
        )
    for kind in (SWEEP, COMPARISON, TUNE):
        if (run_dir / kind.record).is_file():
            raise RunError(f"{run_dir}: is {kind.what}, not a run; give {_run_in(run_dir)}")
    begun = (run_dir / "run.json").is_file()
    remedy = f"finish it {how_to_continue(run_dir, 'train --resume')}" if begun else "train it first"
    if (run_dir / OWNER_FILE).exists():  # which a killed job has left, too
        remedy = f"wait for the job that trains it; if that has ended, {remedy}"
    raise RunError(f"{path}: no such model; {run_dir} is not a finished run, {remedy}")


@contextmanager
def _reading(run_dir: Path) -> Iterator[_ModelFile]:
    """Read a model file; report what the block finds wrong with it in one line, as RunError."""
    path = run_dir / MODEL_NAME
    _refuse_absent(run_dir, path)
    try:
        with path.open("rb"):
            pass  # raises the reason: safetensors calls every file missing that it cannot open
        tensors = safetensors.torch.load_file(path)
        with safetensors.safe_open(str(path), framework="pt") as file:
            head = parse_json(file.metadata()["speechdp"])
        if head["format"] != _FORMAT or head["version"] != _VERSION:
            raise RunError(f"{path}: written by another version of speechdp; train again")
        yield _ModelFile(path, head, tensors)
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RuntimeError,
        MemoryError,
        ConfigError,
        safetensors.SafetensorError,
    ) as error:
        line = no_memory_to_read(path, error)
        if line is not None or is_of_disk(error):
            raise RunError(line or cannot_be_read(path, error)) from error
        reason = one_line(error)
        raise RunError(f"{path}: damaged ({reason}); train again or copy the file again") from error
