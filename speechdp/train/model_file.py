"""The trained model as a file: weights, sizes, and the class statistics that decoding needs."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from speechdp.atomic_file import atomic_path
from speechdp.decode.hmm import log_priors, self_loop_probabilities
from speechdp.errors import RunError
from speechdp.models.lstm_am import LstmAcousticModel, LstmConfig

MODEL_NAME = "model.safetensors"
_FORMAT = "speechdp-model"
_VERSION = 1


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
        model: in evaluation mode.
        class_log_prior: (C,) log-probability of each class in training.
        self_loop: (C,) probability of staying in an HMM state for another frame.
        config: sizes and the data it was trained on.
    """

    model: LstmAcousticModel
    class_log_prior: Tensor
    self_loop: Tensor
    config: dict[str, Any]


def save_model(run_dir: Path, model: LstmAcousticModel, counts: ClassCounts, facts: dict[str, Any]) -> Path:
    """Write RUN/model.safetensors atomically.

    Args:
        facts: JSON-like; recorded with the sizes (feature_dim, num_classes, data checksum, ...).

    Raises:
        RunError: the disk is full.
    """
    path = run_dir / MODEL_NAME
    tensors = {f"model.{name}": value.detach().cpu().clone() for name, value in model.state_dict().items()}
    tensors["class_frames"] = torch.from_numpy(counts.frames)
    tensors["class_runs"] = torch.from_numpy(counts.runs)
    head = {"format": _FORMAT, "version": _VERSION, "lstm": dataclasses.asdict(model.config), **facts}
    content = safetensors.torch.save(tensors, {"speechdp": json.dumps(head)})
    try:
        with atomic_path(path) as temporary:
            temporary.write_bytes(content)
    except OSError as error:
        raise RunError(
            f"{path}: cannot be written ({error.strerror or os.strerror(error.errno or 0)}); "
            "free some space, then go on with --resume"
        ) from error
    return path


def load_model(run_dir: Path, device: torch.device) -> LoadedModel:
    """Load RUN/model.safetensors.

    Raises:
        RunError: missing, damaged or of another version.
    """
    path = run_dir / MODEL_NAME
    if not path.is_file():
        raise RunError(f"{path}: no such model; {run_dir} is not a finished run, train it or use --resume")
    try:
        tensors = safetensors.torch.load_file(path)
        with safetensors.safe_open(str(path), framework="pt") as file:
            head = json.loads(file.metadata()["speechdp"])
        if head["format"] != _FORMAT or head["version"] != _VERSION:
            raise RunError(f"{path}: written by another version of speechdp; train again")
        model = LstmAcousticModel(head["feature_dim"], head["num_classes"], LstmConfig(**head["lstm"]))
        weights = {k.removeprefix("model."): v for k, v in tensors.items() if k.startswith("model.")}
        model.load_state_dict(weights)
        frames, runs = tensors["class_frames"].numpy(), tensors["class_runs"].numpy()
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, safetensors.SafetensorError) as error:
        reason = " ".join(str(error).split())
        raise RunError(f"{path}: damaged ({reason}); train again or copy the file anew") from error
    return LoadedModel(
        model=model.to(device).eval(),
        class_log_prior=torch.from_numpy(log_priors(frames)),
        self_loop=torch.from_numpy(self_loop_probabilities(frames, runs)),
        config=head,
    )
