"""Options of a training run: frozen dataclasses, one a component, checked together before step 1.

The docstring under a field is its help on the command line.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from speechdp.data.plan import PlanOptions
from speechdp.errors import ConfigError
from speechdp.models.lstm_am import LstmConfig
from speechdp.models.presets import PRESETS, Preset
from speechdp.train.schedule import Schedule


@dataclass(frozen=True)
class ModelOptions:
    """The acoustic model."""

    preset: Literal["tiny", "kaldi-4x800", "swb2000"] = "tiny"
    """Sizes to start from; the options below change single ones."""
    layers: int | None = None
    """LSTM layers."""
    cells: int | None = None
    """Cells a layer and direction."""
    bidirectional: bool | None = None
    """BLSTM (True) or LSTM (False)."""
    projection: int | None = None
    """Size of the recurrent projection (LSTMP), 0 for none."""
    bottleneck: int | None = None
    """Size of the linear layer before the softmax, 0 for none."""
    dropout: float | None = None
    """Dropout between layers and before the output."""

    def base(self) -> Preset:
        """Return the preset."""
        return PRESETS[self.preset]

    def lstm(self) -> LstmConfig:
        """Return the sizes: the preset's, changed by the options given."""
        given = {f.name: getattr(self, f.name) for f in dataclasses.fields(LstmConfig)}
        return dataclasses.replace(
            self.base().model, **{name: value for name, value in given.items() if value is not None}
        )


@dataclass(frozen=True)
class BatchOptions:
    """How utterances become batches; each option defaults to the preset's."""

    batch_size: int | None = None
    """Segments a rank and step."""
    chunk_frames: int | None = None
    """Longest segment in frames; 0 takes utterances whole."""
    left_context: int | None = None
    """Frames before a segment that are input only."""
    right_context: int = 0
    """Frames after a segment that are input only."""
    spec_augment: bool = False
    """Hide random bands and stretches of the features in training: for small corpora."""

    def __post_init__(self) -> None:
        for name in ("left_context", "right_context"):
            if (getattr(self, name) or 0) < 0:
                raise ConfigError(f"--{name.replace('_', '-')} {getattr(self, name)}: must not be negative")

    def resolve(self, preset: Preset) -> BatchOptions:
        """Fill what was not given from `preset`."""
        return BatchOptions(
            batch_size=preset.batch_size if self.batch_size is None else self.batch_size,
            chunk_frames=preset.chunk_frames if self.chunk_frames is None else self.chunk_frames,
            left_context=preset.left_context if self.left_context is None else self.left_context,
            right_context=self.right_context,
            spec_augment=self.spec_augment,
        )


@dataclass(frozen=True)
class OptimizerOptions:
    """The optimizer and its learning rate over epochs."""

    optimizer: Literal["sgd", "adam", "adamw"] = "adam"
    """SGD with momentum, Adam, or AdamW."""
    learning_rate: float | None = None
    """Learning rate of the plateau; default 0.002 for adam and adamw, 0.1 for sgd."""
    momentum: float = 0.9
    """Momentum of sgd; first beta of adam and adamw."""
    weight_decay: float = 0.0
    """L2 penalty (sgd, adam) or decoupled decay (adamw)."""
    max_gradient_norm: float = 1.0
    """Clip the gradient (mean over frames) to this norm; 0: never."""
    warmup_epochs: float = 0.0
    """Epochs over which the learning rate rises linearly."""
    warmup_from: float = 0.0
    """Learning rate at the start of the warm-up."""
    anneal_from: int = -1
    """First epoch, counted from 0, with an annealed learning rate; -1: two thirds of --epochs."""
    anneal_factor: float = math.sqrt(0.5)
    """Learning rate of an annealed epoch over that of the epoch before."""

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"--momentum {self.momentum}: must lie in [0, 1)")
        for name in ("weight_decay", "max_gradient_norm"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"--{name.replace('_', '-')} {getattr(self, name)}: must not be negative")

    def schedule(self, epochs: int) -> Schedule:
        """Return the learning rate over `epochs` epochs."""
        default = 0.1 if self.optimizer == "sgd" else 0.002
        return Schedule(
            learning_rate=default if self.learning_rate is None else self.learning_rate,
            warmup_epochs=self.warmup_epochs,
            warmup_from=self.warmup_from,
            anneal_from=max(1, epochs * 2 // 3) if self.anneal_from < 0 else self.anneal_from,
            anneal_factor=self.anneal_factor,
        )


@dataclass(frozen=True)
class TrainOptions:
    """Everything that decides what a run computes, and what it needs to be repeated."""

    model: ModelOptions = field(default_factory=ModelOptions)
    batch: BatchOptions = field(default_factory=BatchOptions)
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    strategy: str = "gradient_averaging"
    """NAME or NAME:option=value,...: what ranks exchange and when (docs/strategies.md)."""
    backend: Literal["auto", "serial", "horovod", "mpi", "torch"] = "auto"
    """Communicator; auto takes horovod where it is installed, else mpi, and says so."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes the GPU of this local rank where there is one."""
    epochs: int = 12
    """Passes over the training split."""
    seed: int = 1
    """Of initial weights, order of the data, and dropout."""
    train_split: str = "train"
    """Split to train on."""
    held_out: str = "dev"
    """Split for the log-probability per frame and frame accuracy after each epoch."""
    alignments: Path | None = None
    """Directory of targets to train on (RUN/alignments/K of an earlier run) instead of the shards' own."""
    realign: int = 0
    """Rounds of training and forced alignment before the run proper."""
    realign_epochs: int | None = None
    """Epochs of each such round; default: --epochs."""
    max_steps: int = 0
    """End after so many steps, to try or to time something; 0: all epochs."""
    checkpoint_steps: int = 0
    """Save every so many steps, beside the checkpoint after each epoch; 0: only those."""

    def __post_init__(self) -> None:
        for name, least in (
            ("epochs", 1),
            ("realign", 0),
            ("checkpoint_steps", 0),
            ("max_steps", 0),
            ("seed", 0),
        ):
            if getattr(self, name) < least:
                raise ConfigError(
                    f"--{name.replace('_', '-')} {getattr(self, name)}: must be at least {least}"
                )
        if self.realign_epochs is not None and self.realign_epochs < 1:
            raise ConfigError(f"--realign-epochs {self.realign_epochs}: must be at least 1")
        self.model.lstm()
        self.schedule()
        self.plan()

    def schedule(self) -> Schedule:
        """Return the learning rate over this run."""
        return self.optimizer.schedule(self.epochs)

    def batches(self) -> BatchOptions:
        """Return the batch options with nothing left open."""
        return self.batch.resolve(self.model.base())

    def plan(self) -> PlanOptions:
        """Return what the epoch plan needs."""
        batches = self.batches()
        assert batches.batch_size is not None and batches.chunk_frames is not None
        return PlanOptions(batches.batch_size, batches.chunk_frames, self.seed)

    def to_json(self) -> dict[str, Any]:
        """Return the options as JSON-like values."""
        values: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self), default=str))
        return values

    def fingerprint(self) -> str:
        """Return a hash of all options: ranks compare it, and a resumed run must have the same."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()[:16]
