"""The base class of tasks: a model, a loss, scores on held-out data, and the file of the finished model.

Loss and scores are sums over frames, so they are correct when ranks hold different numbers of frames.
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

if TYPE_CHECKING:  # options import tasks, and --help and the launcher do without torch
    from torch import Tensor, nn

    from speechdp.data.loading.batch import Batch
    from speechdp.data.shards.dataset import Dataset
    from speechdp.tasks.model_file import ClassCounts

#: Tensors by name: what a stage of the forward pass passes to the next.
Values: TypeAlias = "dict[str, Tensor]"
#: Name of the last stage's output.
LOSS = "loss"


@dataclass(frozen=True)
class LossSum:
    """A loss as a sum and a count, never a mean: correct when ranks hold different numbers of frames.

    Attributes:
        total: scalar, in the unit of the task's loss, summed over frames; differentiable.
        num_frames: frames summed over.
    """

    total: Tensor
    num_frames: int


def loss_mistake(task: Task, returned: object) -> str | None:
    """Describe in one line what is wrong with the value a task's `loss` returned; None: nothing.

    Called at every step, so it is cheap if nothing is wrong.
    """
    if not isinstance(returned, LossSum):
        is_bare = getattr(returned, "requires_grad", False)
        found = "the tensor alone" if is_bare else _given_for_loss(returned)
    elif not (getattr(returned.total, "requires_grad", False) and returned.total.dim() == 0):
        found = f"a LossSum of {_given_for_loss(returned.total)}"
    elif not hasattr(returned.num_frames, "__float__"):  # numpy numbers and tensors have it, too
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
        sums: sum of each of the task's metrics, by its key; divided by all ranks' frames it is the metric's
            value.
        num_frames: frames scored.
        counts: number of frames of metrics that are means over only some frames, by key.  A metric with no
            frames on any rank is not recorded.
    """

    sums: dict[str, float]
    num_frames: int
    counts: dict[str, int] = field(default_factory=dict)

    def count(self, key: str) -> int:
        """Return the number of frames that a metric's sum is over."""
        return self.counts.get(key, self.num_frames)


def score_mistake(task: Task, returned: object) -> str | None:
    """Describe in one line what is wrong with the value a task's `score` returned; None: nothing."""
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
    """Say which part of the scores is not a number (numpy's are, tensors are not), and what to do."""
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
    """A part of the forward pass that the profile times separately.

    Attributes:
        name: name in the profile, e.g. "decoder".
        run: computes named outputs from the batch and the outputs of earlier stages.
    """

    name: str
    run: Callable[[Values, Batch], Values]


@dataclass(frozen=True)
class TaskData:
    """What a task can read about the data it is trained on.

    Attributes:
        dataset: the data directory.
        inputs: how its features become the model's input.
        tying: the targets if states depend on context (--context); None: the data's own classes.
    """

    dataset: Dataset
    inputs: InputOptions
    tying: StateTying | None = None

    @property
    def feature_dim(self) -> int:
        """Number of values in a frame of a batch."""
        return self.dataset.feature_dim * self.inputs.copies

    @property
    def num_classes(self) -> int:
        """Number of classes of the targets, or number of symbols."""
        return self.dataset.num_classes if self.tying is None else self.tying.num_classes

    def facts(self) -> dict[str, Any]:
        """Return what every model file records about the data."""
        return {
            "data_checksum": self.dataset.checksum,
            "features": self.dataset.features.to_dict(),
            "sampling_rate": self.dataset.sampling_rate,
        }

    def facts_of_input(self) -> dict[str, Any]:
        """Return what the file of a model that reads features records in addition."""
        return {
            "feature_dim": self.feature_dim,
            "inputs": dataclasses.asdict(self.inputs),
            "num_classes": self.num_classes,
            **({} if self.tying is None else {"tying": self.tying.to_json()}),
        }


