"""Running statistics of batch normalisation: no parameters, so no strategy exchanges them; averaged here.

Each rank normalises by the statistics of its own batches while it trains, as torch's DistributedDataParallel
has it, and keeps their running means.  A model in evaluation mode uses those, so it is judged, and in the end
saved, with their average over the ranks.  Meanwhile every rank goes on with its own: what a run comes to does
not depend on how often it is evaluated or saved.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from speechdp.comm.base import Communicator


def running_statistics(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's floating-point buffers by name; models without batch normalisation have none."""
    return {name: buffer for name, buffer in model.named_buffers() if buffer.is_floating_point()}


def average_statistics(model: nn.Module, comm: Communicator, *, has_trained: bool) -> None:
    """Replace the running statistics by their mean over the ranks that have trained.  Collective.

    A rank that has gone astray, and whose parameters some strategies leave out of their averages, has
    statistics that are no numbers: it does not count, and takes the others' average.

    Args:
        model: the same on every rank.
        has_trained: whether this rank's model has seen batches; ranks that only serve have not.
    """
    buffers = list(running_statistics(model).values())
    if not buffers:
        return
    flat = torch.cat([buffer.detach().double().cpu().flatten() for buffer in buffers])
    counts = has_trained and bool(flat.isfinite().all())
    weight = torch.full((1,), float(counts), dtype=torch.float64)
    total = torch.cat([flat if counts else torch.zeros_like(flat), weight])
    comm.allreduce(total, name="running_statistics")
    if total[-1] == 0:
        return
    means = total[:-1] / total[-1]
    for buffer, mean in zip(buffers, torch.split(means, [b.numel() for b in buffers]), strict=True):
        buffer.copy_(mean.view(buffer.shape))


@contextmanager
def averaged_statistics(model: nn.Module, comm: Communicator, *, has_trained: bool) -> Iterator[None]:
    """Give the model the ranks' average for the block, then this rank's own again.  Collective.

    Statistics that are no numbers do not come back: they would stay so for ever.
    """
    own = {name: buffer.clone() for name, buffer in running_statistics(model).items()}
    average_statistics(model, comm, has_trained=has_trained)
    yield
    for name, buffer in running_statistics(model).items():
        if bool(own[name].isfinite().all()):
            buffer.copy_(own[name])


def load_statistics(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Restore this rank's `running_statistics` from its checkpoint."""
    for name, buffer in running_statistics(model).items():
        if name in saved:
            buffer.copy_(saved[name])
