"""The parts of a run that depend on its task: model, loss, options and model file."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from speechdp.comm.loss_tolerance import in_shares
from speechdp.data.loading.source import SplitSource
from speechdp.data.shards.dataset import TASK_OF, Dataset
from speechdp.data.transforms.preprocess import inputs_of
from speechdp.errors import ConfigError
from speechdp.labels.hmm import StateInventory
from speechdp.labels.kaldi_pdfs import classes_of, is_kaldi_pdfs
from speechdp.labels.state_tying import StateTying, tying_in
from speechdp.models.precision import Precision
from speechdp.models.without_weights import without_weights
from speechdp.options.run import TrainOptions
from speechdp.tasks.acoustic import AcousticTask, FullSumTask
from speechdp.tasks.base import Task, TaskData
from speechdp.tasks.model_file import ClassCounts, load_weights, shapes_of
from speechdp.tasks.registry import is_ours, made_network
from speechdp.train.session import Session

#: Ranks that are threads share a random generator: models made at the same time would get wrong weights.
_ONE_AT_A_TIME = threading.Lock()


def check_task(dataset: Dataset, options: TrainOptions) -> None:
    """Refuse data prepared for another task.  Raises ConfigError."""
    task, stored = options.task_class, dataset.stored
    if stored in task.trains_on:
        return
    if dataset.task == "acoustic" and not {"features", "audio"}.isdisjoint(task.trains_on):
        remedy = f"prepare them {'without' if stored == 'audio' else 'with'} --store audio"
    else:
        wanted = TASK_OF[task.trains_on[0]]
        remedy = f"add --task {dataset.task}, or prepare the recordings with --task {wanted}"
    raise ConfigError(
        f"{dataset.path}: holds {stored}, and --task {task.name} is trained on "
        f"{' or '.join(task.trains_on)}; {remedy}"
    )


def make_model(dataset: Dataset, options: TrainOptions) -> nn.Module:
    """Build the model with initial weights that depend only on the seed.

    Raises:
        ConfigError: the task says that `decode` reads its models, but `decode` could not rebuild this one.
    """
    task = options.make_task()
    data = task_data(dataset, options)
    with _ONE_AT_A_TIME:
        torch.manual_seed(options.seed)
        model = task.make_model(data)
        if task.decodes and not is_ours(options.task):
            _refuse_unlike_network(task, model, data)
    return model


def _refuse_unlike_network(task: Task, model: nn.Module, data: TaskData) -> None:
    """Refuse a model that `decode` would build differently from the task alone.  Raises ConfigError."""
    if not isinstance(task, AcousticTask):
        raise ConfigError(
            f"--task {task.name}: decode reads only models of tasks derived from AcousticTask; derive the "
            "class from it, or declare decodes = False"
        )
    if type(task).make_model in (AcousticTask.make_model, FullSumTask.make_model):
        return  # make_network has made it
    with torch.random.fork_rng(devices=[]):
        network = made_network(task, data.feature_dim, task.num_outputs(data))
    if shapes_of(model.state_dict()) != shapes_of(network.state_dict()):
        other = "another " if type(network) is type(model) else ""
        raise ConfigError(
            f"--task {task.name}: its model is a {type(model).__name__}, but decode would create "
            f"{other}{type(network).__name__}; create it in make_network(feature_dim, num_classes), as "
            "networks of your own are, or declare decodes = False in the task's class"
        )


def outline(dataset: Dataset, options: TrainOptions) -> nn.Module:
    """Return the model for inspecting its layers and sizes.  Raises as `make_model`.

    A model of our own tasks has no weights here, which takes neither time nor memory.  Another task may build
    its model from values that it computes, which exist on a real device only.
    """
    if not is_ours(options.task):
        return make_model(dataset, options)
    with without_weights():
        return make_model(dataset, options)


def check_precision(session: Session, options: TrainOptions) -> None:
    """Refuse a precision in which this rank's device cannot compute the model.  Raises ConfigError."""
    if options.precision == "fp32":
        return
    Precision(options.precision, session.device).check(outline(session.dataset, options))


def task_data(dataset: Dataset, options: TrainOptions) -> TaskData:
    """Return what the task gets to know about its data: the data set, the inputs and the targets' tying.

    Raises:
        ConfigError: the targets' state tying cannot be read, or the targets are of other phones.
    """
    tying = tying_in(options.alignments)
    if tying is not None and tying.inventory != StateInventory.load(dataset.classes_path):
        raise ConfigError(
            f"--alignments {options.alignments}: its phones are not those of {dataset.path}; give an "
            "alignment of these data"
        )
    return TaskData(dataset, options.inputs, tying)


