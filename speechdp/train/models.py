"""What depends on the task of a run: model, loss, options and model file."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import nn

from speechdp.comm.loss_tolerance import in_shares
from speechdp.data.loading.source import SplitSource
from speechdp.data.loading.source_options import make_preprocessor
from speechdp.data.shards.dataset import Dataset
from speechdp.errors import ConfigError
from speechdp.labels.kaldi_pdfs import classes_of
from speechdp.labels.symbols import symbols_of
from speechdp.models.lstm_am import LstmAcousticModel
from speechdp.models.tacotron.model import Tacotron
from speechdp.options.run import TrainOptions
from speechdp.tasks.acoustic import AcousticTask
from speechdp.tasks.base import Task
from speechdp.tasks.synthesis import SynthesisTask
from speechdp.train.model_file import ClassCounts, save_model, save_synthesis_model
from speechdp.train.session import Session


def check_task(dataset: Dataset, options: TrainOptions) -> None:
    """Refuse data that are another task's.  Raises ConfigError."""
    if dataset.task != options.task:
        raise ConfigError(
            f"{dataset.path}: was prepared for --task {dataset.task}, not {options.task}; "
            f"add --task {dataset.task}, or prepare other data"
        )


def make_model(dataset: Dataset, options: TrainOptions) -> nn.Module:
    """Build the model with weights that depend on the seed alone."""
    return (make_acoustic_model if options.task == "acoustic" else make_tacotron)(dataset, options)


def make_tacotron(dataset: Dataset, options: TrainOptions) -> Tacotron:
    """Build a synthesis model with weights that depend on the seed alone."""
    torch.manual_seed(options.seed)
    features = dataset.features
    return Tacotron(dataset.num_classes, features.num_mel_bins, features.linear_dim, options.model.tacotron())


def make_acoustic_model(dataset: Dataset, options: TrainOptions) -> LstmAcousticModel:
    """Build an acoustic model with weights that depend on the seed alone."""
    torch.manual_seed(options.seed)
    input_dim = make_preprocessor(dataset, options.source(options.train_split, augmented=False)).output_dim
    return LstmAcousticModel(input_dim, dataset.num_classes, options.model.lstm())


def make_task(options: TrainOptions) -> Task:
    """Return what the model is trained for."""
    return AcousticTask() if options.task == "acoustic" else SynthesisTask(options.model.guide())


def describe_data(dataset: Dataset, options: TrainOptions) -> dict[str, Any]:
    """Return what the model file says of the data; before training, lest a missing file be found after it.

    Raises:
        ConfigError: classes or symbols that are missing, or other data's.
    """
    facts = {
        "data_checksum": dataset.checksum,
        "features": dataset.features.to_dict(),
        "sampling_rate": dataset.sampling_rate,
    }
    if options.task == "synthesis":
        return {**facts, "symbols": symbols_of(dataset).to_dict()}
    return {
        **facts,
        "feature_dim": dataset.feature_dim * options.inputs.copies,
        "inputs": dataclasses.asdict(options.inputs),
        "num_classes": dataset.num_classes,
        "classes_sha256": classes_of(dataset).sha256,
    }


def save_trained(
    session: Session, source: SplitSource, run_dir: Path, model: nn.Module, facts: dict[str, Any]
) -> None:
    """Write the trained model with what its use needs.  Collective.

    Args:
        source: the split trained on.
        run_dir: where the model file goes, written by rank 0.
        model: trained; the same on every rank.
        facts: what `describe_data` gave.

    Raises:
        RunError: the disk is full.
    """
    if isinstance(model, Tacotron):
        if session.comm.rank == 0:
            save_synthesis_model(run_dir, model, facts)
        return
    assert isinstance(model, LstmAcousticModel)
    counts = count_classes(source, session)
    if session.comm.rank == 0:
        save_model(run_dir, model, counts, facts)


def count_classes(source: SplitSource, session: Session) -> ClassCounts:
    """Count frames and runs of each class over a split.  Collective: each rank counts its share."""
    comm = session.comm

    def count(share: int, num_shares: int) -> ClassCounts:
        counts = source.count_classes(session.dataset.num_classes, share, num_shares)
        comm.allreduce(torch.from_numpy(counts), name="class_counts")
        return ClassCounts(counts[0], counts[1])

    return in_shares(comm, count)
