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
from speechdp.train.recipe import OptimizerName, Recipe, RecipeName, find_recipe
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
    """How utterances become batches; options default to the preset's."""

    batch_size: int | None = None
    """Segments a rank and step."""
    global_batch: int | None = None
    """Segments a step, all ranks together; default with --recipe adpsgd-asr: 2560."""
    chunk_frames: int | None = None
    """Longest segment in frames; 0 takes utterances whole."""
    left_context: int | None = None
    """Frames before a segment that are input only."""
    right_context: int = 0
    """Frames after a segment that are input only."""
    spec_augment: bool = False
    """Hide random bands and stretches of the features in training: for small corpora."""

    def __post_init__(self) -> None:
        if self.batch_size is not None and self.global_batch is not None:
            raise ConfigError(
                "--batch-size (of a rank) and --global-batch (of all ranks) exclude each other: give one"
            )
        if self.global_batch is not None and self.global_batch < 1:
            raise ConfigError(f"--global-batch {self.global_batch}: a batch holds at least 1 segment")
        for name in ("left_context", "right_context"):
            if (getattr(self, name) or 0) < 0:
                raise ConfigError(f"--{name.replace('_', '-')} {getattr(self, name)}: must not be negative")

    def resolve(self, preset: Preset, recipe: Recipe, size: int | None) -> BatchOptions:
        """Fill what was not given from `recipe`, then `preset`, for `size` ranks that train."""
        batch_size = self.batch_size
        if batch_size is None:
            batch_size = self._share(recipe, size) or preset.batch_size
        return BatchOptions(
            batch_size=batch_size,
            chunk_frames=preset.chunk_frames if self.chunk_frames is None else self.chunk_frames,
            left_context=preset.left_context if self.left_context is None else self.left_context,
            right_context=self.right_context,
            spec_augment=self.spec_augment,
        )

    def plan(self, seed: int) -> PlanOptions:
        """Return what the epoch plan needs; of resolved options."""
        assert self.batch_size is not None and self.chunk_frames is not None
        return PlanOptions(self.batch_size, self.chunk_frames, seed)

    def _share(self, recipe: Recipe, size: int | None) -> int | None:
        """Return a rank's part of the global batch; None where there is no global batch."""
        total = recipe.global_batch if self.global_batch is None else self.global_batch
        if total is None:
            return None
        assert size is not None, "a global batch is shared out by resolve(size)"
        if total % size:
            raise ConfigError(
                f"--global-batch {total}{'' if self.global_batch else ' (of the recipe)'}: does not divide "
                f"by {size} ranks; give a multiple of {size}, or --batch-size"
            )
        return total // size


