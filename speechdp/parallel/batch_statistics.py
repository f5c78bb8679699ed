"""Average running statistics, as of batch normalisation: not parameters, so no strategy exchanges them.

While it trains, each rank normalises by the statistics of its own batches, as torch's
DistributedDataParallel does, and keeps their running means.  A model in evaluation mode uses those means, so
it is evaluated, and finally saved, with their average over the ranks.  Every rank keeps its own meanwhile:
the result of a run does not depend on how often it is evaluated or saved.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from speechdp.comm.base import Communicator
from speechdp.comm.staging import as_bytes
from speechdp.errors import ConfigError
from speechdp.remedies import backend


def running_statistics(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's floating-point buffers by name: those that this rank's batches may have changed."""
    return {name: buffer for name, buffer in model.named_buffers() if buffer.is_floating_point()}


def refuse_unsynchronised(model: nn.Module, comm: Communicator, *, together: bool) -> None:
    """Refuse torch's SyncBatchNorm where it would silently not exchange, or could not.

    Args:
        model: on the device that it is trained on.
        together: whether ranks take their steps together; otherwise they would wait in its exchange for ever.

    Raises:
        ConfigError: the model has one that is refused.
    """
    if comm.size == 1:
        return
    for name, module in model.named_modules():
        if not isinstance(module, nn.SyncBatchNorm):
            continue
        on_cpu = all(parameter.device.type == "cpu" for parameter in model.parameters())
        if on_cpu or not together or not torch.distributed.is_initialized():
            raise ConfigError(
                f"the model's {name or 'only layer'} is a torch SyncBatchNorm, which works only with "
                f"torch.distributed ({backend('torch')}), on GPUs, and if all ranks step together; use "
                "BatchNorm instead (leave out convert_sync_batchnorm): each rank then normalises with its "
                "own batches, and running statistics are averaged for evaluations"
            )


def average_statistics(model: nn.Module, comm: Communicator, *, has_trained: bool) -> None:
    """Replace the running statistics by their mean over the ranks that have trained.  Collective.

    A rank whose statistics are NaN or infinite has diverged, and some strategies leave its parameters out of
    their averages.  It does not count here either, and takes the others' average.

    Args:
        model: the same on every rank.
        has_trained: whether this rank's model has seen batches; False for ranks that only serve.
    """
    buffers = _differing(model, comm)
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


def _differing(model: nn.Module, comm: Communicator) -> list[Tensor]:
    """Return the buffers in which ranks differ: statistics of their batches.  Collective.

    Leaves out buffers whose mean has no meaning: constants (the same on all ranks), masks (finite on no
    rank), and tables that grow with what a rank has seen (of another shape on another rank).
    """
    buffers = running_statistics(model)
    if not buffers or comm.size == 1:
        return []
    ranks = comm.allgather_object({name: _mark(buffer) for name, buffer in buffers.items()})
    found = []
    for name, buffer in buffers.items():
        marks = [marks.get(name, {}) for marks in ranks]
        is_one_shape = all(mark.get("shape") == list(buffer.shape) for mark in marks)
        is_constant = all(mark == marks[0] for mark in marks)
        if is_one_shape and not is_constant and any(mark["is_finite"] for mark in marks):
            found.append(buffer)
    return found


def _mark(buffer: Tensor) -> dict[str, Any]:
    values = buffer.detach().cpu().contiguous()
    return {
        "shape": list(values.shape),
        "is_finite": bool(values.isfinite().all()),
        "checksum": hashlib.sha256(as_bytes(values).numpy().data).hexdigest(),
    }


@contextmanager
def averaged_statistics(model: nn.Module, comm: Communicator, *, has_trained: bool) -> Iterator[None]:
    """Give the model the ranks' average inside the block, then its own statistics again.  Collective.

    Statistics that are not finite are not restored: they would stay so for ever.
    """
    own = {name: buffer.clone() for name, buffer in running_statistics(model).items()}
    try:
        average_statistics(model, comm, has_trained=has_trained)
        yield
    finally:
        load_buffers(model, {name: kept for name, kept in own.items() if bool(kept.isfinite().all())})


def load_buffers(model: nn.Module, kept: Mapping[str, Tensor]) -> None:
    """Restore a model's buffers from copies of some of them; a table that has grown stays as it is."""
    for name, buffer in model.named_buffers():
        copy = kept.get(name)
        # An expanded buffer cannot be written to, and nothing has changed it.
        if copy is not None and copy.shape == buffer.shape and not torch.equal(copy, buffer):
            buffer.copy_(copy)
