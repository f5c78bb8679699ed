"""Options of a training run: frozen dataclasses, one per component, checked together before step 1.

The docstring under a field is its help on the command line.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from speechdp.counting import counted
from speechdp.data.loading.source_request import Context, SourceRequest
from speechdp.data.plan.epoch_plan import PlanOptions
from speechdp.data.transforms.augment_options import AugmentOptions
from speechdp.data.transforms.inputs import InputOptions
from speechdp.errors import ConfigError
from speechdp.models.precision import PrecisionName
from speechdp.models.presets import Preset
from speechdp.options.batch import BatchOptions, LoadingOptions
from speechdp.options.faults import FaultOptions
from speechdp.options.model import ModelOptions
from speechdp.options.optimizer import OptimizerOptions
from speechdp.options.recipe import RecipeName, find_recipe
from speechdp.options.schedule import Schedule
from speechdp.options.seed import check_seed
from speechdp.options.shown import heading, shown
from speechdp.parallel.registry import StrategyChoice
from speechdp.tasks.base import Task
from speechdp.tasks.registry import task_class, task_options

RealignFrom = Literal["last", "throughout", "scratch"]

#: Options, by group, that earlier versions did not have. The fingerprint omits them at their defaults;
#: otherwise runs that those versions started could not be resumed.
_ADDED_LATER = (
    ("", "flat_start"),
    ("", "realign_criterion"),
    ("", "realign_from"),
    ("", "initial_model"),
    ("", "context"),
    ("", "tied_states"),
    ("", "precision"),
    ("", "cuda_graphs"),
    ("", "average_epochs"),
    ("model", "criterion"),
    ("model", "prior_scale"),
    ("model", "subsampling"),
)

_TIED_STATES = 1000
#: Parser of a strategy on the command line. It keeps the text; the code that uses the strategy parses it.
_STRATEGY_TEXT = tyro.constructors.PrimitiveConstructorSpec(
    nargs=1,
    metavar="NAME",
    instance_from_str=lambda words: StrategyChoice(words[0]),
    is_instance=lambda value: isinstance(value, StrategyChoice),
    str_from_instance=lambda choice: [choice.text],
)
#: Options of a training that makes no alignments after its first.
_WITHOUT_REALIGNMENT: dict[str, Any] = {
    "realign": 0,
    "realign_epochs": None,
    "realign_criterion": None,
    "realign_from": "last",
    "context": "none",
    "tied_states": None,
}


@dataclass(frozen=True)
class TrainOptions:
    """What to train, on which data, for how long, and how the ranks work together."""

    model: Annotated[ModelOptions, heading("model")] = field(default_factory=ModelOptions)
    batch: Annotated[BatchOptions, heading("batch")] = field(default_factory=BatchOptions)
    optimizer: Annotated[OptimizerOptions, heading("optimizer")] = field(default_factory=OptimizerOptions)
    inputs: Annotated[InputOptions, heading("model input")] = field(default_factory=InputOptions)
    augment: Annotated[AugmentOptions, heading("augmentation")] = field(default_factory=AugmentOptions)
    loading: Annotated[LoadingOptions, heading("data loading and sampling")] = field(
        default_factory=LoadingOptions
    )
    faults: Annotated[FaultOptions, heading("failure")] = field(default_factory=FaultOptions)
    task: Annotated[str, shown("{acoustic,synthesis}|NAME|MODULE:CLASS")] = "acoustic"
    """acoustic: a speech recognition model (LSTM over HMM states).
    synthesis: a text-to-speech model (Tacotron); needs data prepared with --task synthesis.
    NAME or MODULE:CLASS: a task of your own (docs/api.md); options follow it: NAME:OPTION=VALUE,..."""
    recipe: RecipeName = "none"
    """Set of defaults for the options below; options given explicitly take precedence.
    adpsgd-asr: 16 epochs of SGD with batch 2560 and a scaled, warmed-up learning rate (docs/training.md)."""
    strategy: Annotated[StrategyChoice, _STRATEGY_TEXT, shown("NAME[:OPTION=VALUE,...]")] = field(
        default_factory=lambda: StrategyChoice("gradient_averaging")
    )
    """What ranks exchange and when, e.g. model_averaging:period=16; docs/strategies.md lists all."""
    backend: Literal["auto", "serial", "horovod", "mpi", "torch"] = "auto"
    """Library the ranks communicate with.
    auto: horovod if installed, else mpi; torch: torch.distributed; serial: a single rank."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device each rank computes on; auto: the GPU of its local rank if there is one, else the CPU."""
    precision: PrecisionName = "fp32"
    """Number format of forward and backward passes, and of evaluation.
    Weights stay in float32, and so do exchanges unless the strategy has compression=.
    bf16: half precision by torch.autocast; fp16: likewise, with loss scaling (docs/training.md)."""
    cuda_graphs: Literal["auto", "off"] = "auto"
    """auto: on a GPU, recurrent layers train with CUDA graphs, captured for each batch shape.
    off: kernels are launched one by one, which takes less memory but often twice the time."""
    epochs: Annotated[int | None, shown("N", "12; 16 with --recipe adpsgd-asr")] = None
    """Passes over the training split."""
    average_epochs: Annotated[int, shown("N")] = 1
    """The model of the run is the mean of the models after the last N epochs; 1: the last model itself."""
    seed: Annotated[int, shown("SEED")] = 1
    """Seed for initial weights, data order and dropout."""
    initial_model: Annotated[Path | None, shown("RUN", "random weights")] = None
    """Start from the weights of the model in this run folder, which must have the same sizes and features."""
    train_split: Annotated[str, shown("SPLIT")] = "train"
    """Split to train on."""
    held_out: Annotated[str, shown("SPLIT")] = "dev"
    """Split to evaluate on after each epoch.
    Acoustic models: log-probability per frame and frame accuracy; synthesis: L1 error."""
    alignments: Annotated[Path | None, shown("DIR", "the targets in DATA")] = None
    """Train on the targets in this folder, e.g. RUN/alignments/K of an earlier run."""
    flat_start: bool = False
    """First align the transcripts from scratch, with Gaussian mixtures, instead of training on the targets in
    DATA.  For data prepared without alignments, whose targets only spread each transcript evenly."""
    realign: Annotated[int | Literal["auto"], shown("{ROUNDS,auto}")] = 0
    """Rounds of training and forced alignment before the actual training; 0: none.
    auto: until a round changes the class of fewer than 5 % of the frames, at most 6 rounds."""
    realign_epochs: Annotated[int | None, shown("N", "--epochs")] = None
    """Epochs in each round of --realign."""
    realign_criterion: Annotated[
        Literal["frame", "full-sum"] | None, shown("{frame,full-sum}", "--criterion")
    ] = None
    """Criterion of the first round of --realign.
    full-sum: that round learns from the transcripts alone, not from the targets in DATA."""
    realign_from: RealignFrom = "last"
    """Weights that each round of --realign starts from.
    last: those of the previous round; the actual training starts from initial weights.
    throughout: those of the previous round; the actual training starts from those of the last round.
    scratch: initial weights."""
    context: Literal["none", "left", "both"] = "none"
    """Neighbouring phones that HMM states depend on in the actual training; decision trees tie the states.
    left: the phone before; both: also the one after (triphones). Needs an alignment, e.g. --flat-start."""
    tied_states: Annotated[int | None, shown("N", "1000")] = None
    """Maximum number of classes that --context makes; fewer where a state would have too few frames."""
    max_steps: Annotated[int, shown("STEPS")] = 0
    """Stop after this many steps, for trials and timing; 0: train all epochs."""
    checkpoint_steps: Annotated[int, shown("STEPS")] = 0
    """Also save a checkpoint every STEPS steps, not only after each epoch; 0: only after each epoch."""
    slow_ranks: Annotated[str, shown("RANK:FACTOR,...", "none")] = ""
    """Simulate stragglers: each step of these ranks takes FACTOR times as long, by sleeping, e.g. 1:5."""

    def __post_init__(self) -> None:
        for name, least in (
            ("epochs", 1),
            ("average_epochs", 1),
            ("realign", 0),
            ("realign_epochs", 1),
            ("tied_states", 1),
            ("checkpoint_steps", 0),
            ("max_steps", 0),
        ):
            value = getattr(self, name)
            if value not in (None, "auto") and value < least:
                raise ConfigError(f"--{name.replace('_', '-')} {value}: must be at least {least}")
        self._check_average()
        check_seed(self.seed)
        _slow_ranks(self.slow_ranks)
        if self.batch.batch_frames and self.optimizer.base_batch is not None:
            raise ConfigError("--base-batch is in segments, --batch-frames in frames: give --learning-rate")
        self.make_task()  # refuses models of another task
        self._refuse_beside_task()
        if self.tied_states is not None and self.context == "none":
            raise ConfigError("--tied-states: goes with --context; leave it out")
        for name in ("realign_epochs", "realign_criterion", "realign_from"):
            if not self.realign and getattr(self, name) not in (None, "last"):
                raise ConfigError(f"--{name.replace('_', '-')}: goes with --realign; leave it out")
        if self.realign:
            if self.realign_criterion == "full-sum":
                self._refuse_cuts("leave out --realign-criterion full-sum")
            self._refuse_in_first_round()
        batch, optimizer = self._resolve(1)  # 1: any number of ranks will do, only divisibility depends on it
        optimizer.schedule()
        batch.plan(self.seed)

    def _check_average(self) -> None:
        """Refuse to average more epochs than the training has.  Raises ConfigError."""
        number = self.average_epochs
        if number > 1 and self.max_steps:
            raise ConfigError(
                f"--average-epochs {number}: not with --max-steps, which may end a training before its last "
                "epochs; leave one out"
            )
        if number > self.num_epochs:
            raise ConfigError(
                f"--average-epochs {number}: the training has {counted(self.num_epochs, 'epoch')}; "
                "average fewer, or give more --epochs"
            )

    @property
    def may_begin_from_model(self) -> bool:
        """Whether --initial-model can be used with this task and criterion."""
        return self.task_class.decodes and self.model.criterion != "ctc"

    def _refuse_beside_task(self) -> None:
        """Refuse options that do not apply to the task.  Raises ConfigError."""
        task = self.task_class
        if self.make_task().transcripts is not None:
            self._refuse_beside_transcripts()
        if task.whole_utterances:
            self._refuse_parts(task.name)
        elif self.aligns and not task.decodes:
            raise ConfigError(
                f"{self.aligning[0]}: not with --task {task.name}, whose models cannot align; leave it out, "
                "or align by a run of --task acoustic with --flat-start, and give its targets: "
                "--alignments RUN/alignments/0"
            )
        if self.initial_model is not None and not self.may_begin_from_model:
            raise ConfigError(
                "--initial-model: only for acoustic models of HMM states that can be decoded; leave it out"
            )
        self._refuse_two_beginnings()

    def _refuse_two_beginnings(self) -> None:
        """Refuse a flat start whose alignment nothing would use.  Raises ConfigError."""
        if self.flat_start and self.alignments is not None:
            raise ConfigError("--flat-start and --alignments: each sets the first alignment; leave one out")
        if self.flat_start and self.realign_criterion == "full-sum":
            raise ConfigError("--flat-start: --realign-criterion full-sum uses no alignment; leave one out")

    def first_round_model(self) -> ModelOptions:
        """Return the model options of the first round of --realign, with that round's criterion."""
        if self.realign_criterion is None:
            return self.model
        return dataclasses.replace(self.model, criterion=self.realign_criterion)

    def _refuse_in_first_round(self) -> None:
        """Refuse options that the first round of --realign cannot use.  Raises ConfigError."""
        dataclasses.replace(self, model=self.first_round_model(), **_WITHOUT_REALIGNMENT)

    def with_setting(
        self, strategy: StrategyChoice, batch_size: int = 0, learning_rate: float | None = None
    ) -> TrainOptions:
        """Return these options with another strategy, batch per rank and learning rate.

        Args:
            batch_size: segments; 0: keep the batch.
            learning_rate: learning rate of the plateau; None: keep it.
        """
        batch, optimizer = self.batch, self.optimizer
        if batch_size:
            batch = dataclasses.replace(batch, batch_size=batch_size)
        if learning_rate is not None:
            optimizer = dataclasses.replace(optimizer, learning_rate=learning_rate)
        return dataclasses.replace(self, strategy=strategy, batch=batch, optimizer=optimizer)

    def on_alignments(self, alignments: Path | None) -> TrainOptions:
        """Return the options of a run that trains on these targets and makes no alignment itself."""
        return dataclasses.replace(
            self,
            model=self._later_model(),
            alignments=alignments,
            flat_start=False,
            **_WITHOUT_REALIGNMENT,
        )

    def _later_model(self) -> ModelOptions:
        """Return the model options of all rounds after the first; only the first may use full-sum."""
        if self.realign_criterion != "full-sum":
            return self.model
        return dataclasses.replace(self.model, prior_scale=None)

    def _refuse_beside_transcripts(self) -> None:
        """Refuse options that conflict with learning whole transcripts.  Raises ConfigError.

        --context remains allowed with full-sum, because its decision trees are grown from an alignment even
        if the training itself needs none.
        """
        criterion = self.model.criterion
        if self.aligns and not (criterion == "full-sum" and self.context != "none" and not self.realign):
            name, remedy = self.aligning[0], ""
            if self.realign:
                remedy = ", or give --realign-criterion full-sum instead of --criterion"
            raise ConfigError(
                f"{name}: not with --criterion {criterion}, which uses no alignment; leave it out{remedy}"
            )
        self._refuse_cuts("give --criterion frame")

    def _refuse_cuts(self, instead: str) -> None:
        """Refuse to cut utterances if whole transcripts are learnt.  Raises ConfigError."""
        batches = self._resolve(1)[0]  # any number of ranks, as in __post_init__: cuts do not depend on it
        if batches.chunk_frames or batches.left_context or batches.right_context:
            raise ConfigError(
                "training on transcripts needs whole utterances: give --chunk-frames 0 --left-context 0 "
                f"--right-context 0, or {instead}"
            )

    def _refuse_parts(self, task: str) -> None:
        """Refuse, in one message, options that cut utterances or alter their sound.  Raises ConfigError."""
        given = [
            f"--{field.name.replace('_', '-')}"
            for group in (self.inputs, self.augment)
            for field in dataclasses.fields(group)
            if getattr(group, field.name) != field.default
        ]
        batch = self.batch
        for name, value in (
            ("chunk-frames", batch.chunk_frames),
            ("left-context", batch.left_context),
            ("right-context", batch.right_context),
            ("alignments", self.alignments),
            ("flat-start", self.flat_start),
            ("realign", self.realign),
            ("context", self.context != "none"),
        ):
            if value:
                given.append(f"--{name}")
        if given:
            raise ConfigError(
                f"{', '.join(given)}: not with --task {task}, which trains on whole utterances with their "
                f"texts; leave {'it' if len(given) == 1 else 'them'} out"
            )

    @property
    def task_class(self) -> type[Task]:
        """Class of the task that the model is trained for."""
        return task_class(self.task)

    def make_task(self) -> Task:
        """Return the task that the model is trained for, with the options of its model.

        Raises:
            ConfigError: another task's options, or invalid sizes.
        """
        return self._later_model().make_task(self.task_class, task_options(self.task))

    @property
    def preset(self) -> Preset:
        """The model to start from.  Raises ConfigError if it is another task's."""
        return self.model.base(self.task_class)

    @property
    def preset_name(self) -> str:
        """Name of the model to start from, or of the task if it has no presets (a user's own task)."""
        presets = self.task_class.presets
        return self.model.preset or (presets[0] if presets else self.task_class.name)

    @property
    def num_epochs(self) -> int:
        """Passes over the training split."""
        return find_recipe(self.recipe).epochs if self.epochs is None else self.epochs

    def resolve(self, size: int) -> TrainOptions:
        """Return these options with all defaults resolved, for `size` training ranks.

        Options given take precedence, then the recipe, then the preset and the defaults.  Values depend on
        `size` only with a recipe, --global-batch or --base-batch.  Without these, the methods below also work
        on unresolved options.

        Raises:
            ConfigError: a global batch that does not divide by `size`.
        """
        batch, optimizer = self._resolve(size)
        return dataclasses.replace(self, batch=batch, optimizer=optimizer, epochs=self.num_epochs)

    def _resolve(self, size: int | None) -> tuple[BatchOptions, OptimizerOptions]:
        recipe = find_recipe(self.recipe)
        batch = self.batch.resolve(self.preset, recipe, size)
        assert batch.batch_size is not None
        global_batch = None if size is None else batch.batch_size * size
        return batch, self.optimizer.resolve(recipe, self.num_epochs, global_batch)

    def optimizing(self) -> OptimizerOptions:
        """Return the optimizer's options with all defaults resolved."""
        return self._resolve(None)[1]

    def schedule(self) -> Schedule:
        """Return the learning rate schedule of this run."""
        return self.optimizing().schedule()

    def batches(self) -> BatchOptions:
        """Return the batch options with all defaults resolved."""
        return self._resolve(None)[0]

    def plan(self) -> PlanOptions:
        """Return the options of the epoch plan."""
        return self.batches().plan(self.seed)

    def source(self, split: str, *, augmented: bool) -> SourceRequest:
        """Return the request for a split's batches, for training (`augmented`) or for scoring."""
        batches = self.batches()
        return SourceRequest(
            split=split,
            alignments=self.alignments,
            context=Context(batches.left_context or 0, batches.right_context),
            inputs=self.inputs,
            augment=self.augment if augmented else AugmentOptions(),
            seed=self.seed,
            transcripts=self.make_task().transcripts,
        )

    @property
    def aligns(self) -> bool:
        """Whether the run makes targets before the actual training."""
        return bool(self.aligning)

    @property
    def aligning(self) -> tuple[str, ...]:
        """The options given that make targets before the actual training, e.g. --realign."""
        given = (
            ("--realign", bool(self.realign)),
            ("--flat-start", self.flat_start),
            ("--context", self.context != "none"),
        )
        return tuple(name for name, is_given in given if is_given)

    @property
    def max_classes(self) -> int:
        """Maximum number of classes that --context makes."""
        return _TIED_STATES if self.tied_states is None else self.tied_states

    @property
    def trusts_alignment(self) -> bool:
        """Whether the model learns each frame's class from the data's own alignment, unchanged."""
        task = self.make_task()
        own = self.aligns or self.alignments is not None
        return task.decodes and task.transcripts is None and not own

    def to_decode(self, split: str) -> str:
        """Return the split to decode after training; "" (none) if the task's models cannot be decoded."""
        return split if self.make_task().decodes else ""

    def slowness(self, rank: int) -> float:
        """Return the factor by which `rank` is slowed down; 1: not at all."""
        return _slow_ranks(self.slow_ranks).get(rank, 1.0)

    def check_warmup(self) -> None:
        """Refuse --warmup-from without a warm-up.  Call on unresolved options.  Raises ConfigError."""
        self.optimizer.check_warmup(find_recipe(self.recipe))

    def check_slow_ranks(self, size: int) -> None:
        """Refuse to slow down a rank that does not exist or does not train.  Raises ConfigError."""
        parts = self.strategy.parsed.roster(size).part_of_rank
        for rank in _slow_ranks(self.slow_ranks):
            if rank >= size:
                why = f"there is no rank {rank}, only {counted(size, 'rank')}, numbered from 0"
            elif parts[rank] is None:
                why = f"rank {rank} does not train with --strategy {self.strategy}"
            else:
                continue
            raise ConfigError(f"--slow-ranks {self.slow_ranks}: {why}; name another, or leave it out")

    def to_json(self, size: int | None = None) -> dict[str, Any]:
        """Return the options as JSON-like values; with `size`, also the resolved values under `resolved`."""
        values: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self), default=str))
        return values if size is None else {**values, "resolved": self.resolve(size).to_json()}

    def fingerprint(self) -> str:
        """Return a hash of all options that affect the result; a resumed run must have the same hash.

        The hash includes resolved values, so it differs if another version has changed the recipe.
        """
        loading = LoadingOptions(preprocess_on=self.loading.preprocess_on)  # a GPU rounds differently
        # Graphs compute the same values, and a run whose GPU is too small for them continues without.
        values = dataclasses.replace(
            self, loading=loading, faults=FaultOptions(), cuda_graphs="auto"
        ).to_json(1)
        defaults = TrainOptions().to_json()
        for part in (values, values["resolved"]):
            _leave_out_added(part, defaults)
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def _leave_out_added(values: dict[str, Any], defaults: dict[str, Any]) -> None:
    """Remove the options of _ADDED_LATER that are at their defaults."""
    for group, name in _ADDED_LATER:
        own, usual = (options[group] if group else options for options in (values, defaults))
        if own[name] == usual[name]:
            del own[name]


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
            raise ConfigError(f"--slow-ranks {part}: the factor must be at least 1, the rank at least 0")
    return result