def load_initial_weights(model: nn.Module, dataset: Dataset, options: TrainOptions) -> None:
    """Give a model the weights of `options.initial_model`, if there is one.

    If that model has states without context, and the targets have states in context, each class starts from
    the weights of the state it belongs to; see `_with_classes_of`.

    Raises:
        ConfigError: the initial model has other sizes, features or classes.
        RunError: the initial model is missing or damaged.
    """
    folder = options.initial_model
    if folder is None:
        return
    from speechdp.decode.origin import check_origin  # noqa: PLC0415

    trained = load_weights(folder)
    # --like alone puts all utterances into test.
    remedy = f"leave --initial-model out, or prepare the data with --like {folder} --split random:dev=0.1"
    if is_kaldi_pdfs(dataset.classes_path):
        remedy = "leave --initial-model out: Kaldi data prepared --like its run can only be scored"
    check_origin(trained.config, dataset, classes_of(dataset), remedy)
    weights, own = trained.weights, model.state_dict()
    tying = tying_in(options.alignments)
    if trained.tying is not None and options.aligns:
        raise ConfigError(
            f"--initial-model {folder}: already has context-dependent states; leave out "
            f"{' and '.join(options.aligning)} and give --alignments {folder}/alignments/tied, or give a "
            "model without such states"
        )
    if trained.tying is None and tying is not None:
        weights = _with_classes_of(tying, weights, own)
    elif (trained.tying and trained.tying.to_json()) != (tying and tying.to_json()):
        raise ConfigError(
            f"--initial-model {folder}: its context-dependent states are not those to be trained; give "
            "--alignments of that run (its alignments/tied), or leave --initial-model out"
        )
    same_sizes = {k: v.shape for k, v in weights.items()} == {k: v.shape for k, v in own.items()}
    if not same_sizes or inputs_of(trained.config) != options.inputs:
        raise ConfigError(
            f"--initial-model {folder}: has other sizes or inputs than the model to be trained; give the "
            f"options of that run ({_made_by(trained.config)}, --deltas, ...)"
        )
    model.load_state_dict(weights)


def _made_by(config: Mapping[str, Any]) -> str:
    """Return the options that determined a run's network, according to its model file."""
    if "lstm" in config:
        return "--preset, --layers, --cells"
    return f"--task {config['task']}{':' if config['options'] else ''}{config['options']}"


def _with_classes_of(
    tying: StateTying, weights: Mapping[str, Tensor], own: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Expand the weights of a model of states without context to the classes of tied states.

    The output layer has one row per state, (S, ...), and gets one per class, (C, ...): a copy of its state's
    row.  The K classes of a state share its probability at first, so their bias is lower by ln K.  Then the
    posteriors of a state's classes add up to the posterior of the state.

    Args:
        tying: mapping of classes to states.
        weights: weights of the model without context.
        own: weights of the model with context; their sizes show which tensors have a row per class.
    """
    states = torch.from_numpy(tying.states).long()
    shared_by = torch.bincount(states).log()[states]  # ln K of each class's state
    num_states, num_classes = tying.inventory.num_classes, tying.num_classes

    def of_classes(name: str, weight: Tensor) -> Tensor:
        wanted = own[name].shape if name in own else weight.shape
        if weight.shape[:1] != (num_states,) or wanted != (num_classes, *weight.shape[1:]):
            return weight
        is_bias = name.endswith("bias") and weight.dim() == 1
        return weight[states] - shared_by if is_bias else weight[states]

    return {name: of_classes(name, weight) for name, weight in weights.items()}


def check_initial_model(dataset: Dataset, options: TrainOptions) -> None:
    """Refuse an initial model that training cannot start from.  Raises as `load_initial_weights`."""
    if options.initial_model is not None:
        load_initial_weights(make_model(dataset, options), dataset, options)


def describe_data(dataset: Dataset, options: TrainOptions) -> dict[str, Any]:
    """Return the model file's description of the data; call it before training, to find missing files early.

    Raises:
        ConfigError: classes or symbols are missing or belong to other data, or a value is not JSON-like.
    """
    task = options.make_task()
    facts = task.describe_data(task_data(dataset, options))
    try:
        json.dumps(facts)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"--task {task.name}: describe_data() returns what a model file cannot hold ({error}); "
            "make it texts, Python's numbers, lists and dicts"
        ) from error
    return facts


def save_trained(
    session: Session,
    options: TrainOptions,
    source: SplitSource,
    run_dir: Path,
    model: nn.Module,
    facts: dict[str, Any],
) -> None:
    """Write the trained model with everything needed to use it.  Collective.

    Args:
        options: options of the training.
        source: the training split.
        run_dir: folder for the model file, which rank 0 writes.
        model: trained model, the same on every rank.
        facts: result of `describe_data`.

    Raises:
        RunError: the disk is full.
    """
    task, counts = options.make_task(), None
    if task.counts_classes:
        counts = count_classes(source, session, task_data(session.dataset, options).num_classes)
    if session.comm.rank == 0:
        task.save(run_dir, model, facts, counts)


def count_classes(source: SplitSource, session: Session, num_classes: int) -> ClassCounts:
    """Count frames and runs of each class over a split.  Collective: each rank counts its share."""
    comm = session.comm

    def count(share: int, num_shares: int) -> ClassCounts:
        counts = source.count_classes(num_classes, share, num_shares)
        comm.allreduce(torch.from_numpy(counts), name="class_counts")
        return ClassCounts(counts[0], counts[1])

    return in_shares(comm, count)
