"""Sum gradients over ranks, with matrices sent as two factors of low rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from speechdp.comm.base import Communicator
from speechdp.parallel.flat_buffer import FlatBuffer

#: A matrix is sent as factors if it has at least this many times their elements.
_LEAST_GAIN = 2
#: Seed of the first Q: arbitrary, but the same on all ranks.
_SEED = 0


class LowRankSum:
    """Sum gradients over ranks: matrices as two factors of low rank, everything else in full.

    Update rule: for each matrix, G_i its gradient on rank i, r the rank of its factors, orth(X) an
    orthonormal basis of X's columns,
        M_i = G_i + E_i;   P = orth(sum_i M_i Q);   Q_i = M_i^T P;   E_i <- M_i - P Q_i^T
        sum <- P (sum_i Q_i)^T;   Q <- orth(sum_i Q_i).
    E_i is the part of rank i's gradients that has not been applied so far: all returned sums and the E_i add
    up to the exact sums.  Q starts at random, the same on all ranks.  A tensor of more than two dimensions is
    treated as the matrix of its first by all others.

    Exchange: two, after backward: all P, in one vector with everything sent in full; then all Q_i, while E_i
    is computed.  A matrix of m by n is sent as factors if they have at most half of its elements: (m + n) r
    values instead of m n.

    Guarantee: the sums are bitwise the same on all ranks, if their processors are of one kind and use the
    same number of threads.  An update that is skipped, because a gradient has overflowed or no rank has
    frames, leaves E_i and Q unchanged.

    Source: PowerSGD (Vogels, Karimireddy, Jaggi 2019, arXiv 1905.13727, recalled; torch's `powerSGD_hook`).
    Deviations: sums over frames instead of means; E_i subtracts rank i's own contribution to the sum,
    P Q_i^T, not the mean that all ranks get.  The E_i add up to the same, and those of a rank with fewer or
    no frames do not grow with time.  QR instead of Gram-Schmidt, also for Q: columns that vanish, as for a
    gradient of 0, are replaced.

    Args:
        gradients: summed in place; the factors follow their layout.
        group: the ranks.
        rank: rank of the factors.

    Attributes:
        largest_rank: largest rank at which some matrix has small enough factors; 0: none has.  With a larger
            one, all matrices would be sent in full.
    """

    def __init__(self, gradients: FlatBuffer, group: Communicator, rank: int) -> None:
        self._gradients, self._group = gradients, group
        values = gradients.values
        self._error = torch.zeros_like(values)
        chosen = [i for i, p in enumerate(gradients.places) if rank <= _largest_rank(p.shape)]
        self.largest_rank = max(_largest_rank(place.shape) for place in gradients.places)
        self._matrices, self._errors = (
            [views[i].flatten(1) for i in chosen] for views in map(gradients.views_of, (values, self._error))
        )
        places = [(gradients.places[i].offset, gradients.places[i].num_elements) for i in chosen]
        others = [gradients.whole[piece] for piece in _rest(places, gradients.whole.numel())]
        shapes = [matrix.shape for matrix in self._matrices]
        num_in_full = sum(other.numel() for other in others)
        self._left = values.new_zeros(rank * sum(m for m, _ in shapes) + num_in_full)
        self._right = values.new_zeros(rank * sum(n for _, n in shapes))
        self._ps = _factors(self._left, [m for m, _ in shapes], rank)
        parts = self._left[self._left.numel() - num_in_full :].split_with_sizes([o.numel() for o in others])
        #: For each tensor sent in full: its place in the gradients and in the message.
        self._in_full = list(zip(others, parts, strict=True))
        self._qs = _factors(self._right, [n for _, n in shapes], rank)
        self._own = torch.zeros_like(self._right)
        self._own_qs = _factors(self._own, [n for _, n in shapes], rank)
        self._loss_scale = 1.0
        generator = torch.Generator().manual_seed(_SEED)
        self._right.copy_(torch.randn(self._right.numel(), generator=generator))
        for q in self._qs:
            _orthonormalise(q)

    def sum(self, loss_scale: float = 1.0) -> None:
        """Replace the gradients, and the frame count behind them, by their sums over ranks.  Collective.

        The host waits for the device, because a skipped update must leave no trace here.  If a rank's
        gradient is not finite, all gradients become NaN on all ranks.

        Args:
            loss_scale: factor of the gradients; the same on all ranks.
        """
        if loss_scale != self._loss_scale:
            self._error.mul_(loss_scale / self._loss_scale)
            self._loss_scale = loss_scale
        for matrix, error, p, q in zip(self._matrices, self._errors, self._ps, self._qs, strict=True):
            torch.mm(q, matrix.add_(error).T, out=p)
        for gradient, part in self._in_full:
            part.copy_(gradient)
        self._group.allreduce(self._left, name="gradients.left")
        for gradient, part in self._in_full:
            gradient.copy_(part)
        # A value in a matrix that is not finite makes its P not finite.
        if not bool(self._left.isfinite().all()):
            self._gradients.values.fill_(math.nan)
        elif self._gradients.extra[0].item() > 0:
            self._sum_matrices()

    def _sum_matrices(self) -> None:
        """Compute the sums of the matrices, whose left factors are already summed.  Collective."""
        for matrix, p, own_q in zip(self._matrices, self._ps, self._own_qs, strict=True):
            _orthonormalise(p)
            torch.mm(p, matrix, out=own_q)
        self._right.copy_(self._own)
        work = self._group.allreduce_async(self._right, name="gradients.right")
        for matrix, error, p, own_q in zip(self._matrices, self._errors, self._ps, self._own_qs, strict=True):
            torch.addmm(matrix, p.T, own_q, alpha=-1, out=error)
        work.wait()
        for matrix, p, q in zip(self._matrices, self._ps, self._qs, strict=True):
            torch.mm(p.T, q, out=matrix)
            _orthonormalise(q)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs."""
        return {
            "error": self._error,
            "basis": self._right,
            "loss_scale": self._loss_scale,
            "size": self._group.size,
            "rank": self._group.rank,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state; for another number of ranks, or another rank's state, E_i starts at 0."""
        self._right.copy_(state["basis"])
        if (state["size"], state["rank"]) == (self._group.size, self._group.rank):
            self._error.copy_(state["error"])
            self._loss_scale = state["loss_scale"]
        else:
            self._error.zero_()


def _largest_rank(shape: Sequence[int]) -> int:
    """Return the largest rank at which a tensor's factors are small enough; 0: none."""
    if len(shape) < 2:
        return 0
    m, n = shape[0], math.prod(shape[1:])
    return m * n // (_LEAST_GAIN * (m + n)) if m + n > 0 else 0


def _rest(places: Sequence[tuple[int, int]], end: int) -> list[slice]:
    """Return the pieces of a vector outside of `places`, pairs of offset and length."""
    borders = [(0, 0), *sorted((start, start + length) for start, length in places), (end, end)]
    return [slice(first, last) for (_, first), (last, _) in pairwise(borders) if first < last]


def _factors(vector: Tensor, lengths: Sequence[int], rank: int) -> list[Tensor]:
    """Return the factors at the start of a vector, one after another.  (rank, length) each

    Their columns are rows here, because products with matrices are then several times faster.
    """
    ends = [rank * sum(lengths[: i + 1]) for i in range(len(lengths))]
    return [vector[end - rank * n : end].view(rank, n) for end, n in zip(ends, lengths, strict=True)]


def _orthonormalise(factor: Tensor) -> None:
    """Replace the rows by an orthonormal basis of their span, completed if the span is smaller."""
    factor.copy_(torch.linalg.qr(factor.T).Q.T)
