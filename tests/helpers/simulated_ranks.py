"""All ranks of a run in one process, as the rows of a matrix: equations are written down as in the papers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from speechdp.comm.base import Communicator
from speechdp.testing import make_batch, make_replica, summed_loss

LEARNING_RATE = 0.3


class SimulatedRanks:
    """Parameters of `size` ranks and plain SGD with momentum on each.

    Attributes:
        x: parameters, a row a rank.
        frames: of each rank in the last step.
    """

    def __init__(self, size: int, momentum: float = 0.0) -> None:
        self._replica = make_replica()
        self._momentum = momentum
        self.x = self._replica.parameters.values.repeat(size, 1)
        self.frames = torch.zeros(size, dtype=self.x.dtype)
        self._velocity = torch.zeros_like(self.x)

    def updates(self, step: int, has_frames: Callable[[int, int], bool] = lambda rank, step: True) -> Tensor:
        """Return lr * (momentum and mean gradient at `x`) of every rank's batch of `step`, a row a rank.

        Args:
            has_frames: says whether a rank has a batch in a step; a rank without one does not move.
        """
        moved = torch.zeros_like(self.x)
        self.frames.zero_()
        for rank in range(len(self.x)):
            if not has_frames(rank, step):
                continue
            batch = make_batch(rank, step)
            gradient = self._gradient(self.x[rank], rank, step) / batch.num_frames
            self._velocity[rank] = self._momentum * self._velocity[rank] + gradient
            moved[rank] = LEARNING_RATE * self._velocity[rank]
            self.frames[rank] = batch.num_frames
        return moved

    def _gradient(self, x: Tensor, rank: int, step: int) -> Tensor:
        self._replica.parameters.values.copy_(x)
        self._replica.clear_gradients()
        summed_loss(self._replica.model, make_batch(rank, step)).backward()
        return self._replica.gradients.values


def simulated_once(comm: Communicator, simulate: Callable[[], Tensor]) -> Tensor:
    """Return the parameters of all ranks, a row a rank, as `simulate` has them.

    Collective; rank 0 does the work.  On every rank the cost would grow by the square of their number.
    """
    x = simulate() if comm.rank == 0 else SimulatedRanks(comm.size).x
    return comm.broadcast(x, name="simulated")
