"""What a model is trained for: a model, a loss, scores on held-out data, and a file in the end.

Loss and scores are sums over frames: right also when ranks hold different numbers of frames.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from speechdp.data.shards.layout import Stored
from speechdp.data.transforms.inputs import InputOptions
from speechdp.errors import ConfigError
from speechdp.extensions import write_options
from speechdp.labels.state_tying import StateTying
from speechdp.labels.transcript_hmm import TranscriptOptions
from speechdp.models.presets import Preset
from speechdp.tasks.metrics import Metric, TaskRecord

if TYPE_CHECKING:  # options know tasks, and --help and the launcher do without torch
    from torch import Tensor, nn

    from speechdp.data.loading.batch import Batch
    from speechdp.data.shards.dataset import Dataset
    from speechdp.tasks.model_file import ClassCounts

#: Tensors by name: what stages of a forward pass hand on.
Values: TypeAlias = "dict[str, Tensor]"
#: What the last stage puts out.
LOSS = "loss"


@dataclass(frozen=True)
class LossSum:
    """A loss as a sum and a count, never a mean: right also when ranks hold different numbers of frames.

    Attributes:
        total: scalar, in the unit of the task's loss, summed over frames; differentiable.
        num_frames: frames summed over.
    """

    total: Tensor
    num_frames: int


def loss_mistake(task: Task, returned: object) -> str | None:
    """Return, in a line, what is wrong with what a task's `loss` has returned; None: nothing.

    Asked at every step: cheap where nothing is.
    """
    if not isinstance(returned, LossSum):
        is_bare = getattr(returned, "requires_grad", False)
        found = "the tensor alone" if is_bare else _given_for_loss(returned)
    elif not (getattr(returned.total, "requires_grad", False) and returned.total.dim() == 0):
        found = f"a LossSum of {_given_for_loss(returned.total)}"
    elif not hasattr(returned.num_frames, "__float__"):  # numbers of numpy and tensors have it, too
        found = f"a LossSum of {returned.num_frames!r} frames"
    else:
        return None
    return (
        f"loss() of {_class_of(task)} must return LossSum(scalar tensor that requires grad, number of "
        f"frames); it returned {found}"
    )


def _given_for_loss(value: object) -> str:
    from speechdp.parallel.training_step import given_for_loss  # noqa: PLC0415

    return given_for_loss(value)


@dataclass(frozen=True)
class FrameScores:
    """Sums over held-out frames.

    Attributes:
        sums: of each of the task's metrics, by its key; divided by all ranks' frames they are its values.
        num_frames: frames scored.
        counts: of metrics that are means over some of the frames only, how many those are, by their keys.  A
            metric that has none on all ranks together is left out of what is recorded.
    """

    sums: dict[str, float]
    num_frames: int
    counts: dict[str, int] = field(default_factory=dict)

    def count(self, key: str) -> int:
        """Return how many frames a metric's sum is over."""
        return self.counts.get(key, self.num_frames)


def score_mistake(task: Task, returned: object) -> str | None:
    """Return, in a line, what is wrong with what a task's `score` has returned; None: nothing."""
    wanted = "FrameScores(sums by the keys of the metrics, number of frames), all of them numbers"
    if not isinstance(returned, FrameScores):
        found = "None" if returned is None else f"an object of type {type(returned).__name__}"
    elif (number := _no_number(returned)) is not None:
        found = f"FrameScores of which {number}"
    elif missing := [metric.key for metric in task.metrics if metric.key not in returned.sums]:
        return (
            f"--task {task.name}: score() returns no sum for {missing[0]}, a metric that the task declares; "
            "add it to FrameScores.sums, or leave the metric out"
        )
    else:
        return None
    return f"score() of {_class_of(task)} must return {wanted}; it returned {found}"


def _class_of(task: Task) -> str:
    return f"{type(task).__module__}:{type(task).__name__}"


def _no_number(scores: FrameScores) -> str | None:
    """Return what of scores is no number (numpy's are numbers, tensors are not), and what to do."""
    for what, values in (("the sums", scores.sums), ("the counts", scores.counts)):
        if not isinstance(values, Mapping):
            return f"{what} are an object of type {type(values).__name__}: give a dict"
    fields: dict[str, object] = {"num_frames": scores.num_frames}
    fields |= {f"the sum of {key}": value for key, value in scores.sums.items()}
    fields |= {f"the count of {key}": value for key, value in scores.counts.items()}
    for name, value in fields.items():
        if not isinstance(value, Real):
            remedy = ": give .item() of its sum" if hasattr(value, "item") else ""
            return f"{name} is an object of type {type(value).__name__}{remedy}"
    return None


@dataclass(frozen=True)
class Stage:
    """A part of the forward pass, which the profile times by itself.

    Attributes:
        name: as in a profile, e.g. "decoder".
        run: computes named outputs from the outputs of the stages before, and the batch.
    """

    name: str
    run: Callable[[Values, Batch], Values]


@dataclass(frozen=True)
class TaskData:
    """What a task is told of the data it is trained on.

    Attributes:
        dataset: the data directory.
        inputs: what of its features becomes the model's input.
        tying: what the targets are where states depend on context (--context); None: the data's own classes.
    """

    dataset: Dataset
    inputs: InputOptions
    tying: StateTying | None = None

    @property
    def feature_dim(self) -> int:
        """Size of a frame as batches hold it."""
        return self.dataset.feature_dim * self.inputs.copies

    @property
    def num_classes(self) -> int:
        """Number of classes of the targets, or of symbols."""
        return self.dataset.num_classes if self.tying is None else self.tying.num_classes

    def facts(self) -> dict[str, Any]:
        """Return what every model file says of the data."""
        return {
            "data_checksum": self.dataset.checksum,
            "features": self.dataset.features.to_dict(),
            "sampling_rate": self.dataset.sampling_rate,
        }

    def facts_of_input(self) -> dict[str, Any]:
        """Return what the file of a model that reads features says besides."""
        return {
            "feature_dim": self.feature_dim,
            "inputs": dataclasses.asdict(self.inputs),
            "num_classes": self.num_classes,
            **({} if self.tying is None else {"tying": self.tying.to_json()}),
        }


