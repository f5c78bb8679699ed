"""The mean of the models after the last epochs, which takes the last one's place (--average-epochs)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from speechdp.checkpoint.state import RankState, join_state, split_state
from speechdp.comm.base import Communicator
from speechdp.parallel.batch_statistics import load_buffers, running_statistics
from speechdp.parallel.replica import Replica

_NAME = "epoch_average"


class EpochAverage:
    """Adds up the models that a run has after its last epochs; the final one is the last of them.

    Sums are in float64, in the memory of rank 0's host alone: 8 bytes a parameter.  So nothing is rounded but
    the mean itself, and a GPU holds nothing more.  Running statistics (batch normalisation's) are averaged as
    parameters are; other buffers stay those of the final model: counts of batches, and tables that have
    become longer meanwhile.

    Args:
        wanted: models in the mean; 1: the final model is left as it is.
        num_epochs: of the run.
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
        #: Both empty on other ranks than 0.
        self._parameters: Tensor | None = None
        self._statistics: dict[str, Tensor] = {}

    def note(self, epochs_done: float, replica: Replica, model: nn.Module) -> None:
        """Add the model that was scored at a place in training if an epoch ends there, one that counts.

        The last epoch's is not added: where a strategy's `finish` has more to do, it is not the final model.

        Args:
            epochs_done: a fraction where a run pauses within an epoch.
            replica: with the parameters that were scored.
            model: likewise, with the ranks' average of its running statistics.
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
        """Give every rank the mean of the final model and of those before.  Collective.

        Args:
            replica: with the final model's parameters, the same on every rank.
            model: the final model.

        Returns:
            Models in the mean; 1: nothing has changed.
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
        """Return what a checkpoint needs; the sums on rank 0."""
        values: dict[str, Any] = {_NAME: self._num_models} if self._num_models else {}
        sums = {f"statistics.{name}": x for name, x in self._statistics.items()}
        if self._parameters is not None:
            sums["parameters"] = self._parameters
        return RankState(values, split_state(_NAME, sums).tensors)

    def load(self, state: RankState) -> None:
        """Restore what `state` returned; a rank that goes on as a copy of rank 0 keeps no sums."""
        self._forget()
        self._num_models = state.values.get(_NAME, 0)
        if self._comm.rank != 0 or not self._num_models:
            return
        sums = join_state(_NAME, {}, state.tensors)
        self._parameters = sums.pop("parameters").clone()
        self._statistics = {name.removeprefix("statistics."): x.clone() for name, x in sums.items()}


def _sum_from(tensor: Tensor) -> Tensor:
    """Begin a sum, whose memory is its own."""
    return tensor.detach().to("cpu", torch.float64, copy=True)
