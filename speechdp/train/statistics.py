"""Running statistics of batch normalisation: no parameters, so no strategy exchanges them; averaged here.

Each rank normalises by the statistics of its own batches while it trains, as torch's DistributedDataParallel
has it, and keeps their running means.  A model in evaluation mode uses those, so they are averaged over the
ranks whenever a model is judged, saved or finished.  Running means are linear in what they are means of:
averaging them more often changes nothing but the last digits.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from speechdp.comm.base import Communicator


def running_statistics(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's floating-point buffers by name; models without batch normalisation have none."""
    return {name: buffer for name, buffer in model.named_buffers() if buffer.is_floating_point()}


def average_statistics(model: nn.Module, comm: Communicator, *, has_trained: bool) -> None:
    """Replace the running statistics by their mean over the ranks that have trained.  Collective.

    Args:
        model: the same on every rank.
        has_trained: whether this rank's model has seen batches; ranks that only serve have not.
    """
    buffers = list(running_statistics(model).values())
    if not buffers or comm.size == 1:
        return
    weight = torch.ones(1, dtype=torch.float64) * has_trained
    flat = torch.cat([buffer.detach().double().cpu().flatten() for buffer in buffers])
    total = torch.cat([flat * weight, weight])
    comm.allreduce(total, name="running_statistics")
    if total[-1] == 0:
        return
    means = total[:-1] / total[-1]
    for buffer, mean in zip(buffers, torch.split(means, [b.numel() for b in buffers]), strict=True):
        buffer.copy_(mean.view(buffer.shape))


def share_statistics(model: nn.Module, saved: Mapping[str, Tensor], comm: Communicator) -> None:
    """Take up the statistics that rank 0 has saved as "statistics.NAME".  Collective."""
    for name, buffer in running_statistics(model).items():
        value = saved.get(f"statistics.{name}", buffer).detach().cpu().clone()
        comm.broadcast(value, name=f"statistics.{name}")
        buffer.copy_(value)