class Task(ABC):
    """What a model is trained for and judged by: derive a dataclass, whose fields are the task's options.

    An instance is the same on every rank.  `model` is what `make_model` has made.

    Attributes:
        metrics: what models are judged by on held-out data; the first is what they are chosen by.
        trains_on: what data directories hold that it can be trained on: features (or audio, to make them
            from) with a class for each frame as targets, or spectrograms with the symbols of their text.
        whole_utterances: it cannot learn parts of utterances, nor from inputs that are changed.
        decodes: whether `decode` reads its models, so that its runs may have a word error rate.
        transcripts: probabilities of the HMMs of transcripts that batches, of whole utterances then, hold
            (`Batch.transcripts`); None: they hold none.
        counts_classes: whether its model file needs to know how often each class occurs in the targets.
        batch_size: segments of a rank's batch where neither options nor a preset say.
        presets: names of models to start from, the first is the default (ours alone).
        model_options: options of `--help`'s group "model" that go with it (ours alone).
        modules: stages that the profile can run alone; empty for a task that it cannot take apart, as for a
            class with a `loss` or `make_model` of its own that declares neither `modules` nor `stages`:
            those of its base would time another model or loss.
    """

    metrics: ClassVar[tuple[Metric, ...]]
    trains_on: ClassVar[tuple[Stored, ...]] = ("features", "audio")
    whole_utterances: ClassVar[bool] = False
    decodes: ClassVar[bool] = False
    counts_classes: ClassVar[bool] = False
    batch_size: ClassVar[int] = 16
    presets: ClassVar[tuple[str, ...]] = ()
    model_options: ClassVar[tuple[str, ...]] = ()
    modules: ClassVar[tuple[str, ...]] = ()
    transcripts: ClassVar[TranscriptOptions | None] = None
    #: Its name on the command line, given where it is registered.
    name: ClassVar[str] = ""

    def __init_subclass__(cls, **others: Any) -> None:
        """Take from a class the modules of its base, where it has another model or loss than that."""
        super().__init_subclass__(**others)

        def distance(name: str) -> int:
            return next(number for number, base in enumerate(cls.__mro__) if name in vars(base))

        if min(map(distance, ("loss", "make_model"))) < min(map(distance, ("modules", "stages"))):
            cls.modules = ()

    @classmethod
    def of_preset(cls, preset: Preset, given: Mapping[str, Any]) -> Task:
        """Return the task with a preset's model, changed by the model options given."""
        raise NotImplementedError(f"{cls.__name__} has presets, and makes nothing of them")

    @classmethod
    def record(cls) -> TaskRecord:
        """Return what run.json says of it, from which reports take their columns."""
        return TaskRecord(cls.metrics, cls.decodes)

    @classmethod  # noqa: B027 - a task may need nothing
    def check_data(cls, dataset: Dataset) -> None:
        """Refuse data without what the task needs besides the shards.

        Raises:
            ConfigError, ShardError: names of classes or symbols that are missing, or other data's.
        """

    def for_data(self, dataset: Dataset) -> Task:
        """Return the task with what its scores need to know of the data; itself where that is nothing.

        Raises:
            ConfigError: as `check_data`.
        """
        return self

    @abstractmethod
    def make_model(self, data: TaskData) -> nn.Module:
        """Return a model with initial weights, drawn from torch's random numbers, on the CPU."""

    @abstractmethod
    def loss(self, model: Any, batch: Batch) -> LossSum:
        """Return the summed loss of a batch with at least one frame."""

    @abstractmethod
    def score(self, model: Any, batch: Batch) -> FrameScores:
        """Return the sums of all `metrics` on a batch; the model is in evaluation mode, gradients are off."""

    def stages(self, model: Any) -> tuple[Stage, ...]:
        """Return the stages of the forward pass, the loss last; only of a task with `modules`."""
        raise ConfigError(f"--task {self.name}: has no stages to be timed")

    def model_facts(self) -> dict[str, Any]:
        """Return what a profile says of the model besides its preset."""
        return {}

    def describe_data(self, data: TaskData) -> dict[str, Any]:
        """Return what the model file says of the data; before training, lest what is missing be found after.

        Returns:
            What JSON holds: texts, Python's numbers (not numpy's), true, false, None, lists and dicts.

        Raises:
            ConfigError: as `check_data`.
        """
        return {**data.facts(), **data.facts_of_input()}

    def save(self, run_dir: Path, model: Any, facts: dict[str, Any], counts: ClassCounts | None) -> None:
        """Write the finished model with what its use needs; rank 0 alone.

        Args:
            run_dir: the file is RUN/model.safetensors.
            model: trained.
            facts: what `describe_data` gave.
            counts: of the targets trained on, with `counts_classes`.

        Raises:
            RunError: the disk is full.
        """
        from speechdp.tasks.model_file import save_any_model  # noqa: PLC0415

        save_any_model(run_dir, model, {"task": self.name, "options": write_options(self), **facts})