class Task(ABC):
    """What a model is trained for and evaluated by.  Derive a dataclass; its fields are the task's options.

    An instance is the same on every rank.  `model` is what `make_model` returned.

    Attributes:
        metrics: metrics on held-out data; models are chosen by the first.
        trains_on: contents of data directories that it can be trained on: features (or audio, to compute them
            from) with a class for each frame as target, or spectrograms with the symbols of their text.
        whole_utterances: the task learns only from whole utterances with unchanged inputs; options that cut,
            augment or otherwise transform them are refused.
        decodes: whether `decode` reads its models, so its runs may have a word error rate.
        transcripts: probabilities in the transcripts' HMMs.  Batches then hold whole utterances and these
            HMMs (`Batch.transcripts`); None: batches hold no HMMs.
        counts_classes: whether its model file must hold how often each class occurs in the targets.
        batch_size: default number of segments in a rank's batch, if neither options nor a preset give one.
        presets: names of models to start from, the first is the default (only in our own tasks).
        model_options: options in `--help`'s group "model" that apply to it (only in our own tasks).
        modules: stages that the profile can run alone.  Empty for a task that the profile cannot split, and
            for a class that overrides `loss` or `make_model` without declaring `modules` or `stages`: those
            of its base would time another model or loss.
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
    #: Name on the command line, set when the task is registered.
    name: ClassVar[str] = ""

    def __init_subclass__(cls, **others: Any) -> None:
        """Clear the modules that a class inherits if it has another model or loss than their base."""
        super().__init_subclass__(**others)

        def distance(name: str) -> int:
            return next(number for number, base in enumerate(cls.__mro__) if name in vars(base))

        if min(map(distance, ("loss", "make_model"))) < min(map(distance, ("modules", "stages"))):
            cls.modules = ()

    @classmethod
    def of_preset(cls, preset: Preset, given: Mapping[str, Any]) -> Task:
        """Return the task with a preset's model, changed by the given model options."""
        raise NotImplementedError(f"{cls.__name__} has presets, and makes nothing of them")

    @classmethod
    def record(cls) -> TaskRecord:
        """Return what run.json records about the task; reports take their columns from it."""
        return TaskRecord(cls.metrics, cls.decodes)

    @classmethod  # noqa: B027 - a task may need nothing
    def check_data(cls, dataset: Dataset) -> None:
        """Refuse data without what the task needs beside the shards.

        Raises:
            ConfigError, ShardError: the names of classes or symbols are missing, or belong to other data.
        """

    def for_data(self, dataset: Dataset) -> Task:
        """Return the task with what its scores need from the data; the task itself if that is nothing.

        Raises:
            ConfigError: as `check_data`.
        """
        return self

    @abstractmethod
    def make_model(self, data: TaskData) -> nn.Module:
        """Return a model on the CPU with initial weights, drawn from torch's random numbers."""

    @abstractmethod
    def loss(self, model: Any, batch: Batch) -> LossSum:
        """Return the summed loss of a batch with at least one frame."""

    @abstractmethod
    def score(self, model: Any, batch: Batch) -> FrameScores:
        """Return the sums of all `metrics` on a batch; the model is in evaluation mode, gradients are off."""

    def stages(self, model: Any) -> tuple[Stage, ...]:
        """Return the stages of the forward pass, the loss last.  Only for tasks with `modules`."""
        raise ConfigError(f"--task {self.name}: has no stages to be timed")

    def model_facts(self) -> dict[str, Any]:
        """Return what a profile shows about the model beside its preset."""
        return {}

    def describe_data(self, data: TaskData) -> dict[str, Any]:
        """Return what the model file records about the data.

        Called before training, so that missing files are found then and not after it.

        Returns:
            JSON values: strings, Python's numbers (not numpy's), true, false, None, lists and dicts.

        Raises:
            ConfigError: as `check_data`.
        """
        return {**data.facts(), **data.facts_of_input()}

    def save(self, run_dir: Path, model: Any, facts: dict[str, Any], counts: ClassCounts | None) -> None:
        """Write the finished model with everything its use needs; on rank 0 alone.

        Args:
            run_dir: folder in which model.safetensors is written.
            model: trained model.
            facts: what `describe_data` returned.
            counts: class counts of the training targets, with `counts_classes`.

        Raises:
            RunError: the disk is full.
        """
        from speechdp.tasks.model_file import save_any_model  # noqa: PLC0415

        save_any_model(run_dir, model, {"task": self.name, "options": write_options(self), **facts})
