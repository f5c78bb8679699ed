"""What depends on the task of a run: model, loss, options and model file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from speechdp.comm.loss_tolerance import in_shares
from speechdp.data.loading.source import SplitSource
from speechdp.data.shards.dataset import Dataset
from speechdp.errors import ConfigError
from speechdp.models.lstm_am import LstmAcousticModel
from speechdp.options.run import TrainOptions
from speechdp.tasks.base import Task, TaskData
from speechdp.tasks.model_file import ClassCounts
from speechdp.train.session import Session


def check_task(dataset: Dataset, options: TrainOptions) -> None:
    """Refuse data that are another task's.  Raises ConfigError."""
    task = options.task_class
    if dataset.stored not in task.trains_on:
        raise ConfigError(
            f"{dataset.path}: was prepared for --task {dataset.task}, not {task.name}; "
            f"add --task {dataset.task}, or prepare other data"
        )


def make_model(dataset: Dataset, options: TrainOptions) -> nn.Module:
    """Build the model with weights that depend on the seed alone."""
    torch.manual_seed(options.seed)
    return options.make_task().make_model(TaskData(dataset, options.inputs))


def make_acoustic_model(dataset: Dataset, options: TrainOptions) -> LstmAcousticModel:
    """Build an acoustic model with weights that depend on the seed alone."""
    model = make_model(dataset, options)
    assert isinstance(model, LstmAcousticModel)
    return model


def describe_data(dataset: Dataset, options: TrainOptions) -> dict[str, Any]:
    """Return what the model file says of the data; before training, lest a missing file be found after it.

    Raises:
        ConfigError: classes or symbols that are missing, or other data's.
    """
    return options.make_task().describe_data(TaskData(dataset, options.inputs))


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
