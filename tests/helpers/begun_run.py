"""A run of two ranks that was interrupted after its first epoch, made in this process."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

import torch
import tyro

from speechdp.checkpoint.state import RankState, load_checkpoint
from speechdp.cli.train import TrainCommand
from speechdp.comm.base import Communicator
from speechdp.comm.threads.communicator import run_threads
from speechdp.data.shards.dataset import Dataset
from speechdp.parallel.run_files import Metrics
from speechdp.tasks.metrics import Metric
from speechdp.train.progress import SilentReporter
from speechdp.train.run import train_run
from speechdp.train.session import Session
from tests.helpers.slow_disk import checkpoints_completed

SIZE = 2


class DeliberateError(Exception):
    """Ends the run."""


class _Interrupting(SilentReporter):
    """Ends the run at its first step after an evaluation."""

    def __init__(self) -> None:
        self._evaluated = False

    def evaluated(self, metrics: Metrics, held_out: Sequence[Metric]) -> None:
        self._evaluated = True

    def step(self, epoch: float, frames: int, loss: float | None) -> None:
        if self._evaluated:
            raise DeliberateError


def begin_run(dataset: Dataset, run: Path, options: Sequence[str]) -> None:
    """Leave a run that `train DATA RUN OPTIONS --resume` over two ranks continues."""
    command = tyro.cli(
        TrainCommand,
        args=["data", "run", *options],
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes),
    )

    def train(comm: Communicator) -> None:
        with contextlib.suppress(DeliberateError):
            session = Session(dataset, comm, torch.device("cpu"), _Interrupting())
            train_run(session, command.options, run)

    with checkpoints_completed():
        run_threads(SIZE, train)
    assert (run / "run.json").is_file() and not (run / "completed.json").exists()


def load_last_checkpoint(run: Path) -> list[RankState]:
    """Load the last checkpoint as every rank would; it must be complete and usable."""

    def load(comm: Communicator) -> RankState:
        notices: list[str] = []
        state = load_checkpoint(run, comm, notices)
        assert state is not None and notices == [], notices
        return state

    states = run_threads(SIZE, load)
    assert bool(states[0].tensors["parameters"].isfinite().all())
    return states
