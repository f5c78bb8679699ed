"""Open and close both ends of a job's feeding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from speechdp.comm.base import Communicator
from speechdp.comm.packets import Allocate, fresh
from speechdp.comm.startup.feeder_roles import Roles
from speechdp.data.loading.buffers import BufferPool
from speechdp.data.loading.source_options import SourceOptions
from speechdp.data.shards.dataset import Dataset
from speechdp.feeding.feeder import feed
from speechdp.feeding.feeder_link import FeederLink

#: Tensors smaller than this, in bytes, do not come from the pool.
_SMALL_BYTES = 1 << 16


@dataclass
class FeederConnection:
    """A trainer's link to its feeders, and the exit code that it sends them at the end."""

    link: FeederLink
    exit_code: int = 0


@contextmanager
def open_link(job: Communicator, roles: Roles, device: torch.device) -> Iterator[FeederConnection]:
    """Link this trainer to its feeders; at the end send them the exit code.  Collective over the job.

    The feeders call `serve_trainers` meanwhile.

    Args:
        job: all ranks of the job.
        roles: which ranks train and which feed.
        device: of the batches; for a GPU they arrive in page-locked memory.
    """
    channel = job.packets(_into(BufferPool(pin=device.type == "cuda")))
    connection = FeederConnection(FeederLink(channel, roles.feeders_of(job.rank)))
    try:
        yield connection
    except BaseException:
        connection.link.abandon()
        raise
    connection.link.close(connection.exit_code)
    channel.close()


def serve_trainers(job: Communicator, roles: Roles, dataset: Dataset, num_threads: int = 1) -> int:
    """Feed the trainers of this rank until they finish; return their exit code.  Collective over the job.

    Args:
        job: all ranks of the job.
        roles: which ranks train and which feed.
        dataset: the data.
        num_threads: preprocessing threads.

    Raises:
        as `feed`.
    """
    channel = job.packets()
    trainers = roles.trainers_of(job.rank)
    options = SourceOptions(num_threads=num_threads, num_ranks=len(trainers))
    exit_code = feed(channel, trainers, dataset, options)
    channel.close()
    return exit_code


def _into(pool: BufferPool) -> Allocate:
    def allocate(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        small = torch.Size(shape).numel() * dtype.itemsize < _SMALL_BYTES
        return fresh(shape, dtype) if small else pool.take(shape, dtype)

    return allocate
