"""What depends on the task of a run: model, loss, options and model file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from speechdp.comm.loss_tolerance import in_shares
from speechdp.data.loading.source import SplitSource
from speechdp.data.shards.dataset import Dataset
from speechdp.errors import ConfigError
from speechdp.options.run import TrainOptions
from speechdp.tasks.base import Task, TaskData
from speechdp.tasks.model_file import ClassCounts
from speechdp.train.session import Session


def check_task(dataset: Dataset, options: TrainOptions) -> None:
    """Refuse data that are another task's.  Raises ConfigError."""
    task, stored = options.task_class, dataset.stored
    if stored in task.trains_on:
        return
    if dataset.task == "acoustic" and not {"features", "audio"}.isdisjoint(task.trains_on):
        remedy = f"prepare them {'without' if stored == 'audio' else 'with'} --store audio"
    else:
        remedy = f"add --task {dataset.task}, or prepare other data"
    raise ConfigError(
        f"{dataset.path}: holds {stored}, and --task {task.name} is trained on "
        f"{' or '.join(task.trains_on)}; {remedy}"
    )


def make_model(dataset: Dataset, options: TrainOptions) -> nn.Module:
    """Build the model with weights that depend on the seed alone."""
    torch.manual_seed(options.seed)
    return options.make_task().make_model(TaskData(dataset, options.inputs))


def describe_data(dataset: Dataset, options: TrainOptions) -> dict[str, Any]:
    """Return what the model file says of the data; before training, lest a missing file be found after it.

    Raises:
        ConfigError: classes or symbols that are missing, or other data's; what the file cannot hold.
    """
    task = options.make_task()
    facts = task.describe_data(TaskData(dataset, options.inputs))
    try:
        json.dumps(facts)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"--task {task.name}: describe_data() returns what a model file cannot hold ({error}); "
            "make it texts, Python's numbers, lists and dicts"
        ) from error
    return facts


def save_trained(
    session: Session, task: Task, source: SplitSource, run_dir: Path, model: nn.Module, facts: dict[str, Any]
) -> None:
    """Write the trained model with what its use needs.  Collective.

    Args:
        task: what the model was trained for.
        source: the split trained on.
        run_dir: where the model file goes, written by rank 0.
        model: trained; the same on every rank.
        facts: what `describe_data` gave.

    Raises:
        RunError: the disk is full.
    """
    counts = count_classes(source, session) if task.counts_classes else None
    if session.comm.rank == 0:
        task.save(run_dir, model, facts, counts)


def count_classes(source: SplitSource, session: Session) -> ClassCounts:
    """Count frames and runs of each class over a split.  Collective: each rank counts its share."""
    comm = session.comm

    def count(share: int, num_shares: int) -> ClassCounts:
        counts = source.count_classes(session.dataset.num_classes, share, num_shares)
        comm.allreduce(torch.from_numpy(counts), name="class_counts")
        return ClassCounts(counts[0], counts[1])

    return in_shares(comm, count)
