"""The mean of the models after the last epochs, which replaces the final model (--average-epochs)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from speechdp.checkpoint.state import RankState, split_state
from speechdp.comm.base import Communicator
from speechdp.parallel.batch_statistics import load_buffers, running_statistics
from speechdp.parallel.replica import Replica
from speechdp.parallel.strategy import part_of

_NAME = "epoch_average"


class EpochAverage:
    """Adds up a run's models after each of its last epochs; the last of them is the final model.

    The sums are float64 in host memory, on rank 0 alone: 8 bytes per parameter.  So only the mean itself is
    rounded, and a GPU holds nothing more.  Running statistics (of batch normalisation) are averaged like
    parameters.  Other buffers stay those of the final model: counts of batches, and tables that have grown.

    Args:
        wanted: number of models in the mean; 1: the final model is left unchanged.
        num_epochs: number of epochs of the run.
        comm: the ranks.

    Example:
        >>> average = EpochAverage(2, 3, comm)
        >>> average.note(1, replica, model)  # too early
        >>> average.note(2, replica, model)
        >>> average.conclude(replica, model)  # after the third epoch
        2
    """

    def __init__(self, wanted: int, num_epochs: int, comm: Communicator) -> None:
        self._first, self._num_epochs, self._comm = num_epochs - wanted + 1, num_epochs, comm
        self._num_models = 0
        #: Both stay empty on ranks other than 0.
        self._parameters: Tensor | None = None
        self._statistics: dict[str, Tensor] = {}

    def note(self, epochs_done: float, replica: Replica, model: nn.Module) -> None:
        """Add the model that was just scored, if one of the epochs to average ends here.

        The last epoch's model is not added: if a strategy's `finish` changes it, it is not the final model.

        Args:
            epochs_done: epochs done; a fraction if a run pauses within an epoch.
            replica: replica with the scored parameters.
            model: scored model, with the ranks' average of its running statistics.
        """
        if self._first <= epochs_done < self._num_epochs and float(epochs_done).is_integer():
            self._add(replica, model)

    def _add(self, replica: Replica, model: nn.Module) -> None:
        self._num_models += 1
        if self._comm.rank != 0:
            return
        values, shown = replica.parameters.values.detach(), running_statistics(model)
        if self._parameters is None:
            self._parameters = _sum_from(values)
            self._statistics = {name: _sum_from(x) for name, x in shown.items()}
            return
        self._parameters += values.cpu()
        self._statistics = {
            name: total + shown[name].detach().cpu()
            for name, total in self._statistics.items()
            if name in shown and shown[name].shape == total.shape
        }

    def conclude(self, replica: Replica, model: nn.Module) -> int:
        """Give every rank the mean of the final model and those added before.  Collective.

        Args:
            replica: replica with the final model's parameters, the same on every rank.
            model: the final model.

        Returns:
            Number of models in the mean; 1: nothing has changed.
        """
        if self._num_models == 0:
            return 1
        self._add(replica, model)
        number = self._num_models
        if self._parameters is not None:
            replica.parameters.values.copy_(self._parameters.div_(number))
        self._comm.broadcast(replica.parameters.whole, name=_NAME)
        own = running_statistics(model)
        shapes = {name: list(total.shape) for name, total in self._statistics.items()}
        for name, shape in self._comm.broadcast_object(shapes).items():
            mean = torch.empty(shape, dtype=torch.float64)
            if self._comm.rank == 0:
                mean.copy_(self._statistics[name] / number)
            self._comm.broadcast(mean, name=f"{_NAME}.{name}")
            if name in own:
                load_buffers(model, {name: mean.to(own[name])})
        self._forget()
        return number

    def _forget(self) -> None:
        self._num_models, self._parameters, self._statistics = 0, None, {}

    def state(self) -> RankState:
        """Return the state for a checkpoint: the count, and on rank 0 the sums."""
        values: dict[str, Any] = {_NAME: self._num_models} if self._num_models else {}
        sums = {f"statistics.{name}": x for name, x in self._statistics.items()}
        if self._parameters is not None:
            sums["parameters"] = self._parameters
        return RankState(values, split_state(_NAME, sums).tensors)

    def load(self, state: RankState) -> None:
        """Restore what `state` returned; a rank that resumes from a copy of rank 0's state keeps no sums."""
        self._forget()
        self._num_models = state.values.get(_NAME, 0)
        if self._comm.rank != 0 or not self._num_models:
            return
        sums = part_of(f"{_NAME}.", state.tensors)
        self._parameters = sums["parameters"].clone()
        self._statistics = {name: x.clone() for name, x in part_of("statistics.", sums).items()}


def _sum_from(tensor: Tensor) -> Tensor:
    """Return a float64 copy of `tensor` on the CPU, to begin a sum."""
    return tensor.detach().to("cpu", torch.float64, copy=True)