@dataclass(frozen=True)
class OptimizerOptions:
    """The optimizer and its learning rate over epochs; what is not given comes from --recipe."""

    optimizer: OptimizerName | None = None
    """SGD with momentum, Adam, or AdamW; default: adam, with --recipe adpsgd-asr sgd."""
    learning_rate: float | None = None
    """Learning rate of the plateau; default 0.002 for adam and adamw, 0.1 for sgd, unless scaled as below."""
    base_learning_rate: float | None = None
    """Learning rate at --base-batch; the plateau's is this times global batch / base batch, and the warm-up
    begins at it.  Default with --recipe adpsgd-asr: 0.1."""
    base_batch: int | None = None
    """Segments a step, all ranks together, that --base-learning-rate suits; with --recipe adpsgd-asr 256."""
    momentum: float | None = None
    """Momentum of sgd; first beta of adam and adamw; default 0.9."""
    weight_decay: float = 0.0
    """L2 penalty (sgd, adam) or decoupled decay (adamw)."""
    max_gradient_norm: float = 1.0
    """Clip the gradient (mean over frames) to this norm; 0: never."""
    warmup_epochs: float | None = None
    """Epochs over which the learning rate rises linearly; default: 0, with --recipe adpsgd-asr 10/16 of
    --epochs."""
    warmup_from: float | None = None
    """Learning rate at the start of the warm-up; default: the base learning rate if there is one, else 0."""
    anneal_from: int | None = None
    """First epoch, counted from 0, with an annealed learning rate; -1, the default: two thirds of --epochs;
    with --recipe adpsgd-asr the first after the warm-up."""
    anneal_factor: float = math.sqrt(0.5)
    """Learning rate of an annealed epoch over that of the epoch before."""

    def __post_init__(self) -> None:
        if self.momentum is not None and not 0 <= self.momentum < 1:
            raise ConfigError(f"--momentum {self.momentum}: must lie in [0, 1)")
        for name in ("weight_decay", "max_gradient_norm"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"--{name.replace('_', '-')} {getattr(self, name)}: must not be negative")
        for name in ("base_learning_rate", "base_batch"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"--{name.replace('_', '-')} {value}: must be positive")
            if value is not None and self.learning_rate is not None:
                raise ConfigError(
                    f"--{name.replace('_', '-')} scales the learning rate, --learning-rate sets it: give one"
                )

    def resolve(self, recipe: Recipe, epochs: int, global_batch: int | None) -> OptimizerOptions:
        """Fill what was not given from `recipe`, for so many epochs and segments a step (None: unknown).

        Raises:
            ConfigError: a learning rate to be scaled that is not known, or that is another optimizer's.
        """
        peak = self._peak(recipe, global_batch)
        start = self.warmup_from
        if start is None:  # the rate that suits the base batch, as long as that is below the peak
            scale = self._scale(recipe, global_batch)
            start = 0.0 if scale is None else peak / max(scale, 1.0)
        warmup = recipe.warmup_share * epochs if self.warmup_epochs is None else self.warmup_epochs
        anneal_from = self.anneal_from
        if anneal_from is None:
            anneal_from = math.ceil(warmup) if recipe.warmup_share else -1
        return dataclasses.replace(
            self,
            optimizer=self.optimizer or recipe.optimizer,
            learning_rate=peak,
            base_learning_rate=None,
            base_batch=None,
            momentum=recipe.momentum if self.momentum is None else self.momentum,
            warmup_epochs=warmup,
            warmup_from=start,
            anneal_from=max(1, epochs * 2 // 3) if anneal_from < 0 else anneal_from,
        )

    def schedule(self) -> Schedule:
        """Return the learning rate over epochs; of resolved options."""
        assert self.learning_rate is not None and self.warmup_epochs is not None
        assert self.warmup_from is not None and self.anneal_from is not None
        return Schedule(
            learning_rate=self.learning_rate,
            warmup_epochs=self.warmup_epochs,
            warmup_from=self.warmup_from,
            anneal_from=self.anneal_from,
            anneal_factor=self.anneal_factor,
        )

    def _peak(self, recipe: Recipe, global_batch: int | None) -> float:
        """Return the learning rate of the plateau."""
        optimizer = self.optimizer or recipe.optimizer
        if self.learning_rate is not None:
            return self.learning_rate
        base = recipe.base_learning_rate if self.base_learning_rate is None else self.base_learning_rate
        scale = self._scale(recipe, global_batch)
        if base is None and scale is None:
            return 0.1 if optimizer == "sgd" else 0.002
        if base is None or scale is None:
            raise ConfigError("--base-learning-rate and --base-batch need each other: give both or neither")
        if self.base_learning_rate is None and optimizer != recipe.optimizer:
            raise ConfigError(
                f"--optimizer {optimizer}: the recipe's learning rate is for {recipe.optimizer}; "
                "give --learning-rate or --base-learning-rate"
            )
        return base * scale

    def _scale(self, recipe: Recipe, global_batch: int | None) -> float | None:
        """Return how many base batches a step has; None where the learning rate is not scaled."""
        base = recipe.base_batch if self.base_batch is None else self.base_batch
        if base is None:
            return None
        assert global_batch is not None, "the learning rate is scaled by resolve(size)"
        return global_batch / base


@dataclass(frozen=True)
class TrainOptions:
    """Everything that decides what a run computes, and what it needs to be repeated."""

    model: ModelOptions = field(default_factory=ModelOptions)
    batch: BatchOptions = field(default_factory=BatchOptions)
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    recipe: RecipeName = "none"
    """Options to train with where none are given; adpsgd-asr: SGD, large batch, learning rate scaled to it
    with a warm-up, as in arXiv 1904.04956 (recalled, not checked against the paper; docs/training.md)."""
    strategy: str = "gradient_averaging"
    """NAME or NAME:option=value,...: what ranks exchange and when (docs/strategies.md)."""
    backend: Literal["auto", "serial", "horovod", "mpi", "torch"] = "auto"
    """Communicator; auto takes horovod where it is installed, else mpi, and says so."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes the GPU of this local rank where there is one."""
    epochs: int | None = None
    """Passes over the training split; default: 12, with --recipe adpsgd-asr 16."""
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
    slow_ranks: str = ""
    """RANK:FACTOR,...: ranks that take so many times as long to compute, by sleeping: stragglers."""

    def __post_init__(self) -> None:
        for name, least in (
            ("epochs", 1),
            ("realign", 0),
            ("realign_epochs", 1),
            ("checkpoint_steps", 0),
            ("max_steps", 0),
            ("seed", 0),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"--{name.replace('_', '-')} {value}: must be at least {least}")
        _slow_ranks(self.slow_ranks)
        self.model.lstm()
        batch, optimizer = self._resolve(1)  # with any number of ranks: only divisibility depends on it
        optimizer.schedule()
        batch.plan(self.seed)

    @property
    def num_epochs(self) -> int:
        """Passes over the training split."""
        return find_recipe(self.recipe).epochs if self.epochs is None else self.epochs

    def resolve(self, size: int) -> TrainOptions:
        """Return these options with nothing left open, for data dealt to `size` ranks.

        What is given counts, else the recipe, else the preset and the defaults.  Only where the recipe or
        --global-batch or --base-batch is used does anything depend on `size`; without them the methods
        below may be called on options as they were given.

        Raises:
            ConfigError: a global batch that does not divide by `size`.
        """
        batch, optimizer = self._resolve(size)
        return dataclasses.replace(self, batch=batch, optimizer=optimizer, epochs=self.num_epochs)

    def _resolve(self, size: int | None) -> tuple[BatchOptions, OptimizerOptions]:
        recipe = find_recipe(self.recipe)
        batch = self.batch.resolve(self.model.base(), recipe, size)
        assert batch.batch_size is not None
        global_batch = None if size is None else batch.batch_size * size
        return batch, self.optimizer.resolve(recipe, self.num_epochs, global_batch)

    def optimizing(self) -> OptimizerOptions:
        """Return the optimizer's options with nothing left open."""
        return self._resolve(None)[1]

    def schedule(self) -> Schedule:
        """Return the learning rate over this run."""
        return self.optimizing().schedule()

    def batches(self) -> BatchOptions:
        """Return the batch options with nothing left open."""
        return self._resolve(None)[0]

    def plan(self) -> PlanOptions:
        """Return what the epoch plan needs."""
        return self.batches().plan(self.seed)

    def slowness(self, rank: int) -> float:
        """Return how many times as long as it takes `rank` pretends to compute."""
        return _slow_ranks(self.slow_ranks).get(rank, 1.0)

    def to_json(self, size: int | None = None) -> dict[str, Any]:
        """Return the options as JSON-like values; with `size` also, as `resolved`, what they come to."""
        values: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self), default=str))
        return values if size is None else {**values, "resolved": self.resolve(size).to_json()}

    def fingerprint(self) -> str:
        """Return a hash of all options: ranks compare it, and a resumed run must have the same.

        What they come to is hashed as well: a recipe that another version has changed is another run.
        """
        return hashlib.sha256(json.dumps(self.to_json(1), sort_keys=True).encode()).hexdigest()[:16]


def _slow_ranks(text: str) -> dict[int, float]:
    """Read `RANK:FACTOR,...`.  Raises ConfigError for anything else."""
    result = {}
    for part in filter(None, text.split(",")):
        rank, _, factor = part.partition(":")
        try:
            result[int(rank)] = float(factor)
        except ValueError:
            raise ConfigError(f"--slow-ranks {part}: write RANK:FACTOR, e.g. 1:5") from None
        if not 1 <= result[int(rank)] < math.inf or int(rank) < 0:
            raise ConfigError(f"--slow-ranks {part}: the factor is at least 1, the rank at least 0")
    return result
