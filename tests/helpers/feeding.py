"""Jobs with feeders whose ranks are threads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from speechdp.comm.base import Communicator
from speechdp.comm.startup.feeder_roles import assign_roles
from speechdp.comm.threads.communicator import run_threads
from speechdp.data.loading.batch import Batch
from speechdp.data.shards.dataset import Dataset
from speechdp.feeding.fed_source import Feeders
from speechdp.feeding.feeder_link import FeederLink
from speechdp.feeding.feeders import open_link, serve_trainers

T = TypeVar("T")


@dataclass(frozen=True)
class Trainer:
    """A rank that trains: the communicator of those that do, its link, and what opens sources over it."""

    comm: Communicator
    link: FeederLink
    feeders: Feeders


def fed(
    num_trainers: int,
    num_feeders: int,
    dataset_of: Callable[[int], Dataset],
    train: Callable[[Trainer], T],
    *,
    exit_code: int = 0,
) -> list[T]:
    """Run `train` on ranks that are fed by others; return its results, in order of rank.

    Args:
        dataset_of: returns the data of a feeder, given its number from 0.
        exit_code: exit code of the trainers, and hence the feeders.
    """
    size = num_trainers + num_feeders
    roles = assign_roles(["host"] * size, num_feeders)

    def work(job: Communicator) -> T | int:
        is_feeder = job.rank in roles.feeders
        part = job.split(int(is_feeder))
        if is_feeder:
            return serve_trainers(job, roles, dataset_of(part.rank))
        with open_link(job, roles, torch.device("cpu")) as goodbye:
            goodbye.exit_code = exit_code
            return train(Trainer(part, goodbye.link, Feeders(goodbye.link)))

    results = run_threads(size, work)
    assert results[num_trainers:] == [exit_code] * num_feeders
    return results[:num_trainers]  # type: ignore[return-value]


def assert_same_batch(one: Batch, other: Batch) -> None:
    """Compare bit by bit."""
    assert torch.equal(one.features, other.features)
    assert torch.equal(one.targets, other.targets)
    assert torch.equal(one.lengths, other.lengths)
    assert one.num_frames == other.num_frames
    assert one.features.dtype == other.features.dtype and one.targets.dtype == other.targets.dtype
