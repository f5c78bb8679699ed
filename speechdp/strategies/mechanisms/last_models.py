"""The averaged models of the end of training, kept for the final combine."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor

from speechdp.comm.base import Communicator
from speechdp.parallel.strategy import Progress

#: The models are spread over the last half epoch, or the last quarter of training if that is shorter.
_LAST_EPOCHS, _LAST_SHARE = 0.5, 0.25


class LastModels:
    """Keep up to `most` averaged models of the last stretch of training, and return their running means.

    The stretch is cut into `most` equal parts.  The first average at or after the end of each part is kept,
    and the final model always.  Vectors are kept only in the host memory of rank 0, not on a GPU; every rank
    knows their number.

    Args:
        most: largest number of models kept, including the final one.
        comm: the ranks.
    """

    def __init__(self, most: int, comm: Communicator) -> None:
        self._most, self._comm = most, comm
        self._vectors: deque[Tensor] = deque(maxlen=most)  # empty on other ranks than 0
        self._num_kept = 0
        self._parts_done = 0
        #: Whether the newest average is among those kept.
        self._is_newest_kept = False

    def offer(self, values: Tensor, progress: Progress) -> None:
        """Keep a new average if a part of the stretch has ended since the last one that was kept."""
        stretch = min(_LAST_EPOCHS, _LAST_SHARE * progress.num_epochs)
        done = progress.epoch - (progress.num_epochs - stretch)
        parts = int(done / stretch * self._most + 1e-9)
        self._is_newest_kept = parts > self._parts_done
        if self._is_newest_kept:
            self._parts_done = parts
            self._keep(values)

    def conclude(self, values: Tensor, *, is_new: bool) -> None:
        """Keep the final model, unless it is an average that is already kept (`is_new` False)."""
        if is_new or not self._is_newest_kept:
            self._keep(values)
        self._is_newest_kept = True

    def _keep(self, values: Tensor) -> None:
        self._num_kept = min(self._num_kept + 1, self._most)
        if self._comm.rank == 0:
            self._vectors.append(values.detach().to("cpu", copy=True))

    def means(self, like: Tensor) -> list[Tensor]:
        """Return the means of the last 2, 3, ... models on every rank, on the CPU.  Collective.

        Args:
            like: a vector of the models' size and type.
        """
        results: list[Tensor] = []
        running = torch.zeros(like.shape, dtype=like.dtype)
        for number in range(1, self._num_kept + 1):
            if self._comm.rank == 0:
                running += self._vectors[-number]
            if number > 1:
                results.append(self._comm.broadcast(running / number, name=f"combine.{number}"))
        return results

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs; on rank 0 that includes the vectors."""
        state: dict[str, Any] = {
            "num_kept": self._num_kept,
            "parts_done": self._parts_done,
            "is_newest_kept": self._is_newest_kept,
        }
        return state | {f"kept.{i}": vector for i, vector in enumerate(self._vectors)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""
        self._num_kept, self._parts_done = state["num_kept"], state["parts_done"]
        self._is_newest_kept = state["is_newest_kept"]
        count = sum(name.startswith("kept.") for name in state)
        self._vectors = deque((state[f"kept.{i}"].clone() for i in range(count)), maxlen=self._most)
